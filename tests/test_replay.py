"""Gradients and their parts in float64 against the policy's own update; runs on disk as the loop leaves them."""

from dataclasses import asdict, replace

import pytest
import torch

from data import training_data
from engine.batches import micro_batches
from engine.hub import base_fingerprint
from engine.policy import Policy, PolicyConfig
from engine.sampler import SamplingConfig
from loss import Algorithm, Denominators, LossConfig, group_advantages, make_loss, policy_loss
from record.checkpoint import TrainState, prepare_checkpoint
from record.rollouts import write_rollouts
from record.run import Run, new_record
from stats.replay import _choose_step, format_replay, replay, score

ALGORITHMS: list[Algorithm] = ["gspo", "gspo-token", "grpo", "dr-grpo", "dapo"]
POLICY = {"lora_rank": 4, "lora_alpha": 8, "learning_rate": 1e-2, "gradient_checkpointing": False}


def shake(policy):
    """Move B away from 0, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if ".lora_B." in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)


@pytest.fixture(scope="module")
def policy(tiny_base):
    """Return a float64 policy, which no test changes."""
    policy = Policy(PolicyConfig(base_model=str(tiny_base), **POLICY), seed=0)
    policy.model.double()
    shake(policy)
    return policy


def sampled_with(group, logprobs):
    """Return the group as if the sampler had given its completions these log-probabilities."""
    pairs = zip(group.completions, logprobs, strict=True)
    return replace(group, completions=[replace(completion, logprobs=values) for completion, values in pairs])


def own_logprobs(policy, group):
    """Return the policy's log-probabilities of each completion's tokens."""
    found = {}
    for batch in micro_batches(training_data([group], degenerate=True), max_tokens=10_000):
        with torch.no_grad():
            rows = policy.token_logprobs(batch)[0]
        for ids, values, mask in zip(batch.input_ids.tolist(), rows, batch.completion_mask, strict=True):
            found[tuple(ids)] = values[mask]
    ids = [(*group.prompt_ids, *completion.token_ids) for completion in group.completions]
    longest = max(map(len, ids))
    return [found[own + (0,) * (longest - len(own))] for own in ids]


@pytest.fixture
def groups(policy, make_group):
    """Return two groups that teach and one that does not, sampled by an engine a little off the policy."""
    generator = torch.Generator().manual_seed(0)
    teaching = []
    for group in (make_group([1, 0, 0], seed=1), make_group([1, 1, 0], lengths=[9, 4, 12], seed=2)):
        own = own_logprobs(policy, group)
        off = [(values + 0.3 * torch.randn(len(values), generator=generator)).tolist() for values in own]
        teaching.append(sampled_with(group, off))
    return [teaching[0], make_group([1, 1, 1], seed=3), teaching[1]]


def gradient_of(policy, groups, algorithm, denominators, keep=lambda datum: True):
    """Return the gradient that the kept sequences alone give to a step with these denominators."""
    objective = LossConfig(algorithm=algorithm).objective
    kept = []
    for group in groups:
        rewards = [score.reward for score in group.scores]
        group = replace(group, advantages=group_advantages(rewards, divide_by_std=objective.divide_by_std))
        kept += [datum for datum in training_data([group]) if keep(datum)]
    policy.optimizer.zero_grad()
    for batch in micro_batches(kept, max_tokens=10_000):
        logprobs, _ = policy.token_logprobs(batch)
        output = policy_loss(
            logprobs, batch.sampling_logprobs, batch.completion_mask, batch.advantages,
            objective=objective, denominators=denominators,
        )  # fmt: skip
        output.loss.backward()
    return torch.cat([parameter.grad.flatten().double() for parameter in policy.parameters.values()])


def own_update(policy, groups, max_tokens):
    """Return what the policy's own forward and backward say of the step, under GSPO."""
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    loss = make_loss(LossConfig(), Denominators.of(lengths, max_tokens=max_tokens))
    (batch,) = policy.begin_update([training_data(groups)])
    return policy.forward_backward(batch, loss)


