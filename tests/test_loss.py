"""GSPO's loss against numbers worked by hand and against a naive loop, in float64."""

import math

import pytest
import torch

from loss import LossConfig, gspo_loss, sequence_ratios

f64 = torch.float64
CONFIG = LossConfig(epsilon_low=0.1, epsilon_high=0.2)
MASK = torch.tensor([[False, True, True, True], [True, True, False, False], [False, True, True, False]])
SAMPLING = torch.tensor([[0.0, -1.0, -0.5, -2.0], [-0.3, -0.7, 0.0, 0.0], [0.0, -1.2, -0.4, 0.0]], dtype=f64)
STEPS = torch.tensor([[9.0, 0.06, 0.03, 0.12], [0.6, 0.2, -9.0, 9.0], [9.0, -0.6, 0.2, 9.0]], dtype=f64)
ADVANTAGES = torch.tensor([0.5, 2.0, -1.0], dtype=f64)


def loss_of(steps=STEPS, *, advantages=ADVANTAGES, num_sequences=4, config=CONFIG, mask=MASK, sampling=SAMPLING):
    policy = (sampling + steps).requires_grad_()
    output = gspo_loss(policy, sampling, mask, advantages, num_sequences=num_sequences, config=config)
    (gradient,) = torch.autograd.grad(output.loss, policy)
    return output, gradient


def naive_loss(steps, mask, advantages, num_sequences, config):
    total = 0.0
    for row, advantage in enumerate(advantages.tolist()):
        log_ratios = [steps[row, t].item() for t in range(steps.shape[1]) if mask[row, t]]
        ratio = math.prod(math.exp(x) for x in log_ratios) ** (1 / len(log_ratios))
        clipped = max(1 - config.epsilon_low, min(1 + config.epsilon_high, ratio))
        total += min(ratio * advantage, clipped * advantage)
    return -total / num_sequences


def test_the_ratio_is_the_geometric_mean_over_completion_tokens_only():
    ratios = sequence_ratios(SAMPLING + STEPS, SAMPLING, MASK)
    expected = [math.exp(0.07), math.exp(0.4), math.exp(-0.2)]  # means of (.06 .03 .12), (.6 .2), (-.6 .2)
    assert ratios.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_loss_equals_the_number_worked_by_hand():
    output, _ = loss_of()
    # Row 1 is inside the range; row 2 is cut at 1.2; row 3 (advantage below 0) is cut at 0.9.
    by_hand = -(math.exp(0.07) * 0.5 + 1.2 * 2.0 + 0.9 * -1.0) / 4
    assert output.loss.item() == pytest.approx(by_hand, abs=1e-12)
    assert output.clipped.tolist() == [False, True, True]


def test_the_gradient_equals_the_one_worked_by_hand():
    _, gradient = loss_of()
    each = -math.exp(0.07) * 0.5 / 3 / 4  # d(ratio)/d(logprob) = ratio / 3 tokens
    expected = torch.tensor([[0.0, each, each, each], [0.0] * 4, [0.0] * 4], dtype=f64)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_the_loss_equals_a_naive_loop_on_random_numbers():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        steps = torch.randn(5, 7, generator=generator, dtype=f64) * 0.3
        mask = torch.rand(5, 7, generator=generator) < 0.6
        mask[:, 0] = True
        advantages = torch.randn(5, generator=generator, dtype=f64)
        output, _ = loss_of(
            steps, advantages=advantages, num_sequences=9, mask=mask, sampling=-torch.rand_like(steps)
        )
        assert output.loss.item() == pytest.approx(naive_loss(steps, mask, advantages, 9, CONFIG), abs=1e-12)


def test_clipping_takes_the_gradient_only_where_the_sequence_already_moved_the_right_way():
    up, down = torch.full((1, 2), 0.5, dtype=f64), torch.full((1, 2), -0.5, dtype=f64)
    mask, sampling = torch.ones(1, 2, dtype=torch.bool), torch.full((1, 2), -1.0, dtype=f64)
    for steps, advantage, clipped in [(up, 1, True), (up, -1, False), (down, 1, False), (down, -1, True)]:
        output, gradient = loss_of(
            steps, advantages=torch.tensor([advantage], dtype=f64), mask=mask, sampling=sampling
        )
        assert output.clipped.item() is clipped
        assert (gradient.abs().max().item() == 0) is clipped


