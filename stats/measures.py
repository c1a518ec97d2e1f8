"""The four numbers of the chapter's table, and how checkpoints differ from the base in each.

What a reader could get wrong: a difference that is not supported is not shown to be zero. `Comparison.detectable`
says how large a difference would have been found. Letters: P problems, n completions a problem, M checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stats.estimates import (
    Z80,
    Estimate,
    Floats,
    detectable_difference,
    difference_errors,
    drawing_error,
    null_error,
    paired_differences,
    pass_drawing_error,
)
from stats.evaluations import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number of the table, computed from each problem's generations."""

    field: str  # its name in `Summary`
    title: str
    column: str  # the `Generation` field that it averages
    any_of_n: bool = False  # whether one such generation is enough for the problem
    unit: str = "points"

    def per_problem(self, evaluation: Evaluation) -> Floats:
        """Return the measure of each problem, [P]."""
        values = evaluation.table(self.column)
        return values.max(1) if self.any_of_n else values.mean(1)

    def redrawing_error(self, evaluation: Evaluation) -> float:
        """Return the standard error of the measure when the same problems are sampled again."""
        values = evaluation.table(self.column)
        return pass_drawing_error(values) if self.any_of_n else drawing_error(values)

    def one_draw(self, n: int) -> float:
        """Return the pseudo-observation of `paired_differences`: how far one draw moves one problem's value."""
        return 0.0 if self.unit == "tokens" else 1.0 if self.any_of_n else 1 / math.sqrt(n)

    def trials(self, evaluation: Evaluation) -> int:
        """Return how many yes or no the measure is the mean of."""
        return len(evaluation.problems) * (1 if self.any_of_n else evaluation.header.sampling.group_size)

    def null_error(self, evaluation: Evaluation, theirs: float) -> float:
        """Return the standard error of the difference from another run's value if both were one model."""
        error = self.redrawing_error(evaluation)
        if self.unit == "tokens":
            return math.sqrt(2) * error
        return null_error(float(self.per_problem(evaluation).mean()), theirs, error, self.trials(evaluation))

    def show(self, value: float, sign: str = "") -> str:
        """Return percentage points or tokens for a reader; `sign` is "+" for a difference."""
        if not math.isfinite(value):
            return "-"
        digits = 0 if self.unit == "tokens" and abs(value) >= 100 else 1
        rounded = round(value if self.unit == "tokens" else 100 * value, digits) + 0.0  # + 0.0 makes -0.0 a plain 0
        return f"{rounded:{sign},.{digits}f}"

    def show_change(self, change: Estimate) -> str:
        """Return a difference with its interval, bold where zero lies outside."""
        ends = f"{self.show(change.low, '+')} to {self.show(change.high, '+')}"
        text = f"{self.show(change.value, '+')} ({'alike on every problem' if change.low == change.high else ends})"
        return f"**{text}**" if excludes_zero(change) else text


def measures(n: int) -> list[Measure]:
    """Return the four numbers of the chapter's table."""
    return [
        Measure(field="average", title=f"Average@{n}", column="correct"),
        Measure(field="passed", title=f"Pass@{n}", column="correct", any_of_n=True),
        Measure(field="format_rate", title="Format", column="formatted"),
        Measure(field="mean_tokens", title="mean tokens", column="completion_tokens", unit="tokens"),
    ]


def excludes_zero(change: Estimate) -> bool:
    """Return whether the interval lies on one side of zero; False where no interval is defined."""
    return change.low > 0 or change.high < 0


class Comparison:
    """Checkpoints against the base, problem by problem; repeats of the base are averaged."""

    def __init__(self, evaluations: Sequence[Evaluation]) -> None:
        """Split evaluations in order; those with the label of the first are the base."""
        label = evaluations[0].header.label
        self.base = [e for e in evaluations if e.header.label == label]
        self.checkpoints = [e for e in evaluations if e.header.label != label]
        self.n = evaluations[0].header.sampling.group_size
        self.measures = measures(self.n)

    def differences(self, measure: Measure) -> Floats:
        """Return the differences from the base, [P, M]."""
        baseline = np.mean([measure.per_problem(e) for e in self.base], axis=0)
        return np.stack([measure.per_problem(e) - baseline for e in self.checkpoints], axis=1)

    def changes(self, measure: Measure) -> list[Estimate]:
        """Return the mean differences, [M], with intervals that hold for all checkpoints at once."""
        if not self.checkpoints:
            return []
        return paired_differences(self.differences(measure), pseudo_observation=measure.one_draw(self.n))

    def detectable(self, measure: Measure) -> tuple[float, float, float]:
        """Return the differences from the base that would be found four times in five.

        Of one checkpoint, sampled again on these problems; of one, and of the largest of all, on other problems of
        this kind, with the median spread of the checkpoints.
        """
        again = detectable_difference(measure.redrawing_error(self.base[0]) * math.sqrt(1 + 1 / len(self.base)))
        differences = self.differences(measure)
        if len(differences) < 2:
            return again, math.nan, math.nan
        errors = difference_errors(differences, pseudo_observation=measure.one_draw(self.n))
        halves = np.array([e.high - e.low for e in self.changes(measure)]) / 2
        return again, detectable_difference(float(np.median(errors))), float(np.median(halves + Z80 * errors))
