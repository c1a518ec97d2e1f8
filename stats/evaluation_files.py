"""Writing evaluation files: a header, then a line a problem, appended by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict
from io import FileIO
from pathlib import Path

from data import write_whole
from record.disk import writing
from stats.evaluations import EvalHeader, Evaluation, ProblemResult, read_evaluation, summarise


class BusyError(RuntimeError):
    """Another evaluation writes the same file."""


def finished_problems(path: Path, header: EvalHeader) -> set[str]:
    """Return the ids of the problems that the file holds; none where there is no file.

    ValueError, naming the first difference, where the file is of another evaluation than the header's.
    """
    if not path.exists():
        return set()
    evaluation = read_evaluation(path)
    old, new = (asdict(h.sampling) | asdict(h) | {"sampling": None} for h in (evaluation.header, header))
    for key in new:
        if old[key] != new[key]:
            theirs, ours = (
                text if len(text) <= 80 else f"{text[:80]}..." for text in (repr(old[key]), repr(new[key]))
            )
            raise ValueError(
                f"{path} holds another evaluation: {key} is {theirs} there and {ours} here; "
                "choose another --output or --repeat, or move the file away"
            )
    return {result.id for result in evaluation.problems}


class EvaluationWriter:
    """Appends to one evaluation file, which `open` begins or continues."""

    def __init__(self, path: Path, header: EvalHeader) -> None:
        """Touch nothing yet."""
        self._path, self._header = path, header
        self._file: FileIO | None = None
        self._finished: set[str] = set()

    def open(self) -> FileIO:
        """Lock the file and cut off a half-written last line; BusyError where another process has the lock."""
        if self._file:
            return self._file
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                write_whole(self._path, json.dumps(asdict(self._header)) + "\n")
            self._file = self._path.open("r+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            busy = f"{self._path} is being written by another evaluation; wait for it to end"
            raise BusyError(busy) from error
        self._file.truncate(self._file.read().rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)
        self._finished = finished_problems(self._path, self._header)
        return self._file

    def write(self, result: ProblemResult) -> bool:
        """Append a result unless the file has it; return whether it was appended and is on the disk."""
        file = self.open()
        if result.id in self._finished:
            return False
        line = memoryview(json.dumps(asdict(result)).encode() + b"\n")
        with writing(self._path):
            while line:
                line = line[file.write(line) :]
            os.fsync(file)
        self._finished.add(result.id)
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._file:
            self._file.close()


def write_summary(path: Path) -> Evaluation:
    """Write the summary of an evaluation file beside it, as readable JSON; return the evaluation."""
    evaluation = read_evaluation(path)
    summary = json.dumps(asdict(summarise(evaluation)))
    summary = json.loads(summary, parse_constant=lambda nan: None)  # JSON has no NaN; null is undefined
    summary_path = path.with_suffix(".summary.json")
    with writing(summary_path):
        write_whole(summary_path, json.dumps(summary, indent=2) + "\n")
    return evaluation
