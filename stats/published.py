"""The chapter's published table, and evaluations held against it, where both answered the same problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from engine.sampler import SamplingConfig
from stats.estimates import Z95, repetition_noise
from stats.evaluations import Evaluation
from stats.measures import measures
from stats.page import listed, plain, table

PUBLISHED_MODEL = "Qwen3.5-4B"


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the chapter's table: counts of 30 AIME25 problems x 12 completions."""

    name: str
    num_correct: int
    num_passed: int
    num_formatted: int
    mean_tokens: float

    @property
    def values(self) -> dict[str, float]:
        """The row by the names of `Summary`: rates in [0, 1], tokens."""
        return {
            "average": self.num_correct / 360,
            "passed": self.num_passed / 30,
            "format_rate": self.num_formatted / 360,
            "mean_tokens": self.mean_tokens,
        }


PUBLISHED = (
    Published("base", 148, 17, 168, 6489.8),
    Published("base, run 2", 146, 20, 171, 6442.5),
    Published("step 20", 148, 22, 224, 5775.4),
    Published("step 40", 136, 18, 314, 4785.8),
    Published("step 60", 126, 19, 333, 4438.7),
    Published("step 80", 125, 22, 352, 3886.9),
    Published("step 100", 122, 20, 358, 3358.1),
)


def published_rows(evaluation: Evaluation, algorithm: str | None) -> tuple[Published, ...]:
    """Return the rows that can be compared: all, only the base's where another algorithm trained, or none.

    The published measurement is of PUBLISHED_MODEL on the 30 AIME25 problems, 12 completions of at most 8,192
    tokens each, at temperature 1 from the whole distribution. An unknown algorithm counts as GSPO.
    """
    header = evaluation.header
    theirs = SamplingConfig(group_size=12, max_tokens=8192, max_prompt_tokens=header.sampling.max_prompt_tokens)
    if not header.base_model.rstrip("/").endswith(PUBLISHED_MODEL) or header.sampling != theirs:
        return ()
    if (header.dataset, len(header.problem_ids)) != ("aime25.jsonl", 30):
        return ()
    return tuple(row for row in PUBLISHED if algorithm in ("gspo", None) or row.name.startswith("base"))


def published_parts(
    evaluations: Sequence[Evaluation], algorithm: str | None, repeats: Sequence[Sequence[Evaluation]] = ()
) -> Iterator[str]:
    """Yield the paragraphs and tables of the report's section on the published table.

    `repeats` are the evaluations of further trainings that differ in their seeds alone.
    """
    if theirs := published_rows(evaluations[0], algorithm):
        judged, *others = ([e.by_the_chapters_rule() for e in part] for part in (evaluations, *repeats))
        yield from _differences(judged, theirs, algorithm, others)
    else:
        yield from _form(evaluations[0])
    yield supported_by_counts(PUBLISHED)


def _form(evaluation: Evaluation) -> Iterator[str]:
    header = evaluation.header
    yield (
        f"**Nothing can be compared.** The chapter measured {PUBLISHED_MODEL} on the 30 AIME25 problems, 12 "
        f"completions of at most 8,192 tokens each, at temperature 1; this is {plain(header.base_model)} on "
        f"{len(header.problem_ids)} problems of {plain(header.dataset)}, {header.sampling.group_size} of at "
        f"most {header.sampling.max_tokens:,}, sampled as said above. Its table is here only to show the form "
        "that ours follows."
    )
    rows = [
        [r.name, *(f"{r.values[f]:.2%}" for f in ("average", "passed", "format_rate")), f"{r.mean_tokens:,.1f}",
         f"{r.num_correct}/360", f"{r.num_passed}/30"]
        for r in PUBLISHED
    ]  # fmt: skip
    yield table(["published", "Average@12", "Pass@12", "Format", "mean tokens", "correct", "passed"], rows)


