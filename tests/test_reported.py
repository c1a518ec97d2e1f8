"""What must hold: a run's numbers stand beside the published ones; settings that differ are marked."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from made_up import BASE, BASE_RIGHTS, chapter_evaluation, reported_record

from data import Problem, questions_sha256
from stats.curves import TrainedRun
from stats.reported import SETTINGS, differences, reported_parts


def rows_of(parts) -> dict[str, list[str]]:
    """Return the cells of every table row by the first one."""
    lines = [line.strip("|").split("|") for part in parts for line in part.split("\n") if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def metrics(**columns) -> dict[str, np.ndarray]:
    return {
        "step": np.arange(1.0, 4.0),
        "gspo/sequence_clip_fraction": np.array([0.1, np.nan, 0.3]),
        "time/step_seconds": np.array([3600.0, 1800.0, 1800.0]),
    } | columns


def test_the_runs_numbers_stand_beside_the_published_ones():
    run = TrainedRun("ours", reported_record(), metrics())
    rows = rows_of(reported_parts([run], [BASE], 2.5))
    assert rows["steps done"] == ["3", "100"]
    assert rows["clipped sequences, mean"] == ["20.00%", "13.11%"]
    assert rows["clipped sequences, last step"] == ["30.00%", "6.25%"]
    assert rows["seconds a step"] == ["2400.0", "85"]
    assert rows["time of all steps"] == ["2 h 0 min", "2 h 22 min"]
    assert rows["cost"] == ["5.00 at 2.5 an hour", "155.80 yuan"]


def test_without_a_price_or_a_clock_there_is_no_cost():
    run = TrainedRun("ours", {}, {"step": np.arange(3, dtype=np.float64)})
    rows = rows_of(reported_parts([run], [BASE], 2.5))
    assert [
        rows[name][0] for name in ("clipped sequences, mean", "seconds a step", "time of all steps", "cost")
    ] == ["-"] * 4
    old = rows_of(reported_parts([TrainedRun("ours", {}, metrics())], [BASE], None))
    assert (old["cost"][0], old["clipped sequences, mean"][0]) == ("-", "-")  # of all completions since format 2


def test_the_base_that_was_evaluated_twice_and_the_best_checkpoints_are_had_by_hand():
    again = chapter_evaluation(0, [*BASE_RIGHTS[:-1], 6], repeat=2, boxes=6, tokens=5990)
    steps = [chapter_evaluation(20, [6] * 30, boxes=7, tokens=200), chapter_evaluation(40, [6] * 30, tokens=100)]
    rows = rows_of(reported_parts([], [BASE, again, *steps], None))
    assert rows["base evaluated twice: Average@12, points"] == [f"{100 * -6 / 360:+.1f}", "-0.6"]
    assert rows["base evaluated twice: Pass@12, points"] == ["+0.0", "+10.0"]
    assert rows["base evaluated twice: mean tokens"] == ["-10.0", "-47.3"]
    assert rows["best checkpoint by Average@12"] == ["step 20 and step 40 (50.0)", "step 20 (41.1)"]
    assert rows["best checkpoint by Pass@12"] == ["step 20 and step 40 (100.0)", "step 20 and step 80 (73.3)"]
    assert rows["best checkpoint by Format"] == ["step 40 (100.0)", "step 100 (99.4)"]
    assert rows["best checkpoint by mean tokens"] == ["step 40 (106)", "step 100 (3,358)"]
    once = rows_of(reported_parts([], [BASE], None))
    assert once["base evaluated twice: Format, points"] == ["evaluated once", "+0.8"]
    assert "best checkpoint by Format" not in once
    assert rows_of(reported_parts([], steps, None))["base evaluated twice: Format, points"][0] == "not evaluated"


def test_every_setting_is_in_the_table_and_one_that_differs_is_marked():
    run = TrainedRun("ours", reported_record(learning_rate=1e-3, steps=50), metrics())
    rows = rows_of(reported_parts([run], [BASE], None))
    assert rows["learning rate"] == ["**0.001**", "4e-05"]
    assert rows["steps"] == ["**50**", "100"]
    assert rows["LoRA rank"] == ["32", "32"]
    assert {setting.name for setting in SETTINGS} <= set(rows)
    assert differences(run) == ["learning rate is 0.001, published 4e-05"]


def test_a_run_on_other_questions_or_in_another_order_is_another_experiment():
    problems = [Problem(id=str(n), question=f"What is {n} + 1?", answer=str(n + 1)) for n in range(3)]
    hashes = {questions_sha256(order) for order in (problems, problems[::-1], problems[:2])}
    assert len(hashes) == 3
    for data in ({"questions_sha256": hashes.pop()}, {}):
        record = reported_record() | {"data": data}
        assert differences(TrainedRun("ours", record, metrics())) == [
            "its first 800 questions are not the published run's"
        ]


def test_train_without_flags_is_the_reported_run():
    train = pytest.importorskip("train")
    config = train.TrainConfig()
    record = {"settings": asdict(config), "objective": asdict(config.loss.objective)}
    assert [setting.name for setting in SETTINGS if not setting.agrees(record)] == []
    assert [setting.name for setting in SETTINGS if setting.of(record) is None] == []
