"""Problems on disk, and the stream that deals them out to training.

A file is JSON Lines in UTF-8, one object a line with the non-empty strings `id`, `question` and `answer`.
Lines end at "\\n" only: hundreds of DAPO's questions contain U+000C and its like, at which `str.splitlines`
would cut a record in two. On disk texts are kept to the character.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal


class DataError(ValueError):
    """Data that cannot be used; the message is one sentence that says where and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and the answer that earns the reward; raises DataError for anything but non-empty text."""

    id: str
    question: str
    answer: str

    def __post_init__(self) -> None:
        for field in fields(self):
            text = getattr(self, field.name)
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{field.name} must be a non-empty string, not {text!r}")
            if re.search("[\ud800-\udfff]", text):
                raise DataError(f"{field.name} contains half of a surrogate pair, which UTF-8 cannot store")


Verdict = Literal["correct", "wrong", "no_box", "unclosed", "unparsed", "timeout", "crash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer of T tokens."""

    token_ids: list[int]  # [T], with the end token when finish_reason is "stop"
    logprobs: list[float]  # [T] nats, under the sampler's distribution
    text: str
    finish_reason: Literal["stop", "length"]

    def __post_init__(self) -> None:
        """Check once, where completions enter, that every token has a finite logprob."""
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} tokens came with {len(self.logprobs)} logprobs")
        if not all(map(math.isfinite, self.logprobs)):
            raise ValueError("the sampler returned a logprob that is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one completion earned, and why.

    `verdict` is `correct`, `wrong`, `no_box` (none, or only empty and placeholder ones), `unclosed` (a box, or the
    thinking, was still open at the end), `unparsed` (the box holds no single finished answer that can be read),
    `timeout` (the comparison took too long) or `crash` (the worker died). `answer` is what the box holds.
    """

    reward: float
    answer: str | None
    verdict: Verdict
    chapter_correct: bool | None = None
    """What the chapter's own code would say; None where that has no say or the comparison did not end."""
    chapter_formatted: bool | None = None
    r"""Whether any complete `\boxed{...}` is there, which is the chapter's format."""

    @property
    def correct(self) -> bool:
        """The answer is right."""
        return self.reward == 1

    @property
    def formatted(self) -> bool:
        """The last box that was opened is complete and not a placeholder."""
        return self.answer is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G completions of one problem in one step."""

    problem: Problem
    prompt_ids: list[int]  # [P]
    completions: list[Completion]  # [G]
    scores: list[Score]  # [G]
    advantages: list[float]  # [G]
    policy_version: int

    @property
    def degenerate(self) -> bool:
        """Whether all rewards agree, so that the group teaches nothing."""
        return not any(self.advantages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A sequence to train on: a prompt, its completion of T tokens, and the completion's advantage."""

    token_ids: list[int]  # [P + T]
    sampling_logprobs: list[float]  # [T] nats
    advantage: float

    @property
    def num_completion_tokens(self) -> int:
        """T, the end token included."""
        return len(self.sampling_logprobs)


def training_data(groups: Iterable[Group], *, degenerate: bool = False) -> list[Datum]:
    """Return the sequences to train on; those of degenerate groups, which teach nothing, only on demand."""
    return [
        Datum(
            token_ids=group.prompt_ids + completion.token_ids,
            sampling_logprobs=completion.logprobs,
            advantage=advantage,
        )
        for group in groups
        if degenerate or not group.degenerate
        for completion, advantage in zip(group.completions, group.advantages, strict=True)
    ]


def read_problems(path: str | os.PathLike[str]) -> list[Problem]:
    """Every problem of the file, in its order; fields beyond the three are ignored.

    Raises DataError naming the file and the 1-based line for the first line that is no problem or repeats an
    id, DataError for an empty file, and OSError where the file cannot be opened.
    """
    problems: dict[str, Problem] = {}
    for number, record in read_records(path):
        try:
            if missing := [field.name for field in fields(Problem) if field.name not in record]:
                raise DataError(f"{' and '.join(missing)} missing")
            problem = Problem(**{field.name: record[field.name] for field in fields(Problem)})
            if problem.id in problems:
                raise DataError(f"an earlier line has the id {problem.id!r} too")
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        problems[problem.id] = problem
    return list(problems.values())


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number, from 1, and its JSON object; raises DataError naming file and line, or OSError."""
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n")
    if lines == [b""]:
        raise DataError(f"{path} is empty")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # ValueError is the base of both decoders' errors.
            raise DataError(f"{path}, line {number}: not JSON in UTF-8 ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: a JSON object is expected, not {line[:40].decode()!r}")
        yield number, record


def write_problems(path: str | os.PathLike[str], problems: Iterable[Problem]) -> None:
    """Write what `read_problems` reads back equal; raises DataError for a repeated id, or OSError."""
    lines: dict[str, str] = {}
    for problem in problems:
        if problem.id in lines:
            raise DataError(f"{path} is not written: two problems have the id {problem.id!r}")
        lines[problem.id] = json.dumps(asdict(problem), ensure_ascii=False) + "\n"
    write_whole(Path(path), "".join(lines.values()))


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 under a temporary name beside `path`, then rename: nobody ever meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())  # Without it, a power cut can leave the new name on an empty file.
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Return the hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_at_least_one(config: object, *names: str) -> None:
    """Raise ValueError for the first of these fields of a config that is below 1; None is let through."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def sampling_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def training_order(problems: Sequence[Problem], *, seed: int) -> list[Problem]:
    """Return all problems in the order in which a run meets them, texts stripped, as the chapter's code does it.

    What leaves problems out comes afterwards: a shuffle of a shorter list is another order.
    """
    stripped = [replace(p, question=p.question.strip(), answer=p.answer.strip()) for p in problems]
    random.Random(seed).shuffle(stripped)
    return stripped


def questions_sha256(problems: Iterable[Problem]) -> str:
    """Return the hash of the questions in this order, joined by NUL."""
    return hashlib.sha256("\0".join(problem.question for problem in problems).encode()).hexdigest()


class ProblemStream:
    """Deals the problems out in their order, and again in the same order when all have been taken.

    `num_taken`, the count dealt so far, is its whole state.
    """

    def __init__(self, problems: Sequence[Problem], *, num_taken: int = 0) -> None:
        """Raise DataError when there is nothing to deal, ValueError for a negative num_taken."""
        if not problems:
            raise DataError("there are no problems to deal out")
        if num_taken < 0:
            raise ValueError(f"num_taken must be at least 0, not {num_taken}")
        self.num_taken = num_taken
        self._problems = tuple(problems)

    def take(self, count: int) -> list[Problem]:
        """Deal the next `count` problems; raises ValueError below 1."""
        if count < 1:
            raise ValueError(f"the number of problems to take must be at least 1, not {count}")
        start, self.num_taken = self.num_taken, self.num_taken + count
        return [self._problems[number % len(self._problems)] for number in range(start, self.num_taken)]
