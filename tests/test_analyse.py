"""What must hold: figures show the numbers of the files, whatever is there; nothing incomparable is mixed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from numpy.testing import assert_allclose

from analyse import (
    AnalyseConfig,
    analyse,
    benchmark_figure,
    main,
    moving_average,
    pass_at_k_figure,
    problems_figure,
    read_evaluations,
    read_metrics,
    training_figure,
)
from report import PUBLISHED
from results import EvalHeader, Evaluation, Generation, ProblemResult, summarise
from rollout import SamplingConfig


def made_up(step: int, *, repeat: int = 1, num_problems: int = 6, n: int = 4, seed: int = 0) -> Evaluation:
    """An evaluation whose later steps are boxed more often and cut off less often."""
    rng = np.random.default_rng([seed, step, repeat])
    results = []
    for i in range(num_problems):
        generations = []
        for _ in range(n):
            cut = rng.random() < 0.5 - step / 250
            formatted = not cut and rng.random() < 0.9
            correct = formatted and rng.random() < i / num_problems
            generations.append(
                Generation(
                    answer="7" if correct else "8" if formatted else None,
                    verdict="correct" if correct else "wrong" if formatted else "no_box",
                    correct=correct,
                    formatted=formatted,
                    completion_tokens=100 if cut else int(rng.integers(10, 60)),
                    finish_reason="length" if cut else "stop",
                    text="so it is",
                )
            )
        results.append(ProblemResult(id=f"p{i}", reference="7", generations=tuple(generations)))
    header = EvalHeader(
        suite_version="0.1.0",
        engine="vllm 1",
        label=f"step-{step:06d}" if step else "base",
        step=step,
        repeat=repeat,
        seed=42,
        base_model="some/model",
        revision=None,
        base_fingerprint="f",
        adapter_sha256=None,
        dataset="sums.jsonl",
        dataset_sha256="d",
        problem_ids=tuple(result.id for result in results),
        problems_per_block=5,
        sampling=SamplingConfig(group_size=n),
    )
    return Evaluation(header=header, problems=tuple(results))


def write(folder: Path, *evaluations: Evaluation) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for e in evaluations:
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in (e.header, *e.problems))
        (folder / f"{e.header.label}-{e.header.repeat}.jsonl").write_text(lines)
    return folder


def write_metrics(run: Path, num_steps: int) -> Path:
    """A run's log with a skipped step and, as of a run that is going on, half a line at its end."""
    run.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "step": step,
                "reward/accuracy": step / 100,
                "reward/format_rate": 0.5,
                "rollout/completion_tokens": 50.0 - step,
                "rollout/truncated_fraction": 0.1,
                "gspo/loss": None if step == 2 else 0.001,
                "gspo/seq_ratio_mean": None if step == 2 else 0.9997,
                "gspo/sequence_clip_fraction": None if step == 2 else 0.13,
                "gspo/token_clip_fraction": None if step == 2 else 0.12,
                "gspo/train_sequences": 0 if step == 2 else 48,
                "gspo/normalization_sequences": 64,
                "gspo/skipped": step == 2,
            }
        )
        for step in range(1, num_steps + 1)
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "rew']))
    return run


def drawn(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata(), dtype=np.float64)


SEVEN = [made_up(0), made_up(0, repeat=2), *(made_up(step) for step in (20, 40, 60, 80, 100))]


def test_bars_and_whiskers_are_the_summaries_numbers():
    summaries = [summarise(e) for e in SEVEN]
    figure = benchmark_figure(summaries)
    left, right, lengths = figure.axes
    heights = [bar.get_height() for container in left.containers[1::2] for bar in container]
    assert_allclose(heights, [100 * s.average.value for s in summaries] + [100 * s.passed.value for s in summaries])
    whiskers = cast("LineCollection", left.collections[0]).get_segments()
    assert_allclose(np.array(whiskers[0])[:, 1], [100 * summaries[0].average.low, 100 * summaries[0].average.high])
    assert_allclose(
        [bar.get_height() for bar in right.containers[1]], [100 * s.format_rate.value for s in summaries]
    )
    assert_allclose(drawn(lengths.lines[0]), [s.mean_tokens.value for s in summaries])


