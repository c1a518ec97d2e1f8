"""The figures of runs and evaluations, one function a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from stats.curves import moving_average
from stats.estimates import Estimate, Floats
from stats.evaluations import Evaluation, Summary
from stats.published import Published
from stats.published_training import CURVES, published_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#666666"  # Okabe & Ito's palette; different greys when printed
LINES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#56B4E9", (0, (6, 1)))]


def benchmark_figure(summaries: Sequence[Summary], published: Sequence[Published] = ()) -> Figure:
    """Return the chapter's figure: Average@n and Pass@n; format rate and mean tokens; 95 % intervals."""
    figure, ((left, right),) = _figure(1, 2, width=11, height=4.6)
    lengths = right.twinx()
    places = np.arange(len(summaries), dtype=np.float64)
    bars = {"edgecolor": "white", "ecolor": "0.25", "capsize": 3}
    for axes, shift, width, field, label, colour, hatch in [
        (left, -0.2, 0.4, "average", f"Average@{summaries[0].val_n}", BLUE, None),
        (left, 0.2, 0.4, "passed", f"Pass@{summaries[0].val_n}", ORANGE, "///"),
        (right, 0, 0.6, "format_rate", "Format", ORANGE, "///"),
    ]:
        rates = [getattr(summary, field) for summary in summaries]
        style = {"yerr": 100 * _arms(rates), "label": label, "color": colour, "hatch": hatch} | bars
        axes.bar(places + shift, [100 * e.value for e in rates], width, **style)
    tokens = [s.mean_tokens for s in summaries]
    style = {"yerr": _arms(tokens), "color": BLUE, "marker": "o", "linewidth": 2, "capsize": 3}
    lengths.errorbar(places, [e.value for e in tokens], label="tokens (right)", **style)
    by_name = {row.name: row.values for row in published}
    style = {"markerfacecolor": "white", "linestyle": "none", "zorder": 5}
    for axes, field, shift, scale, marker, label in [
        (left, "average", -0.2, 100, "D", "published"),
        (left, "passed", 0.2, 100, "D", None),
        (right, "format_rate", 0, 100, "D", "published"),
        (lengths, "mean_tokens", 0, 1, "s", "published tokens"),
    ]:
        marks = [(i + shift, scale * by_name[s.name][field]) for i, s in enumerate(summaries) if s.name in by_name]
        if marks:
            colour = BLUE if axes is lengths else "black"
            axes.plot(*zip(*marks, strict=True), label=label, color=colour, marker=marker, **style)
    left.set(ylabel="% of completions, % of problems", ylim=(0, 105))
    right.set(ylabel="% of completions", ylim=(0, 105))
    lengths.set(ylabel="tokens a completion", ylim=(0, None))
    for axes, legend in ((left, [left]), (right, [right, lengths])):
        axes.set_xticks(places, [_two_lines(s.name) for s in summaries], rotation=0 if len(places) <= 8 else 90)
        axes.grid(visible=False, axis="x")
        axes.set_xlim(min(-0.7, (len(places) - 5) / 2), max(len(places) - 0.3, (len(places) + 3) / 2))
        handles = list(chain(*(each.get_legend_handles_labels()[0] for each in legend)))
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 4}
        axes.legend(handles=handles, frameon=False, columnspacing=1.2, **place)
    return figure


def training_figure(runs: dict[str, dict[str, Floats]]) -> Figure:
    """Return the chapter's training curves: each step faint, a centred moving average bold; one colour a run."""
    panels = [
        ("reward/accuracy", "reward"),
        ("reward/format_rate", "format rate"),
        ("rollout/mean_completion_tokens", "completion tokens"),
        ("rollout/truncated_fraction", "cut off by the length limit"),
        ("gspo/loss", "loss"),
        ("gspo/seq_ratio_mean", "mean sequence ratio"),
        ("gspo/sequence_clip_fraction", "sequences clipped"),
        ("gspo/token_clip_fraction", "tokens clipped"),
        ("gspo/train_sequences", "trained on (dotted: normalizer)"),
    ]
    figure, grid = _figure(3, 3, width=11, height=8.4)
    for (name, columns), line in zip(runs.items(), LINES * len(runs), strict=False):
        for axes, (key, title) in zip(grid.flat, panels, strict=True):
            if key in columns:
                _curve(axes, columns, key, line, name)
                axes.set_title(title, fontsize=10)
                axes.ticklabel_format(axis="y", useOffset=False)
    last = grid.flat[-1]
    for columns in runs.values():
        if "gspo/normalization_sequences" in columns:
            last.plot(columns["step"], columns["gspo/normalization_sequences"], color=GREY, linestyle=":")
    last.set_ylim(0, None)
    for axes in grid[-1]:
        alone = next(iter(runs.values())) if len(runs) == 1 else None
        axes.set_xlabel(f"step (bold: mean of {_window(alone)} steps)" if alone else "step")
    if len(runs) > 1:
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def published_figure(name: str, columns: dict[str, Floats]) -> Figure:
    """Return a run's curves over the published ones, each step faint, a centred moving average bold."""
    figure, grid = _figure(2, 4, width=14, height=6.2)
    for axes, curve in zip(grid.flat, CURVES, strict=True):
        for label, values, line in [
            ("published", published_curves(), (ORANGE, "--")),
            (name, columns, (BLUE, "-")),
        ]:
            _curve(axes, values | {curve.key: curve.scale * values[curve.key]}, curve.key, line, label)
        axes.set_title(curve.title, fontsize=10)
        axes.ticklabel_format(axis="y", useOffset=False)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return figure


