"""What a step reports, and where it goes: `metrics.jsonl` is the truth, SwanLab mirrors it.

The field paths of `StepMetrics` are the logged keys (`reward/accuracy`, `gspo/loss`, ...), the chapter's names.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tqdm import tqdm

from check import GateReading
from checkpoint import writing
from data import write_whole
from loss import MAX_MISMATCH_WEIGHT, MismatchWeight, truncated_weights
from policy import UpdateResult
from rollout import Group

if TYPE_CHECKING:
    from torch import Tensor

SwanlabMode = Literal["online", "local", "offline", "disabled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMetrics:
    """Of all completions of the step."""

    accuracy: float
    format_rate: float
    degenerate_groups: int


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
    """Means over all completions of the step, in tokens."""

    completion_tokens: float
    prompt_tokens: float
    truncated_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoMetrics:
    """The update over its training sequences, whatever the algorithm; None where nothing was trained."""

    loss: float | None = None
    """Mean over the step's mini-batches, as is grad_norm."""
    grad_norm: float | None = None
    seq_ratio_mean: float | None = None
    sequence_clip_fraction: float | None = None
    """Sequences that give no gradient since all of their tokens are clipped."""
    token_clip_fraction: float | None = None
    entropy: float | None = None
    """Of the policy at a completion token, in nats."""
    train_sequences: int = 0
    normalization_sequences: int
    padding_fraction: float | None = None
    """Of the positions that went through the model in the update."""
    optimizer_steps: int = 0
    """0 where every group was degenerate, and the step was skipped."""


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
    """Where the step's seconds went; its checkpoint is not in them."""

    sync_seconds: float
    """The adapter, from trainer to sampler."""
    rollout_seconds: float
    """Sampling and grading."""
    grading_seconds: float
    gate_seconds: float
    update_seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    reward: RewardMetrics
    verdict: VerdictMetrics
    rollout: RolloutMetrics
    gspo: GspoMetrics
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
        return dict(flatten(asdict(self)))

    @property
    def not_finite(self) -> list[str]:
        """Keys of what came out infinite or not a number."""
        return [key for key, value in self.flat().items() if isinstance(value, float) and not math.isfinite(value)]

    def summary(self) -> str:
        """Return the step in one line for the terminal."""
        gspo = self.gspo
        update = (
            f"loss {gspo.loss:+.2e}  clipped {gspo.sequence_clip_fraction:6.2%}"
            if gspo.loss is not None
            else "skipped: every group was degenerate"
        )
        return (
            f"step {self.step:4d}  reward {self.reward.accuracy:6.2%}  format {self.reward.format_rate:7.2%}  "
            f"tokens {self.rollout.completion_tokens:7.1f}  {update}  {self.time.step_seconds:5.1f} s"
        )


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries, each under its path: `reward/accuracy`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def step_metrics(
    step: int,
    groups: Sequence[Group],
    updates: Sequence[UpdateResult],
    gate: GateReading,
    time_metrics: TimeMetrics,
    *,
    mismatch_weight: MismatchWeight,
) -> StepMetrics:
    """Return what a step reports; `updates` holds one result an optimizer step, none when all was degenerate."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    verdicts = Counter(rollout.score.verdict for rollout in rollouts)
    count = len(rollouts)
    return StepMetrics(
        step=step,
        reward=RewardMetrics(
            accuracy=sum(r.score.reward for r in rollouts) / count,
            format_rate=sum(r.score.formatted for r in rollouts) / count,
            degenerate_groups=sum(group.degenerate for group in groups),
        ),
        verdict=VerdictMetrics(**{f.name: verdicts[f.name] for f in fields(VerdictMetrics)}),  # pyright: ignore[reportArgumentType]
        rollout=RolloutMetrics(
            completion_tokens=sum(len(r.completion.token_ids) for r in rollouts) / count,
            prompt_tokens=sum(len(group.prompt_ids) for group in groups) / len(groups),
            truncated_fraction=sum(r.completion.finish_reason == "length" for r in rollouts) / count,
        ),
        gate=gate,
        time=time_metrics,
        **_update_metrics(updates, mismatch_weight, normalization_sequences=count),
    )


def _update_metrics(
    updates: Sequence[UpdateResult], mismatch_weight: MismatchWeight, *, normalization_sequences: int
) -> dict[str, Any]:
    import torch

    if not updates:
        return {
            "gspo": GspoMetrics(normalization_sequences=normalization_sequences),
            "gap": GapMetrics(),
            "mismatch": MismatchMetrics(),
            "positive": SignMetrics(),
            "negative": SignMetrics(),
            "mini_batch": {},
        }

    def together(name: str) -> Tensor:
        return torch.cat([getattr(update, name) for update in updates])

    log_ratios, engine, advantages = together("log_ratios"), together("engine_log_ratios"), together("advantages")
    tokens, clipped_tokens = together("num_tokens"), together("num_clipped_tokens")
    clipped, gaps = tokens == clipped_tokens, together("token_gaps")
    moved = torch.cat([update.update_log_ratios for update in updates])

    def of_sign(chosen: Tensor) -> SignMetrics:
        if not chosen.any():
            return SignMetrics()
        parts = {"log_ratio": log_ratios, "engine_log_ratio": engine, "update_log_ratio": moved}
        moments = {f"{name}_mean": float(part[chosen].mean()) for name, part in parts.items()}
        moments |= {f"{name}_std": float(part[chosen].std(correction=0)) for name, part in parts.items()}
        return SignMetrics(
            train_sequences=int(chosen.sum()), clip_fraction=float(clipped[chosen].float().mean()), **moments
        )

    return {
        "gspo": GspoMetrics(
            loss=sum(update.loss for update in updates) / len(updates),
            grad_norm=sum(update.grad_norm for update in updates) / len(updates),
            seq_ratio_mean=float(log_ratios.exp().mean()),
            sequence_clip_fraction=float(clipped.float().mean()),
            token_clip_fraction=float(clipped_tokens.sum() / tokens.sum()),
            entropy=float(together("entropies").mean()),
            train_sequences=len(advantages),
            normalization_sequences=normalization_sequences,
            padding_fraction=sum(update.padding_fraction for update in updates) / len(updates),
            optimizer_steps=len(updates),
        ),
        "gap": GapMetrics(
            token_mean=float(gaps.abs().mean()),
            token_p99=float(gaps.abs().quantile(0.99)),
            token_max=float(gaps.abs().max()),
            kl=float((gaps.expm1() - gaps).mean()),
        ),
        "mismatch": _mismatch({"none": None, "token": gaps, "sequence": engine}[mismatch_weight]),
        "positive": of_sign(advantages > 0),
        "negative": of_sign(advantages < 0),
        "mini_batch": {
            str(number): {
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "sequence_clip_fraction": float((update.num_tokens == update.num_clipped_tokens).float().mean()),
            }
            for number, update in enumerate(updates, start=1)
        }
        if len(updates) > 1
        else {},
    }


def _mismatch(log_weights: Tensor | None) -> MismatchMetrics:
    if log_weights is None:
        return MismatchMetrics()
    return MismatchMetrics(
        weight_mean=float(truncated_weights(log_weights).mean()),
        truncated_fraction=float((log_weights > math.log(MAX_MISMATCH_WEIGHT)).float().mean()),
    )


FINISH_SECONDS = 60
"""What the mirror gets for its last uploads."""
MISMATCH_LIMIT = 0.1
"""By which the mean mismatch weight may differ from 1 without an alarm."""
LONGEST_STREAK = 5
"""Steps after which the slowest of the alarms sounds."""


def alarms(recent: Sequence[StepMetrics]) -> list[str]:
    """Return what is wrong from the newest of these steps on, and what it usually means.

    An alarm about a lasting state sounds once, when it has lasted long enough; `recent` has to reach one step
    further back than that.
    """

    def begins(steps: int, holds: Callable[[StepMetrics], bool]) -> bool:
        newest, before = recent[-steps:], recent[: -steps or None][-1:]
        return len(newest) == steps and all(map(holds, newest)) and not any(map(holds, before))

    step = recent[-1]
    found = []
    ungraded, count = step.verdict.timeout + step.verdict.crash, step.gspo.normalization_sequences
    if ungraded > 0.01 * count:
        found.append(
            f"{ungraded} of {count} completions could not be graded (timeout {step.verdict.timeout}, crash "
            f"{step.verdict.crash}) and were paid 0; `python reward.py --text FILE --reference X` shows what one "
            "of them does"
        )
    if begins(LONGEST_STREAK, lambda s: s.reward.accuracy == 0):
        found.append(
            f"no completion has been right for {LONGEST_STREAK} steps: the problems are too hard for this model, "
            "or its answers and the references differ in form; read some in the run's rollouts"
        )
    if begins(1, lambda s: s.reward.format_rate == 0):
        found.append(
            r"no completion has a whole \boxed{}: the model does not follow the instruction (is it the tuned "
            "model, with its own chat template?), or max_tokens ends every answer before the box"
        )
    if begins(3, lambda s: s.gspo.train_sequences == 0):
        found.append(
            "every group has been degenerate for 3 steps, so nothing is learnt: the problems are all too easy or "
            "all too hard for this model, or its completions hardly differ (is the temperature 1?)"
        )
    if begins(1, lambda s: s.mismatch.weight_mean is not None and abs(s.mismatch.weight_mean - 1) > MISMATCH_LIMIT):
        found.append(
            f"the mismatch weights average {step.mismatch.weight_mean:.3g}: they correct for rounding, and should "
            "average 1; look at gap/token_mean, the two engines have drifted apart"
        )
    if begins(1, lambda s: s.rollout.truncated_fraction == 1):
        found.append(
            "every completion was cut off at max_tokens: raise it, or look whether the model ever writes its end "
            "token"
        )
    return found


class MetricsLog:
    """Appends each step to `metrics.jsonl` and mirrors it to SwanLab; a context manager.

    The mirror is best effort: without a login or a network the run carries on offline, with one line of notice.
    """

    def __init__(
        self,
        folder: Path,
        *,
        after_step: int,
        mode: SwanlabMode,
        swanlab_id: str | None,
        config: dict[str, Any],
    ) -> None:
        """Open the log of a run.

        Args:
            folder: the run's folder.
            after_step: lines of later steps are set aside; the resumed run writes them again.
            mode: where SwanLab writes.
            swanlab_id: the SwanLab run to continue, or None for a new one.
            config: settings shown beside the curves.
        """
        self._path = folder / "metrics.jsonl"
        self._file: FileIO | None = None
        self._notices: list[str] = []
        self._recent: deque[StepMetrics] = deque(maxlen=LONGEST_STREAK + 1)
        self._keep_until(after_step)
        self._swanlab = _start_swanlab(folder, mode, swanlab_id, config)
        self.swanlab_id = swanlab_id or (self._swanlab.id if self._swanlab else None)
        """The id under which SwanLab can continue this run; kept where the mirror is off or lost for a while."""

    def __enter__(self) -> MetricsLog:
        """Open the file for appending."""
        self._file = self._path.open("ab", buffering=0)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        """Close the file, and SwanLab as finished, interrupted or crashed."""
        if self._file:
            self._file.close()
        if self._swanlab:
            interrupted = exc_type is not None and not issubclass(exc_type, Exception)
            state = "success" if exc_type is None else "aborted" if interrupted else "crashed"
            self._mirror(lambda run: _finish(run, state))
            self._show_notices()

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        flat, broken = metrics.flat(), metrics.not_finite
        self._append((json.dumps(flat | dict.fromkeys(broken)) + "\n").encode())
        self._recent.append(metrics)
        numbers = {k: v for k, v in flat.items() if k != "step" and v is not None and k not in broken}
        self._mirror(lambda run: run.log(numbers, step=metrics.step))

    def show(self) -> None:
        """Print the newest step's summary line and what there is to warn of."""
        newest = self._recent[-1]
        self._show_notices()
        tqdm.write(newest.summary())
        warnings = alarms(list(self._recent))
        if broken := newest.not_finite:
            warnings.append(f"not a finite number: {', '.join(broken)}; look at the step's rollouts")
        for warning in warnings:
            tqdm.write(f"warning: {warning}")

    def _show_notices(self) -> None:
        while self._notices:
            tqdm.write(self._notices.pop(0))

    def _append(self, line: bytes) -> None:
        """Write a whole line or none; DiskError when it cannot be written."""
        assert self._file, "the log is not open"
        start = self._file.seek(0, os.SEEK_END)
        with writing(self._path, num_bytes=len(line)):
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(start)
                raise

    def _mirror(self, action: Callable[[Any], object]) -> None:
        if self._swanlab:
            try:
                action(self._swanlab)
            except Exception as error:  # a tracker's fault must not cost the run
                self._swanlab = None
                self._notices.append(f"SwanLab stopped ({error}); {self._path} goes on")

    def _keep_until(self, step: int) -> None:
        """Move later lines to RUN/replaced, behind those of earlier times."""
        kept, replaced = [], []
        for line in self._path.read_text().split("\n") if self._path.exists() else []:
            try:
                (kept if json.loads(line)["step"] <= step else replaced).append(line + "\n")
            except ValueError:  # the half-written last line of a killed run, or the end of the file
                break
        target = self._path.parent / "replaced" / self._path.name
        with writing(self._path):
            if replaced:
                target.parent.mkdir(exist_ok=True)
                earlier = target.read_text().splitlines(keepends=True) if target.exists() else []
                if earlier[-len(replaced) :] != replaced:  # after a kill between these two writings
                    write_whole(target, "".join(earlier + replaced))
            write_whole(self._path, "".join(kept))


