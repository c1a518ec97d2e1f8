"""Finished evaluations as one page that says in plain words what they support and what they do not.

What a reader could get wrong: two noises. The table's intervals and the differences from the base speak of
other problems of this kind. The comparison with the published table speaks of another run on these same
problems, since both runs answered them. A difference that is not supported is not shown to be zero: the page
says how large a difference would have been seen.

Letters: P problems, n completions a problem, M checkpoints, S steps.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from estimates import (
    Z80,
    Z95,
    Estimate,
    Floats,
    decompose_format_change,
    detectable_difference,
    difference_errors,
    drawing_error,
    null_error,
    paired_differences,
    pass_drawing_error,
)
from results import Evaluation, summarise
from rollout import SamplingConfig

PUBLISHED_MODEL = "Qwen3.5-4B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A row of the chapter's table, 30 AIME25 problems x 12, by its counts."""

    name: str
    num_correct: int
    num_passed: int
    num_formatted: int
    mean_tokens: float

    @property
    def values(self) -> dict[str, float]:
        """The row under the names of `Summary`: rates in [0, 1], tokens."""
        return {
            "average": self.num_correct / 360,
            "passed": self.num_passed / 30,
            "format_rate": self.num_formatted / 360,
            "mean_tokens": self.mean_tokens,
        }


