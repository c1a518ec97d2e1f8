"""Evaluations and training curves as tables, figures and one report that says what they support.

What a reader could get wrong: nothing is compared across different problems, sampling settings or base models.
"""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from data import write_whole
from loss import Algorithm
from record.cli import Command, run_command
from record.disk import writing
from record.run import Run
from stats import figures
from stats.curves import TrainedRun
from stats.evaluations import Evaluation, format_table, read_evaluations, summarise
from stats.page import html_page
from stats.published import published_rows
from stats.published_training import why_not_paired
from stats.replay import format_replay, replay
from stats.report import report_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = ("seed", "data_seed", "run_name")
"""Settings in which two trainings of one configuration differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyseConfig:
    """Tables and figures of evaluations and runs."""

    runs: tuple[Path, ...] = ()
    """Folders of runs: training curves of all, evaluations of the first."""
    result_dir: Path | None = None
    """Folder of evaluation files; default the first run's, else runs/eval."""
    output: Path | None = None
    """The benchmark figure (.png, .pdf or .svg); other figures add to its name, the report goes to its folder."""
    dpi: int = 150
    report: bool = False
    """Also write report.md and, in one file that can be copied anywhere, report.html."""
    price_per_hour: float | None = None
    """What an hour of the machine that trained costs: the report then gives the cost of the steps."""
    show: bool = False
    """Open what was written in the desktop's viewer."""
    replay: Path | None = None
    """Instead, score a stored step of this run again under several objectives, at the weights that sampled it."""
    algorithms: tuple[Algorithm, ...] = ("gspo", "grpo", "dr-grpo", "dapo")
    """With --replay: the objectives."""
    step: int | None = None
    """With --replay: which step; default the newest whose weights were kept."""
    base_model: str | None = None
    """With --replay: where the base model lies, if it was moved since the run."""

    def __post_init__(self) -> None:
        if self.dpi < 10:
            raise ValueError(f"dpi is {self.dpi}; it must be at least 10")
        if self.output and self.output.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--output is {self.output}; its name must end in .png, .pdf or .svg")
        if len({run.name for run in self.runs}) < len(self.runs):
            raise ValueError("two of the --runs have the same name, so that their curves could not be told apart")
        if self.price_per_hour is not None and self.price_per_hour < 0:
            raise ValueError(f"price_per_hour is {self.price_per_hour}; it must be at least 0")


def analyse(config: AnalyseConfig, command: Command) -> list[Path]:
    """Print the table, write the figures and the report; return the files, the report's page last.

    ValueError or OSError, in one sentence, where there is nothing to analyse or nothing that can be compared. Then
    `command` begins, and what cannot be written is a DiskError.
    """
    runs = [Run(folder) for folder in config.runs]
    results = config.result_dir or (runs[0].evaluations if runs else Path("runs/eval"))
    trained = [TrainedRun.read(run) for run in runs]
    evaluations = read_evaluations(results)
    if not evaluations and (config.report or not runs):
        raise ValueError(f"there is no finished evaluation in {results}; `python eval.py` makes one")
    others = repeats(runs, evaluations) if config.report else []
    summaries = [summarise(evaluation) for evaluation in evaluations]
    algorithm = Run(results.resolve().parent).algorithm or (runs[0].algorithm if runs else None)
    drawn: dict[str, Figure] = {}
    if summaries:
        print(format_table(summaries))
        published = published_rows(evaluations[0], algorithm)
        judged = [summarise(e.by_the_chapters_rule()) for e in evaluations] if published else summaries
        drawn["benchmark"] = figures.benchmark_figure(judged, published)
        drawn["pass-at-k"] = figures.pass_at_k_figure(summaries)
        drawn["problems"] = figures.problems_figure(evaluations)
    if trained:
        drawn["training"] = figures.training_figure({run.name: run.metrics for run in trained})
        if "gap/token_mean" in trained[0].metrics:
            drawn["clipping"] = figures.clipping_figure(trained[0].metrics)
    for run in trained:
        if why := why_not_paired(run):
            print(why)
        else:
            drawn[f"published-{run.name}"] = figures.published_figure(run.name, run.metrics)
    output = config.output or (runs[0].folder if runs else results) / "figures" / "results.png"
    output.parent.mkdir(parents=True, exist_ok=True)
    command.begin("the same command writes every file again")
    written, pictures = [], {}
    for name, figure in drawn.items():
        path = output if name == "benchmark" else output.with_stem(f"{output.stem}-{name}")
        pictures[name] = path.with_suffix(".png")
        for file in {path, pictures[name]} if config.report else {path}:
            with writing(file):
                figure.savefig(file, dpi=config.dpi)
        written.append(path)
    if config.report:
        names = {name: path.name for name, path in pictures.items()}
        price = config.price_per_hour
        text = report_markdown(
            evaluations, trained, names, algorithm=algorithm, repeats=others, price_per_hour=price
        )
        page = html_page(text, {path.name: path.read_bytes() for path in pictures.values()})
        for path, content in [(output.with_name("report.md"), text), (output.with_name("report.html"), page)]:
            with writing(path):
                write_whole(path, content)
            written.append(path)
    return written


def repeats(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Return the evaluations of the further runs that differ from the first in nothing but their seeds."""
    found, measured = [], (evaluations[0].header.dataset_sha256, evaluations[0].header.sampling)
    experiments = [_experiment(run) for run in runs]
    for run, experiment in zip(runs[1:], experiments[1:], strict=True):
        if experiment is None or experiment != experiments[0]:
            continue
        own = read_evaluations(run.evaluations)
        if own and (own[0].header.dataset_sha256, own[0].header.sampling) == measured:
            found.append(own)
    return found


def _experiment(run: Run) -> dict[str, Any] | None:
    """Return a run's settings but for its seeds; None where it has none on record that can be compared."""
    try:
        return {key: value for key, value in run.identity.items() if key not in SEEDS}
    except ValueError:
        return None


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags and analyse."""

    def work(command: Command) -> None:
        config = tyro.cli(AnalyseConfig, args=argv, description=__doc__)
        if config.replay:
            print(format_replay(replay(Run(config.replay), config.algorithms, config.step, config.base_model)))
            return
        written = analyse(config, command)
        for path in written:
            print(path)
        if config.show:
            webbrowser.open(written[-1].resolve().as_uri())

    run_command(work)


if __name__ == "__main__":
    main()
