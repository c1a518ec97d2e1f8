"""What must hold: pass@k and every error by hand in float64; intervals cover what their docstrings say."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.testing import assert_allclose

from stats.estimates import (
    Z95,
    decompose_format_change,
    detectable_difference,
    difference_errors,
    drawing_error,
    estimate_mean,
    estimate_rate,
    mean_interval,
    null_error,
    paired_differences,
    pass_at_k,
    pass_drawing_error,
    rate_interval,
    t_quantile,
    wilson_interval,
)

# Beta(a, b) difficulties of problems: as AIME is to a 4 B model, even, hard, easy, and (nearly) all alike.
DIFFICULTIES = {
    "u-shaped": (0.3, 0.45),
    "even": (1, 1),
    "hard": (0.3, 2),
    "very hard": (0.1, 2),
    "easy": (2, 0.3),
    "very easy": (5, 0.2),
    "alike": (20, 30),
}


def simulated_correct(name: str, *, benchmarks: int, seed: int) -> np.ndarray:
    """Counts of right answers of `benchmarks` benchmarks of 30 problems x 12."""
    rng = np.random.default_rng(seed)
    return rng.binomial(12, rng.beta(*DIFFICULTIES[name], size=(benchmarks, 30)))


def true_pass_at_k(name: str, k: int) -> float:
    """E[1 - (1 - p)^k] under the Beta distribution, exactly."""
    a, b = DIFFICULTIES[name]
    return 1 - math.prod((b + j) / (a + b + j) for j in range(k))


def test_pass_at_k_is_the_exact_hypergeometric_value():
    for n in range(1, 13):
        curves = pass_at_k(np.arange(n + 1, dtype=np.float64), n)
        for c in range(n + 1):
            for k in range(1, n + 1):
                exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
                assert_allclose(curves[c, k - 1], float(exact), rtol=0, atol=1e-12)


def test_pass_at_1_is_the_average_and_pass_at_n_is_any():
    counts = np.array([0, 1, 7, 12])
    curves = pass_at_k(counts, 12)
    assert_allclose(curves[:, 0], counts / 12, rtol=0, atol=1e-15)
    assert_allclose(curves[:, -1], [0, 1, 1, 1], rtol=0, atol=0)


def test_pass_at_k_of_a_thousand_samples_does_not_overflow():
    assert_allclose(pass_at_k(np.array([1]), 1000)[0, 499], 0.5, rtol=0, atol=1e-12)


def test_the_t_quantile_is_the_tabulated_one():
    for degrees, tabulated in [(1, 12.7062), (4, 2.7764), (9, 2.2622), (29, 2.0452), (1000, 1.9623)]:
        assert_allclose(t_quantile(degrees), tabulated, rtol=0, atol=5e-5)


def test_wilsons_ends_are_the_rates_that_the_score_test_just_accepts():
    rate, trials = 17 / 30, 30
    for end in wilson_interval(rate, trials):
        assert_allclose(abs(rate - end), Z95 * math.sqrt(end * (1 - end) / trials), rtol=1e-12)
    assert_allclose(wilson_interval(0.0, 30), (0.0, Z95**2 / (30 + Z95**2)), rtol=0, atol=1e-15)


def test_a_rate_of_one_yes_or_no_a_problem_is_at_least_as_wide_as_wilsons():
    solved = np.array([1.0] * 17 + [0.0] * 13)
    low, high = rate_interval(solved * 12, np.full(30, 12.0), k=12)
    wilson = wilson_interval(17 / 30, 30)
    assert wilson[0] - 0.03 < low < wilson[0]
    assert wilson[1] < high < wilson[1] + 0.03


@pytest.mark.parametrize("name", DIFFICULTIES)
def test_the_interval_of_average_at_12_covers_92_to_98_percent_of_simulated_benchmarks(name: str):
    correct = simulated_correct(name, benchmarks=1000, seed=1)
    low, high = rate_interval(correct.astype(float), np.full(correct.shape, 12.0))
    truth = true_pass_at_k(name, 1)
    assert 0.92 <= ((low <= truth) & (truth <= high)).mean() <= 0.98


@pytest.mark.parametrize("name", DIFFICULTIES)
def test_the_interval_of_pass_at_k_covers_at_least_92_percent_of_simulated_benchmarks(name: str):
    correct = simulated_correct(name, benchmarks=1000, seed=2)
    curves = pass_at_k(correct, 12)
    for k in (2, 4, 8, 12):
        low, high = rate_interval(curves[..., k - 1] * 12, np.full(correct.shape, 12.0), k=k)
        truth = true_pass_at_k(name, k)
        assert ((low <= truth) & (truth <= high)).mean() >= 0.92, k


def test_the_interval_of_mean_tokens_covers_92_to_98_percent_of_simulated_benchmarks():
    rng = np.random.default_rng(3)
    lengths = rng.gamma(2, 1500, size=(1000, 30, 1)) * rng.gamma(4, 0.25, size=(1000, 30, 12))
    low, high = mean_interval(lengths.sum(2), np.full((1000, 30), 12.0))
    assert 0.92 <= ((low <= 3000) & (high >= 3000)).mean() <= 0.98


def test_the_plain_percentile_interval_would_not_have_covered_hard_benchmarks():
    correct = simulated_correct("very hard", benchmarks=1000, seed=1) / 12
    draws = np.random.default_rng(0).integers(30, size=(2000, 30))
    low, high = np.quantile(correct[:, draws].mean(2), [0.025, 0.975], axis=1)
    truth = true_pass_at_k("very hard", 1)
    assert ((low <= truth) & (truth <= high)).mean() < 0.90


def test_intervals_stay_honest_where_the_data_are_degenerate():
    twelve = np.full(30, 12.0)
    none, every = estimate_rate(np.zeros(30), twelve), estimate_rate(twelve, twelve)
    assert none.value == none.low == 0
    assert every.value == every.high == 1
    assert_allclose([none.high, 1 - every.low], t_quantile(29) ** 2 / (360 + t_quantile(29) ** 2), rtol=1e-12)
    one_problem = estimate_rate(np.array([6.0]), np.array([12.0]))
    assert_allclose([one_problem.low, one_problem.high], wilson_interval(0.5, 1), rtol=1e-12)
    tokens_of_one = estimate_mean(np.array([600.0]), np.array([12.0]))
    assert tokens_of_one.value == 50
    assert math.isnan(tokens_of_one.low)
    with np.errstate(all="raise"):
        assert math.isnan(estimate_rate(np.zeros(30), np.zeros(30)).value)


def test_a_ratio_weighs_problems_by_how_many_completions_they_count():
    totals, counts = np.array([3.0, 0.0, 1.0, 4.0]), np.array([4.0, 0.0, 2.0, 10.0])
    estimate = estimate_rate(totals, counts)
    assert estimate.value == 0.5
    assert 0 <= estimate.low < 0.5 < estimate.high <= 1


@pytest.mark.parametrize("gain", [0.0, 1.0])
@pytest.mark.parametrize("name", DIFFICULTIES)
def test_paired_differences_hold_for_all_checkpoints_at_once(name: str, gain: float):
    """Five checkpoints whose log-odds on every problem are the base's plus a gain; the truth is an integral."""
    rng = np.random.default_rng(4)

    def gained(p: np.ndarray) -> np.ndarray:
        return p * np.exp(gain) / (1 - p + p * np.exp(gain))

    problems = rng.beta(*DIFFICULTIES[name], size=1_000_000)
    true_average = (gained(problems) - problems).mean()
    true_pass = ((1 - problems) ** 12 - (1 - gained(problems)) ** 12).mean()
    held = np.zeros(2)
    for _ in range(200):
        p = rng.beta(*DIFFICULTIES[name], size=(30, 1))
        base, steps = rng.random((30, 1, 12)) < p[..., None], rng.random((30, 5, 12)) < gained(p)[..., None]
        for i, (values, pseudo, truth) in enumerate(
            [
                (steps.mean(2) - base.mean(2), 12**-0.5, true_average),
                (steps.max(2) * 1.0 - base.max(2), 1, true_pass),
            ]
        ):
            held[i] += all(c.low <= truth <= c.high for c in paired_differences(values, pseudo_observation=pseudo))
    assert (held / 200 >= 0.93).all(), held / 200


