"""Where metrics go: metrics.jsonl, a copy on SwanLab, and a line with alarms on the terminal."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO
from typing import Any

from tqdm import tqdm

from data import write_whole
from record.disk import writing
from record.metrics import StepMetrics
from record.mirror import finish_swanlab, start_swanlab
from record.run import Run

MISMATCH_LIMIT = 0.1
"""By which the mean mismatch weight may differ from 1 without an alarm."""
LONGEST_STREAK = 5
"""Steps after which the slowest of the alarms sounds."""


def alarms(recent: Sequence[StepMetrics]) -> list[str]:
    """Return what is wrong from the newest of these steps on, and what it usually means.

    An alarm about a lasting state sounds once, when it has lasted long enough; `recent` has to reach one step
    further back than that.
    """

    def begins(steps: int, holds: Callable[[StepMetrics], bool]) -> bool:
        newest, before = recent[-steps:], recent[: -steps or None][-1:]
        return len(newest) == steps and all(map(holds, newest)) and not any(map(holds, before))

    step = recent[-1]
    found = []
    ungraded, count = step.verdict.timeout + step.verdict.crash, step.rollout.completions
    if ungraded > 0.01 * count:
        found.append(
            f"{ungraded} of {count} completions could not be graded (timeout {step.verdict.timeout}, crash "
            f"{step.verdict.crash}) and were paid 0; `python reward.py --text FILE --reference X` shows what one "
            "of them does"
        )
    if begins(LONGEST_STREAK, lambda s: s.reward.accuracy == 0):
        found.append(
            f"no completion has been right for {LONGEST_STREAK} steps: the problems are too hard for this model, "
            "or its answers and the references differ in form; read some in the run's rollouts"
        )
    if begins(1, lambda s: s.reward.format_rate == 0):
        found.append(
            r"no completion has a whole \boxed{}: the model does not follow the instruction (is it the tuned "
            "model, with its own chat template?), or max_tokens ends every answer before the box"
        )
    if begins(3, lambda s: s.train.update_skipped == 1):
        found.append(
            "every group has been degenerate for 3 steps, so nothing is learnt: the problems are all too easy or "
            "all too hard for this model, or its completions hardly differ (is the temperature 1?)"
        )
    if begins(1, lambda s: s.mismatch.weight_mean is not None and abs(s.mismatch.weight_mean - 1) > MISMATCH_LIMIT):
        found.append(
            f"the mismatch weights average {step.mismatch.weight_mean:.3g}: they correct for rounding, and should "
            "average 1; look at gap/token_mean, the two engines have drifted apart"
        )
    if begins(1, lambda s: s.rollout.truncated_fraction == 1):
        found.append(
            "every completion was cut off at max_tokens: raise it, or look whether the model ever writes its end "
            "token"
        )
    return found


class NoLog:
    """The log of the ranks that keep none."""

    swanlab_id = None

    def __enter__(self) -> NoLog:
        """Return the log."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing, as the others do."""

    def write(self, metrics: StepMetrics) -> None:
        """Write nothing."""

    def show(self) -> None:
        """Print nothing."""


class MetricsLog:
    """Appends each step to `metrics.jsonl` and mirrors it to SwanLab; a context manager.

    The mirror is best effort: without a login or a network the run carries on offline, with one line of notice.
    """

    def __init__(
        self,
        run: Run,
        *,
        after_step: int,
        swanlab_id: str | None,
        settings: dict[str, Any],
    ) -> None:
        """Open the log of a run.

        Args:
            run: whose log it is.
            after_step: lines of later steps are archived; the resumed run writes them again.
            swanlab_id: the SwanLab run to continue, or None for a new one.
            settings: of the run, shown beside SwanLab's curves; they say where it writes.
        """
        self._path, self._replaced = run.metrics_path, run.replaced
        self._file: FileIO | None = None
        self._notices: list[str] = []
        self._recent: deque[StepMetrics] = deque(maxlen=LONGEST_STREAK + 1)
        self._keep_until(after_step)
        self._swanlab = start_swanlab(run.folder, swanlab_id, settings)
        self.swanlab_id = swanlab_id or (self._swanlab.id if self._swanlab else None)
        """The id under which SwanLab can continue this run; kept where the mirror is off or lost for a while."""

    def __enter__(self) -> MetricsLog:
        """Open the file for appending."""
        self._file = self._path.open("ab", buffering=0)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        """Close the file, and SwanLab as finished, interrupted or crashed."""
        if self._file:
            self._file.close()
        if self._swanlab:
            interrupted = exc_type is not None and not issubclass(exc_type, Exception)
            state = "success" if exc_type is None else "aborted" if interrupted else "crashed"
            self._mirror(lambda run: finish_swanlab(run, state))
            self._show_notices()

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        flat, broken = metrics.flat(), metrics.not_finite
        self._append((json.dumps(flat | dict.fromkeys(broken)) + "\n").encode())
        self._recent.append(metrics)
        numbers = {k: v for k, v in flat.items() if k != "step" and v is not None and k not in broken}
        self._mirror(lambda run: run.log(numbers, step=metrics.step - 1))  # the chapter counts from 0

    def show(self) -> None:
        """Print the newest step's summary line and what there is to warn of."""
        newest = self._recent[-1]
        self._show_notices()
        tqdm.write(newest.summary())
        warnings = alarms(list(self._recent))
        if broken := newest.not_finite:
            warnings.append(f"not a finite number: {', '.join(broken)}; look at the step's rollouts")
        for warning in warnings:
            tqdm.write(f"warning: {warning}")

    def _show_notices(self) -> None:
        while self._notices:
            tqdm.write(self._notices.pop(0))

    def _append(self, line: bytes) -> None:
        """Write a whole line or none; DiskError when it cannot be written."""
        assert self._file, "the log is not open"
        start = self._file.seek(0, os.SEEK_END)
        with writing(self._path, num_bytes=len(line)):
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(start)
                raise

    def _mirror(self, action: Callable[[Any], object]) -> None:
        if self._swanlab:
            try:
                action(self._swanlab)
            except Exception as error:  # a tracker's fault must not cost the run
                self._swanlab = None
                self._notices.append(f"SwanLab stopped ({error}); {self._path} goes on")

    def _keep_until(self, step: int) -> None:
        """Move later lines to RUN/replaced, behind those of earlier times."""
        kept, replaced = [], []
        for line in self._path.read_text().split("\n") if self._path.exists() else []:
            try:
                (kept if json.loads(line)["step"] <= step else replaced).append(line + "\n")
            except ValueError:  # the half-written last line of a killed run, or the end of the file
                break
        target = self._replaced / self._path.name
        with writing(self._path):
            if replaced:
                target.parent.mkdir(exist_ok=True)
                earlier = target.read_text().splitlines(keepends=True) if target.exists() else []
                if earlier[-len(replaced) :] != replaced:  # after a kill between these two writings
                    write_whole(target, "".join(earlier + replaced))
            write_whole(self._path, "".join(kept))
