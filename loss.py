"""The objectives on tensors, checkable against the papers alone.

An objective is four choices: the ratio (one a token or one a sequence), the clip range, the average, and whether
advantages are divided by their group's standard deviation. The published algorithms are rows of one table.

What a reader could get wrong: GSPO's sequence ratio is exp of the *mean* token log-ratio and each sequence is
clipped as a whole; every denominator is a number of the whole optimizer step, so that neither micro-batches nor
degenerate groups that are not sent through the model change the gradient.

Letters: B sequences, L padded length. Column t of a [B, L-1] tensor speaks of token t + 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Algorithm = Literal["gspo", "gspo-token", "grpo", "dr-grpo", "dapo"]
Ratio = Literal["sequence", "sequence-token", "token"]
Average = Literal["sequences", "tokens", "fixed-length"]
MismatchWeight = Literal["none", "token", "sequence"]

MAX_LOG_RATIO = 20.0  # exp overflows float32 at 88; nothing that trains comes near either
MAX_MISMATCH_WEIGHT = 2.0  # the cap of truncated importance sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The choices that make an algorithm."""

    ratio: Ratio
    epsilon_low: float
    epsilon_high: float
    average: Average = "sequences"
    divide_by_std: bool = True

    def __post_init__(self) -> None:
        """Refuse an empty clip range, and averages that would silently weigh sequences by their length."""
        if not 0 < self.epsilon_low < 1 or not 0 < self.epsilon_high < math.inf:
            raise ValueError(
                f"the clip range is [1 - {self.epsilon_low}, 1 + {self.epsilon_high}]; "
                "epsilon_low must lie between 0 and 1, epsilon_high above 0"
            )
        if self.ratio != "token" and self.average != "sequences":
            raise ValueError(
                f"ratio {self.ratio!r} does not go with average {self.average!r}: one ratio a sequence, averaged "
                "over tokens, would weigh long answers more; use average 'sequences', or ratio 'token'"
            )


