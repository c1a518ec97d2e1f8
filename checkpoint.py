"""What a run keeps on disk: checkpoints, whole or absent and never resumed from when damaged, and its rollouts.

A folder or file gets its name only when it is complete, so a kill at any moment leaves either the old or the new.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from data import Problem, write_whole
from reward import Score
from rollout import Completion, Group, Rollout

if TYPE_CHECKING:
    from policy import Policy


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


def lock_run(folder: Path) -> IO[str]:
    """Return a file that holds the run's folder until it is closed; the kernel does so however the process ends.

    ValueError when another process holds it. A lock file without a process holds nothing.
    """
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(f"{holder} is training in {folder}; wait for it or use another --run-name") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def save_checkpoint(folder: Path, policy: Policy, state: TrainState, *, keep: int | None = None) -> None:
    """Write a checkpoint under a temporary name and rename it, so that `folder` is whole or absent.

    Then drop those that it replaces: earlier ones of an interruption and, beyond the newest `keep`, the oldest.
    DiskError, with the earlier checkpoints as they were, when it cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    with writing(folder, num_bytes=policy.checkpoint_bytes):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            policy.save(temporary)
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            state = replace(state, sha256={str(path.relative_to(temporary)): sha256(path) for path in files})
            for path in files:
                _sync_to_disk(path)
            write_state(temporary, state)
            temporary.rename(folder)
            _sync_to_disk(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    earlier = [path for path in _checkpoints(folder.parent.parent) if path.name < folder.name]
    dropped = [path for path in earlier if _written_on_interruption(path)]
    kept = [path for path in earlier if path not in dropped]
    for path in dropped + (kept[: max(0, len(kept) + 1 - keep)] if keep else []):
        condemned = path.with_name(f".{path.name}.tmp")  # never half a checkpoint under a checkpoint's name
        path.rename(condemned)
        shutil.rmtree(condemned, ignore_errors=True)


def _written_on_interruption(folder: Path) -> bool:
    try:
        return read_state(folder).interrupted
    except ValueError:
        return False


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


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


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def newest_good_checkpoint(run: Path, *, base_fingerprint: str | None = None) -> Path | None:
    """Return the newest checkpoint that `load_state` accepts, naming those passed over; None when there is none.

    ValueError when there are some and it accepts none.
    """
    folders = _checkpoints(run)
    for folder in reversed(folders):
        try:
            load_state(folder, base_fingerprint=base_fingerprint)
            return folder
        except ValueError as error:
            tqdm.write(f"passed over: {error}")
    if folders:
        raise ValueError(f"no checkpoint of {run} can be used; start again under another --run-name")
    return None


def has_begun(run: Path) -> bool:
    """Return whether a step of the run is on record."""
    metrics = run / "metrics.jsonl"
    return bool(_checkpoints(run)) or (metrics.exists() and metrics.stat().st_size > 0)


def set_aside(run: Path, *, after_step: int) -> None:
    """Move what a resumed run will do again, all that is of later steps, to RUN/replaced."""
    for path in run.glob("checkpoints/.step-*.tmp"):
        shutil.rmtree(path)
    for path in run.glob("*/step-*"):
        step = re.match(r"step-(\d{6})(?!\d)", path.name)
        if path.parent.name in ("checkpoints", "rollouts", "eval") and step and int(step[1]) > after_step:
            target = run / "replaced" / path.relative_to(run)
            if target.exists():
                shutil.rmtree(target) if target.is_dir() else target.unlink()
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)


def write_rollouts(path: Path, groups: Sequence[Group]) -> None:
    """Write a step's rollouts as Parquet, one row a completion, in the order of the groups; whole or not at all."""
    import polars

    rows = [
        {
            "group": index,
            "problem_id": group.problem.id,
            "question": group.problem.question,
            "reference": group.problem.answer,
            "policy_version": group.policy_version,
            "prompt_ids": group.prompt_ids,
            "token_ids": rollout.completion.token_ids,
            "sampling_logprobs": rollout.completion.logprobs,
            "text": rollout.completion.text,
            "finish_reason": rollout.completion.finish_reason,
            "reward": rollout.score.reward,
            "verdict": rollout.score.verdict,
            "answer": rollout.score.answer,
            "advantage": rollout.advantage,
        }
        for index, group in enumerate(groups)
        for rollout in group.rollouts
    ]
    tokens = polars.List(polars.Int32)
    schema = {"prompt_ids": tokens, "token_ids": tokens, "answer": polars.String}
    table = polars.DataFrame(rows, schema_overrides=schema)
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path, num_bytes=int(table.estimated_size())):
        path.parent.mkdir(exist_ok=True)
        try:
            table.write_parquet(temporary, compression="zstd")
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def read_rollouts(path: Path) -> list[Group]:
    """Return the groups that `write_rollouts` wrote."""
    import polars

    return [
        Group(
            problem=Problem(id=rows[0]["problem_id"], question=rows[0]["question"], answer=rows[0]["reference"]),
            prompt_ids=rows[0]["prompt_ids"],
            rollouts=[
                Rollout(
                    completion=Completion(
                        token_ids=row["token_ids"],
                        logprobs=row["sampling_logprobs"],
                        text=row["text"],
                        finish_reason=row["finish_reason"],
                    ),
                    score=Score(reward=row["reward"], answer=row["answer"], verdict=row["verdict"]),
                    advantage=row["advantage"],
                )
                for row in rows
            ],
            policy_version=rows[0]["policy_version"],
        )
        for rows in (part.to_dicts() for part in polars.read_parquet(path).partition_by("group"))
    ]


def base_fingerprint(folder: Path) -> str:
    """Return a hash over the bytes of a base model's config, tokenizer, chat template and weights."""
    names = ("config", "generation_config", "tokenizer", "tokenizer_config")
    named = [*(folder / f"{name}.json" for name in names), folder / "chat_template.jinja"]
    files = [path for path in named if path.exists()]
    files += sorted(folder.glob("*.safetensors"))
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    """Return the hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
