"""What must hold: the published curves are what was published; a run is paired with them only if it is that run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from made_up import BASE, reported_record, write_evaluations, write_reported_run
from numpy.testing import assert_allclose

from analyse import AnalyseConfig, analyse
from record.cli import Command
from record.run import Run
from stats.curves import TrainedRun
from stats.figures import published_figure
from stats.published_training import CURVES, paired, published_curves, published_training_parts, why_not_paired
from stats.reported import LAST_CLIPPED, MEAN_CLIPPED, STEPS

BY_KEY = {curve.key: curve for curve in CURVES}


def test_the_file_gives_the_published_clip_fractions_and_the_curves_ends():
    curves = published_curves()
    assert curves["step"].tolist() == list(range(1, STEPS + 1))
    clipped = curves["gspo/sequence_clip_fraction"]
    assert_allclose(64 * clipped.sum(), 841)
    assert abs(clipped.mean() - MEAN_CLIPPED) < 0.0005  # 13.14 % decoded, 13.11 % published
    assert clipped[-1] == LAST_CLIPPED
    for key, first, last in [
        ("reward/chapter_accuracy", 0.528, 0.66),
        ("reward/chapter_format_rate", 0.58, 0.83),
        ("rollout/mean_completion_tokens", 2984, 2028),
    ]:
        assert_allclose((curves[key][:10].mean(), curves[key][-10:].mean()), (first, last), rtol=0.01)


def as_published(**changes) -> dict[str, np.ndarray]:
    return {key: values.copy() for key, values in published_curves().items()} | changes


def test_steps_are_paired_by_number_and_a_skipped_step_by_none():
    reward = published_curves()["reward/chapter_accuracy"] + np.where(np.arange(100) < 20, 0.1, 0.0)
    ratio = published_curves()["gspo/seq_ratio_mean"].copy()
    ratio[3] = math.nan
    metrics = {
        key: values[10:60]
        for key, values in as_published(**{"reward/chapter_accuracy": reward, "gspo/seq_ratio_mean": ratio}).items()
    }
    whole = paired(metrics, BY_KEY["reward/chapter_accuracy"])
    assert whole.num_steps == 50
    assert_allclose(whole.difference.value, 0.1 * 10 / 50, rtol=1e-12)
    assert_allclose(whole.ours - whole.published, whole.difference.value, rtol=1e-12)
    assert_allclose(
        paired(metrics, BY_KEY["reward/chapter_accuracy"], last_step=20).difference.value, 0.1, rtol=1e-12
    )
    all_steps = as_published(**{"gspo/seq_ratio_mean": ratio})
    assert paired(all_steps, BY_KEY["gspo/seq_ratio_mean"]).num_steps == 99
    beyond = {key: values + (100 if key == "step" else 0) for key, values in as_published().items()}
    assert paired(beyond, BY_KEY["gspo/loss"]).num_steps == 0


def test_an_interval_is_as_wide_as_the_reading_error_where_the_curves_agree():
    for curve in CURVES:
        same = paired(as_published(), curve)
        error = curve.reading_error or 0.005 * published_curves()[curve.key].mean()
        assert_allclose(
            (same.difference.value, same.difference.low, same.difference.high), (0, -error, error), atol=1e-15
        )


def test_a_run_that_differs_is_called_different_and_one_that_does_not_is_not(tmp_path: Path):
    def section(name: str, **changes) -> str:
        run = TrainedRun.read(Run(write_reported_run(tmp_path / name, **changes)))
        assert why_not_paired(run) is None
        return "\n\n".join(published_training_parts([run], {f"published-{name}": f"{name}.png"}))

    alike, better = section("alike", seed=1), section("better", seed=1, gain=0.15)
    for text, called_different in ((alike, False), (better, True)):
        (reward,) = (line for line in text.split("\n") if line.startswith("| reward, %"))
        assert ("**" in reward) == called_different
    for text in (alike, better):
        assert "Two honest runs of one configuration drift apart" in text
        assert "reading error" in text
        cells = [line.split("|")[4:6] for line in text.split("\n") if line.startswith("| ")][2:]
        whole, early = (sum("**" in row[column] for row in cells) for column in (0, 1))
        assert f"{whole} of 8 intervals exclude zero, and {early} of those over the first 20 steps" in text


def test_honest_made_up_runs_are_seldom_called_different(tmp_path: Path):
    runs = [TrainedRun.read(Run(write_reported_run(tmp_path / str(seed), seed=seed))) for seed in range(30)]
    early = [paired(run.metrics, BY_KEY["reward/chapter_accuracy"], last_step=20).difference for run in runs]
    assert np.mean([e.low > 0 or e.high < 0 for e in early]) < 0.2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data_seed": 43}, "data seed is 43, published 42"),
        ({"data_seed": None, "seed": 43}, "data seed is 43, published 42"),
        (
            {"algorithm": "grpo", "ratio": "token"},
            "algorithm is grpo, published gspo; ratio is token, published sequence",
        ),
        ({"completions_a_group": 4}, "completions a group is 4, published 8"),
        ({"base_model": "runs/tiny/base"}, "base model is runs/tiny/base, published Qwen/Qwen3.5-4B"),
    ],
)
def test_another_configuration_is_told_in_one_sentence_what_differs(changes: dict, named: str):
    run = TrainedRun("odd", reported_record(**changes), as_published())
    sentence = why_not_paired(run)
    assert sentence == (f"odd is not drawn over the published curves, since it is not the reported run: {named}.")


def test_what_is_no_part_of_the_experiment_may_differ():
    record = reported_record(steps=60, steps_between_checkpoints=0, base_model="/models/Qwen3.5-4B/", seed=43)
    assert why_not_paired(TrainedRun("fine", record, as_published())) is None


def test_a_log_of_an_older_version_and_a_folder_without_settings_are_not_paired():
    old = as_published()
    del old["rollout/mean_completion_tokens"]
    assert "of an older version, has no rollout/mean_completion_tokens" in str(
        why_not_paired(TrainedRun("old", reported_record(), old))
    )
    assert "not on record" in str(why_not_paired(TrainedRun("bare", {}, as_published())))


def test_the_figure_has_a_panel_a_curve_with_both_runs_in_it():
    metrics = as_published(**{"reward/chapter_accuracy": published_curves()["reward/chapter_accuracy"] / 2})
    figure = published_figure("ours", metrics)
    assert [axes.get_title() for axes in figure.axes] == [curve.title for curve in CURVES]
    for axes, curve in zip(figure.axes, CURVES, strict=True):
        theirs, _, ours, _ = axes.lines
        assert_allclose(np.asarray(theirs.get_ydata()), curve.scale * published_curves()[curve.key])
        assert_allclose(np.asarray(ours.get_ydata()), curve.scale * metrics[curve.key])


def test_a_run_of_the_reported_configuration_is_drawn_and_another_is_told_why(tmp_path: Path, capsys):
    run, other = write_reported_run(tmp_path / "made-up"), write_reported_run(tmp_path / "other", seed=1)
    (other / "config.json").write_text(json.dumps(reported_record(data_seed=7)))
    write_evaluations(run / "eval", BASE)
    written = analyse(AnalyseConfig(runs=(run, other), report=True, dpi=40), Command())
    assert [path.name for path in written if "published" in path.name] == ["results-published-made-up.png"]
    text = (run / "figures/report.md").read_text()
    section = text.partition("## Beside the published training curves")[2].partition("\n## ")[0]
    assert "](results-published-made-up.png)" in section
    assert "other is not drawn over the published curves" in section
    assert "data seed is 7, published 42" in capsys.readouterr().out
