"""What must hold: only like measurements are held against the published table; the noise is that of two runs."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from made_up import BASE, BASE_RIGHTS, PICTURES, another_base, chapter_evaluation

from engine.sampler import SamplingConfig
from stats.estimates import Z95, repetition_noise
from stats.measures import measures
from stats.published import PUBLISHED
from stats.report import report_markdown

AVERAGE = measures(12)[0]


def test_every_published_cell_is_compared_for_the_chapters_model():
    text = report_markdown([BASE, chapter_evaluation(100, BASE_RIGHTS, boxes=12, tokens=3358)], [], PICTURES)
    noise = 100 * Z95 * AVERAGE.null_error(BASE, 148 / 360)
    ours = 100 * sum(BASE_RIGHTS) / 360
    assert f"| base | Average@12 | {ours:.1f} | 41.1 | {ours - 4111 / 100:+.1f} | ± {noise:.1f} | inside |" in text
    assert "| base | mean tokens | 6,006 | 6,490 | -484 |" in text
    assert len(re.findall(r"\| (\*\*outside\*\*|outside drawing noise|inside) \|", text)) == 8
    assert "Nothing can be compared" not in text


def test_checkpoints_of_another_algorithm_are_not_held_against_the_published_ones():
    evaluations = [BASE, chapter_evaluation(100, BASE_RIGHTS)]
    text = report_markdown(evaluations, [], PICTURES, algorithm="grpo")
    assert len(re.findall(r"\| (\*\*outside\*\*|outside drawing noise|inside) \|", text)) == 4
    assert "trained with GSPO. These were trained with grpo, and are not compared" in text


def test_what_is_not_known_of_the_training_is_said():
    text = report_markdown([BASE, chapter_evaluation(100, BASE_RIGHTS)], [], PICTURES, algorithm=None)
    assert len(re.findall(r"\| (\*\*outside\*\*|outside drawing noise|inside) \|", text)) == 8
    assert "not on record here; they are taken to be GSPO's" in text
    assert "not on record" not in report_markdown([BASE], [], PICTURES, algorithm=None)
    assert "No row of the published table" in report_markdown(
        [chapter_evaluation(100, BASE_RIGHTS)], [], PICTURES, algorithm="grpo"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"base_model": "runs/tiny/base"},
        {"dataset": "aime24.jsonl"},
        {"sampling": SamplingConfig(group_size=12, max_tokens=4096)},
        {"sampling": SamplingConfig(group_size=12, max_tokens=8192, temperature=0.6)},
        {"sampling": SamplingConfig(group_size=12, max_tokens=8192, top_k=20)},
    ],
)
def test_nothing_is_compared_with_the_published_table_for_another_setting(changed: dict):
    text = report_markdown([replace(BASE, header=replace(BASE.header, **changed))], [], PICTURES)
    assert "**Nothing can be compared.**" in text
    assert "inside" not in text.partition("Beside the published table")[2].partition("What the published")[0]
    for row in PUBLISHED:
        assert f"| {row.name} | {row.values['average']:.2%} |" in text


def test_the_published_table_by_itself_suggests_a_loss_and_establishes_none():
    """(148 + 146)/720 - 122/360 = 6.94 points; its largest drawing error 3.10: 6.1 at one look, 8.0 for five."""
    text = report_markdown(another_base(BASE), [], PICTURES)
    assert "10.0 points in Pass@12" in text
    assert "6.9 points below both base runs together" in text
    assert "more than the 6.1 that" in text
    assert "less than the 8.0 that" in text


def test_a_checkpoint_of_one_training_is_no_failure_outside_drawing_noise():
    text = report_markdown([BASE, chapter_evaluation(100, BASE_RIGHTS, boxes=6, tokens=6000)], [], PICTURES)
    assert "| step 100 | Format |" in text
    (row,) = (line for line in text.split("\n") if line.startswith("| step 100 | Format |"))
    assert row.endswith("| outside drawing noise |")
    assert "a difference outside it is not yet a failure" in text
    assert not any("**outside**" in line for line in text.split("\n") if line.startswith("| step 100 |"))


def test_with_several_trainings_their_spread_is_the_noise_and_ours_their_mean():
    trained = [chapter_evaluation(100, [right] * 30, boxes=12) for right in (4, 5, 6)]
    repeats = [[BASE, other] for other in trained[1:]]
    text = report_markdown([BASE, trained[0]], [], PICTURES, repeats=repeats)
    (row,) = (line for line in text.split("\n") if line.startswith("| step 100 | Average@12 |"))
    noise = 100 * 4.302653 * (1 / 12) * math.sqrt(1 + 1 / 3)  # Student's t of 2 degrees; standard deviation 1/12
    assert row == f"| step 100 | Average@12 | 41.7 | 33.9 | +7.8 | ± {noise:.1f} | inside |"
    assert "comes from 3 trainings with different seeds, ours is their mean" in text
    assert "not yet a failure" not in text


@pytest.mark.parametrize("trainings", [2, 3, 5])
def test_honest_repetitions_are_called_different_one_time_in_twenty_and_by_drawing_noise_alone_one_in_four(
    trainings: int,
):
    """Trainings that differ by 3 points (standard deviation) in the true Average@12 of 30 problems x 12."""
    rng = np.random.default_rng(0)
    rates = rng.normal(0.4, 0.03, size=(4000, trainings + 1))
    values = rng.binomial(360, rates) / 360
    ours, theirs = values[:, :-1], values[:, -1]
    noise = np.array([repetition_noise(row) for row in ours])
    assert 0.035 < np.mean(np.abs(ours.mean(1) - theirs) > noise) < 0.065
    drawing = 1.96 * math.sqrt(2 * 0.4 * 0.6 / 360)
    assert np.mean(np.abs(ours[:, 0] - theirs) > drawing) > 0.15
