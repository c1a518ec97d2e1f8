"""The gate against the real engines, with each fault put in on purpose."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from bench.update import take_steps
from data import training_data
from engine.gate import CheckError, Gate
from engine.hub import load_tokenizer
from engine.policy import Policy, PolicyConfig
from engine.sampler import Sampler, SamplerConfig, SamplingConfig
from engine.selfcheck import self_check
from loss import LossConfig
from reward import Grader
from rollout import collect_groups, encode_prompt
from tiny import sums

SAMPLING = SamplingConfig(group_size=8, max_tokens=48)


@pytest.fixture(scope="module")
def run(tiny_base, tmp_path_factory):
    """Return two engines in the middle of a run, three steps after its start."""
    tokenizer = load_tokenizer(str(tiny_base))
    folder = tmp_path_factory.mktemp("adapter")
    config = PolicyConfig(base_model=str(tiny_base), lora_rank=8, learning_rate=1e-3)
    sampler_config = SamplerConfig(base_model=str(tiny_base), lora_rank=8, max_model_len=128)
    with Grader() as grader, Sampler(sampler_config) as sampler:
        policy = Policy(config, seed=0)
        questions = [problem.question for problem in sums(seed=0)]
        prompts = [encode_prompt(tokenizer, question) for question in questions[:4]]
        checked = self_check(policy, sampler, tokenizer, prompts, questions, SAMPLING, adapter=folder)
        gate = Gate(policy, baseline_mismatch=checked.baseline_mismatch)

        def collect(step):
            problems = list(enumerate(sums(seed=step)[:8]))
            groups = collect_groups(sampler.stream, grader, tokenizer, problems, SAMPLING, seed=0, step=step)
            # An untaught base is hardly ever right; that it learns something is all that matters here.
            return [replace(g, advantages=[(-1.0) ** n for n in range(len(g.completions))]) for g in groups]

        def load(version):
            policy.save_adapter(folder)
            sampler.load_adapter(folder, version=version)

        def check(groups):
            return gate.check(training_data(groups, degenerate=True))

        def update(groups):
            max_tokens = SAMPLING.max_tokens
            return take_steps(policy, groups, LossConfig(), max_tokens=max_tokens, check_update=gate.check_update)

        readings = []
        for step in (1, 2, 3):
            load(step - 1)
            groups = collect(step)
            readings.append(check(groups))
            update(groups)
        yield SimpleNamespace(
            policy=policy, sampler=sampler, collect=collect, load=load, check=check, update=update,
            readings=readings,
        )  # fmt: skip


def test_a_run_in_order_passes(run):
    assert all(reading.token_gap < 0.01 for reading in run.readings)
    assert run.readings[0].base_share is None  # the first adapter is the base
    assert all(reading.base_share < 0.5 for reading in run.readings[1:])


def test_a_sampler_left_on_the_base_model_is_caught(run):
    run.load(3)
    run.sampler.unload_adapter()
    with pytest.raises(CheckError, match=r"the sampler runs the base model: .* at \d+% of \d+ tokens"):
        run.check(run.collect(4))


def test_a_sampler_one_adapter_behind_is_caught(run):
    with run.policy.previous_adapter():
        run.load(2)
    with pytest.raises(CheckError, match="the sampler runs the policy before the last update"):
        run.check(run.collect(5))


def test_damaged_weights_as_after_a_faulty_wake_up_are_caught(run):
    run.load(3)

    def scale(worker, factor):
        for name, parameter in worker.model_runner.model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.mul_(factor)

    run.sampler.engine.collective_rpc(scale, args=(4.0,))
    try:
        with pytest.raises(CheckError, match="damaged weights"):
            run.check(run.collect(6))
    finally:
        run.sampler.engine.collective_rpc(scale, args=(0.25,))
    run.check(run.collect(6))


class Stub:
    """A policy whose log-probabilities a token id decides; three in five are nearer to -1 as the one before."""

    micro_batch_tokens, has_previous, offset = 1000, True, 0.001

    def token_logprobs(self, batch):
        before = torch.where(batch.input_ids[:, 1:] % 5 < 3, 0.0005, 0.0015)
        return -1 + (before if self.offset is None else self.offset) * batch.completion_mask, None

    @contextmanager
    def previous_adapter(self, offset=None):
        self.offset = offset
        yield
        del self.offset

    def without_adapter(self):
        return self.previous_adapter(0.01)


@pytest.mark.parametrize("copied", [True, False])
def test_many_copies_of_one_completion_are_not_much_evidence(make_group, copied):
    """60 % of 1,600 tokens are certainty, but not where there are only 25 different ones."""
    groups = [make_group([1, 0] * 4, lengths=[25] * 8, seed=0 if copied else seed) for seed in range(8)]
    for number, completion in enumerate(completion for group in groups for completion in group.completions):
        completion.token_ids[:] = range(10, 35) if copied else range(100 * number, 100 * number + 25)
        completion.logprobs[:] = [-1.0] * 25
    with (
        nullcontext() if copied else pytest.raises(CheckError, match=r"before the last update.*60% of 1600 tokens")
    ):
        Gate(cast("Policy", Stub()), baseline_mismatch=0.001).check(training_data(groups))


def test_a_trainer_that_reads_padding_is_caught(run, pad_on_the_left):
    run.load(3)
    groups = run.collect(7)
    pad_on_the_left(run.policy)
    with pytest.raises(CheckError, match="the trainer reads padding"):
        run.check(groups)


def test_a_batch_that_is_wrong_only_in_part_is_caught_before_the_weights_move(run):
    run.load(3)
    groups = run.collect(8)
    run.check(groups)
    first, *others = groups
    broken = [replace(c, logprobs=[-5.0] * len(c.logprobs)) for c in first.completions[:2]]
    groups = [replace(first, completions=[*broken, *first.completions[2:]]), *others]
    before = {name: parameter.detach().clone() for name, parameter in run.policy.parameters.items()}
    with pytest.raises(CheckError, match="part of the batch was sampled or scored wrongly"):
        run.update(groups)
    assert all(torch.equal(before[name], parameter) for name, parameter in run.policy.parameters.items())
