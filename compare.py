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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro

from analyse import RUN_STYLES, moving_average, read_metrics
from estimates import Estimate, Floats, t_quantile
from loss import LossConfig
from results import Evaluation, read_evaluation, summarise
from train import comparable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST_STEPS = 10
BESIDE_OBJECTIVE = ("old_logprobs", "mini_batches", "mismatch_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedRun:
    """One run of the comparison."""

    folder: Path
    seed: int
    metrics: dict[str, Floats]  # each [S]
    evaluations: dict[int, Evaluation]
    """Of its checkpoints, by step; finished ones, and of repeated ones the first."""

    @property
    def reward(self) -> float:
        """Mean training reward of the last steps."""
        return float(self.metrics["reward/accuracy"][-LAST_STEPS:].mean())


def read_matched_runs(folders: Sequence[Path]) -> dict[str, list[MatchedRun]]:
    """Return the runs by algorithm, with what of it was changed, in the order of their seeds.

    ValueError unless all have the same settings but for objective and seed, the same number of steps, and every
    algorithm has the same seeds.
    """
    runs: dict[str, list[MatchedRun]] = {}
    shared: tuple[Path, dict[str, Any]] | None = None
    for folder in folders:
        try:
            record = json.loads((folder / "config.json").read_text())
            label, seed = _label(LossConfig(**record["settings"]["loss"])), record["settings"]["seed"]
            common = comparable(record)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} is not the folder of a run ({error})") from error
        common = {k: v for k, v in common.items() if k not in ("seed", "run_name") and not k.startswith("loss/")}
        metrics = read_metrics(folder)
        common |= {"steps taken": len(metrics["step"])}
        shared = shared or (folder, common)
        if different := [k for k in common | shared[1] if common.get(k) != shared[1].get(k)]:
            raise ValueError(f"{folder} and {shared[0]} do not match: they differ in {', '.join(different)}")
        run = MatchedRun(folder=folder, seed=seed, metrics=metrics, evaluations=_read_evaluations(folder))
        runs.setdefault(label, []).append(run)
    seeds = {name: sorted(run.seed for run in group) for name, group in runs.items()}
    if len(runs) < 2:
        raise ValueError(f"a comparison needs runs of at least two objectives; these are all {next(iter(runs))}")
    if any(len(set(own)) < len(own) or own != next(iter(seeds.values())) for own in seeds.values()):
        raise ValueError(f"each algorithm needs one run of each seed; these have {seeds}")
    return {name: sorted(group, key=lambda run: run.seed) for name, group in runs.items()}


def _label(loss: LossConfig) -> str:
    """Return the algorithm's name with every setting that is not the algorithm's own."""
    plain = LossConfig(algorithm=loss.algorithm)
    here, usual = (asdict(c.objective) | {n: getattr(c, n) for n in BESIDE_OBJECTIVE} for c in (loss, plain))
    changed = [f"{name.replace('_', ' ')} {here[name]}" for name in here if here[name] != usual[name]]
    return ", ".join([loss.algorithm, *changed])


def _common_step(runs: dict[str, list[MatchedRun]]) -> int | None:
    """Return the newest step of which every run has an evaluation; ValueError where these do not match."""
    every = [run for group in runs.values() for run in group]
    steps = set.intersection(*(set(run.evaluations) for run in every))
    if not steps:
        return None
    step = max(steps)
    (first, measured), *others = ((run, run.evaluations[step].header) for run in every)
    for run, header in others:
        if (header.dataset_sha256, header.sampling) != (measured.dataset_sha256, measured.sampling):
            raise ValueError(
                f"{first.folder} and {run.folder} cannot be compared: step {step} was evaluated on other problems, "
                "or sampled otherwise in doing so"
            )
    return step


def _read_evaluations(folder: Path) -> dict[int, Evaluation]:
    read = map(read_evaluation, sorted((folder / "eval").glob("step-*.jsonl")))
    return {e.header.step: e for e in read if e.complete and e.header.repeat == 1}


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean of second - first over pairs, with Student's 95 % interval.

    The ends are NaN where the pairs show no spread: there is only one, or all differ by the same amount.
    """
    differences = np.subtract(second, first)
    mean, count = float(differences.mean()), len(differences)
    if np.ptp(differences) < 1e-12:
        return Estimate(value=mean, low=float("nan"), high=float("nan"))
    arm = float(t_quantile(count - 1) * differences.std(ddof=1) / np.sqrt(count))
    return Estimate(value=mean, low=mean - arm, high=mean + arm)


def compare_text(runs: dict[str, list[MatchedRun]]) -> str:
    """Return a table of the runs and, for each algorithm against the first, what its differences support.

    ValueError where evaluations do not match.
    """
    reference, *others = runs
    measures = {
        "training reward over the last 10 steps": {
            name: [run.reward for run in group] for name, group in runs.items()
        }
    }
    if step := _common_step(runs):
        measures[f"held-out accuracy at step {step}"] = {
            name: [summarise(run.evaluations[step]).average.value for run in group] for name, group in runs.items()
        }
    lines = [
        f"| algorithm | seed | {' | '.join(measures)} |",
        f"| --- | --- | {' | '.join('---' for _ in measures)} |",
    ]
    for name, group in runs.items():
        for number, run in enumerate(group):
            values = " | ".join(f"{values[name][number]:.2%}" for values in measures.values())
            lines.append(f"| {name} | {run.seed} | {values} |")
    lines.append("")
    if not step and any(run.evaluations for group in runs.values() for run in group):
        lines.append("No step has a finished evaluation in every run, so held-out accuracy is not compared.")
    for name in others:
        for measure, values in measures.items():
            first, second = values[reference], values[name]
            lines.append(_sentence(reference, name, measure, paired_difference(first, second), len(first)))
    return "\n".join(lines) + "\n"


def _sentence(reference: str, name: str, measure: str, change: Estimate, pairs: int) -> str:
    points = f"{100 * change.value:+.1f} points in {measure} ({name} minus {reference}, {pairs} matched seeds"
    if not np.isfinite(change.low):
        return (
            f"{points}): without a spread between pairs nothing is known of seed noise; nothing can be concluded."
        )
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
        for (name, group), (colour, style) in zip(runs.items(), RUN_STYLES * len(runs), strict=False):
            curves = np.stack([moving_average(run.metrics[key], window) for run in group])
            axes.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
            label = f"{name}, {len(group)} seeds"
            axes.plot(steps, curves.mean(0), linestyle=style, color=colour, linewidth=2, label=label)
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
    """Folders of runs that differ in objective (`--algorithm`, `--epsilon-low`, `--mini-batches`, ...) and seed."""
    output: Path = Path("runs/compare.png")
    """The figure; the text goes beside it as Markdown."""


def main() -> None:
    """Compare the runs; exit status 2 and one sentence on bad input."""
    config = tyro.cli(CompareConfig, description=__doc__)
    try:
        runs = read_matched_runs(config.runs)
        text = compare_text(runs)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(text)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    compare_figure(runs).savefig(config.output, dpi=150)
    config.output.with_suffix(".md").write_text(text)
    print(f"{config.output} and {config.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
