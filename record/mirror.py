"""SwanLab, as a mirror of the log that costs the run nothing when it fails."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any, Literal, NoReturn

from tqdm import tqdm

SwanlabMode = Literal["online", "local", "offline", "disabled"]
FINISH_SECONDS = 60
"""What the mirror gets for its last uploads."""


def finish_swanlab(run: Any, state: str) -> None:
    """Close the mirror; TimeoutError after a minute, since SwanLab waits without end for a server that is gone."""

    def out_of_time(*_: object) -> NoReturn:
        raise TimeoutError(f"not uploaded within {FINISH_SECONDS} s; `swanlab sync` does it later")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(FINISH_SECONDS)
    try:
        run.finish(state)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def start_swanlab(folder: Path, swanlab_id: str | None, settings: dict[str, Any]) -> Any:
    """Return SwanLab's run, a new one or that of the id; None, with a notice, where it cannot record."""
    mode: SwanlabMode = settings["swanlab_mode"]
    if mode == "disabled":
        return None
    try:
        import swanlab
    except ImportError:
        tqdm.write("SwanLab is not installed; metrics.jsonl has everything")
        return None
    if mode == "local" and not importlib.util.find_spec("swanboard"):
        tqdm.write("SwanLab's local mode needs `swanlab[dashboard]`, which is not installed; it records offline")
        mode = "offline"
    options = {"project": settings["swanlab_project"], "workspace": settings["swanlab_workspace"]}
    options |= {"name": folder.name, "config": settings, "log_dir": str(folder / "swanlog")}
    if mode == "online":
        try:
            if swanlab_id is None:
                return swanlab.init(mode="online", **options)
            return swanlab.init(mode="online", id=swanlab_id, resume="allow", **options)
        except Exception as error:  # no login, no network, a server's fault: none may cost the run
            tqdm.write(f"SwanLab is not reachable ({error}); it records offline, `swanlab sync` uploads later")
            mode = "offline"
    try:
        return swanlab.init(mode=mode, **options)
    except Exception as error:  # a full or read-only disk, for one
        tqdm.write(f"SwanLab cannot record ({error}); metrics.jsonl has everything")
        return None
