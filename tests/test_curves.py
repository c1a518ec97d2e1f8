"""What must hold: a moving average is centred; the interval of a correlated series covers what it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from stats.curves import mean_of_series, moving_average


def test_the_moving_average_is_centred_and_skips_what_is_missing():
    assert_allclose(moving_average(np.array([1.0, 2.0, math.nan, 4.0, 8.0]), 3), [1.5, 1.5, 3.0, 6.0, 6.0])
    assert math.isnan(moving_average(np.array([math.nan, math.nan]), 3)[0])


def series(autocorrelation: float, *, steps: int, count: int) -> np.ndarray:
    """Series of mean 0 whose neighbours are so correlated, [count, steps]."""
    noise = np.random.default_rng(0).normal(size=(count, steps + 100))
    values = np.zeros_like(noise)
    for step in range(1, steps + 100):
        values[:, step] = autocorrelation * values[:, step - 1] + noise[:, step]
    return values[:, 100:]


@pytest.mark.parametrize(
    ("autocorrelation", "steps", "least", "most"),
    [
        (0, 100, 0.935, 0.965),
        (0.5, 100, 0.915, 0.95),
        (0.9, 100, 0.86, 0.9),
        (0, 20, 0.935, 0.965),
        (0.5, 20, 0.88, 0.93),
    ],
)
def test_the_interval_of_a_series_covers_its_mean_as_often_as_it_says(
    autocorrelation: float, steps: int, least: float, most: float
):
    intervals = [mean_of_series(row) for row in series(autocorrelation, steps=steps, count=2000)]
    assert least < np.mean([e.low <= 0 <= e.high for e in intervals]) < most


def test_an_interval_that_takes_steps_for_independent_would_not_cover():
    rows = series(0.5, steps=100, count=2000)
    arms = 1.96 * rows.std(1, ddof=1) / math.sqrt(100)
    assert np.mean(np.abs(rows.mean(1)) < arms) < 0.8


def test_the_standard_error_is_had_by_hand():
    values = np.array([1.0, 2.0, 4.0, 1.0, 0.0, 3.0, 5.0, 2.0, 2.0, 0.0])  # mean 2
    errors = values - 2
    lagged = [sum(errors[i] * errors[i - lag] for i in range(lag, 10)) / 10 for lag in range(5)]
    variance = lagged[0] + 2 * (4 / 5 * lagged[1] + 3 / 5 * lagged[2] + 2 / 5 * lagged[3] + 1 / 5 * lagged[4])
    critical = 1.96 + 2.9694 / 2 + 0.4160 / 4 - 0.5324 / 8
    estimate = mean_of_series(values)
    assert_allclose((estimate.value, estimate.high - 2), (2, critical * math.sqrt(variance / 10)), rtol=1e-12)


def test_few_steps_have_no_interval():
    estimate = mean_of_series(np.arange(9, dtype=np.float64))
    assert estimate.value == 4
    assert math.isnan(estimate.low)
    assert math.isnan(mean_of_series(np.array([])).value)