def _finish(run: Any, state: str) -> None:
    """Close the mirror, which would wait for a server that is gone without end; TimeoutError after a minute."""

    def out_of_time(*_: object) -> NoReturn:
        raise TimeoutError(f"not uploaded within {FINISH_SECONDS} s; `swanlab sync` does it later")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(FINISH_SECONDS)
    try:
        run.finish(state)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _start_swanlab(folder: Path, mode: SwanlabMode, swanlab_id: str | None, config: dict[str, Any]) -> Any:
    if mode == "disabled":
        return None
    try:
        import swanlab
    except ImportError:
        tqdm.write("SwanLab is not installed; metrics.jsonl has everything")
        return None
    if mode == "local" and not importlib.util.find_spec("swanboard"):
        tqdm.write("SwanLab's local mode needs `swanlab[dashboard]`, which is not installed; it records offline")
        mode = "offline"
    options = {"project": "gspo", "name": folder.name, "config": config, "log_dir": str(folder / "swanlog")}
    if mode == "online":
        try:
            if swanlab_id is None:
                return swanlab.init(mode="online", **options)
            return swanlab.init(mode="online", id=swanlab_id, resume="allow", **options)
        except Exception as error:  # no login, no network, a server's fault: none may cost the run
            tqdm.write(f"SwanLab is not reachable ({error}); it records offline, `swanlab sync` uploads later")
            mode = "offline"
    try:
        return swanlab.init(mode=mode, **options)
    except Exception as error:  # a full or read-only disk, for one
        tqdm.write(f"SwanLab cannot record ({error}); metrics.jsonl has everything")
        return None
