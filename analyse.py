"""Evaluations and training curves as tables, figures and one report that says what they support.

What a reader could get wrong: two noises. Intervals in the table and the differences speak of other problems
of this kind; the comparison with the published table speaks of another run on these same problems, since both
runs answered them. Nothing is compared across different problems, sampling settings or base models.

Letters: P problems, n completions a problem, M checkpoints, S steps.
"""

from __future__ import annotations

import json
import math
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro

from data import write_whole
from estimates import Estimate, Floats
from loss import Algorithm
from report import Published, published_rows, report_markdown, report_page
from results import Evaluation, Summary, format_table, read_evaluation, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK, LIGHT, GREY = "#0072B2", "#E69F00", "#666666"  # Okabe & Ito's blue and orange: apart in grey, too
RUN_STYLES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#56B4E9", (0, (6, 1)))]


# --- Reading ------------------------------------------------------------------------------------------------


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Return the finished evaluations of a folder, base first; those still going are named on stderr.

    ValueError when they are not of the same problems, settings and base model.
    """
    finished: list[tuple[Path, Evaluation]] = []
    for path in sorted(folder.glob("*.jsonl")):
        evaluation = read_evaluation(path)
        if evaluation.complete:
            finished.append((path, evaluation))
        else:
            num_done, num_all = len(evaluation.problems), len(evaluation.header.problem_ids)
            print(f"left out: {path} has {num_done} of {num_all} problems so far", file=sys.stderr)
    for path, evaluation in finished[1:]:
        (first, old), new = (finished[0][0], finished[0][1].header), evaluation.header
        for what, theirs, ours in [
            ("completions a problem", old.sampling.group_size, new.sampling.group_size),
            ("problems", f"{old.dataset} ({len(old.problem_ids)})", f"{new.dataset} ({len(new.problem_ids)})"),
            ("texts of the problems", old.dataset_sha256[:12], new.dataset_sha256[:12]),
            ("sampling settings", old.sampling, new.sampling),
            ("base model", (old.base_model, old.base_fingerprint), (new.base_model, new.base_fingerprint)),
        ]:
            if theirs != ours:
                raise ValueError(
                    f"{first} and {path} cannot be compared: {what} {theirs} against {ours}; keep them in two "
                    "folders"
                )
    return sorted((e for _, e in finished), key=_place)


def _place(evaluation: Evaluation) -> tuple[int, bool, str, int]:
    header = evaluation.header
    return header.step, header.label != "base", header.label, header.repeat


def read_metrics(run: Path) -> dict[str, Floats]:
    """Return every numeric column of a run's metrics.jsonl, [S]; NaN where a step has none.

    A half-written last line, of a run that is still going, is left out. ValueError for a file without a step.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is not the folder of a run that has trained: it has no metrics.jsonl")
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    if not lines:
        raise ValueError(f"{path} holds no finished step yet")
    return {
        key: np.array([math.nan if line.get(key) is None else line[key] for line in lines], dtype=np.float64)
        for key, value in lines[0].items()
        if value is None or isinstance(value, int | float)
    }


