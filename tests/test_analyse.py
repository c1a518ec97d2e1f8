"""What must hold: a folder gives tables, figures and report, whatever is there; nothing else is drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import (
    BASE,
    SEVEN,
    chapter_evaluation,
    reported_record,
    seeded_evaluation,
    write_evaluations,
    write_metrics,
    write_reported_run,
)

from analyse import AnalyseConfig, analyse, main, repeats
from engine.sampler import SamplingConfig
from record.cli import Command
from record.run import Run
from stats.evaluations import read_evaluations


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_a_run_gives_table_figures_and_report_in_the_format_asked_for(tmp_path: Path, capsys, suffix: str):
    run = write_metrics(tmp_path / "demo", 8)
    write_evaluations(run / "eval", *SEVEN)
    output = tmp_path / f"out/aime{suffix}"
    written = analyse(AnalyseConfig(runs=(run,), output=output, report=True, dpi=40), Command())
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
    folder = write_evaluations(tmp_path, seeded_evaluation(0))
    written = analyse(AnalyseConfig(result_dir=folder, report=True, dpi=40), Command())
    assert [p.name for p in written][:3] == ["results.png", "results-pass-at-k.png", "results-problems.png"]


def test_an_evaluation_of_one_completion_of_one_problem_is_drawn(tmp_path: Path):
    folder = write_evaluations(
        tmp_path, seeded_evaluation(0, num_problems=1, n=1), seeded_evaluation(20, num_problems=1, n=1)
    )
    analyse(AnalyseConfig(result_dir=folder, report=True, dpi=40), Command())


def test_curves_of_a_run_that_is_still_going_need_no_evaluation(tmp_path: Path):
    run = write_metrics(tmp_path / "demo", 3)
    assert [p.name for p in analyse(AnalyseConfig(runs=(run,), dpi=40), Command())] == ["results-training.png"]


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
    plain = [seeded_evaluation(step, num_problems=30, n=12) for step in (0, 20)]
    write_evaluations(tmp_path / "run/eval", *(replace(e, header=replace(e.header, **theirs)) for e in plain))
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
    write_evaluations(tmp_path, seeded_evaluation(0))
    main(["--result-dir", str(tmp_path), "--report", "--show", "--dpi", "40"])
    assert opened == [(tmp_path / "figures/report.html").as_uri()]


def test_further_runs_of_the_same_configuration_lend_their_spread(tmp_path: Path):
    runs = [write_reported_run(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3, 4)]
    for number, run in enumerate(runs):
        record = reported_record(seed=number, temperature=0.5 if number == 2 else 1.0)
        (run / "config.json").write_text(json.dumps(record))
        write_evaluations(run / "eval", BASE, chapter_evaluation(20, [4 + number] * 30))
    evaluations = read_evaluations(runs[0] / "eval")
    found = repeats([Run(run) for run in runs], evaluations)
    assert [e[-1].table("correct").sum() for e in found] == [5 * 30, 7 * 30]  # not the one at another temperature
    (runs[1] / "config.json").unlink()
    assert len(repeats([Run(run) for run in runs], evaluations)) == 1
    assert repeats([], evaluations) == []
