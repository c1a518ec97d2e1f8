"""Evaluations on disk, and what each comes to: the chapter's numbers with their intervals.

What a reader could get wrong: the problems are the sample, not the generations. Twelve answers to one problem
are not twelve pieces of evidence about the next problem, so every interval of a summary speaks of other
problems of the same kind. Lines end at "\n" only.

Letters: P problems, n completions a problem, k <= n.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from estimates import Estimate, Floats, estimate_mean, estimate_rate, pass_at_k, wilson_interval
from rollout import SamplingConfig


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
    """Every setting that the generations depend on; the first line of an evaluation file."""

    suite_version: str
    engine: str
    """The sampler's package and version."""
    label: str
    step: int
    """0 for the base model and for an adapter that does not say."""
    repeat: int
    seed: int
    base_model: str
    revision: str | None
    base_fingerprint: str
    adapter_sha256: str | None
    dataset: str
    dataset_sha256: str
    """Of the texts and answers of the problems evaluated, so that `--limit` changes it."""
    problem_ids: tuple[str, ...]  # [P]
    problems_per_block: int
    sampling: SamplingConfig

    @property
    def name(self) -> str:
        """The label as a reader wants it: "base", "step 20", "base, run 2"."""
        plain = f"step {self.step}" if self.label == f"step-{self.step:06d}" else self.label
        return plain if self.repeat == 1 else f"{plain}, run {self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation file, read; the problems are in the data set's order, however they finished."""

    header: EvalHeader
    problems: tuple[ProblemResult, ...]

    @property
    def complete(self) -> bool:
        """Whether every problem of the header has its generations."""
        return len(self.problems) == len(self.header.problem_ids)

    def table(self, field: str) -> Floats:
        """One field or property of every generation as a number, [P, n]."""
        return np.array([[getattr(g, field) for g in p.generations] for p in self.problems], dtype=np.float64)


# --- The numbers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What an evaluation says: rates in [0, 1], lengths in tokens.

    Every interval covers what other problems of this kind, sampled afresh, would show. All bootstrap over
    problems (`estimates.rate_interval`, `estimates.mean_interval`), but for `passed`: a plain proportion of
    problems, which gets Wilson's.
    """

    name: str
    num_problems: int
    val_n: int
    num_correct: int
    """Of all P x n generations; the chapter's "correct"."""
    num_passed: int
    """Problems with at least one right generation; the chapter's "passed"."""
    average: Estimate
    """The chapter's Average@n: num_correct / (P n)."""
    passed: Estimate
    """The chapter's Pass@n: num_passed / P."""
    format_rate: Estimate
    mean_tokens: Estimate
    """Of all completions, those that were cut off included."""
    truncated_fraction: Estimate
    finished_average: Estimate
    """Right among the completions that ended by themselves."""
    finished_format: Estimate
    majority: Estimate
    """Mean `majority_credit`."""
    pass_at_k: tuple[Estimate, ...]  # [n], for k = 1..n; the last is `passed`
    verdicts: dict[str, int]


def summarise(evaluation: Evaluation) -> Summary:
    """Reduce the problems present to the chapter's numbers and their intervals; ValueError without any."""
    if not evaluation.problems:
        raise ValueError(f"the evaluation of {evaluation.header.name} holds no finished problem yet")
    n = evaluation.header.sampling.group_size
    correct, formatted, tokens = map(evaluation.table, ("correct", "formatted", "completion_tokens"))
    ended = 1 - evaluation.table("truncated")
    samples = np.full(len(correct), float(n))
    curves = pass_at_k(correct.sum(1), n)  # [P, n]
    num_passed = int(correct.max(1).sum())
    low, high = wilson_interval(num_passed / len(correct), len(correct))
    passed = Estimate(value=num_passed / len(correct), low=float(low), high=float(high))
    votes = np.array([majority_credit(problem) for problem in evaluation.problems])
    return Summary(
        name=evaluation.header.name,
        num_problems=len(correct),
        val_n=n,
        num_correct=int(correct.sum()),
        num_passed=num_passed,
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
    """Share of the most voted answers that are right: 1, 0, or a fraction at a tie; 0 without any answer.

    All right answers vote together, since the grader calls them equal. Wrong ones vote as they are written
    but for blanks, so that two spellings of one wrong answer split their vote.
    """
    votes = Counter(
        True if g.correct else "".join((g.answer or "").split())
        for g in problem.generations
        if g.correct or g.answer is not None
    )
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return winners.count(True) / len(winners) if winners else 0.0


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
        rows.append(("", *(bounds(e, 100) for e in rates), bounds(s.mean_tokens), "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in rows
    )


def bounds(estimate: Estimate, scale: float = 1.0) -> str:
    """Return an interval as "40.1..52.3"; a dash where there is none."""
    if math.isnan(estimate.low):
        return "-"
    return f"{estimate.low * scale:.1f}..{estimate.high * scale:.1f}"


# --- The file -----------------------------------------------------------------------------------------------


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation file, finished or not; a half-written last line is left out.

    Raises ValueError, with file and line, for anything that is not a header followed by one line a problem.
    """
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last "\n" is nothing, or half a line
    number = 1
    try:
        fields = json.loads(lines[0] if lines else b"")
        header = EvalHeader(
            **fields
            | {"problem_ids": tuple(fields["problem_ids"]), "sampling": SamplingConfig(**fields["sampling"])}
        )
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
