"""Estimates from n completions of each of P problems: pass@k, intervals, differences, detectable differences.

What a reader could get wrong: there are two noises. Intervals over problems say what other problems of this kind
would show; the P problems are the sample, however many completions each has. Drawing errors say what another run
on these same problems would show; they are smaller, and decide whether two runs on one benchmark differ.

Letters: P problems, n completions a problem, k <= n, M comparisons, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_RESAMPLES = 4000
Z95 = NormalDist().inv_cdf(0.975)
Z80 = NormalDist().inv_cdf(0.8)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with the ends of its 95 % interval; NaN where the data define none."""

    value: float
    low: float
    high: float

    def ends(self, form: str, *, scale: float = 1.0, to: str = " to ", none: str = "no interval") -> str:
        """Return the interval for a reader: "40.1 to 52.3"."""
        return none if math.isnan(self.low) else f"{scale * self.low:{form}}{to}{scale * self.high:{form}}"


def pass_at_k(num_correct: Floats, n: int) -> Floats:
    """Return unbiased chances that one of k samples or more is right, for k = 1..n: [..., P] to [..., P, n].

    1 - C(n - c, k) / C(n, k) from c correct samples of n (Chen et al. 2021, arXiv:2107.03374, equation 1),
    computed as a product that neither overflows nor cancels. Column n - 1 is the chapter's Pass@n.
    """
    draws = np.arange(n)
    still_wrong = np.clip(n - np.asarray(num_correct)[..., None] - draws, 0, None) / (n - draws)
    return 1.0 - np.cumprod(still_wrong, axis=-1, dtype=np.float64)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % point of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


@lru_cache(maxsize=8)
def resamples(num_problems: int) -> Floats:
    """Return how often each problem is drawn in each bootstrap resample, [R, P]; the same on every call."""
    draws = np.random.default_rng(0).integers(num_problems, size=(NUM_RESAMPLES, num_problems))
    return np.stack([np.bincount(row, minlength=num_problems) for row in draws]).astype(np.float64)


def bootstrap_tail(num_problems: int) -> float:
    """Return the tail probability whose bootstrap percentiles over P problems bound a 95 % interval.

    It is below 0.025, because the bootstrap's spread is sqrt((P - 1) / P) of the right one and normal where it
    should be Student's: the "expanded percentile" interval of Hesterberg 2015, arXiv:1411.5279.
    """
    return NormalDist().cdf(-math.sqrt(num_problems / (num_problems - 1)) * t_quantile(num_problems - 1))


def wilson_interval(rate: Any, trials: Any, z: float = Z95) -> tuple[Floats, Floats]:
    """Return Wilson's (1927) 95 % interval of a proportion of independent trials; arrays broadcast."""
    centre = (rate + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(rate * (1 - rate) / trials + z**2 / (4 * trials**2))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)