def _differences(
    evaluations: Sequence[Evaluation],
    published: Sequence[Published],
    algorithm: str | None,
    repeats: Sequence[Sequence[Evaluation]],
) -> Iterator[str]:
    if algorithm != "gspo" and any(e.header.label != "base" for e in evaluations):
        yield "The published checkpoints were trained with GSPO. " + (
            f"These were trained with {algorithm}, and are not compared with them."
            if algorithm
            else "What these were trained with is not on record here; they are taken to be GSPO's."
        )
    theirs = {row.name: row.values for row in published}
    rows: list[list[str]] = []
    beyond: dict[str, list[bool]] = {"of the base": [], "of checkpoints": []}
    trainings = set()  # how many a checkpoint's values come from
    for e in evaluations:
        others = [other for repeat in repeats for other in repeat if other.header.name == e.header.name]
        trained, seeds = e.header.label != "base", [e, *others]
        for m in measures(12) if e.header.name in theirs else []:
            values = [float(m.per_problem(each).mean()) for each in (seeds if trained else [e])]
            our, their = fmean(values), theirs[e.header.name][m.field]
            noise, word = Z95 * m.null_error(e, their), "**outside**"
            if len(values) > 1:
                noise = max(noise, repetition_noise(values))
            elif trained:
                word = "outside drawing noise"
            if trained:
                trainings.add(len(values))
            outside = abs(our - their) > noise + 1e-12
            beyond["of checkpoints" if trained else "of the base"].append(outside)
            numbers = [m.show(our), m.show(their), m.show(our - their, "+"), f"± {m.show(noise)}"]
            rows.append([plain(e.header.name), m.title, *numbers, word if outside else "inside"])
    if not rows:
        yield "No row of the published table is of a model that was evaluated here."
        return
    yield table(["", "", "ours", "published", "difference", "noise", "noise explains it?"], rows)
    counts = [f"{sum(found)} of {len(found)} differences {of}" for of, found in beyond.items() if found]
    yield (
        f"Outside the noise (95 %) lie {listed(counts)}; of one model evaluated twice, about one in twenty would. "
        "Drawing noise is that of sampling again on the same 30 problems: of their run only totals are known, so "
        "their draws are taken to vary from problem to problem as ours do. Inside means that noise alone can "
        "explain the difference, not that the two are equal. Ours is judged by the chapter's own rule here, and in "
        "the figure beside published marks; in every other table by ours."
    )
    if 1 in trainings:
        yield (
            "Where a checkpoint comes from one training, its noise is that of drawing alone. Two trainings of one "
            "configuration differ by more than two evaluations of one model, and one training on each side does "
            "not say by how much. So agreement within drawing noise is agreement, and a difference outside it is "
            "not yet a failure; evaluated runs of other seeds, after the first in `--runs`, put the spread between "
            "trainings into the judgement."
        )
    if several := trainings - {1}:
        yield (
            f"Where a checkpoint comes from {listed(sorted(map(str, several)))} trainings with different seeds, "
            "ours is their mean. The noise is how far one further training may lie from it (Student's t over the "
            "trainings), and at least that of drawing."
        )


def supported_by_counts(rows: Sequence[Published]) -> str:
    """Return what a table of counts supports by itself: two evaluations of one base, then its checkpoints.

    Only totals are known, so drawing noise is taken at its largest, that of independent completions.
    """
    first, second, *steps = rows
    last, passed = steps[-1], first.num_passed / 30
    noise = 100 * Z95 * math.sqrt(2 * passed * (1 - passed) / 30)
    lower = min(first.num_passed, second.num_passed)
    gaining = [row.name for row in steps if 100 * (row.num_passed - lower) / 30 > noise]
    gain = (
        f"a gain over the lower of the two shows only at {listed(gaining)}"
        if gaining
        else "no Pass@12 tells a gain"
    )
    both = first.num_correct + second.num_correct
    sides = {"above": [], "equal to": [], "below": []}
    for row in steps:
        side = "above" if 2 * row.num_correct > both else "below" if 2 * row.num_correct < both else "equal to"
        sides[side].append(row.name)
    where = [f"{side} it at {listed(names)}" for side, names in sides.items() if names]
    before, after = (first.mean_tokens + second.mean_tokens) / 2, last.mean_tokens
    return (
        "What the published counts support by themselves, with drawing noise at its largest. Its two runs of one "
        f"base differ by {100 * abs(second.num_passed - first.num_passed) / 30:.1f} points in Pass@12; up to "
        f"{noise:.0f} can be noise, so {gain}. Average@12 of both base runs together is {both / 720:.2%}; the "
        f"checkpoints are {listed(where)}. "
        + _against_base("Average@12", last.name, both, last.num_correct, len(steps))
        + _against_base(
            "Format", last.name, first.num_formatted + second.num_formatted, last.num_formatted, len(steps)
        )
        + f"Mean tokens are {100 * (after / before - 1):+.0f} % there; the two base runs differ by "
        f"{100 * abs(second.mean_tokens - first.mean_tokens) / before:.1f} %."
    )


def _against_base(title: str, name: str, both: int, count: int, num_checkpoints: int) -> str:
    """Return whether a count of 360 differs from that of 720 of both base runs by more than drawing can explain."""
    base, rate = both / 720, count / 360
    change, error = rate - base, math.sqrt(base * (1 - base) / 720 + rate * (1 - rate) / 360)
    best = NormalDist().inv_cdf(1 - 0.025 / num_checkpoints) * error
    one = Z95 * error
    kind = "gain" if change > 0 else "loss"
    side = "above" if change > 0 else "below" if change < 0 else "from"
    text = f"At {name} {title} is {100 * abs(change):.1f} points {side} both base runs together"
    if abs(change) <= one:
        return f"{text}, no more than the {100 * one:.1f} that noise explains at one look. "
    if abs(change) < best:
        return (
            f"{text}, more than the {100 * one:.1f} that noise explains at one look and less than the "
            f"{100 * best:.1f} that picking the largest of {num_checkpoints} asks: a {kind} is suggested, not "
            "established. "
        )
    asked = f"more than the {100 * best:.1f} that picking the largest of {num_checkpoints} asks"
    return f"{text}, {asked}: a {kind} beyond drawing noise. "