def test_the_error_of_a_difference_by_hand():
    # Squares 1/4 + 1/4 around the mean 1/2: as sample variance over 2 problems; with two problems added at +-1,
    # (1/2 + 2) / 3 is the variance of 4 rows, their sum has 4 times that, and the mean is over 2.
    differences = np.array([[0.0], [1.0]])
    assert_allclose(difference_errors(differences, pseudo_observation=0), math.sqrt(1 / 2 / 2), rtol=1e-12)
    assert_allclose(difference_errors(differences, pseudo_observation=1), math.sqrt(4 * 2.5 / 3) / 2, rtol=1e-12)


def test_paired_differences_are_centred_and_widen_with_the_number_of_checkpoints():
    rng = np.random.default_rng(5)
    differences = rng.normal(0.1, 0.2, size=(30, 5))
    (single,), every = (
        paired_differences(differences[:, :1], pseudo_observation=0),
        paired_differences(differences, pseudo_observation=0),
    )
    for estimate, column in zip(every, differences.T, strict=True):
        assert_allclose(estimate.value, column.mean(), rtol=1e-12)
        assert_allclose(estimate.high - estimate.value, estimate.value - estimate.low, rtol=1e-9)
    assert every[0].high > single.high
    half = single.high - differences[:, 0].mean()
    student = t_quantile(29) * differences[:, 0].std(ddof=1) / math.sqrt(30)
    assert_allclose(half, student, rtol=0.05)  # one column is a plain paired t interval but for the resampling


def test_paired_differences_of_equal_models_have_no_width_and_of_one_problem_no_interval():
    (equal,) = paired_differences(np.zeros((30, 1)), pseudo_observation=0)
    assert (equal.value, equal.low, equal.high) == (0, 0, 0)
    (lonely,) = paired_differences(np.array([[0.25]]), pseudo_observation=0)
    assert lonely.value == 0.25
    assert math.isnan(lonely.low)


