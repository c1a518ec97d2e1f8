"""Problems on disk, and the stream that deals them out to training.

A file is JSON Lines in UTF-8, one object a line with the non-empty strings `id`, `question` and `answer`.
Lines end at "\\n" only: hundreds of DAPO's questions contain U+000C and its like, at which `str.splitlines`
would cut a record in two. Texts are kept to the character; nothing is stripped or normalised here.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """Data that cannot be used; the message is one sentence that says where and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and the answer that earns the reward; raises DataError for anything but non-empty text."""

    id: str
    question: str
    answer: str

    def __post_init__(self) -> None:  # noqa: D105
        for field in fields(self):
            text = getattr(self, field.name)
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{field.name} must be a non-empty string, not {text!r}")
            if re.search("[\ud800-\udfff]", text):
                raise DataError(f"{field.name} contains half of a surrogate pair, which UTF-8 cannot store")


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


class ProblemStream:
    """Deals the problems out without end; `num_taken`, the count dealt so far, is its whole state.

    Epoch 0 keeps the order given: prepare_data.py has shuffled the file already, so what a short run trained
    on can be read off the top of it. Epoch e > 0 is a shuffle of that order by random.Random(f"{seed}/{e}").
    Each problem comes once an epoch, and the same problems, seed and num_taken always continue alike.
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int, num_taken: int = 0) -> None:
        """Raise DataError when there is nothing to deal, ValueError for a negative num_taken."""
        if not problems:
            raise DataError("there are no problems to deal out")
        if num_taken < 0:
            raise ValueError(f"num_taken must be at least 0, not {num_taken}")
        self.num_taken = num_taken
        self._problems, self._seed = tuple(problems), seed

    def take(self, count: int) -> list[Problem]:
        """Deal the next `count` problems, over as many epochs as it takes; raises ValueError below 1."""
        if count < 1:
            raise ValueError(f"the number of problems to take must be at least 1, not {count}")
        taken: list[Problem] = []
        while len(taken) < count:
            epoch, position = divmod(self.num_taken + len(taken), len(self._problems))
            order = list(self._problems)
            if epoch:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            taken += order[position : position + count - len(taken)]
        self.num_taken += count
        return taken
