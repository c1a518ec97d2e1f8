"""How a script ends: one protocol for bad input, faults and signals.

| what ends it | on stderr | exit status |
| --- | --- | --- |
| bad input, before `Command.begin` | `error: ...` | 2 |
| a fault that explains itself, after it | `error: ...`, the error's notes, the advice | 1 |
| any other fault | the traceback, with the advice as its last note | 1 |
| SIGINT, SIGTERM, SIGHUP | `interrupted`, the exception's notes, the advice | 128 + signal |

Under `torchrun` rank 0 alone gives the advice.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from data import DataError
from engine.ranks import RankError, Ranks
from record.disk import DiskError
from record.interrupts import Interrupts


class Command:
    """A running script: its signals, its ranks, and how to go on once it has begun."""

    def __init__(self) -> None:
        """Start as a single process that has not begun."""
        self.interrupts = Interrupts()
        self.ranks = Ranks()
        self.has_begun = False
        self._advice: Callable[[], str] = lambda: "before the start; nothing is lost"

    def init_ranks(self) -> Ranks:
        """Join the processes that `torchrun` started; the caller enters the result as a context manager."""
        self.ranks = Ranks.init()
        return self.ranks

    def begin(self, advice: str | Callable[[], str]) -> None:
        """Call where the checks of the input end; `advice`, called at the end if callable, says how to go on."""
        self.has_begun = True
        self._advice = (lambda: advice) if isinstance(advice, str) else advice

    @property
    def advice(self) -> list[str]:
        """The sentence on how to go on, on rank 0; none on other ranks."""
        return [self._advice()] if self.ranks.is_main else []


def run_command(work: Callable[[Command], None], *faults: type[Exception]) -> None:
    """Run a script's work, and end the process as the table above says.

    DataError, DiskError, FloatingPointError and the `faults` explain themselves; before `Command.begin` every
    ValueError and OSError does.
    """
    command = Command()
    with command.interrupts:
        try:
            work(command)
            return
        except (KeyboardInterrupt, Exception) as error:
            command.interrupts.holding = True  # as an assignment: a pending signal would be raised in a call
            status = _report(command, error, faults)
            waits = isinstance(error, RankError)
    if waits:  # without the handlers, since the launcher sends SIGTERM once it has seen which rank failed first
        command.ranks.give_way()
    sys.exit(status)


def _report(command: Command, error: KeyboardInterrupt | Exception, faults: Sequence[type[Exception]]) -> int:
    """Print what ended the script, and return its exit status; an unexpected fault is raised again."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, KeyboardInterrupt) or _terminal_is_closed(error):
        _print("", "interrupted", *notes, *command.advice)
        expected = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGHUP
        return 128 + (command.interrupts.received or expected)
    message = "\n".join([f"error: {error}", *notes])
    explained = (DataError, DiskError, FloatingPointError, *faults)
    if isinstance(error, RankError):
        if command.has_begun:  # before, the rank that ended has printed why
            _print("", message, *command.advice)
    elif isinstance(error, explained if command.has_begun else (*explained, OSError, ValueError)):
        command.ranks.report(message)
        _print(*(["", message, *command.advice] if command.has_begun else [message]))
    else:
        for sentence in command.advice:
            error.add_note(sentence)
        command.ranks.report(traceback.format_exc())
        raise
    return 1 if command.has_begun else 2


def _terminal_is_closed(error: Exception) -> bool:
    """Whether the error is of a print to a closed terminal, which can come before its SIGHUP."""
    streams = select.poll()
    for descriptor in (1, 2):
        streams.register(descriptor, 0)  # asks for hang-ups alone
    return getattr(error, "errno", None) == errno.EIO and bool(streams.poll(0))


def _print(*lines: str) -> None:
    """Print to stderr; where a stream's terminal is closed, discard what is left for it."""
    with suppress(OSError):
        print(*lines, sep="\n", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python flushes again at exit, and would change the exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