def test_the_default_range_is_the_reported_runs():
    assert (LossConfig().epsilon_low, LossConfig().epsilon_high) == (3e-4, 4e-4)


def test_any_split_into_micro_batches_gives_the_gradient_of_the_whole():
    _, whole = loss_of()
    for rows in ([0], [1, 2]), ([0], [1], [2]), ([2, 0], [1]):
        parts = torch.zeros_like(whole)
        for part in rows:
            _, parts[part] = loss_of(
                STEPS[part], advantages=ADVANTAGES[part], mask=MASK[part], sampling=SAMPLING[part]
            )
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-15)


def test_padding_changes_nothing_even_when_it_holds_extreme_numbers():
    output, gradient = loss_of()
    padded = torch.cat([STEPS, torch.full((3, 2), 1e30, dtype=f64)], 1)
    mask = torch.cat([MASK, torch.zeros(3, 2, dtype=torch.bool)], 1)
    sampling = torch.cat([SAMPLING, torch.full((3, 2), -1e30, dtype=f64)], 1)
    with_padding, padded_gradient = loss_of(padded, mask=mask, sampling=sampling)
    assert with_padding.loss.item() == output.loss.item()
    torch.testing.assert_close(padded_gradient[:, :4], gradient, rtol=0, atol=0)
    assert padded_gradient[:, 4:].count_nonzero() == 0


WRONG = {
    "sum for mean": lambda r, a, n: torch.minimum(r["sum"] * a, r["sum"].clamp(0.9, 1.2) * a).sum() / n,
    "swapped epsilons": lambda r, a, n: torch.minimum(r["mean"] * a, r["mean"].clamp(0.8, 1.1) * a).sum() / n,
    "wrong denominator": lambda r, a, n: torch.minimum(r["mean"] * a, r["mean"].clamp(0.9, 1.2) * a).mean(),
    "max for min": lambda r, a, n: torch.maximum(r["mean"] * a, r["mean"].clamp(0.9, 1.2) * a).sum() / n,
    "mask off by one": lambda r, a, n: torch.minimum(r["shifted"] * a, r["shifted"].clamp(0.9, 1.2) * a).sum() / n,
    "flipped sign": lambda r, a, n: -torch.minimum(r["mean"] * a, r["mean"].clamp(0.9, 1.2) * a).sum() / n,
    "token level": lambda r, a, n: (
        (
            (torch.minimum(r["token"] * a[:, None], r["token"].clamp(0.9, 1.2) * a[:, None]) * MASK).sum(-1)
            / MASK.sum(-1)
        ).sum()
        / n
    ),
    "no clip": lambda r, a, n: (r["mean"] * a).sum() / n,
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_loss_is_told_apart_from_the_right_one(fault):
    """The hazards that a tolerance of 1e-2 would let through: each gives another number on this batch."""
    masked = STEPS.masked_fill(~MASK, 0.0)
    shifted = MASK.roll(1, dims=1)
    ratios = {
        "sum": masked.sum(-1).exp(),
        "mean": (masked.sum(-1) / MASK.sum(-1)).exp(),
        "shifted": (STEPS.clamp(-1, 1).masked_fill(~shifted, 0.0).sum(-1) / shifted.sum(-1)).exp(),
        "token": STEPS.exp(),
    }
    output, _ = loss_of()
    assert abs(-WRONG[fault](ratios, ADVANTAGES, 4).item() - output.loss.item()) > 1e-3


@pytest.mark.parametrize(("low", "high"), [(0, 0.1), (1, 0.1), (0.1, 0), (-0.1, 0.1)])
def test_an_empty_clip_range_is_refused(low, high):
    with pytest.raises(ValueError, match="clip range"):
        LossConfig(epsilon_low=low, epsilon_high=high)