PUBLISHED = tuple(
    Published(name=name, num_correct=correct, num_passed=passed, num_formatted=formatted, mean_tokens=tokens)
    for name, correct, passed, formatted, tokens in [
        ("base", 148, 17, 168, 6489.8),
        ("base, run 2", 146, 20, 171, 6442.5),
        ("step 20", 148, 22, 224, 5775.4),
        ("step 40", 136, 18, 314, 4785.8),
        ("step 60", 126, 19, 333, 4438.7),
        ("step 80", 125, 22, 352, 3886.9),
        ("step 100", 122, 20, 358, 3358.1),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number of the table, and how it is had from one problem's generations."""

    field: str
    """Its name in `Summary`."""
    title: str
    column: str
    """The `Generation` field that it is made of."""
    any_of_n: bool = False
    """Whether one such generation is enough for the problem."""
    unit: str = "points"

    def per_problem(self, evaluation: Evaluation) -> Floats:
        """The measure of each problem by itself, [P]."""
        values = evaluation.table(self.column)
        return values.max(1) if self.any_of_n else values.mean(1)

    def redrawing_error(self, evaluation: Evaluation) -> float:
        """Standard error of the measure when the same problems are sampled again."""
        values = evaluation.table(self.column)
        return pass_drawing_error(values) if self.any_of_n else drawing_error(values)

    def one_draw(self, n: int) -> float:
        """How far one draw more or less moves one problem's value, for `paired_differences`."""
        return 0.0 if self.unit == "tokens" else 1.0 if self.any_of_n else 1 / math.sqrt(n)

    def null_error(self, evaluation: Evaluation, theirs: float) -> float:
        """Standard error of the difference from another run's value, were both one model on these problems."""
        error = self.redrawing_error(evaluation)
        if self.unit == "tokens":
            return math.sqrt(2) * error
        values = self.per_problem(evaluation)
        trials = len(values) * (1 if self.any_of_n else evaluation.header.sampling.group_size)
        return null_error(float(values.mean()), theirs, error, trials)

    def show(self, value: float, sign: str = "") -> str:
        """Percentage points or tokens, for a reader; `sign` "+" for a difference."""
        if math.isnan(value):
            return "-"
        digits = 0 if self.unit == "tokens" and abs(value) >= 100 else 1
        rounded = round(value if self.unit == "tokens" else 100 * value, digits) + 0.0  # + 0.0 makes -0.0 a plain 0
        return f"{rounded:{sign},.{digits}f}"

    def show_change(self, change: Estimate) -> str:
        """A difference with its interval, bold where zero lies outside."""
        if change.low == change.high:
            text = f"{self.show(change.value, '+')} (alike on every problem)"
        else:
            text = f"{self.show(change.value, '+')} ({self.show(change.low, '+')} to {self.show(change.high, '+')})"
        return f"**{text}**" if excludes_zero(change) else text


def measures(n: int) -> list[Measure]:
    """The four numbers of the chapter's table."""
    return [
        Measure(field="average", title=f"Average@{n}", column="correct"),
        Measure(field="passed", title=f"Pass@{n}", column="correct", any_of_n=True),
        Measure(field="format_rate", title="Format", column="formatted"),
        Measure(field="mean_tokens", title="mean tokens", column="completion_tokens", unit="tokens"),
    ]


def excludes_zero(change: Estimate) -> bool:
    """Whether the interval lies on one side of zero; False where no interval is defined."""
    return change.low > 0 or change.high < 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Checkpoints against the base, its repeats averaged, problem by problem."""

    base: list[Evaluation]
    checkpoints: list[Evaluation]

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation]) -> Comparison:
        """Split evaluations in order; the label of the first is the base."""
        label = evaluations[0].header.label
        return cls(
            base=[e for e in evaluations if e.header.label == label],
            checkpoints=[e for e in evaluations if e.header.label != label],
        )

    @cached_property
    def measures(self) -> list[Measure]:
        """The measures of this n."""
        return measures(self.n)

    @property
    def reference(self) -> str:
        """What the checkpoints are compared with, for a reader: the first of them where there is no base."""
        name = self.base[0].header.name
        return "the base" if name == "base" else _plain(name)

    @property
    def n(self) -> int:
        """Completions a problem."""
        return self.base[0].header.sampling.group_size

    def differences(self, measure: Measure) -> Floats:
        """Per problem and checkpoint, [P, M]."""
        baseline = np.mean([measure.per_problem(e) for e in self.base], axis=0)
        return np.stack([measure.per_problem(e) - baseline for e in self.checkpoints], axis=1)

    def changes(self, measure: Measure) -> list[Estimate]:
        """Mean differences, [M], with intervals that hold for all checkpoints at once."""
        if not self.checkpoints:
            return []
        return paired_differences(self.differences(measure), imagined=measure.one_draw(self.n))

    def detectable(self, measure: Measure) -> tuple[float, float, float]:
        """Differences from the base that would be found four times in five.

        Of one checkpoint, drawn again on these problems; of one checkpoint, on other problems of this kind; of the
        best-looking of all, on other problems. The latter two with the median spread of the checkpoints at hand.
        """
        again = detectable_difference(measure.redrawing_error(self.base[0]) * math.sqrt(1 + 1 / len(self.base)))
        differences = self.differences(measure)
        num_problems = len(differences)
        if num_problems < 2:
            return again, math.nan, math.nan
        errors = difference_errors(differences, imagined=measure.one_draw(self.n))
        halves = np.array([e.high - e.low for e in self.changes(measure)]) / 2
        return again, detectable_difference(float(np.median(errors))), float(np.median(halves + Z80 * errors))


# --- The page -----------------------------------------------------------------------------------------------


def report_markdown(
    evaluations: Sequence[Evaluation],
    metrics: dict[str, dict[str, Floats]],
    pictures: dict[str, str],
    *,
    algorithm: str | None = "gspo",
) -> str:
    """Return the report: what is supported, tables, figures.

    Args:
        evaluations: finished and comparable, base first. metrics: columns of metrics.jsonl, [S] each, by the
        run's name. pictures: file names of the figures "benchmark", "pass-at-k", "problems" and, with
        metrics, "training". algorithm: that trained the checkpoints, where it is known.
    """
    comparison = Comparison.of(evaluations)
    first = evaluations[0].header
    num_problems, n = len(first.problem_ids), first.sampling.group_size
    parts = [
        f"# What {num_problems} problems x {n} completions support",
        f"Base model {_plain(first.base_model)} (weights `{first.base_fingerprint}`); problems "
        f"{_plain(first.dataset)} (`{first.dataset_sha256[:12]}`); temperature {first.sampling.temperature}, top-p "
        f"{first.sampling.top_p}, top-k {first.sampling.top_k}, at most {first.sampling.max_tokens:,} new tokens; "
        f"seed {first.seed}; suite {first.suite_version}, {first.engine}.",
        "## In short",
        _list(_conclusions(comparison)),
        "## The table",
        *_summary_tables(evaluations),
        _picture("Average and Pass; Format and mean tokens; bars are 95 % intervals", pictures["benchmark"]),
        f"## Differences from {comparison.reference}, on the same problems",
        *_difference_parts(comparison),
        "## How much of the change of Format is fewer cut-off completions",
        *_format_parts(comparison),
        "## pass@k",
        _picture("pass@k with 95 % bands over problems, a panel a model", pictures["pass-at-k"]),
        "The chance that at least one of k completions is right; unbiased for every k (Chen et al. 2021).",
        "## Problem by problem",
        _picture("How many completions are right, by problem and model", pictures["problems"]),
    ]
    if metrics:
        parts += ["## Training", _picture("Training curves", pictures["training"]), _list(_training(metrics))]
    parts += ["## Beside the published table", *_published_parts(evaluations, algorithm)]
    return "\n\n".join(parts) + "\n"


def _conclusions(comparison: Comparison) -> Iterator[str]:
    base, names = comparison.reference, [e.header.name for e in comparison.checkpoints]
    if len(comparison.base[0].problems) < 10:
        yield f"**{len(comparison.base[0].problems)} problems are too few** for any interval here to be relied on."
    for measure in comparison.measures if names else []:
        title = measure.title[0].upper() + measure.title[1:]
        changes = comparison.changes(measure)
        best = max(range(len(names)), key=lambda i: abs(changes[i].value))
        largest = f"{measure.show_change(changes[best]).strip('*')} {measure.unit}, at {_plain(names[best])}"
        supported = [_plain(name) for name, change in zip(names, changes, strict=True) if excludes_zero(change)]
        if supported:
            yield (
                f"**{title} changed**: supported at {', '.join(supported)}. The largest difference from {base} is "
                f"{largest}."
            )
        else:
            least = comparison.detectable(measure)[2]
            unseen = (
                f"a true difference below {measure.show(least)} {measure.unit} would often go unnoticed."
                if not math.isnan(least)
                else "with problems that all agree, the data do not say how large a difference would be seen."
            )
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
        tokens = f"{s.mean_tokens.value:,.1f} ({_ends(s.mean_tokens, 1, ',.1f')})"
        counts = [f"{s.num_correct}/{s.num_problems * n}", f"{s.num_passed}/{s.num_problems}"]
        rows.append([_plain(s.name), *map(_rate, (s.average, s.passed, s.format_rate)), tokens, *counts])
        extra = (s.truncated_fraction, s.finished_average, s.finished_format, s.majority)
        more.append([_plain(s.name), *map(_rate, extra)])
    yield _table(["", f"Average@{n}", f"Pass@{n}", "Format", "mean tokens", "correct", "passed"], rows)
    yield (
        "In brackets: 95 % intervals of what other problems of this kind would show. The problems are the sample; "
        f"{n} completions of one problem say nothing about the next. Two of these intervals may overlap although "
        "the models differ, since both met the same problems: differences have a table of their own."
    )
    yield _table(["", "cut off", "right, of the ended", "Format, of the ended", f"majority of {n} right"], more)


def _difference_parts(comparison: Comparison) -> Iterator[str]:
    if not comparison.checkpoints:
        yield "There is no checkpoint to compare; `python eval.py --run RUN` evaluates every checkpoint of a run."
        return
    columns = {m.title: [m.show_change(change) for change in comparison.changes(m)] for m in comparison.measures}
    names = [_plain(e.header.name) for e in comparison.checkpoints]
    yield _table(["", *columns], [list(row) for row in zip(names, *columns.values(), strict=True)])
    yield (
        f"Bold: zero lies outside. In each column the intervals of all {len(names)} checkpoints hold at once 95 % "
        "of the time (max-T over sign flips of the problems' differences), so picking the best checkpoint is paid "
        "for. They speak of other problems of this kind. Four columns are four chances, and only within each is "
        "paid."
    )
    yield "### How large a difference can be seen"
    rows = []
    for m in comparison.measures:
        again, one, best = (m.show(value) for value in comparison.detectable(m))
        rate = m.per_problem(comparison.base[0]).mean()
        trials = len(comparison.base[0].problems) * (
            1 if m.any_of_n else comparison.base[0].header.sampling.group_size
        )
        bounded = m.unit == "points" and 0 < rate < 1
        counts = detectable_difference(math.sqrt(2 * rate * (1 - rate) / trials)) if bounded else math.nan
        rows.append([f"{m.title}, {m.unit}", again, one, best, m.show(counts)])
    best = f"best of {len(names)}, other problems"
    one = ["one checkpoint, these problems", "one checkpoint, other problems"]
    yield _table(["", *one, best, "two runs, from counts alone"], rows)
    yield (
        f"A true difference from {comparison.reference} of this size is found four times in five. On these "
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
        rows.append([_plain(evaluation.header.name), points.show(total, "+"), *map(points.show_change, parts)])
    yield _table(["points", "change of Format", "fewer cut off", "everything else"], rows)
    name, total, fewer, _ = rows[-1]
    yield (
        f"A completion that is cut off at {limit:,} tokens has seldom reached its box. At {name} Format has moved "
        f"by {total} points, of which {fewer.strip('*')} are what fewer (or more) cut-off completions alone "
        "explain; the rest is boxing among completions that end alike (Kitagawa 1955; the two add up; 95 % "
        "intervals over problems)."
    )


def _training(metrics: dict[str, dict[str, Floats]]) -> Iterator[str]:
    for name, columns in metrics.items():
        steps, reward = columns["step"], columns["reward/accuracy"]
        count = min(10, len(steps))
        yield (
            f"{_plain(name)}: {len(steps)} steps; reward {np.nanmean(reward[:count]):.2f} over the first {count} "
            f"and {np.nanmean(reward[-count:]):.2f} over the last. Each step draws other problems, so single steps "
            "are noise."
        )


def published_rows(evaluation: Evaluation, algorithm: str | None) -> tuple[Published, ...]:
    """Return the rows that are of this measurement: all, the base's where another algorithm trained, or none.

    Theirs is of their base model on the 30 AIME25 problems, 12 completions of at most 8,192 tokens each, drawn at
    temperature 1 from the whole distribution. An algorithm that is not known is taken to be theirs, GSPO.
    """
    header = evaluation.header
    theirs = SamplingConfig(group_size=12, max_tokens=8192, max_prompt_tokens=header.sampling.max_prompt_tokens)
    if (
        not header.base_model.rstrip("/").endswith(PUBLISHED_MODEL)
        or (header.dataset, len(header.problem_ids)) != ("aime25.jsonl", 30)
        or header.sampling != theirs
    ):
        return ()
    return tuple(row for row in PUBLISHED if algorithm in ("gspo", None) or row.name.startswith("base"))


def _published_parts(evaluations: Sequence[Evaluation], algorithm: str | None) -> Iterator[str]:
    if theirs := published_rows(evaluations[0], algorithm):
        yield from _beside_published(evaluations, theirs, algorithm)
    else:
        yield from _published_for_its_form(evaluations[0])
    yield _published_by_itself()


def _published_for_its_form(evaluation: Evaluation) -> Iterator[str]:
    header = evaluation.header
    yield (
        f"**Nothing can be compared.** The chapter measured {PUBLISHED_MODEL} on the 30 AIME25 problems, 12 "
        f"completions of at most 8,192 tokens each, at temperature 1; this is {_plain(header.base_model)} on "
        f"{len(header.problem_ids)} problems of {_plain(header.dataset)}, {header.sampling.group_size} of at "
        f"most {header.sampling.max_tokens:,}, sampled as said above. Its table is here only to show the form "
        "that ours follows."
    )
    rows = [
        [r.name, *(f"{r.values[f]:.2%}" for f in ("average", "passed", "format_rate")), f"{r.mean_tokens:,.1f}",
         f"{r.num_correct}/360", f"{r.num_passed}/30"]
        for r in PUBLISHED
    ]  # fmt: skip
    yield _table(["published", "Average@12", "Pass@12", "Format", "mean tokens", "correct", "passed"], rows)


def _beside_published(
    evaluations: Sequence[Evaluation], published: Sequence[Published], algorithm: str | None
) -> Iterator[str]:
    if algorithm != "gspo" and any(e.header.label != "base" for e in evaluations):
        yield "The published checkpoints were trained with GSPO. " + (
            f"These were trained with {algorithm}, and are not compared with them."
            if algorithm
            else "What these were trained with is not on record here; they are taken to be GSPO's."
        )
    theirs = {row.name: row.values for row in published}
    rows, outside = [], 0
    for e in evaluations:
        for m in measures(12) if e.header.name in theirs else []:
            our, their = float(m.per_problem(e).mean()), theirs[e.header.name][m.field]
            noise = Z95 * m.null_error(e, their)
            outside += (beyond := abs(our - their) > noise + 1e-12)
            verdict = "**outside**" if beyond else "inside"
            numbers = [m.show(our), m.show(their), m.show(our - their, "+"), f"± {m.show(noise)}", verdict]
            rows.append([_plain(e.header.name), m.title, *numbers])
    if not rows:
        yield "No row of the published table is of a model that was evaluated here."
        return
    yield _table(["", "", "ours", "published", "difference", "noise", "noise explains it?"], rows)
    yield (
        f"{outside} of {len(rows)} differences lie outside the noise; were both runs the same model, about one "
        "in twenty would. The noise is that of drawing again on the same 30 problems (95 %): of their run "
        "only totals are known, so their draws are taken to vary from problem to problem as ours do. Inside "
        "means that noise alone can explain the difference, not that the two are equal."
    )


def _published_by_itself() -> str:
    first, second, last = PUBLISHED[0], PUBLISHED[1], PUBLISHED[-1]
    drop = (first.num_correct + second.num_correct) / 720 - last.num_correct / 360
    error = _counts_error((first.num_correct + second.num_correct) / 720, 720, last.num_correct / 360, 360)
    five = NormalDist().inv_cdf(1 - 0.025 / 5)
    passed = _counts_error(first.num_passed / 30, 30, first.num_passed / 30, 30)
    return (
        "What the published counts support by themselves, with drawing noise at its largest. Its two runs of one "
        f"base differ by {100 * (second.num_passed - first.num_passed) / 30:.1f} points in Pass@12; up to "
        f"{100 * Z95 * passed:.0f} can be noise, so no Pass@12 in the table tells a gain. Average@12 never rises; "
        f"at step 100 it is {100 * drop:.1f} points below both base runs together, more than the "
        f"{100 * Z95 * error:.1f} that noise explains at one look and less than the {100 * five * error:.1f} that "
        "picking the largest of five asks: a loss is suggested, not established. Format (+52.8 points) and length "
        "(-48 %) changed beyond doubt."
    )


def _counts_error(rate: float, trials: int, other: float, others: int) -> float:
    """Largest standard error that drawing noise can give the difference of two rates."""
    return math.sqrt(rate * (1 - rate) / trials + other * (1 - other) / others)


def report_page(markdown: str, pictures: dict[str, bytes]) -> str:
    """Return the same report as one HTML file; `pictures` are PNG bytes by their file names in the markdown."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("js-default").render(markdown)  # js-default: with tables, without raw HTML
    for name, png in pictures.items():
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{base64.b64encode(png).decode()}"')
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    title = markdown.partition("\n")[0].removeprefix("# ")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )


STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 68rem; margin: 0 auto; padding: 1rem; color: #1a1a1a }
h1 { font-size: 1.6rem; line-height: 1.25 }
h2 { font-size: 1.3rem; margin-top: 2.4em }
code { overflow-wrap: anywhere }
p:has(img), .scroll { overflow-x: auto }
img { max-width: 100%; min-width: 40rem; height: auto }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { padding: .35em .8em; border-bottom: 1px solid #ddd; white-space: nowrap; text-align: right }
th { border-bottom: 2px solid #888; vertical-align: bottom; white-space: normal; min-width: 4.5rem }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff }
"""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def _list(lines: Iterator[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _picture(what: str, name: str) -> str:
    return f"![{what}]({name})"


def _plain(text: str) -> str:
    """Text from a file's name or content, with nothing left that markdown would act on."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", text.replace("\n", " "))


def _rate(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.value) else f"{estimate.value:.2%} ({_ends(estimate, 100, '.1f')})"


def _ends(estimate: Estimate, scale: float, form: str) -> str:
    if math.isnan(estimate.low):
        return "no interval"
    return f"{scale * estimate.low:{form}} to {scale * estimate.high:{form}}"