def test_the_published_rows_are_marked_where_ours_have_the_same_name():
    figure = benchmark_figure([summarise(e) for e in SEVEN[:3]], PUBLISHED)
    marks = next(line for line in figure.axes[0].lines if line.get_marker() == "D")
    assert_allclose(drawn(marks), [100 * row.num_correct / 360 for row in PUBLISHED[:3]])


def test_training_curves_show_every_step_faint_and_its_average_bold(tmp_path: Path):
    columns = read_metrics(write_metrics(tmp_path / "a", 8))
    figure = training_figure({"a": columns, "b": read_metrics(write_metrics(tmp_path / "b", 5))})
    faint, bold, other_faint, other_bold = figure.axes[0].lines
    assert_allclose(drawn(faint), columns["reward/accuracy"])
    assert_allclose(drawn(bold), moving_average(columns["reward/accuracy"], 3))
    assert len(drawn(other_faint)) == 5
    assert bold.get_linestyle() != other_bold.get_linestyle()  # told apart without colour
    assert len(figure.axes) == 9


def test_the_moving_average_is_centred_and_skips_what_is_missing():
    assert_allclose(moving_average(np.array([1.0, 2.0, math.nan, 4.0, 8.0]), 3), [1.5, 1.5, 3.0, 6.0, 6.0])
    assert math.isnan(moving_average(np.array([math.nan, math.nan]), 3)[0])


def test_pass_at_k_has_a_panel_a_checkpoint_with_the_base_in_each():
    summaries = [summarise(e) for e in SEVEN]
    figure = pass_at_k_figure(summaries)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [s.name for s in summaries[1:]]
    base, own = panels[0].lines
    assert_allclose(drawn(base), [100 * e.value for e in summaries[0].pass_at_k])
    assert_allclose(drawn(own), [100 * e.value for e in summaries[1].pass_at_k])
    assert len(panels[0].collections) == 2
    (alone,) = pass_at_k_figure(summaries[:1]).axes
    assert len(alone.lines) == len(alone.collections) == 1


def test_the_problem_picture_has_each_count_once():
    figure = problems_figure(SEVEN)
    counts = sorted(int(text.get_text()) for text in figure.axes[0].texts)
    assert counts == sorted(int(c) for e in SEVEN for c in e.table("correct").sum(1))
    many = problems_figure([made_up(0, num_problems=100)])
    assert not many.axes[0].texts


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_a_run_gives_table_figures_and_report_in_the_format_asked_for(tmp_path: Path, capsys, suffix: str):
    run = write_metrics(tmp_path / "demo", 8)
    write(run / "eval", *SEVEN)
    written = analyse(AnalyseConfig(runs=(run,), output=tmp_path / f"out/aime{suffix}", report=True, dpi=40))
    stems = ["aime", "aime-pass-at-k", "aime-problems", "aime-training"]
    assert [p.name for p in written] == [*(stem + suffix for stem in stems), "report.md", "report.html"]
    assert all(p.stat().st_size > 1000 for p in written)
    assert "step 100" in capsys.readouterr().out
    text = written[-2].read_text()
    for stem in stems:
        assert (tmp_path / f"out/{stem}.png").exists()
        assert f"]({stem}.png)" in text
    page = written[-1].read_text()
    assert page.count("src=") == page.count('src="data:image/png;base64,') == 4


def test_one_evaluation_is_enough(tmp_path: Path):
    folder = write(tmp_path, made_up(0))
    written = analyse(AnalyseConfig(result_dir=folder, report=True, dpi=40))
    assert [p.name for p in written][:3] == ["results.png", "results-pass-at-k.png", "results-problems.png"]


def test_an_evaluation_of_one_completion_of_one_problem_is_drawn(tmp_path: Path):
    folder = write(tmp_path, made_up(0, num_problems=1, n=1), made_up(20, num_problems=1, n=1))
    analyse(AnalyseConfig(result_dir=folder, report=True, dpi=40))


