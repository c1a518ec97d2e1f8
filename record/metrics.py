"""What a step reports: the field paths of `StepMetrics` are the logged keys (`reward/accuracy`, `gspo/loss`, ...).

Letters: S training sequences, N of their completion tokens.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from data import Group
from engine.gate import GateReading
from engine.policy import SequenceOutput, TrainOutput
from loss import MAX_MISMATCH_WEIGHT, MismatchWeight, truncated_weights
from record.run import flatten

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMetrics:
    """Means over all completions of the step, by our judge where not said otherwise."""

    base_mean: float
    shaped_mean: float
    """As base_mean, since no reward is shaped."""
    accuracy: float
    """Share of right completions."""
    format_rate: float
    chapter_accuracy: float
    """By the chapter's own rule; a comparison that did not end counts as wrong."""
    chapter_format_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictMetrics:
    """How many completions got each verdict."""

    correct: int
    wrong: int
    no_box: int
    unclosed: int
    unparsed: int
    timeout: int
    crash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMetrics:
    """Counts, and means over all completions of the step; lengths in tokens, the end token included."""

    groups: int
    train_groups: int
    degenerate_groups: int
    completions: int
    train_completions: int
    """Of groups whose rewards differ."""
    completion_tokens: int
    """The sum over all completions."""
    mean_completion_tokens: float
    max_completion_tokens: int
    mean_sampled_token_surprisal: float
    """Minus the sampler's mean log-probability of a token, in nats."""
    unique_completion_rate: float
    """Different texts in a group over its size, mean over groups."""
    mean_prompt_tokens: float
    truncated_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMetrics:
    """The update in the chapter's words."""

    datums: int
    """Sequences that the update computes: those of groups whose rewards differ."""
    data_cursor_consumed: int
    """Questions taken so far."""
    update_skipped: int
    """1 where every group is degenerate."""
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoMetrics:
    """The update under the chapter's names, with its meanings, whatever the algorithm; absent in a skipped step."""

    loss: float
    """Mean over the step's mini-batches."""
    seq_ratio_mean: float
    """Over the sequences that are trained on."""
    sequence_clip_fraction: float
    """Clipped sequences over all of the step; with one ratio a token, a sequence whose tokens are all clipped."""
    token_clip_fraction: float
    """Tokens of clipped sequences over those of all sequences."""
    train_sequences: int
    normalization_sequences: int
    active_sequence_fraction: float
    train_tokens: int
    normalization_tokens: int
    active_token_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """The update beyond the chapter's log, over the sequences that are trained on; None in a skipped step."""

    optimizer_steps: int = 0
    grad_norm: float | None = None
    """Mean over the step's mini-batches."""
    entropy: float | None = None
    """Of the policy at a completion token, in nats."""
    sequence_clip_fraction: float | None = None
    """Of the sequences that are trained on, as in `mini_batch`, `positive` and `negative`."""
    token_clip_fraction: float | None = None
    """Of each token by itself."""
    padding_fraction: float | None = None
    """Of the positions that went through the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapMetrics:
    """Policy at sampling time against sampler, the same weights in two engines: |log-ratio| of a token in nats."""

    token_mean: float | None = None
    token_p99: float | None = None
    token_max: float | None = None
    kl: float | None = None
    """KL(sampler || policy) of a token, by the k3 estimator: mean of r - 1 - log r, r = policy / sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchMetrics:
    """The weights of `--mismatch-weight`; None without."""

    weight_mean: float | None = None
    truncated_fraction: float | None = None
    """Of the weights, at 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignMetrics:
    """Where clipping comes from, for the sequences whose advantage has one sign; log-ratios in nats."""

    train_sequences: int = 0
    clip_fraction: float | None = None
    log_ratio_mean: float | None = None
    log_ratio_std: float | None = None
    engine_log_ratio_mean: float | None = None
    """The part that is the gap between the two engines."""
    engine_log_ratio_std: float | None = None
    update_log_ratio_mean: float | None = None
    """The part that is the policy's movement since sampling; exactly 0 in a batch's first optimizer step."""
    update_log_ratio_std: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeMetrics:
    """Where the step's seconds went."""

    sync_seconds: float
    """The adapter, from trainer to sampler."""
    rollout_seconds: float
    """Sampling and grading."""
    grading_seconds: float
    gate_seconds: float
    """The step's rollouts on their way to the disk included."""
    update_seconds: float
    checkpoint_seconds: float
    step_seconds: float
    """All of it, the checkpoint included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    reward: RewardMetrics
    verdict: VerdictMetrics
    rollout: RolloutMetrics
    train: TrainMetrics
    gspo: GspoMetrics | None
    update: UpdateMetrics
    gap: GapMetrics
    mismatch: MismatchMetrics
    gate: GateReading
    positive: SignMetrics
    negative: SignMetrics
    time: TimeMetrics
    mini_batch: dict[str, dict[str, float]]
    """Loss, gradient norm and clip fraction of each optimizer step, by its number, where there are several."""

    def flat(self) -> dict[str, Any]:
        """Return the logged form: `reward/accuracy`, `gspo/loss`, ..."""
        return dict(flatten({name: value for name, value in asdict(self).items() if value is not None}))

    @property
    def not_finite(self) -> list[str]:
        """Keys of what came out infinite or not a number."""
        return [key for key, value in self.flat().items() if isinstance(value, float) and not math.isfinite(value)]

    def summary(self) -> str:
        """Return the step in one line for the terminal."""
        update = "skipped: every group was degenerate"
        if self.gspo:
            update = f"loss {self.gspo.loss:+.2e}  clipped {self.gspo.sequence_clip_fraction:6.2%}"
        return (
            f"step {self.step:4d}  reward {self.reward.accuracy:6.2%}  format {self.reward.format_rate:7.2%}  "
            f"tokens {self.rollout.mean_completion_tokens:7.1f}  {update}  {self.time.step_seconds:5.1f} s"
        )


class StepClock:
    """Seconds of a step's phases: `with clock("gate"): ...`."""

    def __init__(self, grader: Any) -> None:
        """Start the step's clock; the grader counts its own seconds, which are a part of the rollout."""
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._grader, self._graded_before = grader, grader.seconds

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add what the block takes to the phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - started

    @property
    def times(self) -> TimeMetrics:
        """The phases up to now."""
        return TimeMetrics(
            sync_seconds=self._seconds["sync"],
            rollout_seconds=self._seconds["rollout"],
            grading_seconds=self._grader.seconds - self._graded_before,
            gate_seconds=self._seconds["gate"],
            update_seconds=self._seconds["update"],
            checkpoint_seconds=self._seconds["checkpoint"],
            step_seconds=time.perf_counter() - self._started,
        )


