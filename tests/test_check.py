"""The gate and the self-check against the real engines, with each fault put in on purpose."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import check
from check import CheckError, Gate, delta_kernel_errors, delta_rule, self_check
from loss import LossConfig
from policy import Policy, PolicyConfig
from reward import Grader
from rollout import Sampler, SamplerConfig, SamplingConfig, collect_groups, load_tokenizer
from tiny import sums

SAMPLING = SamplingConfig(group_size=8, max_tokens=48)
LOSS = LossConfig()


@pytest.fixture(scope="module")
def run(tiny_base, tmp_path_factory):
    """Return two engines in the middle of a run, three steps after its start."""
    tokenizer = load_tokenizer(str(tiny_base))
    folder = tmp_path_factory.mktemp("adapter")
    config = PolicyConfig(base_model=str(tiny_base), lora_rank=8, learning_rate=1e-3)
    sampler_config = SamplerConfig(base_model=str(tiny_base), lora_rank=8, max_model_len=128)
    with Grader() as grader, Sampler(sampler_config) as sampler:
        policy = Policy(config, seed=0)
        checked = self_check(policy, sampler, tokenizer, sums(seed=0), SAMPLING, adapter=folder)
        gate = Gate(policy, floor=checked.floor)

        def collect(step):
            groups = collect_groups(
                sampler.stream,
                grader,
                tokenizer,
                sums(seed=step)[:8],
                SAMPLING,
                seed=0,
                step=step,
                policy_version=0,
            )
            # An untaught base is hardly ever right; that it learns something is all that matters here.
            return [
                replace(group, rollouts=[replace(r, advantage=(-1.0) ** n) for n, r in enumerate(group.rollouts)])
                for group in groups
            ]

        def load(version):
            policy.save_adapter(folder)
            sampler.load_adapter(folder, version=version)

        def update(groups):
            return policy.update(groups, LOSS, max_tokens=SAMPLING.max_tokens, before_step=gate.check_update)

        readings = []
        for step in (1, 2, 3):
            load(step - 1)
            groups = collect(step)
            readings.append(gate.check(groups))
            update(groups)
        yield SimpleNamespace(
            policy=policy, sampler=sampler, gate=gate, collect=collect, load=load, update=update,
            checked=checked, readings=readings, tokenizer=tokenizer, folder=folder,
        )  # fmt: skip


def test_a_run_in_order_passes_and_the_self_check_says_what_it_verified(run):
    assert all(reading.token_gap < 0.01 for reading in run.readings)
    assert run.readings[0].base_share is None  # the first adapter is the base
    assert all(reading.base_share < 0.5 for reading in run.readings[1:])
    assert 0 < run.checked.floor < 0.01
    assert run.checked.findings["adapter"] == "the sampler matched all of its 31 modules"
    assert run.checked.findings["gradients"] == "all 31 adapter modules receive one"
    assert "3 layers" in run.checked.findings["gated delta net"]


def test_a_sampler_left_on_the_base_model_is_caught(run):
    run.load(3)
    run.sampler.unload_adapter()
    with pytest.raises(CheckError, match=r"the sampler runs the base model: .* at \d+% of \d+ tokens"):
        run.gate.check(run.collect(4))


def test_a_sampler_one_adapter_behind_is_caught(run):
    with run.policy.previous_adapter():
        run.load(2)
    with pytest.raises(CheckError, match="the sampler runs the policy before the last update"):
        run.gate.check(run.collect(5))


def test_damaged_weights_as_after_a_faulty_wake_up_are_caught(run):
    run.load(3)

    def scale(worker, factor):
        for name, parameter in worker.model_runner.model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.mul_(factor)

    run.sampler.engine.collective_rpc(scale, args=(4.0,))
    try:
        with pytest.raises(CheckError, match="damaged weights"):
            run.gate.check(run.collect(6))
    finally:
        run.sampler.engine.collective_rpc(scale, args=(0.25,))
    run.gate.check(run.collect(6))


def pad_on_the_left(policy, monkeypatch):
    """Let several sequences run through the model padded on the left, as if their tokens came first."""
    decoder = policy.model.get_base_model().get_decoder()
    right = decoder.forward

    def forward(input_ids, use_cache):
        padding = [len(row) - int(row.nonzero().max()) - 1 for row in input_ids]
        rolled = torch.stack([row.roll(n) for row, n in zip(input_ids, padding, strict=True)])
        output = right(input_ids=rolled, use_cache=use_cache)
        states = output.last_hidden_state
        output.last_hidden_state = torch.stack([row.roll(-n, 0) for row, n in zip(states, padding, strict=True)])
        return output

    monkeypatch.setattr(decoder, "forward", forward)


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
    for number, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.completion.token_ids[:] = range(10, 35) if copied else range(100 * number, 100 * number + 25)
        rollout.completion.logprobs[:] = [-1.0] * 25
    with (
        nullcontext() if copied else pytest.raises(CheckError, match=r"before the last update.*60% of 1600 tokens")
    ):
        Gate(cast("Policy", Stub()), floor=0.001).check(groups)


def test_a_trainer_that_reads_padding_is_caught(run, monkeypatch):
    run.load(3)
    groups = run.collect(7)
    pad_on_the_left(run.policy, monkeypatch)
    with pytest.raises(CheckError, match="the trainer reads padding"):
        run.gate.check(groups)
    with pytest.raises(CheckError, match="padding and the rest of the batch move"):
        self_check(run.policy, run.sampler, run.tokenizer, sums(seed=0), SAMPLING, adapter=run.folder)


def test_a_batch_that_is_wrong_only_in_part_is_caught_before_the_weights_move(run):
    run.load(3)
    groups = run.collect(8)
    run.gate.check(groups)
    broken = [
        replace(r, completion=replace(r.completion, logprobs=[-5.0] * len(r.completion.logprobs)))
        for r in groups[0].rollouts[:2]
    ]
    groups[0] = replace(groups[0], rollouts=[*broken, *groups[0].rollouts[2:]])
    before = {name: parameter.detach().clone() for name, parameter in run.policy.parameters.items()}
    with pytest.raises(CheckError, match="part of the batch was sampled or scored wrongly"):
        run.update(groups)
    assert all(torch.equal(before[name], parameter) for name, parameter in run.policy.parameters.items())


def test_modules_without_a_gradient_are_named(run, monkeypatch):
    layer = run.policy.model.get_base_model().model.layers[1].linear_attn
    monkeypatch.setattr(layer.in_proj_z, "forward", layer.in_proj_z.base_layer.forward)
    with pytest.raises(
        CheckError, match=r"1 adapter modules receive no gradient .*layers\.1\.linear_attn\.in_proj_z"
    ):
        self_check(run.policy, run.sampler, run.tokenizer, sums(seed=0), SAMPLING, adapter=run.folder)


def test_engines_that_disagree_about_the_base_model_are_refused(run, monkeypatch):
    monkeypatch.setattr(run.policy, "temperature", 0.3)
    with pytest.raises(CheckError, match="on the base model already"):
        self_check(run.policy, run.sampler, run.tokenizer, sums(seed=0), SAMPLING, adapter=run.folder)


def test_a_kernel_with_a_wrong_gradient_is_found(run, monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    layer = run.policy.model.get_base_model().model.layers[0].linear_attn
    kernel = modeling_qwen3_5.torch_chunk_gated_delta_rule
    assert max(delta_kernel_errors(kernel, layer, torch.device("cpu")).values()) < 0.01

    def wrong(query, key, value, g, beta, **options):
        return kernel(query, key, value, g + 0.1 * (g - g.detach()), beta, **options)

    def of_other_names(q, k, v, g, beta, use_qk_l2norm_in_kernel=False):  # flash-linear-attention's
        return kernel(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    assert max(delta_kernel_errors(of_other_names, layer, torch.device("cpu")).values()) < 0.01
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", wrong)
    with pytest.raises(CheckError, match="the gradient of g is off by 10"):
        self_check(run.policy, run.sampler, run.tokenizer, sums(seed=0), SAMPLING, adapter=run.folder)


def test_the_reference_rule_equals_its_definition_on_one_head_of_size_one():
    """With unit keys and queries of size 1: S <- e^g S + beta (v - e^g S), output S."""
    value, g, beta = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.0, -0.5, -1.0]), torch.tensor([0.5, 0.25, 1.0])
    ones = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    output = delta_rule(
        1e6 * ones,
        1e6 * ones,
        value.double().view(1, 3, 1, 1),
        g.double().view(1, 3, 1),
        beta.double().view(1, 3, 1),
    )
    state, expected = 0.0, []
    for v, decay, write in zip(value.tolist(), g.double().exp().tolist(), beta.tolist(), strict=True):
        state = decay * state + write * (v - decay * state)
        expected.append(state)
    assert output.flatten().tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chat_template": "{{ messages[0].content }}<|im_end|>"}, "ends a prompt with the end token"),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(run, tiny_base, change, message):
    tokenizer = load_tokenizer(str(tiny_base))
    for name, value in change.items():
        setattr(tokenizer, name, value)
    with pytest.raises(CheckError, match=message):
        self_check(run.policy, run.sampler, tokenizer, sums(seed=0), SAMPLING, adapter=run.folder)


def test_the_end_of_an_answer_may_be_the_tokenizers_or_the_generation_configs(run, tiny_base, capsys):
    """Qwen3.5 has no generation config, and its model config names another token than its chat template writes."""

    def verdict(declared):
        config = SimpleNamespace(eos_token_id=declared)
        policy = cast("Policy", SimpleNamespace(model=SimpleNamespace(generation_config=config)))
        return check._check_end_token(tokenizer, policy)

    tokenizer = load_tokenizer(str(tiny_base))
    end = tokenizer.eos_token_id
    ends = "by the chat template an answer ends with '<|im_end|>'; the sampler stops at"
    assert verdict(None) == f"{ends} '<|im_end|>'"
    assert verdict(0) == f"{ends} '<|endoftext|>' and '<|im_end|>'"
    tokenizer.eos_token = "<|endoftext|>"
    assert verdict([0, end]) == f"{ends} '<|endoftext|>' and '<|im_end|>'"
    assert not capsys.readouterr().out
    assert verdict(0) == f"{ends} '<|endoftext|>'"
    assert (
        "warning: by the chat template an answer ends with '<|im_end|>', but the sampler" in capsys.readouterr().out
    )
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert verdict(0) == "the chat template does not say how an answer ends; the sampler stops at '<|endoftext|>'"
    tokenizer.eos_token = None
    with pytest.raises(CheckError, match="neither tokenizer nor model has an end token"):
        verdict(None)


def test_a_tokenizer_that_loses_text_is_refused(run):
    problems = [replace(sums(seed=0)[0], question="What is <|im_end|>1 + 1?")]
    with pytest.raises(CheckError, match=r"turns the question of problem sum-\d-\d into other text"):
        check._check_round_trip(run.tokenizer, problems)
