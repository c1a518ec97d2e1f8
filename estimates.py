"""What n completions of each of P problems support: pass@k, intervals, differences, and what cannot be seen.

What a reader could get wrong: two questions with two noises. "What would other problems of this kind show?"
is answered by intervals over problems, in which the P problems are the sample, however many completions each
has. "What would another run on these same problems show?" has drawing noise only, which is smaller; it judges
whether two runs on one benchmark can be told apart. Every function says which one it answers.

Letters: P problems, n completions a problem, k <= n, M comparisons, R resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_RESAMPLES = 4000
Z95 = NormalDist().inv_cdf(0.975)
Z80 = NormalDist().inv_cdf(0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with the ends of its 95 % interval; NaN where the data define none."""

    value: float
    low: float
    high: float


def pass_at_k(num_correct: Floats, n: int) -> Floats:
    """Chance that at least one of k samples is right, for every k = 1..n, unbiased: [..., P] to [..., P, n].

    1 - C(n - c, k) / C(n, k) from c correct samples of n (Chen et al. 2021, arXiv:2107.03374, equation 1), as
    a product that neither overflows nor cancels. Column n - 1 is the chapter's Pass@n: 1 where any is right.
    """
    draws = np.arange(n)
    still_wrong = np.clip(n - np.asarray(num_correct)[..., None] - draws, 0, None) / (n - draws)
    return 1.0 - np.cumprod(still_wrong, axis=-1, dtype=np.float64)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % point of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


# --- Other problems of this kind ----------------------------------------------------------------------------


@lru_cache(maxsize=8)
def resamples(num_problems: int) -> Floats:
    """How often each problem is drawn in each bootstrap resample, [R, P]; the same on every call."""
    draws = np.random.default_rng(0).integers(num_problems, size=(NUM_RESAMPLES, num_problems))
    return np.stack([np.bincount(row, minlength=num_problems) for row in draws]).astype(np.float64)


def bootstrap_tail(num_problems: int) -> float:
    """Tail probability at which percentiles of a bootstrap of P problems make a 95 % interval.

    Below 0.025, because the bootstrap's spread is sqrt((P - 1) / P) of the right one and normal where it
    should be Student's: the "expanded percentile" interval of Hesterberg 2015, arXiv:1411.5279.
    """
    return NormalDist().cdf(-math.sqrt(num_problems / (num_problems - 1)) * t_quantile(num_problems - 1))


def wilson_interval(rate: Any, trials: Any, z: float = Z95) -> tuple[Floats, Floats]:
    """Wilson's (1927) 95 % interval of a proportion of independent trials; numbers or arrays, which broadcast."""
    centre = (rate + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(rate * (1 - rate) / trials + z**2 / (4 * trials**2))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)


