"""Writing to a disk that may be full or read-only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.policy import CHECKPOINT_BYTES


class DiskError(OSError):
    """The run could not write; the message names the path, the reason and the space."""


@contextmanager
def writing(path: Path, *, num_bytes: int | None = None) -> Iterator[None]:
    """Turn whatever a library raises on a full or read-only disk into one sentence."""
    import polars
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, polars.exceptions.PolarsError) as error:
        needed = f" It needs about {num_bytes / 1e6:.3g} MB." if num_bytes else ""
        free = shutil.disk_usage(_existing(path)).free
        raise DiskError(f"{path} cannot be written ({error}).{needed} {free / 1e6:.6g} MB are free.") from error


def bytes_on_disk(settings: dict[str, Any], num_adapter_parameters: int, *, after_step: int) -> int:
    """Return the most that the remaining steps write: rollouts, and checkpoints, for a moment one more."""
    steps = max(0, settings["max_steps"] - after_step)
    num_checkpoints = -(-steps // (settings["save_every"] or settings["max_steps"]))
    num_checkpoints = min(num_checkpoints, settings["keep_checkpoints"] or num_checkpoints)
    sampling = settings["sampling"]
    num_tokens = steps * settings["groups_per_step"] * sampling["group_size"] * sampling["max_tokens"]
    token = 4 + 8 + 8 if settings["save_rollouts"] == "all" else 0  # its id, log-probability and text
    return (num_checkpoints + 1) * CHECKPOINT_BYTES * num_adapter_parameters + num_tokens * token


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse, with a DiskError, to begin what the disk cannot hold."""
    free = shutil.disk_usage(_existing(folder)).free
    if num_bytes > free:
        raise DiskError(
            f"the run would write up to {num_bytes / 1e9:,.2f} GB to {folder}, and {free / 1e9:,.2f} GB are "
            "free; make room, or write less with --keep-checkpoints N or --save-rollouts none"
        )


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def sync_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
