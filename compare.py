"""Matched runs of several algorithms over the same seeds: curves with bands, and what a difference supports.

    python compare.py --runs runs/gspo-1 runs/gspo-2 runs/grpo-1 runs/grpo-2

What a reader could get wrong: the sample is the seeds, not the steps or the completions. Two runs with one seed
see the same problems in the same order with the same sampling seeds, so differences are taken within pairs. With
three pairs only large differences can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from loss import LossConfig
from record.cli import Command, run_command
from record.disk import writing
from record.run import Run
from stats.curves import read_metrics
from stats.estimates import Estimate, Floats, t_quantile
from stats.evaluations import Evaluation, read_evaluation, summarise
from stats.figures import comparison_figure
from stats.page import table

LAST_STEPS = 10
BESIDE_OBJECTIVE = ("old_logprobs", "mini_batches", "mismatch_weight")


@dataclass(frozen=True, slots=True)
class MatchedRun:
    """One run of the comparison; the evaluations are of checkpoints, by step, finished and not repeats."""

    folder: Path
    seed: int
    data_seed: int
    metrics: dict[str, Floats]  # each [S]
    evaluations: dict[int, Evaluation]


def read_matched_runs(folders: Sequence[Path]) -> dict[str, list[MatchedRun]]:
    """Group runs by algorithm and overridden settings; sort each group by seed.

    ValueError unless all have the same settings but for objective and seed, the same number of steps, and every
    group has the same seeds.
    """
    runs: dict[str, list[MatchedRun]] = {}
    shared: tuple[Path, dict[str, Any]] | None = None
    for folder in folders:
        run = Run(folder)
        try:
            common, settings = run.identity, run.settings
            label, seed = _label(LossConfig(**settings["loss"])), settings["seed"]
            data_seed = seed if settings["data_seed"] is None else settings["data_seed"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder} is not the folder of a run ({error})") from error
        common = {
            k: v
            for k, v in common.items()
            if k not in ("seed", "data_seed", "run_name") and not k.startswith("loss/")
        }
        metrics = read_metrics(run)
        common |= {"steps taken": len(metrics["step"])}
        shared = shared or (folder, common)
        if different := [k for k in common | shared[1] if common.get(k) != shared[1].get(k)]:
            raise ValueError(f"{folder} and {shared[0]} do not match: they differ in {', '.join(different)}")
        read = map(read_evaluation, sorted(run.evaluations.glob("*.jsonl")))
        evaluations = {e.header.step: e for e in read if e.header.step and e.complete and e.header.repeat == 1}
        runs.setdefault(label, []).append(MatchedRun(folder, seed, data_seed, metrics, evaluations))
    seeds = {name: sorted((run.seed, run.data_seed) for run in group) for name, group in runs.items()}
    if len(runs) < 2:
        raise ValueError(f"a comparison needs runs of at least two objectives; these are all {next(iter(runs))}")
    if any(len(set(own)) < len(own) or own != next(iter(seeds.values())) for own in seeds.values()):
        raise ValueError(f"each algorithm needs one run of each pair of seed and data seed; these have {seeds}")
    return {name: sorted(group, key=lambda run: (run.seed, run.data_seed)) for name, group in runs.items()}


def _label(loss: LossConfig) -> str:
    """Return the algorithm's name with every setting that differs from the algorithm's own."""
    plain = LossConfig(algorithm=loss.algorithm)
    here, usual = (asdict(c.objective) | {n: getattr(c, n) for n in BESIDE_OBJECTIVE} for c in (loss, plain))
    changed = [f"{name.replace('_', ' ')} {here[name]}" for name in here if here[name] != usual[name]]
    return ", ".join([loss.algorithm, *changed])


def _common_step(runs: dict[str, list[MatchedRun]]) -> int | None:
    """Return the newest step that every run has evaluated; ValueError where the evaluations do not match."""
    every = [run for group in runs.values() for run in group]
    step = max(set.intersection(*(set(run.evaluations) for run in every)), default=None)
    if step is None:
        return None
    (first, measured), *others = ((run, run.evaluations[step].header) for run in every)
    for run, header in others:
        if (header.dataset_sha256, header.sampling) != (measured.dataset_sha256, measured.sampling):
            raise ValueError(
                f"{first.folder} and {run.folder} cannot be compared: step {step} was evaluated on other problems, "
                "or sampled otherwise in doing so"
            )
    return step


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean of second - first over pairs, with Student's 95 % interval.

    The ends are NaN where the pairs have no spread: there is only one, or all differ by the same amount.
    """
    differences = np.subtract(second, first)
    mean, count = float(differences.mean()), len(differences)
    if np.ptp(differences) < 1e-12:
        return Estimate(mean, float("nan"), float("nan"))
    arm = float(t_quantile(count - 1) * differences.std(ddof=1) / np.sqrt(count))
    return Estimate(mean, mean - arm, mean + arm)


