"""The objectives against numbers worked by hand and against naive loops, in float64."""

import math
from dataclasses import replace

import pytest
import torch

from loss import PRESETS, Denominators, LossConfig, Objective, mismatch_weights, policy_loss, sequence_log_ratios

f64 = torch.float64
MASK = torch.tensor([[False, True, True, True], [True, True, False, False], [False, True, True, False]])
OLD = torch.tensor([[0.0, -1.0, -0.5, -2.0], [-0.3, -0.7, 0.0, 0.0], [0.0, -1.2, -0.4, 0.0]], dtype=f64)
STEPS = torch.tensor([[9.0, 0.06, 0.03, 0.12], [0.6, 0.2, -9.0, 9.0], [9.0, -0.6, 0.2, 9.0]], dtype=f64)
ADVANTAGES = torch.tensor([0.5, 2.0, -1.0], dtype=f64)
# The step has a degenerate fourth sequence, of 4 tokens.
DENOMINATORS = Denominators(num_sequences=4, num_tokens=11, max_tokens=5)

# The presets, with GSPO's narrow range widened so that a small batch shows all three cases.
OBJECTIVES = {
    name: replace(objective, epsilon_low=0.1, epsilon_high=0.2) if "gspo" in name else objective
    for name, objective in PRESETS.items()
}


def loss_of(
    objective, steps=STEPS, *, advantages=ADVANTAGES, mask=MASK, old=OLD, denominators=DENOMINATORS, weights=None
):
    policy = (old + steps).requires_grad_()
    output = policy_loss(
        policy, old, mask, advantages, objective=objective, denominators=denominators, weights=weights
    )
    (gradient,) = torch.autograd.grad(output.loss, policy)
    return output, gradient


def test_the_sequence_ratio_is_the_geometric_mean_over_completion_tokens_only():
    log_ratios = sequence_log_ratios(OLD + STEPS, OLD, MASK)
    assert log_ratios.tolist() == pytest.approx([0.07, 0.4, -0.2], abs=1e-12)


def hand_worked():
    """Return each preset's sum, worked by hand: min(r A, clip(r) A) of each row or token, and its divisor."""
    e = math.exp
    gspo = -(e(0.07) * 0.5 + 1.2 * 2.0 + 0.9 * -1.0) / 4  # inside; cut above; cut below
    rows = [
        [0.5 * e(0.06), 0.5 * e(0.03), 0.5 * e(0.12)],  # all inside [0.8, 1.2]
        [2 * 1.2, 2 * 1.2],  # exp(0.6) cut at 1.2, exp(0.2) = 1.2214 cut at 1.2
        [-0.8, -e(0.2)],  # exp(-0.6) cut at 0.8; exp(0.2), with A < 0, is not cut
    ]
    higher = [rows[0], [2 * 1.28, 2 * e(0.2)], rows[2]]  # DAPO: cut at 1.28
    return {
        "gspo": gspo,
        "gspo-token": gspo,
        "grpo": -sum(sum(row) / len(row) for row in rows) / 4,
        "dr-grpo": -sum(map(sum, rows)) / (4 * 5),
        "dapo": -sum(map(sum, higher)) / 11,
    }


@pytest.mark.parametrize("name", PRESETS)
def test_each_loss_equals_the_number_worked_by_hand(name):
    output, _ = loss_of(OBJECTIVES[name])
    assert output.loss.item() == pytest.approx(hand_worked()[name], abs=1e-12)


def test_gspos_gradient_equals_the_one_worked_by_hand():
    output, gradient = loss_of(OBJECTIVES["gspo"])
    each = -math.exp(0.07) * 0.5 / 3 / 4  # d(ratio)/d(logprob) = ratio / 3 tokens
    expected = torch.tensor([[0.0, each, each, each], [0.0] * 4, [0.0] * 4], dtype=f64)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert torch.equal(output.clipped, MASK & torch.tensor([[False], [True], [True]]))


def naive_loss(name, objective, policy, old, mask, advantages, denominators):
    """Return the published formula, written out with one scalar a token."""
    loss = torch.zeros((), dtype=f64)
    for row in range(len(mask)):
        columns = [t for t in range(mask.shape[1]) if mask[row, t]]
        ratios = [(policy[row, t] - old[row, t]).exp() for t in columns]
        geometric = torch.stack(ratios).prod() ** (1 / len(ratios))
        if name == "gspo":
            ratios = [geometric]
        elif name == "gspo-token":
            ratios = [geometric.detach() * policy[row, t].exp() / policy[row, t].exp().detach() for t in columns]
        values = []
        for ratio in ratios:
            low, high = torch.tensor([1 - objective.epsilon_low, 1 + objective.epsilon_high], dtype=f64)
            cut = low if ratio < low else high if ratio > high else ratio
            values.append(torch.minimum(ratio * advantages[row], cut * advantages[row]))
        if name == "dapo":
            loss = loss - sum(values) / denominators.num_tokens
        elif name == "dr-grpo":
            loss = loss - sum(values) / denominators.max_tokens / denominators.num_sequences
        else:
            loss = loss - sum(values) / len(values) / denominators.num_sequences
    return loss


