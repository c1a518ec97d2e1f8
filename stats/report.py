"""Finished evaluations as a Markdown report that says what they support and what they do not.

What a reader could get wrong: there are two noises, as in `estimates`. The table's intervals and the differences
from the base are over problems; the comparison with the published table has drawing noise only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from stats.curves import TrainedRun
from stats.estimates import Estimate, decompose_format_change, detectable_difference
from stats.evaluations import Evaluation, rule_differences, summarise
from stats.measures import Comparison, excludes_zero
from stats.page import bullets, plain, table
from stats.published import published_parts
from stats.published_training import published_training_parts
from stats.reported import reported_parts


def report_markdown(
    evaluations: Sequence[Evaluation],
    runs: Sequence[TrainedRun],
    pictures: dict[str, str],
    *,
    algorithm: str | None = "gspo",
    repeats: Sequence[Sequence[Evaluation]] = (),
    price_per_hour: float | None = None,
) -> str:
    """Return the report: conclusions, tables, figures.

    The evaluations are finished and comparable, base first; `pictures` are the file names of the figures;
    `algorithm` trained the checkpoints, None where unknown; `repeats` are the evaluations of further trainings that
    differ in their seeds alone; the price is that of the machine that trained.
    """
    comparison = Comparison(evaluations)
    first = evaluations[0].header
    num_problems, n = len(first.problem_ids), first.sampling.group_size
    parts = [
        f"# What {num_problems} problems x {n} completions support",
        f"Base model {plain(first.base_model)} (weights `{first.base_fingerprint}`); problems "
        f"{plain(first.dataset)} (`{first.dataset_sha256[:12]}`); temperature {first.sampling.temperature}, top-p "
        f"{first.sampling.top_p}, top-k {first.sampling.top_k}, at most {first.sampling.max_tokens:,} new tokens; "
        f"seed {first.seed}; suite {first.suite_version}, {first.engine}.",
        "## In short",
        bullets(_conclusions(comparison)),
        "## The table",
        *_summary_tables(evaluations),
        f"![Average and Pass; Format and mean tokens; bars are 95 % intervals]({pictures['benchmark']})",
        f"## Differences from {_reference(comparison)}, on the same problems",
        *_difference_parts(comparison),
        "## How much of the change of Format is fewer cut-off completions",
        *_format_parts(comparison),
        "## pass@k",
        f"![pass@k with 95 % bands over problems, a panel a model]({pictures['pass-at-k']})",
        "The chance that at least one of k completions is right; unbiased for every k (Chen et al. 2021).",
        "## Problem by problem",
        f"![How many completions are right, by problem and model]({pictures['problems']})",
    ]
    if runs:
        parts += ["## Training", f"![Training curves]({pictures['training']})", bullets(_training(runs))]
        parts += ["## Beside the published training curves", *published_training_parts(runs, pictures)]
    parts += ["## Beside the published table", *published_parts(evaluations, algorithm, repeats)]
    parts += ["## The chapter's other numbers", *reported_parts(runs, evaluations, price_per_hour)]
    return "\n\n".join(parts) + "\n"


def _reference(comparison: Comparison) -> str:
    """Return what the checkpoints are compared with: the first of them where there is no base."""
    name = comparison.base[0].header.name
    return "the base" if name == "base" else plain(name)


def _conclusions(comparison: Comparison) -> Iterator[str]:
    base, names = _reference(comparison), [e.header.name for e in comparison.checkpoints]
    if len(comparison.base[0].problems) < 10:
        yield f"**{len(comparison.base[0].problems)} problems are too few** for any interval here to be relied on."
    for measure in comparison.measures if names else []:
        title = measure.title[0].upper() + measure.title[1:]
        changes = comparison.changes(measure)
        best = max(range(len(names)), key=lambda i: abs(changes[i].value))
        largest = f"{measure.show_change(changes[best]).strip('*')} {measure.unit}, at {plain(names[best])}"
        supported = [plain(name) for name, change in zip(names, changes, strict=True) if excludes_zero(change)]
        if supported:
            yield (
                f"**{title} changed**: supported at {', '.join(supported)}. The largest difference from {base} is "
                f"{largest}."
            )
        else:
            least = comparison.detectable(measure)[2]
            unseen = f"a true difference below {measure.show(least)} {measure.unit} would often go unnoticed."
            if not math.isfinite(least):
                unseen = "these are too few problems to say how large a difference would be seen."
            elif not least:
                unseen = "with problems that all agree, the data do not say how large a difference would be seen."
            yield (
                f"**{title}: no change is supported.** The largest difference from {base} is {largest}. This does "
                f"not show that nothing changed: {unseen}"
            )
    for again in comparison.base[1:]:
        gaps = ", ".join(
            f"{m.show(m.per_problem(again).mean() - m.per_problem(comparison.base[0]).mean(), '+')} {m.unit} in "
            f"{m.title}"
            for m in comparison.measures
        )
        yield f"**Noise, seen directly**: {again.header.name} differs from {base} by {gaps}, by seeds alone."
    if not names:
        yield "There is one model here, so nothing can be said about a change; its own numbers follow."


def _summary_tables(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    summaries = [summarise(evaluation) for evaluation in evaluations]
    n = summaries[0].val_n
    rows, more = [], []
    for s in summaries:
        tokens = f"{s.mean_tokens.value:,.1f} ({s.mean_tokens.ends(',.1f')})"
        counts = [f"{s.num_correct}/{s.num_problems * n}", f"{s.num_passed}/{s.num_problems}"]
        rows.append([plain(s.name), *map(_rate, (s.average, s.passed, s.format_rate)), tokens, *counts])
        extra = (s.truncated_fraction, s.finished_average, s.finished_format, s.majority)
        more.append([plain(s.name), *map(_rate, extra)])
    yield table(["", f"Average@{n}", f"Pass@{n}", "Format", "mean tokens", "correct", "passed"], rows)
    yield (
        "In brackets: 95 % intervals of what other problems of this kind would show. The problems are the sample; "
        f"{n} completions of one problem say nothing about the next. Two of these intervals may overlap although "
        "the models differ, since both met the same problems: differences have a table of their own."
    )
    if different := rule_differences(evaluations):
        yield bullets(plain(line) for line in different)
    yield table(["", "cut off", "right, of the ended", "Format, of the ended", f"majority of {n} right"], more)


def _difference_parts(comparison: Comparison) -> Iterator[str]:
    if not comparison.checkpoints:
        yield "There is no checkpoint to compare; `python eval.py --run RUN` evaluates every checkpoint of a run."
        return
    columns = {m.title: [m.show_change(change) for change in comparison.changes(m)] for m in comparison.measures}
    names = [plain(e.header.name) for e in comparison.checkpoints]
    yield table(["", *columns], [list(row) for row in zip(names, *columns.values(), strict=True)])
    yield (
        f"Bold: zero lies outside. In each column the intervals of all {len(names)} checkpoints hold at once 95 % "
        "of the time (max-T over sign flips of the problems' differences), so they are adjusted for choosing "
        "the best of them. They speak of other problems of this kind. The adjustment holds within a column, not "
        "over the four together."
    )
    yield "### How large a difference can be seen"
    rows = []
    for m in comparison.measures:
        again, one, best = (m.show(value) for value in comparison.detectable(m))
        rate = m.per_problem(comparison.base[0]).mean()
        trials = m.trials(comparison.base[0])
        bounded = m.unit == "points" and 0 < rate < 1
        counts = detectable_difference(math.sqrt(2 * rate * (1 - rate) / trials)) if bounded else math.nan
        rows.append([f"{m.title}, {m.unit}", again, one, best, m.show(counts)])
    best = f"best of {len(names)}, other problems"
    one = ["one checkpoint, these problems", "one checkpoint, other problems"]
    yield table(["", *one, best, "two runs, from counts alone"], rows)
    yield (
        f"A true difference from {_reference(comparison)} of this size is found four times in five. On these "
        "same problems only drawing noise hides it; a claim about other problems must survive their choice as well "
        "(with the spread seen here), and a claim about the best checkpoint the choice among all. The last column "
        "is what a table of counts, like the published one, can promise, since it does not say how much of its "
        "spread is drawing noise."
    )


def _format_parts(comparison: Comparison) -> Iterator[str]:
    if not comparison.checkpoints:
        yield "There is no change to divide."
        return
    limit, points = comparison.base[0].header.sampling.max_tokens, comparison.measures[2]
    before = tuple(np.hstack([e.table(c) for e in comparison.base]) for c in ("formatted", "truncated"))
    rows = []
    for evaluation in comparison.checkpoints:
        after = (evaluation.table("formatted"), evaluation.table("truncated"))
        parts = decompose_format_change((before[0], before[1]), after)
        total = parts[0].value + parts[1].value
        rows.append([plain(evaluation.header.name), points.show(total, "+"), *map(points.show_change, parts)])
    yield table(["points", "change of Format", "fewer cut off", "everything else"], rows)
    name, total, fewer, _ = rows[-1]
    yield (
        f"A completion that is cut off at {limit:,} tokens has seldom reached its box. At {name} Format has moved "
        f"by {total} points, of which {fewer.strip('*')} are what fewer (or more) cut-off completions alone "
        "explain; the rest is boxing among completions that end alike (Kitagawa 1955; the two add up; 95 % "
        "intervals over problems)."
    )


def _training(runs: Sequence[TrainedRun]) -> Iterator[str]:
    for run in runs:
        steps, reward = run.metrics["step"], run.metrics["reward/accuracy"]
        count = min(10, len(steps))
        first, last = np.nanmean(reward[:count]), np.nanmean(reward[-count:])
        yield (
            f"{plain(run.name)}: {len(steps)} steps; reward {first:.2f} over the first {count} and {last:.2f} over "
            "the last. Each step draws other problems, so single steps are noise."
        )


def _rate(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.value) else f"{estimate.value:.2%} ({estimate.ends('.1f', scale=100)})"