def mean_interval(totals: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """95 % interval of sum(totals) / sum(counts), bootstrapping problems: [..., P] to [...].

    Covers the same ratio over all problems of the kind that these P were drawn from, sampled afresh. NaN for
    a single problem.
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
    """95 % interval of a rate in [0, 1], sum(totals) / sum(counts) over problems: [..., P] to [...].

    Covers what `mean_interval` covers. Near 0 or 1 the bootstrap alone is too narrow, because it knows no
    problem that is not among the P. Its ends are therefore moved out to Wilson's interval for as many
    independent trials as would vary as the problems do, at most sum(counts) / k where a trial takes k draws
    (an average over samples of k of n varies at most k / n times as much as one of them: Hoeffding 1948). For
    one yes or no a problem (k = n) that is about the plain proportion's interval, Wilson's with P trials.

    Measured on 1,000 simulated benchmarks of 30 x 12 (tests/test_estimates.py): Average@12 is covered 92 % to
    98 % of the time at every difficulty tried, where the plain percentile bootstrap falls to 86 %. pass@k is
    covered at least 92 % of the time, and nearly always where it is close to 100 %.
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
    """`rate_interval` around its rate; [P] totals and counts; nothing is defined without any count."""
    if not counts.sum():
        return Estimate(value=math.nan, low=math.nan, high=math.nan)
    low, high = rate_interval(totals, counts, k=k)
    return Estimate(value=float(totals.sum() / counts.sum()), low=float(low), high=float(high))


def estimate_mean(totals: Floats, counts: Floats) -> Estimate:
    """`mean_interval` around its mean, for a number without bounds such as tokens; [P] totals and counts."""
    low, high = mean_interval(totals, counts)
    return Estimate(value=float(totals.sum() / counts.sum()), low=float(low), high=float(high))


def difference_errors(differences: Floats, *, imagined: float) -> Floats:
    """Standard error of the mean of each column of per-problem differences [P, M] over problems, [M].

    Two problems are added in thought, one that rose and one that fell by `imagined` (Agresti & Min 2005 add two
    pairs for the like reason): where hardly a problem changed, those that would have may all be missing.
    """
    num_problems = len(differences)
    square = ((differences - differences.mean(0)) ** 2).sum(0) + 2 * imagined**2
    num_rows = num_problems + (2 if imagined else 0)
    return np.sqrt(square * num_rows / (num_rows - 1)) / num_problems


def paired_differences(differences: Floats, *, imagined: float) -> list[Estimate]:
    """Mean of each column of per-problem differences [P, M], with intervals that hold for all M at once.

    Each covers the mean difference over all problems of this kind. All M together hold 95 % of the time, so the
    best-looking of M checkpoints may be read off without having been favoured by the choice (max-T, Westfall &
    Young 1993). The critical value is the 95 % point of the largest |t| when each problem's centred differences
    change sign at random (a wild bootstrap), the same signs for all columns, as one hard problem moves them all.

    Measured on simulated benchmarks of 30 x 12 and 5 checkpoints (tests/test_estimates.py): all five hold 95 %
    of the time or more, with and without a true change, at every difficulty tried. With imagined = 0 that falls
    to 80 % for Average@12, and to next to nothing for Pass@12 where hardly a problem changes.

    Args:
        differences: [P, M].
        imagined: the change of one draw in one problem's value: 1 for Pass@n, 1 / sqrt(n) for an average of n
            yes or no, 0 (no problem added) where values have no bounds.
    """
    num_problems, num_columns = differences.shape
    mean = differences.mean(0)
    if num_problems < 2:
        return [Estimate(value=float(value), low=math.nan, high=math.nan) for value in mean]
    added = np.full((1, num_columns), imagined)
    rows = np.vstack([differences - mean, added, -added] if imagined else [differences - mean])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(NUM_RESAMPLES, len(rows)))
    flipped = signs @ rows / len(rows)  # [R, M]
    spread = np.sqrt(((rows**2).mean(0) - flipped**2).clip(0) / (len(rows) - 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.nan_to_num(np.abs(flipped) / spread, posinf=np.inf)
    critical = max(np.quantile(t.max(1), 0.95, method="higher"), t_quantile(num_problems - 1))  # few rows: few ts
    errors = difference_errors(differences, imagined=imagined)
    half = np.where(errors > 0, critical * errors, 0.0)
    return [Estimate(value=float(m), low=float(m - h), high=float(m + h)) for m, h in zip(mean, half, strict=True)]


# --- Another run on these same problems ---------------------------------------------------------------------


def drawing_error(values: Floats) -> float:
    """Standard error of the mean of values [P, n] when the same problems are sampled again; NaN for n = 1."""
    num_problems, n = values.shape
    if n < 2:
        return math.nan
    return math.sqrt((values.var(1, ddof=1) / n).sum()) / num_problems


def pass_drawing_error(correct: Floats) -> float:
    """Standard error of Pass@n of correct [P, n] when the same problems are sampled again.

    A problem that was never right in n samples may be right in the next n, so its chance is not put at 0:
    each problem's rate has a Jeffreys prior, Beta(1/2, 1/2), and q, the chance of a pass, is averaged over
    what is left possible: the variance of a pass is E[q] - E[q^2] = E[(1 - p)^n] - E[(1 - p)^2n].
    """
    num_problems, n = correct.shape
    right = correct.sum(1)[:, None]
    draws = np.arange(2 * n)
    none_right = np.cumprod((n - right + 0.5 + draws) / (n + 1 + draws), axis=1)  # [P, 2n]: E[(1 - p)^m]
    return math.sqrt((none_right[:, n - 1] - none_right[:, -1]).sum()) / num_problems


def null_error(ours: float, theirs: float, error: float, trials: int) -> float:
    """Standard error of the difference of two runs' rates, were both the same model on the same problems.

    Of their run only the rate is known. So `error`, the drawing error of our rate, is taken as a share of the
    error that `trials` independent draws would have, and that share of both runs' pooled rate is used: at a
    rate of 0 or 1, where our own draws show no noise, noise is still granted to the pooled one.
    """
    pooled = (ours + theirs) / 2
    alone = ours * (1 - ours) / trials
    share = min(1.0, error**2 / alone) if alone else 1.0
    return math.sqrt(2 * share * pooled * (1 - pooled) / trials)


def detectable_difference(error: float) -> float:
    """Smallest true difference that a 95 % test finds four times in five, from its standard error."""
    return (Z95 + Z80) * error


def decompose_format_change(
    before: tuple[Floats, Floats], after: tuple[Floats, Floats]
) -> tuple[Estimate, Estimate]:
    """Split a change of format rate into (fewer cut-off completions, everything else), on paired problems.

    Each side is (formatted, truncated), both [P, n] with an n of its own. The format rate is an average of
    two rates, among completions that ended and among those cut off, weighted by how many there are of each.
    The first part is the change of weights times the mean gap between the two rates, the second the change of
    the two rates times the mean weights (Kitagawa 1955); they add up to the change. Intervals bootstrap over
    problems, as in `mean_interval`.
    """
    num_problems = len(before[0])
    weights = np.vstack([np.ones(num_problems), resamples(num_problems)]) if num_problems > 1 else np.ones((1, 1))
    sides = []
    for formatted, truncated in (before, after):
        cut = weights @ truncated.sum(1)
        ended = weights.sum(1) * truncated.shape[1] - cut
        with np.errstate(invalid="ignore", divide="ignore"):
            of_cut = weights @ (formatted * truncated).sum(1) / cut
            of_ended = weights @ (formatted * (1 - truncated)).sum(1) / ended
        sides.append((cut / (cut + ended), of_cut, of_ended))
    (share_0, cut_0, ended_0), (share_1, cut_1, ended_1) = sides
    # A rate among no completions has weight 0 on its side; the other side's value makes its change nothing.
    cut_0, cut_1 = (np.nan_to_num(np.where(np.isnan(a), b, a)) for a, b in ((cut_0, cut_1), (cut_1, cut_0)))
    ended_0, ended_1 = (
        np.nan_to_num(np.where(np.isnan(a), b, a)) for a, b in ((ended_0, ended_1), (ended_1, ended_0))
    )
    fewer = (share_0 - share_1) * ((ended_0 + ended_1) - (cut_0 + cut_1)) / 2
    mean_share = (share_0 + share_1) / 2
    other = mean_share * (cut_1 - cut_0) + (1 - mean_share) * (ended_1 - ended_0)
    parts = []
    for part in (fewer, other):
        if num_problems < 2:
            parts.append(Estimate(value=float(part[0]), low=math.nan, high=math.nan))
            continue
        tail = bootstrap_tail(num_problems)
        low, high = np.quantile(part[1:], [tail, 1 - tail])
        parts.append(Estimate(value=float(part[0]), low=float(low), high=float(high)))
    return parts[0], parts[1]
