"""Evaluation files, and the summary of each: the chapter's numbers with their intervals.

What a reader could get wrong: the problems are the sample, not the generations: twelve answers to one problem say
nothing about the next one. Letters: P problems, n completions a problem, k <= n.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from engine.sampler import SamplingConfig
from stats.estimates import Estimate, Floats, estimate_mean, estimate_rate, pass_at_k, wilson_interval
from stats.page import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One graded completion; `answer` and `verdict` are the grader's, as in training."""

    answer: str | None
    verdict: str
    correct: bool
    formatted: bool
    completion_tokens: int
    finish_reason: str
    text: str
    chapter_correct: bool | None = None  # by the chapter's own rule; None where that has no say
    chapter_formatted: bool | None = None

    @property
    def truncated(self) -> bool:
        """Whether the length limit cut it off."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """All generations of one problem; a line of an evaluation file."""

    id: str
    reference: str
    generations: tuple[Generation, ...]  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalHeader:
    """The settings that the generations depend on; the first line of an evaluation file."""

    suite_version: str
    engine: str  # the sampler's package and version
    label: str
    step: int  # 0 for the base model and for an adapter that does not say
    repeat: int
    seed: int
    base_model: str
    revision: str | None
    base_fingerprint: str
    adapter_sha256: str | None
    dataset: str
    dataset_sha256: str  # of the texts and answers of the problems evaluated; `--limit` changes it
    problem_ids: tuple[str, ...]  # [P]
    problems_per_block: int
    sampling: SamplingConfig

    @property
    def name(self) -> str:
        """The label for a reader: "base", "step 20", "base, run 2"."""
        plain = f"step {self.step}" if self.label == f"step-{self.step:06d}" else self.label
        return plain if self.repeat == 1 else f"{plain}, run {self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation file's content; the problems are in the data set's order."""

    header: EvalHeader
    problems: tuple[ProblemResult, ...]

    @property
    def complete(self) -> bool:
        """Whether every problem of the header has its generations."""
        return len(self.problems) == len(self.header.problem_ids)

    def by_the_chapters_rule(self) -> Evaluation:
        """Return the evaluation as the chapter's own code would judge it, where it has a say."""

        def judged(generation: Generation) -> Generation:
            correct, formatted = generation.chapter_correct, generation.chapter_formatted
            return replace(
                generation,
                correct=generation.correct if correct is None else correct,
                formatted=generation.formatted if formatted is None else formatted,
            )

        problems = (replace(p, generations=tuple(map(judged, p.generations))) for p in self.problems)
        return replace(self, problems=tuple(problems))

    def table(self, field: str) -> Floats:
        """Return one field or property of every generation as a number, [P, n]."""
        return np.array([[getattr(g, field) for g in p.generations] for p in self.problems], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of an evaluation: rates in [0, 1], lengths in tokens.

    The intervals are over problems: `estimates.rate_interval` and `estimates.mean_interval`, but Wilson's for
    `passed`, a plain proportion of problems.
    """

    name: str
    num_problems: int
    val_n: int
    num_correct: int  # of all P x n generations; the chapter's "correct"
    num_passed: int  # problems with at least one right generation; the chapter's "passed"
    average: Estimate  # the chapter's Average@n: num_correct / (P n)
    passed: Estimate  # the chapter's Pass@n: num_passed / P
    format_rate: Estimate
    mean_tokens: Estimate  # of all completions, truncated ones included
    truncated_fraction: Estimate
    finished_average: Estimate  # right among the completions that were not truncated
    finished_format: Estimate
    majority: Estimate  # mean `majority_credit`
    pass_at_k: tuple[Estimate, ...]  # [n], for k = 1..n; the last is `passed`
    verdicts: dict[str, int]


def summarise(evaluation: Evaluation) -> Summary:
    """Return the numbers of the problems present; ValueError without any."""
    if not evaluation.problems:
        raise ValueError(f"the evaluation of {evaluation.header.name} holds no finished problem yet")
    n = evaluation.header.sampling.group_size
    correct, formatted, tokens = map(evaluation.table, ("correct", "formatted", "completion_tokens"))
    ended = 1 - evaluation.table("truncated")
    samples = np.full(len(correct), float(n))
    curves = pass_at_k(correct.sum(1), n)  # [P, n]
    rate = float(correct.max(1).mean())
    low, high = wilson_interval(rate, len(correct))
    passed = Estimate(rate, float(low), float(high))
    votes = np.array([majority_credit(problem) for problem in evaluation.problems])
    return Summary(
        name=evaluation.header.name,
        num_problems=len(correct),
        val_n=n,
        num_correct=int(correct.sum()),
        num_passed=int(correct.max(1).sum()),
        average=estimate_rate(correct.sum(1), samples),
        passed=passed,
        format_rate=estimate_rate(formatted.sum(1), samples),
        mean_tokens=estimate_mean(tokens.sum(1), samples),
        truncated_fraction=estimate_rate((1 - ended).sum(1), samples),
        finished_average=estimate_rate((correct * ended).sum(1), ended.sum(1)),
        finished_format=estimate_rate((formatted * ended).sum(1), ended.sum(1)),
        majority=estimate_rate(votes * n, samples, k=n),
        pass_at_k=(*(estimate_rate(curves[:, k - 1] * n, samples, k=k) for k in range(1, n)), passed),
        verdicts=dict(Counter(g.verdict for p in evaluation.problems for g in p.generations)),
    )


def majority_credit(problem: ProblemResult) -> float:
    """Return the share of the most voted answers that are right: 0, 1, or a fraction at a tie; 0 without votes.

    All right answers count as one. Wrong ones are compared as text without blanks, so that two spellings differ.
    """
    votes = Counter(
        True if g.correct else "".join((g.answer or "").split())
        for g in problem.generations
        if g.correct or g.answer is not None
    )
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return winners.count(True) / len(winners) if winners else 0.0


def rule_differences(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a line for each evaluation that the chapter's rule has judged too: both rates, first differences."""
    lines = []
    for evaluation in evaluations:
        judged = [(p, g) for p in evaluation.problems for g in p.generations if g.chapter_correct is not None]
        cases = [
            f"{p.id}: {(g.answer or 'no box')[:20]} for {p.reference[:20]} is {g.verdict} by ours"
            for p, g in judged
            if g.chapter_correct != g.correct
        ]
        if judged:
            ours, theirs = fmean(g.correct for _, g in judged), fmean(bool(g.chapter_correct) for _, g in judged)
            shown = f": {'; '.join(cases[:3])}{'; ...' if len(cases) > 3 else ''}" if cases else ""
            lines.append(
                f"{evaluation.header.name}: by the chapter's rule {theirs:.1%}, by ours {ours:.1%}; {len(cases)} "
                f"of {len(judged)} differ{shown}"
            )
    return lines


def format_table(summaries: Sequence[Summary]) -> str:
    """Return the chapter's table for a terminal, each 95 % interval under its number."""
    n = summaries[0].val_n
    rows: list[tuple[str, ...]] = [
        ("", f"Average@{n}", f"Pass@{n}", "Format", "cut off", "mean tokens", "correct", "passed")
    ]
    for s in summaries:
        rates = (s.average, s.passed, s.format_rate, s.truncated_fraction)
        counts = (f"{s.num_correct}/{s.num_problems * n}", f"{s.num_passed}/{s.num_problems}")
        rows.append((s.name, *(f"{e.value:.2%}" for e in rates), f"{s.mean_tokens.value:.1f}", *counts))
        ends = [e.ends(".1f", scale=100, to="..", none="-") for e in rates]
        rows.append(("", *ends, s.mean_tokens.ends(".1f", to="..", none="-"), "", ""))
    return "\n".join("  ".join(row).rstrip() for row in aligned(rows))


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation file, finished or not; a half-written last line is skipped.

    ValueError, with file and line, for anything that is not a header followed by one line a problem.
    """
    lines = path.read_bytes().split(b"\n")[:-1]  # after the last "\n" comes nothing, or half a line
    number = 1
    try:
        fields = json.loads(lines[0] if lines else b"")
        fields |= {"problem_ids": tuple(fields["problem_ids"]), "sampling": SamplingConfig(**fields["sampling"])}
        header = EvalHeader(**fields)
        results: dict[str, ProblemResult] = {}
        for line in lines[1:]:
            number += 1
            fields = json.loads(line)
            generations = tuple(Generation(**generation) for generation in fields["generations"])
            result = ProblemResult(**fields | {"generations": generations})
            if len(generations) != header.sampling.group_size:
                raise ValueError(f"{len(generations)} generations instead of {header.sampling.group_size}")
            if result.id in results or result.id not in header.problem_ids:
                raise ValueError(f"problem {result.id!r} comes twice or is not in the header")
            results[result.id] = result
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}, line {number}: not an evaluation as this suite writes it ({error})") from error
    return Evaluation(header=header, problems=tuple(results[i] for i in header.problem_ids if i in results))


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Return the finished evaluations of a folder, base first; unfinished ones are named on stderr.

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
    return sorted((evaluation for _, evaluation in finished), key=_place)


def _place(evaluation: Evaluation) -> tuple[int, bool, str, int]:
    header = evaluation.header
    return header.step, header.label != "base", header.label, header.repeat
