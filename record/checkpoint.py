"""Checkpoints: whole or absent, and never resumed from when damaged.

A folder gets its name only when it is complete, so a kill at any moment leaves either the old or the new.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data import sha256, write_whole
from record.disk import sync_to_disk, writing

if TYPE_CHECKING:
    from engine.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """All that the next step depends on beside the tensors; `state.json` of a checkpoint."""

    step: int
    """Steps finished, and so the version of the adapter that the sampler loads next."""
    problems_taken: int
    seed: int
    base_model: str
    base_fingerprint: str
    swanlab_id: str | None
    interrupted: bool = False
    """Written because the run was stopped; a later checkpoint takes its place."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Of every other file of the checkpoint, by its name within it."""


def prepare_checkpoint(folder: Path, policy: Policy, state: TrainState) -> None:
    """Write a checkpoint whole under a temporary name; DiskError when it cannot be written."""
    temporary = temporary_name(folder)
    with writing(folder, num_bytes=policy.checkpoint_bytes):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            policy.save(temporary)
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            state = replace(state, sha256={str(path.relative_to(temporary)): sha256(path) for path in files})
            for path in files:
                sync_to_disk(path)
            write_state(temporary, state)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def publish_checkpoint(folder: Path) -> None:
    """Give a prepared checkpoint its name."""
    with writing(folder):
        temporary_name(folder).rename(folder)
        sync_to_disk(folder.parent)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint; a kill never leaves half of one under its name."""
    temporary = temporary_name(folder)
    folder.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def temporary_name(folder: Path) -> Path:
    """Return the name under which a checkpoint is written or deleted."""
    return folder.with_name(f".{folder.name}.tmp")


def write_state(folder: Path, state: TrainState) -> None:
    """Write `state.json`, with a hash of its own content."""
    record = asdict(state)
    record["sha256_of_this"] = _digest(record)
    write_whole(folder / "state.json", json.dumps(record, indent=2) + "\n")


def read_state(folder: Path) -> TrainState:
    """Return what `write_state` wrote, without a look at the other files; ValueError when it was changed since."""
    try:
        record = json.loads((folder / "state.json").read_text())
        digest = record.pop("sha256_of_this")
        state = TrainState(**record)
    except (OSError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"checkpoint {folder} has no readable state.json ({error})") from error
    if digest != _digest(record):
        raise ValueError(f"checkpoint {folder} is damaged: state.json is not what was written there")
    return state


def load_state(folder: Path, *, base_fingerprint: str | None = None) -> TrainState:
    """Return a checkpoint's state, having read every byte of the checkpoint.

    ValueError naming the file that is missing or was changed since, or the base model where it is another one than
    that of `base_fingerprint`.
    """
    state = read_state(folder)
    if base_fingerprint is not None and base_fingerprint != state.base_fingerprint:
        raise ValueError(
            f"checkpoint {folder} belongs to another base model ({state.base_fingerprint}, here {base_fingerprint})"
        )
    for name, expected in state.sha256.items():
        if not (folder / name).is_file() or sha256(folder / name) != expected:
            raise ValueError(f"checkpoint {folder} is damaged: {name} is missing or not what was written")
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A checkpoint's adapter, or one that another program has written."""

    folder: Path
    step: int = 0
    """0 where it has no state."""
    base_model: str | None
    base_fingerprint: str | None = None
    revision: str | None
    lora_rank: int | None

    @property
    def served(self) -> Path:
        """The folder that vLLM loads."""
        return self.folder / "vllm" if (self.folder / "vllm").is_dir() else self.folder


def read_adapter(folder: Path) -> Adapter:
    """Return what PEFT's file and, where there is one, the checkpoint's verified state say; ValueError."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a checkpoint: it has no adapter_config.json (a whole model goes with --base-model)"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    adapter = Adapter(
        folder=folder,
        base_model=config.get("base_model_name_or_path"),
        revision=config.get("revision"),
        lora_rank=config.get("r"),
    )
    if not (folder / "state.json").exists():
        return adapter
    state = load_state(folder)
    return replace(adapter, step=state.step, base_model=state.base_model, base_fingerprint=state.base_fingerprint)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