@pytest.mark.parametrize("algorithm", ["grpo", "dr-grpo"])
def test_parts_add_up_to_the_whole_and_supply_their_projection_on_it(policy, groups, algorithm):
    denominators = Denominators(num_sequences=9, num_tokens=3 + 5 + 7 + 9 + 4 + 12 + 3 + 5 + 7, max_tokens=20)
    whole = gradient_of(policy, groups, algorithm, denominators)
    result = score(policy, groups, [algorithm], 20)
    (scored,) = result.scored
    assert scored.grad_norm == pytest.approx(float(whole.norm()), rel=1e-9)
    assert result.parts == {  # quarters of 3 4 5 7 9 12 end at 4.25, 6 and 8.5
        "3 to 4 tokens": [3, 4], "5 to 5 tokens": [5], "7 to 7 tokens": [7], "9 to 12 tokens": [9, 12],
        "positive advantages": [3, 9, 4], "negative advantages": [5, 7, 12],
    }  # fmt: skip

    def length_within(low, high):
        return lambda datum: low <= datum.num_completion_tokens <= high

    by_length = [length_within(3, 4), length_within(5, 5), length_within(7, 7), length_within(9, 12)]
    by_sign = [lambda datum: datum.advantage > 0, lambda datum: datum.advantage < 0]
    parts = [gradient_of(policy, groups, algorithm, denominators, keep) for keep in by_length + by_sign]
    for cut in (parts[:4], parts[4:]):
        torch.testing.assert_close(sum(cut), whole, rtol=1e-9, atol=1e-15)
    assert scored.shares is not None
    expected = [float(part @ whole / (whole @ whole)) for part in parts]
    assert [scored.shares[part] for part in result.parts] == pytest.approx(expected, rel=1e-9)


def test_gspo_is_what_the_policys_own_update_would_apply(policy, groups):
    update = own_update(policy, groups, max_tokens=20)
    own = torch.cat([parameter.grad.flatten() for parameter in policy.parameters.values()])
    before = {name: parameter.clone() for name, parameter in policy.parameters.items()}
    (scored,) = score(policy, groups, ["gspo"], 20).scored
    assert scored.loss == pytest.approx(update.loss, rel=1e-9)
    assert scored.grad_norm == pytest.approx(update.grad_norm, rel=1e-9)
    clipped = (update.sequences.num_clipped_tokens == update.sequences.num_tokens).tolist()
    assert 0 < scored.sequence_clip_fraction == sum(clipped) / 6 < 1
    assert scored.token_clip_fraction == pytest.approx(int(update.sequences.num_clipped_tokens.sum()) / 40)
    denominators = Denominators(num_sequences=9, num_tokens=55, max_tokens=20)
    torch.testing.assert_close(gradient_of(policy, groups, "gspo", denominators), own, rtol=1e-9, atol=1e-15)
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.parameters.items())


def test_shares_sum_to_one_and_an_objective_is_parallel_to_itself(policy, groups):
    result = score(policy, groups, ALGORITHMS, 20)
    for index, scored in enumerate(result.scored):
        assert scored.shares is not None
        shares = list(scored.shares.values())
        assert sum(shares) == pytest.approx(2, rel=1e-9)
        signs = scored.shares["positive advantages"] + scored.shares["negative advantages"]
        assert signs == pytest.approx(1, rel=1e-9)
        assert result.cosines[index][index] == pytest.approx(1, rel=1e-9)
        assert result.cosines[index] == pytest.approx([row[index] for row in result.cosines], rel=1e-9)
    assert result.cosines[0][1] == pytest.approx(1, rel=1e-9)  # gspo and gspo-token
    assert result.cosines[0] != pytest.approx([1] * 5, abs=1e-3)
    text = format_replay(result)
    assert "at the first optimizer step the ratio is only the gap between the engines" in " ".join(text.split())
    assert all(len(line) == len(text.splitlines()[2]) for line in text.splitlines() if line.startswith("|"))


def test_a_gradient_of_zero_has_neither_shares_nor_cosines(policy, make_group):
    # Far above what was sampled where the advantage is positive, far below where it is negative: all is clipped.
    group = sampled_with(make_group([1, 0]), [[-99.0] * 3, [-1e-3] * 5])
    result = score(policy, [group], ["gspo"], 20)
    assert (result.scored[0].grad_norm, result.scored[0].shares, result.cosines) == (0, None, [[None]])
    assert result.scored[0].sequence_clip_fraction == 1
    assert "| cosine with gspo" in format_replay(result)