def step_metrics(
    step: int,
    groups: Sequence[Group],
    outputs: Sequence[TrainOutput],
    gate: GateReading,
    times: TimeMetrics,
    *,
    problems_taken: int,
    learning_rate: float,
    mismatch_weight: MismatchWeight = "none",
) -> StepMetrics:
    """Return what a step reports; `outputs` holds one an optimizer step, none where every group is degenerate."""
    completions = [completion for group in groups for completion in group.completions]
    scores = [score for group in groups for score in group.scores]
    verdicts = Counter(score.verdict for score in scores)
    lengths = [len(completion.token_ids) for completion in completions]
    count, num_tokens, num_degenerate = len(completions), sum(lengths), sum(group.degenerate for group in groups)
    num_trained = sum(len(group.completions) for group in groups if not group.degenerate)
    mean_reward = _mean([score.reward for score in scores])
    sequences = SequenceOutput.together([output.sequences for output in outputs]) if outputs else None
    return StepMetrics(
        step=step,
        reward=RewardMetrics(
            base_mean=mean_reward,
            shaped_mean=mean_reward,
            accuracy=_mean([score.correct for score in scores]),
            format_rate=_mean([score.formatted for score in scores]),
            chapter_accuracy=_mean([bool(score.chapter_correct) for score in scores]),
            chapter_format_rate=_mean([bool(score.chapter_formatted) for score in scores]),
        ),
        verdict=VerdictMetrics(**{f.name: verdicts[f.name] for f in fields(VerdictMetrics)}),  # pyright: ignore[reportArgumentType]
        rollout=RolloutMetrics(
            groups=len(groups),
            train_groups=len(groups) - num_degenerate,
            degenerate_groups=num_degenerate,
            completions=count,
            train_completions=num_trained,
            completion_tokens=num_tokens,
            mean_completion_tokens=num_tokens / count,
            max_completion_tokens=max(lengths),
            mean_sampled_token_surprisal=-sum(math.fsum(c.logprobs) for c in completions) / num_tokens,
            unique_completion_rate=_mean(
                [len({c.text for c in g.completions}) / len(g.completions) for g in groups]
            ),
            mean_prompt_tokens=_mean([len(group.prompt_ids) for group in groups]),
            truncated_fraction=_mean([completion.finish_reason == "length" for completion in completions]),
        ),
        train=TrainMetrics(
            datums=num_trained,
            data_cursor_consumed=problems_taken,
            update_skipped=int(not outputs),
            learning_rate=learning_rate,
        ),
        gspo=_gspo_metrics(outputs, sequences, count, num_tokens) if sequences else None,
        update=_update_metrics(outputs, sequences) if sequences else UpdateMetrics(),
        gap=_gap_metrics(sequences.mismatches) if sequences else GapMetrics(),
        mismatch=_mismatch_metrics(sequences, mismatch_weight),
        gate=gate,
        positive=_sign_metrics(sequences, 1),
        negative=_sign_metrics(sequences, -1),
        time=times,
        mini_batch={
            str(number): {
                "loss": output.loss,
                "grad_norm": output.grad_norm,
                "sequence_clip_fraction": float(_clipped(output.sequences).float().mean()),
            }
            for number, output in enumerate(outputs, start=1)
        }
        if len(outputs) > 1
        else {},
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _clipped(sequences: SequenceOutput) -> Tensor:
    """Return, [S] bool, which sequences give no gradient, since all of their tokens are clipped."""
    return sequences.num_tokens == sequences.num_clipped_tokens


def _gspo_metrics(
    outputs: Sequence[TrainOutput], sequences: SequenceOutput, num_sequences: int, num_tokens: int
) -> GspoMetrics:
    """Return the chapter's numbers; the counts are of all sequences of the step."""
    clipped, train_tokens = _clipped(sequences), int(sequences.num_tokens.sum())
    return GspoMetrics(
        loss=_mean([output.loss for output in outputs]),
        seq_ratio_mean=float(sequences.log_ratios.exp().mean()),
        sequence_clip_fraction=int(clipped.sum()) / num_sequences,
        token_clip_fraction=int(sequences.num_tokens[clipped].sum()) / num_tokens,
        train_sequences=len(clipped),
        normalization_sequences=num_sequences,
        active_sequence_fraction=len(clipped) / num_sequences,
        train_tokens=train_tokens,
        normalization_tokens=num_tokens,
        active_token_fraction=train_tokens / num_tokens,
    )


def _update_metrics(outputs: Sequence[TrainOutput], sequences: SequenceOutput) -> UpdateMetrics:
    return UpdateMetrics(
        optimizer_steps=len(outputs),
        grad_norm=_mean([output.grad_norm for output in outputs]),
        entropy=float(sequences.entropies.mean()),
        sequence_clip_fraction=float(_clipped(sequences).float().mean()),
        token_clip_fraction=float(sequences.num_clipped_tokens.sum() / sequences.num_tokens.sum()),
        padding_fraction=_mean([output.padding_fraction for output in outputs]),
    )


def _gap_metrics(mismatches: Tensor) -> GapMetrics:
    return GapMetrics(
        token_mean=float(mismatches.abs().mean()),
        token_p99=float(mismatches.abs().quantile(0.99)),
        token_max=float(mismatches.abs().max()),
        kl=float((mismatches.expm1() - mismatches).mean()),
    )


def _mismatch_metrics(sequences: SequenceOutput | None, kind: MismatchWeight) -> MismatchMetrics:
    if sequences is None or kind == "none":
        return MismatchMetrics()
    log_weights = sequences.mismatches if kind == "token" else sequences.mismatch_log_ratios
    return MismatchMetrics(
        weight_mean=float(truncated_weights(log_weights).mean()),
        truncated_fraction=float((log_weights > math.log(MAX_MISMATCH_WEIGHT)).float().mean()),
    )


def _sign_metrics(sequences: SequenceOutput | None, sign: int) -> SignMetrics:
    if sequences is None or not (chosen := sequences.advantages.sign() == sign).any():
        return SignMetrics()
    moments = {}
    for name, log_ratios in [
        ("log_ratio", sequences.log_ratios),
        ("engine_log_ratio", sequences.mismatch_log_ratios),
        ("update_log_ratio", sequences.update_log_ratios),
    ]:
        moments[f"{name}_mean"] = float(log_ratios[chosen].mean())
        moments[f"{name}_std"] = float(log_ratios[chosen].std(correction=0))
    return SignMetrics(
        train_sequences=int(chosen.sum()),
        clip_fraction=float(_clipped(sequences)[chosen].float().mean()),
        **moments,
    )