def test_curves_of_a_run_that_is_still_going_need_no_evaluation(tmp_path: Path):
    run = write_metrics(tmp_path / "demo", 3)
    assert [p.name for p in analyse(AnalyseConfig(runs=(run,), dpi=40))] == ["results-training.png"]


def test_the_base_comes_first_even_before_an_adapter_that_does_not_say_its_step(tmp_path: Path):
    foreign = replace(made_up(0), header=replace(made_up(0).header, label="adapter"))
    write(tmp_path, made_up(20), foreign, made_up(0, repeat=2), made_up(0))
    names = [e.header.name for e in read_evaluations(tmp_path)]
    assert names == ["base", "base, run 2", "adapter", "step 20"]


def test_an_evaluation_that_is_still_going_is_left_out_and_named(tmp_path: Path, capsys):
    going = made_up(20)
    write(tmp_path, made_up(0), replace(going, problems=going.problems[:2]))
    assert [e.header.name for e in read_evaluations(tmp_path)] == ["base"]
    assert "step-000020-1.jsonl has 2 of 6 problems so far" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (made_up(20, n=3), "completions a problem 4 against 3"),
        (made_up(20, num_problems=5), r"problems sums.jsonl \(6\) against sums.jsonl \(5\)"),
        (
            replace(made_up(20), header=replace(made_up(20).header, dataset_sha256="e")),
            "texts of the problems d against e",
        ),
        (replace(made_up(20), header=replace(made_up(20).header, base_fingerprint="g")), "base model"),
        (
            replace(
                made_up(20), header=replace(made_up(20).header, sampling=SamplingConfig(group_size=4, top_p=0.9))
            ),
            "sampling settings",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, other: Evaluation, named: str):
    write(tmp_path, made_up(0), other)
    with pytest.raises(ValueError, match=f"cannot be compared: {named}"):
        read_evaluations(tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("grpo", "trained with grpo, and are not compared"),
        (None, "not on record here; they are taken to be GSPO's"),
    ],
)
def test_the_run_says_whether_its_checkpoints_are_of_the_published_algorithm(
    tmp_path: Path, algorithm: str | None, said: str
):
    theirs = {
        "base_model": "Qwen/Qwen3.5-4B",
        "dataset": "aime25.jsonl",
        "sampling": SamplingConfig(group_size=12, max_tokens=8192),
    }
    plain = [made_up(step, num_problems=30, n=12) for step in (0, 20)]
    write(tmp_path / "run/eval", *(replace(e, header=replace(e.header, **theirs)) for e in plain))
    if algorithm:
        (tmp_path / "run/config.json").write_text(json.dumps({"settings": {"loss": {"algorithm": algorithm}}}))
    main(["--result-dir", str(tmp_path / "run/eval"), "--report", "--dpi", "40"])
    assert said in (tmp_path / "run/eval/figures/report.md").read_text()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--result-dir", "empty"), "error: there is no finished evaluation in empty"),
        (("--runs", "demo", "--report"), "error: there is no finished evaluation in demo/eval"),
        (("--runs", "empty"), "error: empty is not the folder of a run that has trained"),
        (("--result-dir", "broken"), "error: broken/x.jsonl, line 1: not an evaluation"),
        (("--output", "x.gif"), "must end in .png, .pdf or .svg"),
        (("--runs", "a/demo", "b/demo"), "two of the --runs have the same name"),
        (("--dpi", "0"), "dpi is 0"),
    ],
)
def test_what_cannot_be_analysed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, flags: tuple[str, ...], expected: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/x.jsonl").write_text("{}\n")
    write_metrics(tmp_path / "demo", 3)
    with pytest.raises(SystemExit) as exit_info:
        main(flags)
    assert exit_info.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_show_opens_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    write(tmp_path, made_up(0))
    main(["--result-dir", str(tmp_path), "--report", "--show", "--dpi", "40"])
    assert opened == [(tmp_path / "figures/report.html").as_uri()]