def test_what_clips_is_what_clipped_in_the_run_to_the_last_rounding(tiny_base, make_group):
    """In bfloat16, what goes through the model together decides what so narrow a clip takes."""
    policy = Policy(PolicyConfig(base_model=str(tiny_base), lora_rank=4), seed=0)
    shake(policy)
    groups = [make_group([1, 0] * 4, seed=seed, lengths=list(range(9, 41, 4))) for seed in range(8)]
    groups = [sampled_with(group, [v.tolist() for v in own_logprobs(policy, group)]) for group in groups]
    update = own_update(policy, groups, max_tokens=40)
    (scored,) = score(policy, groups, ["gspo"], 40).scored
    clipped = (update.sequences.num_clipped_tokens == update.sequences.num_tokens).tolist()
    assert 0 < scored.sequence_clip_fraction == sum(clipped) / 64 < 1
    assert scored.loss == pytest.approx(update.loss, rel=1e-5)


def test_a_step_that_teaches_nothing_is_refused(policy, make_group):
    with pytest.raises(ValueError, match="every group of this step is degenerate"):
        score(policy, [make_group([1, 1])], ["gspo"], 20)


@pytest.fixture
def run(tiny_base, make_group, tmp_path):
    """Return a run with the rollouts of steps 1 to 4 and the checkpoint of step 2."""
    policy = Policy(PolicyConfig(base_model=str(tiny_base), **POLICY), seed=42)
    sampling = SamplingConfig(group_size=2, max_prompt_tokens=64, max_tokens=20)
    settings = {
        "policy": asdict(policy.config),
        "sampling": asdict(sampling),
        "loss": asdict(LossConfig()),
        "seed": 42,
    }
    fingerprint = base_fingerprint(tiny_base)
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.write_record(new_record(settings, data={}, base_fingerprint=fingerprint, objective={}))
    for step in range(1, 5):
        group = replace(make_group([1, 0], seed=step), policy_version=step - 1)
        write_rollouts(run.rollouts_path(step), [group])
    shake(policy)
    state = TrainState(
        step=2, problems_taken=2, seed=42, base_model=str(tiny_base), base_fingerprint=fingerprint, swanlab_id=None
    )
    prepare_checkpoint(run.checkpoint_path(2), policy, state)
    run.publish_checkpoint(2)
    return run


def test_a_step_is_replayed_at_the_weights_that_sampled_it(run, tiny_base, make_group):
    weights = Policy(PolicyConfig(base_model=str(tiny_base), **POLICY), seed=42)
    fresh = score(weights, [make_group([1, 0], seed=1)], ["grpo"], 20)
    shake(weights)
    moved = score(weights, [replace(make_group([1, 0], seed=3), policy_version=2)], ["grpo"], 20)
    assert replay(run, ["grpo"]) == moved  # the newest with a checkpoint before it
    assert replay(run, ["grpo"], step=1) == fresh
    assert (moved.step, fresh.step) == (3, 1)


def test_what_is_missing_is_named_in_one_sentence(run, tmp_path, tiny_base):
    def refusal(run, *, algorithms=("gspo",), **choices):
        with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
            replay(run, algorithms, **choices)
        return str(refused.value)

    can = "steps that can be replayed: 1, 3"
    assert refusal(run, step=4) == f"{run.folder} has no checkpoint of the step before; {can}"
    assert refusal(run, step=9) == f"{run.folder} has no rollouts of step 9; {can}"
    assert "no objective is called 'ppo'; choose from gspo, gspo-token, grpo" in refusal(
        run, algorithms=["grpo", "ppo"]
    )
    assert "no objective is called ''; choose" in refusal(run, algorithms=[])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_bytes((tiny_base / "config.json").read_bytes())
    assert "does not hold the weights" in refusal(run, base_model=str(tmp_path / "other"))
    assert "is not a run: config.json cannot be read" in refusal(Run(tmp_path))
    (run.folder / "checkpoints/step-000002/adapter_model.safetensors").write_bytes(b"")
    assert "is damaged" in refusal(run)
    for path in (run.folder / "rollouts").iterdir():
        path.unlink()
    assert "has no stored rollouts to replay; was it trained with --save-rollouts none?" in refusal(run)


def test_without_a_checkpoint_the_first_step_is_the_default(tmp_path):
    for step in (1, 2):
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / f"step-{step:06d}.parquet").touch()
    assert _choose_step(Run(tmp_path), None) == (tmp_path / "rollouts/step-000001.parquet", None)
    (tmp_path / "rollouts/step-000001.parquet").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint of the step before; steps that can be replayed: none"):
        _choose_step(Run(tmp_path), None)
