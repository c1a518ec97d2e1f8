"""The steps of a run: each is committed whole, and the last whole one is saved on every way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tqdm import tqdm

from engine.policy import Policy
from record.checkpoint import TrainState, prepare_checkpoint
from record.interrupts import Interrupts
from record.log import MetricsLog, NoLog
from record.metrics import StepMetrics
from record.run import OpenedRun


class Progress:
    """A context manager over the steps that are left.

    Between `weights_move` and `commit` signals wait, and a fault saves nothing: the state is then older than the
    weights, and only the last checkpoint is whole.
    """

    def __init__(self, opened: OpenedRun, policy: Policy, log: MetricsLog | NoLog, interrupts: Interrupts) -> None:
        """Continue an opened run; without a MetricsLog, on other ranks than 0, nothing is written."""
        self._run, self._state, self._settings = opened.run, opened.state, opened.record["settings"]
        self._policy, self._log, self._interrupts = policy, log, interrupts
        self._saved, self._step, self._moving = self._state.step, self._state.step, False
        self._next, self._due = self._state, False

    def __enter__(self) -> Progress:
        """Return the progress."""
        return self

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps that are left, from 1."""
        numbers = range(self._state.step + 1, self._settings["max_steps"] + 1)
        for step in tqdm(numbers, desc=self._run.folder.name, dynamic_ncols=True, disable=None):
            self._step = step
            yield step

    def weights_move(self) -> None:
        """Let signals wait until `commit`: the weights are about to be those of the next step."""
        self._interrupts.hold()
        self._moving = True

    def prepare_checkpoint(self, *, problems_taken: int) -> None:
        """Write, under a temporary name, the checkpoint of the step that has just been taken, where one is due."""
        self._next = replace(self._state, step=self._step, problems_taken=problems_taken)
        every, last = self._settings["save_every"], self._settings["max_steps"]
        self._due = self._step == last or (every > 0 and self._step % every == 0)
        if self._due:
            self._prepare(self._next)

    def commit(self, metrics: StepMetrics) -> None:
        """Put the step on record, give its checkpoint its name, and show the step's line."""
        self._interrupts.hold()
        self._log.write(metrics)
        self._state, self._moving = self._next, False
        if self._due:
            self._publish()
        self._log.show()
        self._interrupts.release()

    def __exit__(self, exc_type: type[BaseException] | None, fault: BaseException | None, *_: object) -> None:
        """Save the last whole step where a signal or a fault ends the run early."""
        if fault is None:
            return
        self._interrupts.holding = True  # as an assignment: a signal that waits would be raised in a call
        fault.add_note(f"in step {self._step}")
        if self._moving:
            fault.add_note(f"step {self._step} is not on record, since its weights had moved")
        if self._state.step > self._saved and not self._moving:
            try:
                self._prepare(replace(self._state, interrupted=True))
                self._publish()
            except Exception as error:
                fault.add_note(f"and step {self._state.step} could not be saved: {error}")

    def _prepare(self, state: TrainState) -> None:
        if isinstance(self._log, MetricsLog):
            state = replace(state, swanlab_id=self._log.swanlab_id)
            prepare_checkpoint(self._run.checkpoint_path(state.step), self._policy, state)

    def _publish(self) -> None:
        if isinstance(self._log, MetricsLog):
            self._run.publish_checkpoint(self._state.step, keep=self._settings["keep_checkpoints"])
        self._saved = self._state.step
