"""Matched runs of several algorithms over the same seeds: curves with bands, and what a difference supports.

    python compare.py --runs runs/gspo-1 runs/gspo-2 runs/grpo-1 runs/grpo-2

What a reader could get wrong: the sample is the seeds, not the steps or the completions. A pair of runs with one
seed sees the same problems in the same order with the same sampling seeds, so the difference is taken within each
pair; its 95 % interval is Student's t over the pairs, and with three pairs only large differences can show.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro

from analyse import RUN_STYLES, moving_average, read_metrics
from estimates import Estimate, Floats
from results import read_evaluation, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST_STEPS = 10
MAY_DIFFER = {"loss", "seed", "run_name", "resume", "save_every", "swanlab_mode", "save_rollouts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedRun:
    """One run of the comparison."""

    folder: Path
    algorithm: str
    seed: int
    metrics: dict[str, Floats]  # each [S]

    @property
    def reward(self) -> float:
        """Mean training reward of the last steps."""
        return float(self.metrics["reward/accuracy"][-LAST_STEPS:].mean())

    @property
    def accuracy(self) -> float | None:
        """Average@k of the newest evaluated checkpoint on held-out problems; None when there is none."""
        files = sorted((self.folder / "eval").glob("step-*.jsonl"))
        return summarise(read_evaluation(files[-1])).average.value if files else None


def read_matched_runs(folders: Sequence[Path]) -> dict[str, list[MatchedRun]]:
    """Return the runs by algorithm, in the order of their seeds.

    ValueError unless all have the same settings but for objective and seed, the same number of steps, and every
    algorithm has the same seeds.
    """
    runs: dict[str, list[MatchedRun]] = {}
    shared: tuple[Path, dict[str, Any]] | None = None
    for folder in folders:
        try:
            record = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} is not the folder of a run ({error})") from error
        settings, metrics = record["settings"], read_metrics(folder)
        common = {name: value for name, value in settings.items() if name not in MAY_DIFFER}
        common |= {"data": record["data"], "base weights": record["base_fingerprint"]}
        common |= {"steps taken": len(metrics["step"])}
        shared = shared or (folder, common)
        if different := [name for name in common if common[name] != shared[1].get(name)]:
            raise ValueError(f"{folder} and {shared[0]} do not match: they differ in {', '.join(different)}")
        name = settings["loss"]["algorithm"]
        run = MatchedRun(folder=folder, algorithm=name, seed=settings["seed"], metrics=metrics)
        runs.setdefault(name, []).append(run)
    seeds = {name: sorted(run.seed for run in group) for name, group in runs.items()}
    if len(runs) < 2:
        raise ValueError("a comparison needs runs of at least two algorithms")
    if any(len(set(own)) < len(own) or own != next(iter(seeds.values())) for own in seeds.values()):
        raise ValueError(f"each algorithm needs one run of each seed; these have {seeds}")
    return {name: sorted(group, key=lambda run: run.seed) for name, group in runs.items()}


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean of second - first over pairs, with Student's 95 % interval; NaN ends for a single pair."""
    from scipy import stats

    differences = np.subtract(second, first)
    mean, count = float(differences.mean()), len(differences)
    if count < 2:
        return Estimate(value=mean, low=float("nan"), high=float("nan"))
    arm = float(stats.t.ppf(0.975, count - 1) * differences.std(ddof=1) / np.sqrt(count))
    return Estimate(value=mean, low=mean - arm, high=mean + arm)


def compare_text(runs: dict[str, list[MatchedRun]]) -> str:
    """Return a table of the runs and, for each algorithm against the first, what its differences support."""
    reference, *others = runs
    lines = [
        "| algorithm | seed | training reward, last 10 steps | held-out accuracy |",
        "| --- | --- | --- | --- |",
    ]
    for name, group in runs.items():
        for run in group:
            held_out = "-" if run.accuracy is None else f"{run.accuracy:.2%}"
            lines.append(f"| {name} | {run.seed} | {run.reward:.2%} | {held_out} |")
    lines.append("")
    for name in others:
        measures = {
            "training reward over the last 10 steps": [[r.reward for r in runs[a]] for a in (reference, name)]
        }
        accuracies = [[run.accuracy for run in runs[a]] for a in (reference, name)]
        if all(value is not None for row in accuracies for value in row):
            measures["held-out accuracy"] = accuracies  # pyright: ignore[reportArgumentType]
        for measure, (first, second) in measures.items():
            lines.append(_sentence(reference, name, measure, paired_difference(first, second), len(first)))
    return "\n".join(lines) + "\n"


def _sentence(reference: str, name: str, measure: str, change: Estimate, pairs: int) -> str:
    points = f"{100 * change.value:+.1f} points in {measure} ({name} minus {reference}, {pairs} matched seeds"
    if not np.isfinite(change.low):
        return f"{points}): one pair says nothing about seed noise, so nothing can be concluded."
    points += f", 95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f})"
    if change.low <= 0 <= change.high:
        arm = 100 * (change.high - change.low) / 2
        return (
            f"{points}: the difference does not exceed seed noise. That does not show the algorithms to be equal: "
            f"with these seeds a difference below about {arm:.1f} points could not have been told from noise."
        )
    return f"{points}: the difference exceeds seed noise on this model, data and budget."


def compare_figure(runs: dict[str, list[MatchedRun]]) -> Figure:
    """Return reward, format, length and clip share by step: mean over seeds, band from least to most."""
    from matplotlib.figure import Figure

    panels = {
        "training reward": "reward/accuracy",
        "format rate": "reward/format_rate",
        "completion tokens": "rollout/completion_tokens",
        "share of clipped tokens": "gspo/token_clip_fraction",
    }
    figure = Figure(figsize=(9, 6), layout="constrained")
    steps = next(iter(runs.values()))[0].metrics["step"]
    window = 1 + 2 * (len(steps) // 20)
    for axes, (title, key) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for (name, group), (colour, style) in zip(runs.items(), RUN_STYLES, strict=False):
            curves = np.stack([moving_average(run.metrics[key], window) for run in group])
            axes.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
            axes.plot(steps, curves.mean(0), style, color=colour, linewidth=2, label=f"{name}, {len(group)} seeds")
        axes.set_title(title, fontsize="medium")
        axes.grid(visible=True, color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, loc="lower right")
    figure.supxlabel(f"step (mean of {window} steps; band: least to most of the seeds)", fontsize="medium")
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """Which runs, and where the figure goes."""

    runs: tuple[Path, ...]
    """Folders of runs that differ in objective and seed alone."""
    output: Path = Path("runs/compare.png")
    """The figure; the text goes beside it as Markdown."""


def main() -> None:
    """Compare the runs; exit status 2 and one sentence on bad input."""
    config = tyro.cli(CompareConfig, description=__doc__)
    try:
        runs = read_matched_runs(config.runs)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    text = compare_text(runs)
    print(text)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    compare_figure(runs).savefig(config.output, dpi=150)
    config.output.with_suffix(".md").write_text(text)
    print(f"{config.output} and {config.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