def clipping_figure(columns: dict[str, Floats]) -> Figure:
    """Return the clip fraction by the advantage's sign, and the two sources of the log-ratio."""
    signs = {"positive": "advantage > 0", "negative": "advantage < 0"}
    sources = {"engine": "gap between the engines", "update": "the policy's own movement"}
    sizes = {"mean": "mean", "p99": "99th percentile", "max": "largest"}
    panels = [
        ("sequences that the clip silences", "{}/clip_fraction", signs),
        ("mean sequence log-ratio (nats)", "{}/log_ratio_mean", signs),
        ("spread of its two sources, advantage < 0 (nats, std)", "negative/{}_log_ratio_std", sources),
        ("|log-ratio| of a token between engines (nats)", "gap/token_{}", sizes),
    ]
    figure, grid = _figure(2, 2, width=9, height=6.5)
    for axes, (title, key, labels) in zip(grid.flat, panels, strict=True):
        for (part, label), line in zip(labels.items(), LINES, strict=False):
            _curve(axes, columns, key.format(part), line, label)
        axes.set_title(title, fontsize=10)
        axes.legend(frameon=False, fontsize=9)
    grid[1][1].set_yscale("log")
    for axes in grid[-1]:
        axes.set_xlabel(f"step (bold: mean of {_window(columns)} steps)")
    return figure


def comparison_figure(groups: dict[str, list[dict[str, Floats]]]) -> Figure:
    """Return reward, format, length and clipping by step: mean over a group's runs, band from least to most."""
    panels = {
        "training reward": "reward/accuracy",
        "format rate": "reward/format_rate",
        "completion tokens": "rollout/mean_completion_tokens",
        "share of clipped tokens": "update/token_clip_fraction",
    }
    figure, grid = _figure(2, 2, width=9, height=6)
    steps = next(iter(groups.values()))[0]["step"]
    window = 1 + 2 * (len(steps) // 20)
    for axes, (title, key) in zip(grid.flat, panels.items(), strict=True):
        for (name, runs), (colour, style) in zip(groups.items(), LINES * len(groups), strict=False):
            curves = np.stack([moving_average(columns[key], window) for columns in runs])
            axes.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
            label = f"{name}, {len(runs)} seeds"
            axes.plot(steps, curves.mean(0), linestyle=style, color=colour, linewidth=2, label=label)
        axes.set_title(title, fontsize=10)
        axes.set_axisbelow("line")
    figure.axes[0].legend(frameon=False, loc="lower right")
    figure.supxlabel(f"step (mean of {window} steps; band: least to most of the seeds)", fontsize=10)
    return figure


def pass_at_k_figure(summaries: Sequence[Summary]) -> Figure:
    """Return pass@k for k = 1..n with 95 % bands over problems: a panel a checkpoint, the base in each."""
    base, others = summaries[0], summaries[1:] or summaries
    columns = min(3, len(others))
    rows = math.ceil(len(others) / columns)
    figure, grid = _figure(rows, columns, width=max(5.0, 3.6 * columns), height=3.2 * rows, share=True)
    k = np.arange(1, base.val_n + 1)
    for axes in grid.flat[len(others) :]:
        axes.set_visible(False)
    for axes, summary in zip(grid.flat, others, strict=False):
        styles = [(base, GREY, "--", "....")] if summary is not base else []
        for curve, colour, line, hatch in [*styles, (summary, BLUE, "-", "")]:
            middle, low, high = 100 * np.array([(e.value, e.low, e.high) for e in curve.pass_at_k]).T
            axes.fill_between(k, low, high, color=colour, alpha=0.22, linewidth=0, hatch=hatch)
            axes.plot(k, middle, color=colour, linestyle=line, linewidth=2, label=curve.name)
        axes.set(title=summary.name, ylim=(0, 105), xlim=(1, max(2, base.val_n)))
        axes.legend(loc="lower right", frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("k")
    for axes in grid[:, 0]:
        axes.set_ylabel("pass@k, %")
    return figure


def problems_figure(evaluations: Sequence[Evaluation]) -> Figure:
    """Return how many of the n completions are right: a row a problem, hardest at the top, a column a model."""
    n = evaluations[0].header.sampling.group_size
    counts = np.stack([e.table("correct").sum(1) for e in evaluations], axis=1)  # [P, M]
    order = np.lexsort((np.arange(len(counts)), counts[:, 0], counts.sum(1)))
    counts, names = counts[order], [evaluations[0].problems[i].id for i in order]
    few = len(counts) <= 60
    height = 1.3 + (0.26 * len(counts) if few else 8)
    figure, ((axes,),) = _figure(1, 1, width=2.6 + 0.75 * len(evaluations), height=height)
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


def _window(columns: dict[str, Floats]) -> int:
    """Return the number of steps, odd, that a bold curve averages."""
    return max(3, len(columns["step"]) // 20 * 2 + 1)


def _curve(axes: Axes, columns: dict[str, Floats], key: str, line: tuple[str, Any], label: str) -> None:
    """Draw every step faint and its moving average bold."""
    steps, (colour, style) = columns["step"], line
    axes.plot(steps, columns[key], color=colour, alpha=0.3, linewidth=0.8)
    smooth = moving_average(columns[key], _window(columns))
    axes.plot(steps, smooth, color=colour, linestyle=style, linewidth=2, label=label)


def _two_lines(name: str) -> str:
    return name.replace(", ", "\n") if ", " in name else name.replace(" ", "\n", 1)


def _arms(estimates: Sequence[Estimate]) -> Floats:
    """Return the lengths of error bars below and above, [2, M]; 0 where no interval is defined."""
    arms = np.array([(e.value - e.low, e.high - e.value) for e in estimates]).T
    return np.nan_to_num(arms).clip(0)