@pytest.mark.parametrize("name", PRESETS)
def test_each_loss_and_its_gradient_equal_a_naive_loop_on_random_numbers(name):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        steps = torch.randn(5, 7, generator=generator, dtype=f64) * 0.3
        mask = torch.rand(5, 7, generator=generator) < 0.6
        mask[:, 0] = True
        advantages = torch.randn(5, generator=generator, dtype=f64)
        old = -torch.rand(5, 7, generator=generator, dtype=f64)
        denominators = Denominators(num_sequences=9, num_tokens=40, max_tokens=7)
        ours, gradient = loss_of(
            OBJECTIVES[name], steps, advantages=advantages, mask=mask, old=old, denominators=denominators
        )
        policy = (old + steps).requires_grad_()
        naive = naive_loss(name, OBJECTIVES[name], policy, old, mask, advantages, denominators)
        (expected,) = torch.autograd.grad(naive, policy)
        assert ours.loss.item() == pytest.approx(naive.item(), abs=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_gspo_token_is_gspo_when_a_sequence_has_one_advantage():
    sequence, sequence_gradient = loss_of(OBJECTIVES["gspo"])
    token, token_gradient = loss_of(OBJECTIVES["gspo-token"])
    assert token.loss.item() == pytest.approx(sequence.loss.item(), abs=1e-15)
    torch.testing.assert_close(token_gradient, sequence_gradient, rtol=0, atol=1e-15)
    assert torch.equal(token.clipped, sequence.clipped)


def test_clipping_takes_the_gradient_only_where_the_sequence_already_moved_the_right_way():
    up, down = torch.full((1, 2), 0.5, dtype=f64), torch.full((1, 2), -0.5, dtype=f64)
    mask, old = torch.ones(1, 2, dtype=torch.bool), torch.full((1, 2), -1.0, dtype=f64)
    for objective in OBJECTIVES.values():
        for steps, advantage, clipped in [(up, 1, True), (up, -1, False), (down, 1, False), (down, -1, True)]:
            advantages = torch.tensor([advantage], dtype=f64)
            output, gradient = loss_of(objective, steps, advantages=advantages, mask=mask, old=old)
            assert output.clipped.tolist() == [[clipped, clipped]]
            assert (gradient.abs().max().item() == 0) is clipped


@pytest.mark.parametrize("name", PRESETS)
def test_any_split_into_micro_batches_gives_the_gradient_of_the_whole(name):
    _, whole = loss_of(OBJECTIVES[name])
    for rows in ([0], [1, 2]), ([0], [1], [2]), ([2, 0], [1]):
        parts = torch.zeros_like(whole)
        for part in rows:
            _, parts[part] = loss_of(
                OBJECTIVES[name], STEPS[part], advantages=ADVANTAGES[part], mask=MASK[part], old=OLD[part]
            )
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", PRESETS)
def test_padding_changes_nothing_even_when_it_holds_extreme_numbers(name):
    output, gradient = loss_of(OBJECTIVES[name])
    padded = torch.cat([STEPS, torch.full((3, 2), 1e30, dtype=f64)], 1)
    mask = torch.cat([MASK, torch.zeros(3, 2, dtype=torch.bool)], 1)
    old = torch.cat([OLD, torch.full((3, 2), -1e30, dtype=f64)], 1)
    with_padding, padded_gradient = loss_of(OBJECTIVES[name], padded, mask=mask, old=old)
    assert with_padding.loss.item() == pytest.approx(output.loss.item(), abs=1e-15)
    torch.testing.assert_close(padded_gradient[:, :4], gradient, rtol=0, atol=0)
    assert padded_gradient[:, 4:].count_nonzero() == 0


def clip(ratio, low=0.9, high=1.2):
    return ratio.clamp(low, high)


WRONG = {
    "sum for mean": lambda r, a: torch.minimum(r["sum"] * a, clip(r["sum"]) * a).sum() / 4,
    "swapped epsilons": lambda r, a: torch.minimum(r["mean"] * a, clip(r["mean"], 0.8, 1.1) * a).sum() / 4,
    "wrong denominator": lambda r, a: torch.minimum(r["mean"] * a, clip(r["mean"]) * a).mean(),
    "max for min": lambda r, a: torch.maximum(r["mean"] * a, clip(r["mean"]) * a).sum() / 4,
    "mask off by one": lambda r, a: torch.minimum(r["shifted"] * a, clip(r["shifted"]) * a).sum() / 4,
    "flipped sign": lambda r, a: -torch.minimum(r["mean"] * a, clip(r["mean"]) * a).sum() / 4,
    "token level": lambda r, a: (
        (
            (torch.minimum(r["token"] * a[:, None], clip(r["token"]) * a[:, None]) * MASK).sum(-1) / MASK.sum(-1)
        ).sum()
        / 4
    ),
    "no clip": lambda r, a: (r["mean"] * a).sum() / 4,
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_gspo_loss_is_told_apart_from_the_right_one(fault):
    """The hazards that a tolerance of 1e-2 would let through: each gives another number on this batch."""
    masked = STEPS.masked_fill(~MASK, 0.0)
    shifted = MASK.roll(1, dims=1)
    ratios = {
        "sum": masked.sum(-1).exp(),
        "mean": (masked.sum(-1) / MASK.sum(-1)).exp(),
        "shifted": (STEPS.clamp(-1, 1).masked_fill(~shifted, 0.0).sum(-1) / shifted.sum(-1)).exp(),
        "token": STEPS.exp(),
    }
    output, _ = loss_of(OBJECTIVES["gspo"])
    assert abs(-WRONG[fault](ratios, ADVANTAGES).item() - output.loss.item()) > 1e-3


def test_log_ratios_are_bounded_only_where_exp_would_overflow_and_after_the_mean():
    mask = torch.ones(1, 2, dtype=torch.bool)
    old, advantages = torch.zeros(1, 2), torch.tensor([-1.0])
    for objective in OBJECTIVES.values():
        output, gradient = loss_of(objective, torch.full((1, 2), 500.0), advantages=advantages, mask=mask, old=old)
        assert math.isfinite(output.loss)
        assert gradient.isfinite().all()
    steps = torch.tensor([[60.0, -60.2]])  # each beyond the bound, their mean of -0.1 is not
    output, _ = loss_of(OBJECTIVES["gspo"], steps, advantages=advantages, mask=mask, old=old)
    assert output.loss.item() == pytest.approx(math.exp(-0.1) / 4, abs=1e-6)


def test_mismatch_weights_are_truncated_means_never_exp_of_a_sum():
    sampling = OLD - torch.tensor([[0.0, 0.3, 0.9, 0.0], [0.1, 0.3, 0.0, 0.0], [0.0, -0.5, -0.1, 0.0]], dtype=f64)
    assert mismatch_weights("none", OLD, sampling, MASK) is None
    sequence = mismatch_weights("sequence", OLD, sampling, MASK)
    assert sequence is not None
    assert sequence[:, 0].tolist() == pytest.approx([math.exp(0.4), math.exp(0.2), math.exp(-0.3)], abs=1e-12)
    token = mismatch_weights("token", OLD, sampling, MASK)
    assert token is not None
    assert token[0, 1:].tolist() == pytest.approx([math.exp(0.3), 2.0, 1.0], abs=1e-12)  # exp(0.9) truncated
    weighted, _ = loss_of(OBJECTIVES["gspo"], weights=sequence)
    terms = [math.exp(0.07) * 0.5 * math.exp(0.4), 1.2 * 2.0 * math.exp(0.2), 0.9 * -1.0 * math.exp(-0.3)]
    assert weighted.loss.item() == pytest.approx(-sum(terms) / 4, abs=1e-12)


def test_the_defaults_are_the_reported_runs():
    assert LossConfig().objective == Objective(ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4)
    assert (LossConfig().old_logprobs, LossConfig().mini_batches) == ("sampler", 1)


def test_single_choices_override_an_algorithm():
    objective = LossConfig(algorithm="grpo", epsilon_high=0.3, divide_by_std=False).objective
    assert objective == Objective(ratio="token", epsilon_low=0.2, epsilon_high=0.3, divide_by_std=False)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"epsilon_low": 0.0}, "clip range"),
        ({"epsilon_low": 1.0}, "clip range"),
        ({"epsilon_high": 0.0}, "clip range"),
        ({"average": "tokens"}, "'sequence' does not go with average 'tokens'.*would weigh long answers more"),
        ({"average": "fixed-length"}, "'sequence' does not go with average 'fixed-length'"),
        ({"algorithm": "gspo-token", "average": "tokens"}, "'sequence-token' does not go with average 'tokens'"),
        ({"algorithm": "dapo", "ratio": "sequence"}, "'sequence' does not go with average 'tokens'"),
        ({"mini_batches": 0}, "mini_batches is 0"),
        ({"mismatch_weight": "token"}, "needs old_logprobs 'policy'"),
        ({"mismatch_weight": "token", "old_logprobs": "policy"}, "does not go with one ratio a sequence"),
    ],
)
def test_choices_that_make_no_sense_are_refused_by_name(choices, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**choices)
