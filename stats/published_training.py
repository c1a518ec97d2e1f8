"""The published run's training curves, and a run of the same configuration paired with them step by step.

published_training.csv has the 100 steps of the publication's two figures, decoded from the raw and the smoothed
curve together (exponential average 0.66 with bias correction). Its clipped sequences sum to 841 of 6,400, 13.14 %;
published are 13.11 %. Two ways of decoding differ by 0.4 to 0.7 of 64 a step on average (by at most 2 in nine
steps of ten, at most 7) and by less than 0.5 % in the sums; the training sequences of step 92 are 48 or 56. Tokens
are read to about 3,000 a step, the mean ratio to 1e-5, the loss to 2e-6, the token clip fraction to 0.01.

What a reader could get wrong: the step is the unit. Its 64 completions share eight questions, and its neighbours
share weights. The publication counts steps from 0, this suite from 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from stats.curves import TrainedRun, mean_of_series
from stats.estimates import Estimate, Floats
from stats.measures import excludes_zero
from stats.page import plain, table
from stats.reported import differences

EARLY_STEPS = 20


@dataclass(frozen=True, slots=True)
class Curve:
    """A published curve, its key in metrics.jsonl, and how a mean over steps is shown."""

    title: str
    key: str
    column: str
    """In the file."""
    divisor: int = 1
    """64 where the file has a step's count or sum and the log a mean over completions."""
    scale: float = 1.0
    form: str = ".1f"
    reading_error: float = 0.0
    """Bound on the error of a mean over steps, in the log's unit."""
    relative_reading_error: float = 0.0
    """The same as a share of the published mean."""

    def show(self, value: float, sign: str = "") -> str:
        """Return a value for a reader, in the title's unit."""
        return "-" if math.isnan(value) else f"{self.scale * value + 0.0:{sign}{self.form}}"


CURVES = (
    Curve("reward, %", "reward/chapter_accuracy", "correct_of_64", 64, 100, relative_reading_error=0.005),
    Curve("format, %", "reward/chapter_format_rate", "formatted_of_64", 64, 100, relative_reading_error=0.005),
    Curve("tokens a completion", "rollout/mean_completion_tokens", "completion_tokens", 64, 1, ",.0f", 3000 / 64),
    Curve("mean sequence ratio", "gspo/seq_ratio_mean", "seq_ratio_mean", 1, 1, ".5f", 1e-5),
    Curve(
        "sequences clipped, %", "gspo/sequence_clip_fraction", "clipped_sequences_of_64", 64, 100,
        relative_reading_error=0.005,
    ),
    Curve("tokens clipped, %", "gspo/token_clip_fraction", "token_clip_fraction", 1, 100, ".1f", 0.01),
    Curve("sequences trained on", "gspo/train_sequences", "train_sequences", relative_reading_error=0.005),
    Curve("loss, 1e-5", "gspo/loss", "loss", 1, 1e5, ".2f", 2e-6),
)  # fmt: skip


@cache
def published_curves() -> dict[str, Floats]:
    """Return the published curves under this suite's keys, [100] each, with "step" from 1 to 100."""
    path = Path(__file__).with_name("published_training.csv")
    rows = np.genfromtxt(path, delimiter=",", names=True)
    return {"step": rows["step"] + 1} | {curve.key: rows[curve.column] / curve.divisor for curve in CURVES}


@dataclass(frozen=True, slots=True)
class Paired:
    """A curve on the steps that both runs have: means, and the mean of ours minus published."""

    num_steps: int
    ours: float
    published: float
    difference: Estimate
    """Its interval includes the reading error."""


def paired(metrics: dict[str, Floats], curve: Curve, *, last_step: int | None = None) -> Paired:
    """Pair a run's curve with the published one, step by step up to `last_step`; skipped steps are left out."""
    published = published_curves()
    steps, ours, theirs = np.intersect1d(metrics["step"], published["step"], return_indices=True)
    ours, theirs = metrics[curve.key][ours], published[curve.key][theirs]
    kept = np.isfinite(ours) & (steps <= (last_step or math.inf))
    if not kept.any():
        return Paired(0, math.nan, math.nan, Estimate(math.nan, math.nan, math.nan))
    mean = float(theirs[kept].mean())
    change = mean_of_series(ours[kept] - theirs[kept])
    reading = curve.reading_error + curve.relative_reading_error * abs(mean)
    wide = Estimate(change.value, change.low - reading, change.high + reading)
    return Paired(int(kept.sum()), float(ours[kept].mean()), mean, wide)


def why_not_paired(run: TrainedRun) -> str | None:
    """Return one sentence on why a run cannot be paired with the published curves; None where it can."""
    reasons = differences(run)
    if missing := [curve.key for curve in CURVES if curve.key not in run.metrics]:
        reasons.append(f"its log, of an older version, has no {' and no '.join(missing)}")
    if not reasons:
        return None
    what = "; ".join(reasons)
    return f"{run.name} is not drawn over the published curves, since it is not the reported run: {what}."


def published_training_parts(runs: Sequence[TrainedRun], pictures: dict[str, str]) -> Iterator[str]:
    """Yield the report's section on the published training curves; `pictures` has "published-NAME" of each run."""
    for run in runs:
        if why := why_not_paired(run):
            yield plain(why)
        else:
            yield f"![{plain(run.name)} over the published run]({pictures[f'published-{run.name}']})"
            yield from _differences(run)


def _differences(run: TrainedRun) -> Iterator[str]:
    rows, outside, outside_early = [], 0, 0
    for curve in CURVES:
        whole, early = paired(run.metrics, curve), paired(run.metrics, curve, last_step=EARLY_STEPS)
        outside += excludes_zero(whole.difference)
        outside_early += excludes_zero(early.difference)
        changes = [_show_change(curve, whole.difference), _show_change(curve, early.difference)]
        rows.append([curve.title, curve.show(whole.ours), curve.show(whole.published), *changes])
    count = int(np.isin(run.metrics["step"], published_curves()["step"]).sum())
    heads = ["", plain(run.name), "published", "difference", f"over the first {EARLY_STEPS} steps"]
    yield table(heads, rows)
    yield (
        f"Means over {count} steps, paired: step 1 here is step 0 there, and both met the same eight questions. In "
        "brackets: 95 % intervals of the mean difference; bold: zero lies outside. The step is the unit, since its "
        "64 completions share eight questions. Neighbouring steps are correlated, so the standard error is robust "
        "to autocorrelation (Newey and West 1987, over half of the steps, with the critical value of Kiefer and "
        "Vogelsang 2005). The published values were read off two figures; each interval is wider by their reading "
        "error."
    )
    yield (
        f"{outside} of {len(CURVES)} intervals exclude zero, and {outside_early} of those over the first "
        f"{EARLY_STEPS} steps; each is a look of its own. Two honest runs of one configuration drift apart as they "
        "learn: their completions differ from the first step on, then their weights do. How far such runs drift "
        "is not known from one run on each side; the intervals contain only what shows within these steps. An "
        "interval around zero says that noise can explain the difference. One that excludes zero says that these "
        "two runs differ, not that one of them was done wrongly. The first steps, before the weights have parted, "
        "say most about whether the same experiment was run."
    )


def _show_change(curve: Curve, change: Estimate) -> str:
    low, high = curve.show(change.low, "+"), curve.show(change.high, "+")
    text = f"{curve.show(change.value, '+')} ({'too few steps' if math.isnan(change.low) else f'{low} to {high}'})"
    return f"**{text}**" if excludes_zero(change) else text
