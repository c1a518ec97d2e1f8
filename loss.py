"""The objective on tensors, checkable against the paper alone (GSPO, arXiv:2507.18071).

What a reader could get wrong: the sequence ratio is exp of the *mean* token log-ratio, each sequence is
clipped as a whole, and the sum over sequences is divided by a number that the caller fixes for the whole step,
so that neither micro-batches nor skipped degenerate groups change the gradient.

Letters: B sequences, L padded length. Column t of a [B, L-1] tensor speaks of token t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The clip range of the sequence ratio: [1 - epsilon_low, 1 + epsilon_high]."""

    epsilon_low: float = 3e-4
    epsilon_high: float = 4e-4

    def __post_init__(self) -> None:
        """Refuse a range that is empty or reaches ratio 0."""
        if not 0 < self.epsilon_low < 1 or self.epsilon_high <= 0:
            raise ValueError(
                f"the clip range is [1 - {self.epsilon_low}, 1 + {self.epsilon_high}]; "
                "epsilon_low must lie between 0 and 1, epsilon_high above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What one batch contributes to the step."""

    loss: Tensor  # []
    ratios: Tensor  # [B], detached
    clipped: Tensor  # [B] bool: the clip took this sequence's gradient away


def sequence_ratios(policy_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return s_i = (pi(y_i) / pi_old(y_i)) ** (1 / |y_i|), [B]: equation 7 of the GSPO paper.

    Args:
        policy_logprobs: log pi of each token, [B, L-1] nats, with the gradient.
        sampling_logprobs: log pi_old of each token, [B, L-1] nats.
        mask: [B, L-1] bool, True on completion tokens; every row has at least one.
    """
    log_ratios = (policy_logprobs - sampling_logprobs).masked_fill(~mask, 0.0)  # [B, L-1]
    return (log_ratios.sum(-1) / mask.sum(-1)).exp()


def gspo_loss(
    policy_logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    num_sequences: int,
    config: LossConfig,
) -> LossOutput:
    """Return -sum_i min(s_i A_i, clip(s_i) A_i) / num_sequences: equation 5 of the GSPO paper.

    Args:
        policy_logprobs: log pi of each token, [B, L-1] nats, with the gradient.
        sampling_logprobs: log pi_old of each token, [B, L-1] nats.
        mask: [B, L-1] bool, True on completion tokens; every row has at least one.
        advantages: one a sequence, [B].
        num_sequences: all sequences of the step, degenerate groups included; not B.
        config: the clip range.
    """
    ratios = sequence_ratios(policy_logprobs, sampling_logprobs, mask)  # [B]
    within = ratios.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
    objective = (ratios * advantages).minimum(within * advantages)
    return LossOutput(
        loss=-objective.sum() / num_sequences,
        ratios=ratios.detach(),
        clipped=(within * advantages < ratios * advantages).detach(),
    )
