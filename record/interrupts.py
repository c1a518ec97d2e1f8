"""SIGINT, SIGTERM and SIGHUP as one KeyboardInterrupt, which can be deferred while something is committed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Interrupts:
    """Raise KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP; deferred while a step is committed.

    A second SIGINT or SIGTERM ends the process at once. A second SIGHUP is ignored, since a closing terminal sends
    it twice: its shell and the kernel. A signal that is ignored at the start (`nohup`) stays ignored.
    """

    def __init__(self) -> None:
        """Change nothing yet; the context manager installs the handlers."""
        self.received: int | None = None  # the first signal
        self.holding = False  # True defers a signal until `release`
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {s: signal.getsignal(s) for s in handled if signal.getsignal(s) != signal.SIG_IGN}

    def __enter__(self) -> Interrupts:
        """Install the handlers."""
        self.listen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the earlier handlers, unless a signal has come: then the process is about to end."""
        if self.received is None:
            for signum, handler in self._before.items():
                signal.signal(signum, handler)

    def listen(self) -> None:
        """Install the handlers, again where a library has replaced them."""
        if self.received is None:
            for signum in self._before:
                signal.signal(signum, self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals to the end of the block; where the block raises, signals stay deferred for its cleanup."""
        self.hold()
        yield
        self.release()

    def hold(self) -> None:
        """Defer signals until `release`."""
        self.holding = True

    def release(self) -> None:
        """Raise the KeyboardInterrupt that was deferred, if there is one."""
        self.holding = False
        if self.received is not None:
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: object) -> None:
        self.received = signum
        for other in self._before:
            signal.signal(other, signal.SIG_IGN if other == signal.SIGHUP else signal.SIG_DFL)
        with suppress(OSError):  # the terminal may be closed
            os.write(sys.stderr.fileno(), b"\nstopping; Ctrl-C or SIGTERM ends it at once now\n")
        if not self.holding:
            raise KeyboardInterrupt
