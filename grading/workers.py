"""Processes that ask sympy and math-verify, and that may be killed.

Each is an interpreter of its own that runs `worker.py`, so it does not matter which thread, event loop or launcher
calls, nor what the main script imports.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data import Verdict

_READY_SECONDS = 300.0  # sympy takes 2 s to import, and many times that beside engines that are starting
_MAX_TASKS = 500  # sympy's caches only grow


class Comparison(NamedTuple):
    """A question for a process: is the answer the reference?"""

    answer: str
    reference: str
    rule: Literal["number", "expression", "chapter"]


class Worker:
    """One process that compares one pair at a time; started now, waited for when first asked."""

    def __init__(self, deadline_seconds: float):
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("worker.py"), str(theirs.fileno()), str(os.getpid())],
            env=os.environ | {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"},  # gmpy2 aborts the process
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the caller, who then closes us
        )
        theirs.close()
        self.deadline_seconds = deadline_seconds
        self.ready = False
        self.fit = True  # to be asked again: owes no reply
        self.num_tasks = 0

    def compare(self, comparison: Comparison) -> Verdict:
        """Return the process's verdict; RuntimeError if it cannot be started."""
        try:
            if not self.ready and not self.connection.poll(_READY_SECONDS):
                raise RuntimeError(f"a grading worker was not ready after {_READY_SECONDS:.0f} s")
            self.ready = self.ready or self.connection.recv()
        except EOFError:
            raise RuntimeError("a grading worker died at its start: is math-verify installed?") from None
        self.num_tasks += 1
        self.fit = False
        try:
            self.connection.send(tuple(comparison))
            if not self.connection.poll(self.deadline_seconds):
                return "timeout"
            reply = self.connection.recv()
        except (EOFError, ConnectionError):
            return "timeout" if self.process.wait() == -signal.SIGXCPU else "crash"
        self.fit = reply != "crash" and self.num_tasks < _MAX_TASKS
        return reply

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Workers:
    """`count` processes between `start` and `close`; thread-safe."""

    def __init__(self, count: int, deadline_seconds: float):
        self._count = count
        self._deadline_seconds = deadline_seconds
        self.running: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def start(self) -> None:
        """Start every process."""
        for _ in range(self._count):
            self._start_one()

    def close(self) -> None:
        """End every process."""
        while self.running:
            self.running.pop().close()
        self._idle = queue.SimpleQueue()

    def settle(self, items: Sequence[Any]) -> list[Any]:
        """Return the items with every Comparison replaced by its verdict; the processes share the work."""
        waiting = [item for item in items if isinstance(item, Comparison)]
        threads = ThreadPoolExecutor(self._count)
        try:
            verdicts = threads.map(self._compare, waiting)
            return [next(verdicts) if isinstance(item, Comparison) else item for item in items]
        finally:
            threads.shutdown(cancel_futures=True)  # Ctrl-C waits for the pairs in hand, not for the whole list

    def _compare(self, comparison: Comparison) -> Verdict:
        if not self.running:
            raise RuntimeError("this grader has no workers: use it inside `with Grader() as grader:`")
        worker = self._idle.get()  # first in, first out: a new worker has time to start behind the others
        try:
            return worker.compare(comparison)
        finally:  # also when interrupted: a reply that is still owed would go to the next question
            if worker in self.running and not worker.fit:
                self.running.remove(worker)
                worker.close()
                self._start_one()
            elif worker in self.running:
                self._idle.put(worker)

    def _start_one(self) -> None:
        self.running.append(Worker(self._deadline_seconds))
        self._idle.put(self.running[-1])
