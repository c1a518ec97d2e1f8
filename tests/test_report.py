"""What must hold: no sentence of the report claims more than its evaluations support."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from made_up import BASE, BASE_RIGHTS, PICTURES, another_base, chapter_evaluation

from stats.curves import TrainedRun
from stats.measures import Measure
from stats.report import report_markdown


def test_a_change_that_is_supported_is_said_to_be_and_one_that_is_not_is_not():
    step = chapter_evaluation(20, BASE_RIGHTS, boxes=12, tokens=3000)
    text = report_markdown([BASE, step], [], PICTURES)
    assert "**Format changed**: supported at step 20" in text
    assert "**Mean tokens changed**" in text
    assert "**Average@12: no change is supported.**" in text
    assert "**Pass@12: no change is supported.**" in text
    assert "does not show that nothing changed" in text


def test_without_a_base_no_checkpoint_is_called_one():
    text = report_markdown([chapter_evaluation(20, BASE_RIGHTS), chapter_evaluation(40, BASE_RIGHTS)], [], PICTURES)
    assert "## Differences from step 20, on the same problems" in text
    assert "from the base" not in text


def test_one_evaluation_says_that_nothing_can_be_said_about_a_change():
    text = report_markdown(another_base(BASE), [], PICTURES)
    assert "nothing can be said about a change" in text
    assert "changed**" not in text


def test_few_problems_are_called_too_few():
    few = [replace(e, problems=e.problems[:4], header=replace(e.header, problem_ids=("p0", "p1", "p2", "p3")))
           for e in (BASE, chapter_evaluation(20, BASE_RIGHTS))]  # fmt: skip
    assert "**4 problems are too few**" in report_markdown(few, [], PICTURES)


def test_training_is_summed_up_with_its_first_and_last_ten_steps():
    columns = {"step": np.arange(1.0, 31.0), "reward/accuracy": np.repeat([0.1, 0.5, 0.9], 10)}
    text = report_markdown(another_base(BASE), [TrainedRun("demo", {}, columns)], PICTURES)
    assert "demo: 30 steps; reward 0.10 over the first 10 and 0.90 over the last" in text
    assert "](training.png)" in text


def test_no_interval_is_shown_where_none_is_defined():
    lonely = replace(BASE, problems=BASE.problems[:1], header=replace(BASE.header, problem_ids=("p0",)))
    text = report_markdown(
        another_base(lonely, replace(lonely, header=replace(lonely.header, label="x"))), [], PICTURES
    )
    assert "nan" not in text
    assert "no interval" in text
    assert Measure(field="f", title="t", column="correct").show(math.nan) == "-"