def _algorithm(run: Path) -> str | None:
    """Return what a run was trained with; None where the folder does not say or is none of a run."""
    try:
        return json.loads((run / "config.json").read_text())["settings"]["loss"]["algorithm"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- Figures ------------------------------------------------------------------------------------------------


def benchmark_figure(summaries: Sequence[Summary], published: Sequence[Published] = ()) -> Figure:
    """The chapter's figure: Average@n and Pass@n; format rate and mean tokens; 95 % intervals over problems."""
    figure, ((left, right),) = _figure(1, 2, width=11, height=4.6)
    lengths = right.twinx()
    places = np.arange(len(summaries), dtype=np.float64)
    _bars(left, places - 0.2, 0.4, summaries, "average", f"Average@{summaries[0].val_n}", DARK)
    _bars(left, places + 0.2, 0.4, summaries, "passed", f"Pass@{summaries[0].val_n}", LIGHT)
    _bars(right, places, 0.6, summaries, "format_rate", "Format", LIGHT)
    tokens = [s.mean_tokens for s in summaries]
    lengths.errorbar(
        places,
        [e.value for e in tokens],
        yerr=_arms(tokens),
        label="tokens (right)",
        **{"color": DARK, "marker": "o", "linewidth": 2, "capsize": 3},
    )
    by_name = {row.name: row.values for row in published}
    for axes, field, shift, scale, marker, label in [
        (left, "average", -0.2, 100, "D", "published"),
        (left, "passed", 0.2, 100, "D", None),
        (right, "format_rate", 0, 100, "D", "published"),
        (lengths, "mean_tokens", 0, 1, "s", "published tokens"),
    ]:
        marks = [(i + shift, scale * by_name[s.name][field]) for i, s in enumerate(summaries) if s.name in by_name]
        if marks:
            style = {"marker": marker, "markerfacecolor": "white", "linestyle": "none", "zorder": 5}
            axes.plot(*zip(*marks, strict=True), label=label, color=DARK if axes is lengths else "black", **style)
    left.set(ylabel="% of completions, % of problems", ylim=(0, 105))
    right.set(ylabel="% of completions", ylim=(0, 105))
    lengths.set(ylabel="tokens a completion", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(places, [_two_lines(s.name) for s in summaries], rotation=0 if len(places) <= 8 else 90)
        axes.grid(visible=False, axis="x")
        axes.set_xlim(min(-0.7, (len(places) - 5) / 2), max(len(places) - 0.3, (len(places) + 3) / 2))
    _legend(left)
    _legend(right, lengths)
    return figure


def training_figure(runs: dict[str, dict[str, Floats]]) -> Figure:
    """The chapter's training pages: every step faint, a centred moving average on top; one colour a run."""
    panels = [
        ("reward/accuracy", "reward"),
        ("reward/format_rate", "format rate"),
        ("rollout/completion_tokens", "completion tokens"),
        ("rollout/truncated_fraction", "cut off by the length limit"),
        ("gspo/loss", "loss"),
        ("gspo/seq_ratio_mean", "mean sequence ratio"),
        ("gspo/sequence_clip_fraction", "sequences clipped"),
        ("gspo/token_clip_fraction", "tokens clipped"),
        ("gspo/train_sequences", "trained on (dotted: normalizer)"),
    ]
    figure, grid = _figure(3, 3, width=11, height=8.4)
    window = 1
    for (name, columns), (colour, line) in zip(runs.items(), RUN_STYLES * len(runs), strict=False):
        window = max(3, len(columns["step"]) // 20 * 2 + 1)
        for axes, (key, title) in zip(grid.flat, panels, strict=True):
            if key not in columns:
                continue
            axes.plot(columns["step"], columns[key], color=colour, alpha=0.3, linewidth=0.8)
            smooth = moving_average(columns[key], window)
            axes.plot(columns["step"], smooth, color=colour, linestyle=line, linewidth=2, label=name)
            axes.set_title(title, fontsize=10)
            axes.ticklabel_format(axis="y", useOffset=False)
    last = grid.flat[-1]
    for columns in runs.values():
        if "gspo/normalization_sequences" in columns:
            last.plot(columns["step"], columns["gspo/normalization_sequences"], color=GREY, linestyle=":")
    last.set_ylim(0, None)
    for axes in grid[-1]:
        axes.set_xlabel(f"step (bold: mean of {window} steps)" if len(runs) == 1 else "step")
    if len(runs) > 1:
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def clipping_figure(columns: dict[str, Floats]) -> Figure:
    """What clips, and why: clip share by sign of the advantage, and the log-ratio's two sources."""
    panels = {
        "sequences that the clip silences": [
            ("positive/clip_fraction", "advantage > 0"),
            ("negative/clip_fraction", "advantage < 0"),
        ],
        "mean sequence log-ratio (nats)": [
            ("positive/log_ratio_mean", "advantage > 0"),
            ("negative/log_ratio_mean", "advantage < 0"),
        ],
        "spread of its two sources, advantage < 0 (nats, std)": [
            ("negative/engine_log_ratio_std", "gap between the engines"),
            ("negative/update_log_ratio_std", "the policy's own movement"),
        ],
        "|log-ratio| of a token between engines (nats)": [
            ("gap/token_mean", "mean"),
            ("gap/token_p99", "99th percentile"),
            ("gap/token_max", "largest"),
        ],
    }
    window = max(3, len(columns["step"]) // 20 * 2 + 1)
    figure, grid = _figure(2, 2, width=9, height=6.5)
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=True):
        for (key, label), (colour, line) in zip(curves, RUN_STYLES, strict=False):
            axes.plot(columns["step"], columns[key], color=colour, alpha=0.3, linewidth=0.8)
            smooth = moving_average(columns[key], window)
            axes.plot(columns["step"], smooth, color=colour, linestyle=line, linewidth=2, label=label)
        axes.set_title(title, fontsize=10)
        axes.legend(frameon=False, fontsize=9)
    grid[1][1].set_yscale("log")
    for axes in grid[-1]:
        axes.set_xlabel(f"step (bold: mean of {window} steps)")
    return figure


def moving_average(values: Floats, window: int) -> Floats:
    """Mean of the finite values among the `window` (odd) around each, fewer at the ends; NaN where none is."""
    padded = np.pad(values, window // 2, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, window)
    finite = np.isfinite(around)
    with np.errstate(invalid="ignore"):
        return np.where(finite, around, 0).sum(1) / finite.sum(1)


def pass_at_k_figure(summaries: Sequence[Summary]) -> Figure:
    """pass@k for k = 1..n: a panel for each evaluation, with its 95 % band over problems, beside the base."""
    base, others = summaries[0], summaries[1:] or summaries
    columns = min(3, len(others))
    rows = math.ceil(len(others) / columns)
    figure, grid = _figure(rows, columns, width=max(5.0, 3.6 * columns), height=3.2 * rows, share=True)
    k = np.arange(1, base.val_n + 1)
    for axes in grid.flat[len(others) :]:
        axes.set_visible(False)
    for axes, summary in zip(grid.flat, others, strict=False):
        styles = [(base, GREY, "--", "....")] if summary is not base else []
        for curve, colour, line, hatch in [*styles, (summary, DARK, "-", "")]:
            low, high = (np.array([getattr(e, end) for e in curve.pass_at_k]) for end in ("low", "high"))
            band = {"color": colour, "alpha": 0.22, "linewidth": 0, "hatch": hatch}
            axes.fill_between(k, 100 * low, 100 * high, **band)
            middle = [100 * e.value for e in curve.pass_at_k]
            axes.plot(k, middle, color=colour, linestyle=line, linewidth=2, label=curve.name)
        axes.set(title=summary.name, ylim=(0, 105), xlim=(1, max(2, base.val_n)))
        axes.legend(loc="lower right", frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("k")
    for axes in grid[:, 0]:
        axes.set_ylabel("pass@k, %")
    return figure


def problems_figure(evaluations: Sequence[Evaluation]) -> Figure:
    """How many of the n completions are right, a row for each problem (hardest at the top), a column each model."""
    n = evaluations[0].header.sampling.group_size
    counts = np.stack([e.table("correct").sum(1) for e in evaluations], axis=1)  # [P, M]
    order = np.lexsort((np.arange(len(counts)), counts[:, 0], counts.sum(1)))
    counts, names = counts[order], [evaluations[0].problems[i].id for i in order]
    few = len(counts) <= 60
    figure, ((axes,),) = _figure(
        1, 1, width=2.6 + 0.75 * len(evaluations), height=1.3 + (0.26 * len(counts) if few else 8)
    )
    image = axes.imshow(counts, aspect="auto", cmap="cividis", vmin=0, vmax=n, interpolation="nearest")
    axes.set_xticks(np.arange(len(evaluations)), [_two_lines(e.header.name) for e in evaluations])
    axes.xaxis.tick_top()
    axes.grid(visible=False)
    if few:
        axes.set_yticks(np.arange(len(counts)), [name if len(name) <= 24 else f"{name[:23]}…" for name in names])
        for (row, column), count in np.ndenumerate(counts):
            shade = "black" if count > 0.55 * n else "white"
            axes.text(column, row, f"{count:.0f}", ha="center", va="center", color=shade, fontsize=8)
    else:
        axes.set(ylabel="problems, hardest first", yticks=[])
    figure.colorbar(image, ax=axes, label=f"right of {n}", location="bottom", shrink=0.8, pad=0.02)
    return figure


def _figure(rows: int, columns: int, *, width: float, height: float, share: bool = False) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)
    for axes in grid.flat:
        axes.grid(visible=True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def _bars(
    axes: Axes, places: Any, width: float, summaries: Sequence[Summary], field: str, label: str, colour: str
) -> None:
    estimates = [getattr(summary, field) for summary in summaries]
    axes.bar(
        places,
        [100 * e.value for e in estimates],
        width,
        yerr=100 * _arms(estimates),
        label=label,
        color=colour,
        edgecolor="white",
        hatch="///" if colour == LIGHT else None,
        ecolor="0.25",
        capsize=3,
    )


def _two_lines(name: str) -> str:
    return name.replace(", ", "\n") if ", " in name else name.replace(" ", "\n", 1)


def _arms(estimates: Sequence[Estimate]) -> Floats:
    """Lengths of error bars below and above, [2, M]; 0 where no interval is defined."""
    arms = np.array([(e.value - e.low, e.high - e.value) for e in estimates]).T
    return np.nan_to_num(arms).clip(0)


def _legend(*axes: Axes) -> None:
    handles, labels = [], []
    for each in axes:
        found = each.get_legend_handles_labels()
        handles += found[0]
        labels += found[1]
    place = {
        "loc": "lower center",
        "bbox_to_anchor": (0.5, 1.0),
        "ncols": 4,
        "frameon": False,
        "columnspacing": 1.2,
    }
    axes[0].legend(handles, labels, **place)


# --- Command ------------------------------------------------------------------------------------------------


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
        """Refuse what cannot be drawn."""
        if self.dpi < 10:
            raise ValueError(f"dpi is {self.dpi}; it must be at least 10")
        if self.output and self.output.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--output is {self.output}; its name must end in .png, .pdf or .svg")
        if len({run.name for run in self.runs}) < len(self.runs):
            raise ValueError("two of the --runs have the same name, so that their curves could not be told apart")


def analyse(config: AnalyseConfig) -> list[Path]:
    """Print the table, write the figures and the report; return the files, the report's page last.

    ValueError or OSError in one sentence where there is nothing to analyse, or nothing that can be compared.
    """
    results = config.result_dir or (config.runs[0] / "eval" if config.runs else Path("runs/eval"))
    metrics = {run.name: read_metrics(run) for run in config.runs}
    evaluations = read_evaluations(results)
    if not evaluations and (config.report or not metrics):
        raise ValueError(f"there is no finished evaluation in {results}; `python eval.py` makes one")
    summaries = [summarise(evaluation) for evaluation in evaluations]
    algorithm = _algorithm(results.resolve().parent) or (_algorithm(config.runs[0]) if config.runs else None)
    output = config.output or (config.runs[0] if config.runs else results) / "figures" / "results.png"
    figures: dict[str, Figure] = {}
    if summaries:
        print(format_table(summaries))
        figures["benchmark"] = benchmark_figure(summaries, published_rows(evaluations[0], algorithm))
        figures["pass-at-k"] = pass_at_k_figure(summaries)
        figures["problems"] = problems_figure(evaluations)
    if metrics:
        figures["training"] = training_figure(metrics)
        first = metrics[config.runs[0].name]
        if "gap/token_mean" in first:
            figures["clipping"] = clipping_figure(first)
    output.parent.mkdir(parents=True, exist_ok=True)
    written, pictures = [], {}
    for name, figure in figures.items():
        path = output if name == "benchmark" else output.with_stem(f"{output.stem}-{name}")
        figure.savefig(path, dpi=config.dpi)
        written.append(path)
        pictures[name] = path.with_suffix(".png")
        if config.report and path != pictures[name]:
            figure.savefig(pictures[name], dpi=config.dpi)
    if config.report:
        names = {name: path.name for name, path in pictures.items()}
        text = report_markdown(evaluations, metrics, names, algorithm=algorithm)
        page = report_page(text, {path.name: path.read_bytes() for path in pictures.values()})
        for path, content in [(output.with_name("report.md"), text), (output.with_name("report.html"), page)]:
            write_whole(path, content)
            written.append(path)
    return written


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags and analyse; exit status 2 and one sentence on bad input."""
    try:
        config = tyro.cli(AnalyseConfig, args=argv, description=__doc__)
        if config.replay:
            from replay import format_replay, replay

            wanted = {"algorithms": config.algorithms, "step": config.step, "base_model": config.base_model}
            print(format_replay(replay(config.replay, **wanted)))
            return
        written = analyse(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for path in written:
        print(path)
    if config.show:
        webbrowser.open(written[-1].resolve().as_uri())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
