"""What must hold: measures, differences from the base and their errors, by hand."""

from __future__ import annotations

import math

import numpy as np
from made_up import BASE, BASE_RIGHTS, PICTURES, chapter_evaluation
from numpy.testing import assert_allclose

from stats.estimates import drawing_error, pass_drawing_error
from stats.measures import Comparison, excludes_zero, measures
from stats.report import report_markdown

AVERAGE, PASS, FORMAT, TOKENS = measures(12)


def test_a_measure_is_the_mean_of_its_problems():
    assert_allclose(AVERAGE.per_problem(BASE), np.array(BASE_RIGHTS) / 12, rtol=1e-12)
    assert_allclose(PASS.per_problem(BASE), [0] * 10 + [1] * 20, rtol=1e-12)
    assert_allclose(FORMAT.per_problem(BASE), np.maximum(BASE_RIGHTS, 6) / 12, rtol=1e-12)
    assert_allclose(TOKENS.per_problem(BASE), 6005.5, rtol=1e-12)


def test_noise_against_a_published_cell_is_that_of_two_runs_of_our_kind():
    correct = BASE.table("correct")
    rate, theirs = correct.mean(), 148 / 360
    share = drawing_error(correct) ** 2 / (rate * (1 - rate) / 360)
    pooled = (rate + theirs) / 2
    assert_allclose(
        AVERAGE.null_error(BASE, theirs), math.sqrt(2 * share * pooled * (1 - pooled) / 360), rtol=1e-12
    )
    share = pass_drawing_error(correct) ** 2 / (2 / 3 * 1 / 3 / 30)
    pooled = (2 / 3 + 17 / 30) / 2
    assert_allclose(PASS.null_error(BASE, 17 / 30), math.sqrt(2 * share * pooled * (1 - pooled) / 30), rtol=1e-12)
    within = np.arange(12).var(ddof=1)
    assert_allclose(TOKENS.null_error(BASE, 6489.8), math.sqrt(2 * within / 12 / 30), rtol=1e-12)


def test_repeats_of_the_base_are_averaged_problem_by_problem():
    second = chapter_evaluation(0, BASE_RIGHTS[::-1], repeat=2)
    step = chapter_evaluation(20, [6] * 30)
    comparison = Comparison([BASE, second, step])
    by_hand = 0.5 - (np.array(BASE_RIGHTS) + BASE_RIGHTS[::-1]) / 24
    assert_allclose(comparison.differences(AVERAGE)[:, 0], by_hand, rtol=1e-12, atol=1e-15)
    (change,) = comparison.changes(AVERAGE)
    assert_allclose(change.value, by_hand.mean(), rtol=1e-12)


def test_the_best_of_several_needs_more_than_the_best_of_one():
    rng = np.random.default_rng(0)
    steps = [chapter_evaluation(s, list(rng.binomial(12, 0.45, size=30))) for s in (20, 40, 60, 80, 100)]
    alone, together = Comparison([BASE, steps[0]]), Comparison([BASE, *steps])
    assert together.changes(AVERAGE)[0].high > alone.changes(AVERAGE)[0].high
    assert_allclose(alone.changes(AVERAGE)[0].value, together.changes(AVERAGE)[0].value, rtol=1e-12)


def test_the_detectable_difference_counts_the_bases_repeats():
    step = chapter_evaluation(20, BASE_RIGHTS)
    one = Comparison([BASE, step]).detectable(AVERAGE)[0]
    two = Comparison([BASE, chapter_evaluation(0, BASE_RIGHTS, repeat=2), step]).detectable(AVERAGE)[0]
    error = drawing_error(BASE.table("correct"))
    assert_allclose(one, 2.8015853 * math.sqrt(2) * error, rtol=1e-6)
    assert_allclose(two / one, math.sqrt(1.5 / 2), rtol=1e-12)


def test_where_no_problem_differs_an_interval_still_has_width_and_tokens_are_called_alike():
    perfect = [chapter_evaluation(step, [12] * 30) for step in (0, 20, 40)]
    comparison = Comparison(perfect)
    for change in comparison.changes(PASS):
        assert change.low < change.value == 0 < change.high < 0.15
    assert 0.05 < comparison.detectable(PASS)[1] < comparison.detectable(PASS)[2] < 0.2
    assert not any(excludes_zero(change) for change in comparison.changes(TOKENS))
    text = report_markdown(perfect, [], PICTURES)
    assert "| +0.0 (alike on every problem) |" in text
    (detectable,) = (line for line in text.split("\n") if line.startswith("| Pass@12, points |"))
    assert detectable.endswith("| - |")  # counts of 30/30 bound nothing