def test_the_drawing_error_is_had_by_hand():
    # Sample variances 1/2 and 0 over n = 2 draws: sqrt(1/4 + 0) / 2 problems.
    assert_allclose(drawing_error(np.array([[0.0, 1.0], [1.0, 1.0]])), 0.25, rtol=1e-12)
    assert math.isnan(drawing_error(np.array([[1.0]])))


def test_the_drawing_error_of_pass_at_n_is_had_by_hand():
    # One problem, 0 right of 1: p is Beta(1/2, 3/2), E[1 - p] = 3/4, E[(1 - p)^2] = (3/2 5/2) / (2 3) = 5/8.
    assert_allclose(pass_drawing_error(np.array([[0.0]])), math.sqrt(3 / 4 - 5 / 8), rtol=1e-12)


def test_the_null_error_is_had_by_hand():
    # Our drawing error is half of what 100 independent draws at 1/2 have: a quarter of the variance is drawing.
    assert_allclose(null_error(0.5, 0.7, 0.025, 100), math.sqrt(2 * 0.25 * 0.6 * 0.4 / 100), rtol=1e-12)
    assert_allclose(null_error(1.0, 0.98, 0.0, 100), math.sqrt(2 * 0.99 * 0.01 / 100), rtol=1e-12)


@pytest.mark.parametrize("name", DIFFICULTIES)
def test_two_runs_of_one_model_are_called_different_at_most_one_time_in_twelve(name: str):
    rng = np.random.default_rng(6)
    outside = np.zeros(2)
    for _ in range(500):
        p = rng.beta(*DIFFICULTIES[name], size=(30, 1))
        ours, theirs = (rng.random((2, 30, 12)) < p).astype(float)
        error = null_error(ours.mean(), theirs.mean(), drawing_error(ours), 360)
        outside[0] += abs(ours.mean() - theirs.mean()) > Z95 * error
        passes = ours.max(1).mean(), theirs.max(1).mean()
        error = null_error(*passes, pass_drawing_error(ours), 30)
        outside[1] += abs(passes[0] - passes[1]) > Z95 * error + 1e-12
    assert (outside / 500 <= 1 / 12).all()


def test_a_detectable_difference_is_one_that_80_percent_of_tests_find():
    rng = np.random.default_rng(7)
    found = np.abs(rng.normal(detectable_difference(1.0), 1, size=100_000)) > Z95
    assert_allclose(found.mean(), 0.8, atol=0.005)


def test_a_change_of_format_divides_into_its_two_parts_by_hand():
    # Before: 4 of 8 cut off, of which 1 boxed; of the 4 that ended, 3. After: 1 cut off, not boxed; 7 ended, boxed.
    before = (np.array([[1, 0, 0, 0], [1, 1, 1, 0]]), np.array([[1, 1, 1, 1], [0, 0, 0, 0]]))
    after = (np.array([[0, 1, 1, 1], [1, 1, 1, 1]]), np.array([[1, 0, 0, 0], [0, 0, 0, 0]]))
    fewer, other = decompose_format_change(before, after)
    assert_allclose(fewer.value, (4 / 8 - 1 / 8) * ((3 / 4 + 1) / 2 - (1 / 4 + 0) / 2), rtol=1e-12)
    assert_allclose(other.value, 5 / 16 * (0 - 1 / 4) + 11 / 16 * (1 - 3 / 4), rtol=1e-12)
    assert_allclose(fewer.value + other.value, 7 / 8 - 4 / 8, rtol=1e-12)


def test_a_change_of_format_is_all_truncation_when_cut_off_means_unboxed():
    rng = np.random.default_rng(8)
    cut_before, cut_after = rng.random((30, 12)) < 0.5, np.zeros((30, 12), dtype=bool)
    fewer, other = decompose_format_change(
        ((~cut_before).astype(float), cut_before.astype(float)),
        ((~cut_after).astype(float), cut_after.astype(float)),
    )
    assert_allclose(fewer.value, cut_before.mean(), rtol=1e-12)
    assert_allclose([other.value, other.low, other.high], 0, atol=1e-12)


def test_a_change_of_format_is_defined_where_no_completion_was_ever_cut_off():
    # Before as above; after, none is cut off and all are boxed: the rate of the cut off counts as having stayed.
    before = (np.array([[1, 0, 0, 0], [1, 1, 1, 0]]), np.array([[1, 1, 1, 1], [0, 0, 0, 0]]))
    fewer, other = decompose_format_change(before, (np.ones((2, 4)), np.zeros((2, 4))))
    assert_allclose(fewer.value, 4 / 8 * ((3 / 4 + 1) / 2 - 1 / 4), rtol=1e-12)
    assert_allclose(other.value, 3 / 4 * (1 - 3 / 4), rtol=1e-12)
    formatted, never = np.ones((30, 12)), np.zeros((30, 12))
    fewer, other = decompose_format_change((never, never), (formatted, never))
    assert_allclose([fewer.value, other.value], [0, 1], atol=1e-12)