def mean_interval(totals: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Return the 95 % interval of sum(totals) / sum(counts), bootstrapping problems: [..., P] to [...].

    It covers the ratio over all problems of the kind that these P were drawn from. NaN for a single problem.
    """
    num_problems = totals.shape[-1]
    if num_problems < 2:
        unknown = np.full(totals.shape[:-1], np.nan)
        return unknown, unknown
    tail = bootstrap_tail(num_problems)
    weights = resamples(num_problems).T
    with np.errstate(invalid="ignore"):
        ratios = (totals @ weights) / (counts @ weights)  # [..., R]; NaN in a resample that has no count at all
    quantile = np.nanquantile if np.isnan(ratios).any() else np.quantile
    low, high = quantile(ratios, [tail, 1 - tail], axis=-1)
    return low, high


def rate_interval(totals: Floats, counts: Floats, *, k: int = 1) -> tuple[Floats, Floats]:
    """Return the 95 % interval of a rate in [0, 1], sum(totals) / sum(counts) over problems: [..., P] to [...].

    Near 0 or 1 the bootstrap alone is too narrow, because it resamples only the P problems. Its ends are moved out
    to Wilson's interval for the number of independent trials that vary as the problems do, at most sum(counts) / k
    where a trial takes k draws (an average over samples of k of n varies at most k / n times as much as one of
    them: Hoeffding 1948). For one yes or no a problem (k = n) that is about Wilson's interval with P trials.

    Coverage on 1,000 simulated benchmarks of 30 x 12 (tests/test_estimates.py): Average@12 92 % to 98 % at every
    difficulty tried (plain percentile bootstrap: down to 86 %), pass@k at least 92 %.
    """
    num_problems = totals.shape[-1]
    count = counts.sum(-1)
    rate = totals.sum(-1) / count
    if num_problems < 2:  # one problem says nothing about how problems differ
        return wilson_interval(rate, np.ones_like(rate))
    residual = totals - rate[..., None] * counts
    variance = num_problems / (num_problems - 1) * (residual**2).sum(-1) / count**2
    with np.errstate(divide="ignore", invalid="ignore"):
        trials = np.fmin(rate * (1 - rate) / variance, count / k)  # 0 / 0 gives way to the other one
    wilson = wilson_interval(rate, trials, z=t_quantile(num_problems - 1))
    low, high = mean_interval(totals, counts)
    return np.minimum(low, wilson[0]), np.maximum(high, wilson[1])


def estimate_rate(totals: Floats, counts: Floats, *, k: int = 1) -> Estimate:
    """Return the rate with its `rate_interval`; totals and counts are [P]; NaN where the counts are all 0."""
    if not counts.sum():
        return Estimate(math.nan, math.nan, math.nan)
    low, high = rate_interval(totals, counts, k=k)
    return Estimate(float(totals.sum() / counts.sum()), float(low), float(high))


def estimate_mean(totals: Floats, counts: Floats) -> Estimate:
    """Return the mean of an unbounded number, such as tokens, with its `mean_interval`; arguments are [P]."""
    low, high = mean_interval(totals, counts)
    return Estimate(float(totals.sum() / counts.sum()), float(low), float(high))


def difference_errors(differences: Floats, *, pseudo_observation: float) -> Floats:
    """Return the standard error over problems of the mean of each column of differences [P, M], [M].

    Adds two pseudo-observations, +d and -d (Agresti and Min 2005), so that the standard error is not zero when few
    problems changed.
    """
    num_problems = len(differences)
    square = ((differences - differences.mean(0)) ** 2).sum(0) + 2 * pseudo_observation**2
    num_rows = num_problems + (2 if pseudo_observation else 0)
    return np.sqrt(square * num_rows / (num_rows - 1)) / num_problems


def paired_differences(differences: Floats, *, pseudo_observation: float) -> list[Estimate]:
    """Return the mean of each column of differences [P, M], with intervals that hold for all M at once.

    They are over problems and adjusted for choosing the best of M checkpoints (max-T, Westfall & Young 1993). The
    critical value is the 95 % point of the largest |t| when each problem's centred differences change sign at
    random (a wild bootstrap), with the same signs in all columns.

    Coverage on simulated benchmarks of 30 x 12 and 5 checkpoints (tests/test_estimates.py): all five at least
    95 %, with and without a true change, at every difficulty tried. Without pseudo-observations it is 80 % for
    Average@12, and near 0 for Pass@12 where few problems change.

    Args:
        differences: [P, M].
        pseudo_observation: d of `difference_errors`: 1 for Pass@n, 1 / sqrt(n) for an average of n yes or no,
            0 (none is added) where values have no bounds.
    """
    num_problems, num_columns = differences.shape
    mean = differences.mean(0)
    if num_problems < 2:
        return [Estimate(float(value), math.nan, math.nan) for value in mean]
    added = np.full((1, num_columns), pseudo_observation)
    rows = np.vstack([differences - mean, added, -added] if pseudo_observation else [differences - mean])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(NUM_RESAMPLES, len(rows)))
    flipped = signs @ rows / len(rows)  # [R, M]
    spread = np.sqrt(((rows**2).mean(0) - flipped**2).clip(0) / (len(rows) - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.nan_to_num(np.abs(flipped) / spread, posinf=np.inf)
    critical = max(np.quantile(t.max(1), 0.95, method="higher"), t_quantile(num_problems - 1))  # few rows: few ts
    errors = difference_errors(differences, pseudo_observation=pseudo_observation)
    half = np.where(errors > 0, critical * errors, 0.0)
    return [Estimate(float(m), float(m - h), float(m + h)) for m, h in zip(mean, half, strict=True)]


def drawing_error(values: Floats) -> float:
    """Return the standard error of the mean of values [P, n] on the same problems, sampled again; NaN for n = 1."""
    num_problems, n = values.shape
    if n < 2:
        return math.nan
    return math.sqrt((values.var(1, ddof=1) / n).sum()) / num_problems


def pass_drawing_error(correct: Floats) -> float:
    """Return the standard error of Pass@n of correct [P, n] when the same problems are sampled again.

    A problem that was never right may be right in the next n samples, so its rate p has a Jeffreys prior,
    Beta(1/2, 1/2), and the variance of a pass is averaged over the posterior: E[(1 - p)^n] - E[(1 - p)^2n].
    """
    num_problems, n = correct.shape
    right = correct.sum(1)[:, None]
    draws = np.arange(2 * n)
    none_right = np.cumprod((n - right + 0.5 + draws) / (n + 1 + draws), axis=1)  # [P, 2n]: E[(1 - p)^m]
    return math.sqrt((none_right[:, n - 1] - none_right[:, -1]).sum()) / num_problems


def null_error(ours: float, theirs: float, error: float, trials: int) -> float:
    """Return the standard error of the difference of two runs' rates if both were one model on the same problems.

    Only the rate of their run is known. `error`, the drawing error of our rate, is expressed as a share of that of
    `trials` independent draws, and that share of the pooled rate's is returned: more than 0 at a rate of 0 or 1.
    """
    pooled = (ours + theirs) / 2
    alone = ours * (1 - ours) / trials
    share = min(1.0, error**2 / alone) if alone else 1.0
    return math.sqrt(2 * share * pooled * (1 - pooled) / trials)


def repetition_noise(values: Sequence[float]) -> float:
    """Return how far from the mean of k trainings' values one further training lies at most, 95 % of the time.

    Student's prediction interval: the spread between trainings, with that of drawing in it, is known from k alone.
    """
    return t_quantile(len(values) - 1) * stdev(values) * math.sqrt(1 + 1 / len(values))


def detectable_difference(error: float) -> float:
    """Return the smallest true difference that a 95 % test finds four times in five, from its standard error."""
    return (Z95 + Z80) * error


def decompose_format_change(
    before: tuple[Floats, Floats], after: tuple[Floats, Floats]
) -> tuple[Estimate, Estimate]:
    """Split a change of format rate into (fewer cut-off completions, everything else), on paired problems.

    Each side is (formatted, truncated), both [P, n]; n may differ. The format rate is the average of two rates,
    among completions that ended and among those cut off, weighted by their counts. The first part is the change
    of weights times the mean difference of the rates; the second is the change of the rates times the mean weights
    (Kitagawa 1955). They add up to the change. Intervals bootstrap over problems, as in `mean_interval`.
    """
    num_problems = len(before[0])
    weights = np.vstack([np.ones(num_problems), resamples(num_problems)]) if num_problems > 1 else np.ones((1, 1))
    sides = []
    for formatted, truncated in (before, after):
        cut, ended = weights @ truncated.sum(1), weights @ (1 - truncated).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            of_cut = weights @ (formatted * truncated).sum(1) / cut
            of_ended = weights @ (formatted * (1 - truncated)).sum(1) / ended
        sides.append((cut / (cut + ended), of_cut, of_ended))
    (share_0, cut_0, ended_0), (share_1, cut_1, ended_1) = sides
    # A rate among no completions has weight 0 on its side; the other side's value makes its change 0.
    (cut_0, cut_1), (ended_0, ended_1) = (
        (np.nan_to_num(np.where(np.isnan(a), b, a)), np.nan_to_num(np.where(np.isnan(b), a, b)))
        for a, b in ((cut_0, cut_1), (ended_0, ended_1))
    )
    fewer = (share_0 - share_1) * ((ended_0 + ended_1) - (cut_0 + cut_1)) / 2
    mean_share = (share_0 + share_1) / 2
    parts = np.stack([fewer, mean_share * (cut_1 - cut_0) + (1 - mean_share) * (ended_1 - ended_0)])
    ends = np.full((2, 2), math.nan)
    if num_problems > 1:
        tail = bootstrap_tail(num_problems)
        ends = np.quantile(parts[:, 1:], [tail, 1 - tail], axis=1)
    first, second = (Estimate(*map(float, part)) for part in zip(parts[:, 0], *ends, strict=True))
    return first, second