PRESETS: dict[Algorithm, Objective] = {
    # GSPO, arXiv:2507.18071, equation 5; the clip range of its experiments (section 5.1)
    "gspo": Objective(ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    # GSPO-token, the same paper, equation 13
    "gspo-token": Objective(ratio="sequence-token", epsilon_low=3e-4, epsilon_high=4e-4),
    # GRPO, DeepSeekMath, arXiv:2402.03300, equation 3, without its KL term
    "grpo": Objective(ratio="token", epsilon_low=0.2, epsilon_high=0.2),
    # Dr. GRPO, arXiv:2503.20783: neither division by length nor by the standard deviation
    "dr-grpo": Objective(
        ratio="token", epsilon_low=0.2, epsilon_high=0.2, average="fixed-length", divide_by_std=False
    ),
    # DAPO, arXiv:2503.14476, equation 8: clip-higher and the token mean
    "dapo": Objective(ratio="token", epsilon_low=0.2, epsilon_high=0.28, average="tokens"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The objective, the ratio's denominator, and the number of optimizer steps per rollout batch."""

    algorithm: Algorithm = "gspo"
    ratio: Ratio | None = None
    """Overrides the algorithm's, as do the next four."""
    epsilon_low: float | None = None
    epsilon_high: float | None = None
    average: Average | None = None
    divide_by_std: bool | None = None
    old_logprobs: Literal["sampler", "policy"] = "sampler"
    """The ratio's denominator: as sampled, or the trainer's own before its first step on the batch."""
    mini_batches: int = 1
    """Optimizer steps a rollout batch, each on whole groups (the GSPO paper: 4)."""
    mismatch_weight: MismatchWeight = "none"
    """With the policy's old_logprobs: weigh by old / sampler, truncated at 2, a token or (as a geometric mean) a
    sequence at a time."""

    def __post_init__(self) -> None:
        """Refuse choices that do not go together."""
        objective = self.objective
        if self.mini_batches < 1:
            raise ValueError(f"mini_batches is {self.mini_batches}; it must be at least 1")
        if self.mismatch_weight != "none" and self.old_logprobs != "policy":
            raise ValueError(
                f"mismatch_weight {self.mismatch_weight!r} needs old_logprobs 'policy': with the sampler's, the "
                "ratio itself already measures the mismatch"
            )
        if self.mismatch_weight == "token" and objective.ratio == "sequence":
            raise ValueError("mismatch_weight 'token' does not go with one ratio a sequence; use 'sequence'")

    @property
    def objective(self) -> Objective:
        """The algorithm's choices, with what overrides them."""
        names = ("ratio", "epsilon_low", "epsilon_high", "average", "divide_by_std")
        overrides = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(PRESETS[self.algorithm], **overrides)


def group_advantages(rewards: Sequence[float], *, divide_by_std: bool = True) -> list[float]:
    """Return (r - mean) / (sample standard deviation + 1e-8) of each reward; all 0 when rewards agree.

    GSPO paper, arXiv:2507.18071, equation 6; the sample (n - 1) form is the chapter's. Without the division it is
    Dr. GRPO's advantage, arXiv:2503.20783.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = statistics.stdev(rewards) + 1e-8 if divide_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What an average divides by: counts over all sequences of an optimizer step, degenerate groups included."""

    num_sequences: int
    num_tokens: int
    """Completion tokens."""
    max_tokens: int
    """The longest completion that sampling allows: Dr. GRPO's constant."""

    @classmethod
    def of(cls, completion_lengths: Sequence[int], *, max_tokens: int) -> Denominators:
        """Count all completions of the step, given their lengths in tokens."""
        return cls(num_sequences=len(completion_lengths), num_tokens=sum(completion_lengths), max_tokens=max_tokens)


def mismatch_weights(
    kind: MismatchWeight, old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor
) -> Tensor | None:
    """Return truncated importance weights old / sampler, [B, L-1] or [B, 1]; never exp of a sum over tokens."""
    if kind == "none":
        return None
    if kind == "sequence":
        return truncated_weights(sequence_log_ratios(old_logprobs, sampling_logprobs, mask)[:, None])
    return truncated_weights((old_logprobs - sampling_logprobs).masked_fill(~mask, 0.0))


def truncated_weights(log_weights: Tensor) -> Tensor:
    """Return the weights of these logarithms, at most MAX_MISMATCH_WEIGHT."""
    return log_weights.clamp(max=math.log(MAX_MISMATCH_WEIGHT)).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What one batch contributes to the step."""

    loss: Tensor  # []
    clipped: Tensor  # [B, L-1] bool: completion tokens whose gradient the clip took away
    log_ratios: Tensor  # [B] nats: log of each sequence's ratio, whatever ratio the objective uses; detached


def sequence_log_ratios(policy_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log s_i, the mean over a sequence's completion tokens of log(pi / pi_old), [B] nats.

    s_i = (pi(y_i) / pi_old(y_i)) ** (1 / |y_i|) is equation 7 of the GSPO paper.

    Args:
        policy_logprobs: log pi of each token, [B, L-1] nats.
        old_logprobs: log pi_old of each token, [B, L-1] nats.
        mask: [B, L-1] bool, True on completion tokens; every row has at least one.
    """
    log_ratios = (policy_logprobs - old_logprobs).masked_fill(~mask, 0.0)  # [B, L-1]
    return log_ratios.sum(-1) / mask.sum(-1)


def policy_loss(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    objective: Objective,
    denominators: Denominators,
    weights: Tensor | None = None,
) -> LossOutput:
    """Return -average(min(r A, clip(r) A)) for the objective's ratio r and average.

    Args:
        policy_logprobs: log pi of each token, [B, L-1] nats, with the gradient.
        old_logprobs: log pi_old of each token, [B, L-1] nats.
        mask: [B, L-1] bool, True on completion tokens; every row has at least one.
        advantages: one a sequence, [B].
        objective: ratio, clip range, average.
        denominators: of the whole step, not of this batch.
        weights: importance weights that multiply the objective, [B, 1] or [B, L-1].
    """
    if objective.ratio == "token":
        log_ratios = (policy_logprobs - old_logprobs).masked_fill(~mask, 0.0)  # [B, L-1]
    else:
        log_ratios = sequence_log_ratios(policy_logprobs, old_logprobs, mask)[:, None]  # [B, 1]
    ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if objective.ratio == "sequence-token":  # the sequence's value, the token's gradient
        own = policy_logprobs.masked_fill(~mask, 0.0)
        ratios = ratios.detach() * (own - own.detach()).exp()  # [B, L-1]

    gains = ratios * advantages[:, None]
    clipped_gains = ratios.clamp(1 - objective.epsilon_low, 1 + objective.epsilon_high) * advantages[:, None]
    values = gains.minimum(clipped_gains) if weights is None else gains.minimum(clipped_gains) * weights

    if values.shape[-1] == 1:  # one a sequence
        total = values.sum() / denominators.num_sequences
    elif objective.average == "sequences":
        total = (values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1)).sum() / denominators.num_sequences
    elif objective.average == "tokens":
        total = values.masked_fill(~mask, 0.0).sum() / denominators.num_tokens
    else:
        total = values.masked_fill(~mask, 0.0).sum() / (denominators.num_sequences * denominators.max_tokens)
    return LossOutput(
        loss=-total,
        clipped=(clipped_gains < gains) & mask,
        log_ratios=sequence_log_ratios(policy_logprobs.detach(), old_logprobs, mask),
    )


LossFunction = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], LossOutput]
"""(logprobs, old_logprobs, sampling_logprobs, mask, each [B, L-1], advantages [B]) -> loss of one micro-batch."""


def make_loss(config: LossConfig, denominators: Denominators) -> LossFunction:
    """Return the loss of an optimizer step, to be summed over its micro-batches."""

    def loss(
        logprobs: Tensor, old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, advantages: Tensor
    ) -> LossOutput:
        return policy_loss(
            logprobs,
            old_logprobs if config.old_logprobs == "policy" else sampling_logprobs,
            mask,
            advantages,
            objective=config.objective,
            denominators=denominators,
            weights=mismatch_weights(config.mismatch_weight, old_logprobs, sampling_logprobs, mask),
        )

    return loss