def compare_text(runs: dict[str, list[MatchedRun]]) -> str:
    """Return a table of the runs and, for each algorithm against the first, what its differences support.

    ValueError where evaluations do not match.
    """
    reference, *others = runs
    measures = {
        f"training reward over the last {LAST_STEPS} steps": {
            name: [float(run.metrics["reward/accuracy"][-LAST_STEPS:].mean()) for run in group]
            for name, group in runs.items()
        }
    }
    if step := _common_step(runs):
        measures[f"held-out accuracy at step {step}"] = {
            name: [summarise(run.evaluations[step]).average.value for run in group] for name, group in runs.items()
        }
    rows = [
        [name, str(run.seed), str(run.data_seed), *(f"{values[name][number]:.2%}" for values in measures.values())]
        for name, group in runs.items()
        for number, run in enumerate(group)
    ]
    lines = [table(["algorithm", "seed", "data seed", *measures], rows), "", _what_seeds_vary(runs[reference])]
    if not step and any(run.evaluations for group in runs.values() for run in group):
        lines.append("No step has a finished evaluation in every run, so held-out accuracy is not compared.")
    for name in others:
        for measure, values in measures.items():
            first, second = values[reference], values[name]
            lines.append(_sentence(reference, name, measure, paired_difference(first, second), len(first)))
    return "\n".join(lines) + "\n"


def _what_seeds_vary(group: list[MatchedRun]) -> str:
    seeds, data_seeds = {run.seed for run in group}, {run.data_seed for run in group}
    if len(data_seeds) == 1 < len(seeds):
        return "All runs meet the same problems in the same order; seeds vary initial weights and sampling alone.\n"
    if len(seeds) == 1 < len(data_seeds):
        return "All runs have one seed; data seeds vary the order of the problems alone.\n"
    return "A seed sets the order of the problems, the initial weights and the sampling.\n"


def _sentence(reference: str, name: str, measure: str, change: Estimate, pairs: int) -> str:
    points, low, high = 100 * change.value, 100 * change.low, 100 * change.high
    text = f"{points:+.1f} points in {measure} ({name} minus {reference}, {pairs} matched seeds"
    if not np.isfinite(low):
        return f"{text}): without a spread between pairs nothing is known of seed noise; nothing can be concluded."
    text += f", 95 % interval {low:+.1f} to {high:+.1f})"
    if low > 0 or high < 0:
        return f"{text}: the difference exceeds seed noise on this model, data and budget."
    return (
        f"{text}: the difference does not exceed seed noise. That does not show the algorithms to be equal: with "
        f"these seeds a difference below about {(high - low) / 2:.1f} points could not have been told from noise."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """Which runs, and where the figure goes."""

    runs: tuple[Path, ...]
    """Folders of runs that differ in objective (`--algorithm`, `--epsilon-low`, `--mini-batches`, ...) and seed."""
    output: Path = Path("runs/compare.png")
    """The figure; the text goes beside it as Markdown."""


def main() -> None:
    """Parse flags and compare."""

    def work(command: Command) -> None:
        config = tyro.cli(CompareConfig, description=__doc__)
        runs = read_matched_runs(config.runs)
        text = compare_text(runs)
        print(text)
        config.output.parent.mkdir(parents=True, exist_ok=True)
        figure = comparison_figure({name: [run.metrics for run in group] for name, group in runs.items()})
        command.begin("the same command writes both files again")
        with writing(config.output):
            figure.savefig(config.output, dpi=150)
            config.output.with_suffix(".md").write_text(text)
        print(f"{config.output} and {config.output.with_suffix('.md')}")

    run_command(work)


if __name__ == "__main__":
    main()
