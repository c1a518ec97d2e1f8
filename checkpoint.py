"""What a run keeps on disk: checkpoints, whole or absent and never resumed from when damaged, and its rollouts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    problems_taken: int
    seed: int
    base_model: str
    base_fingerprint: str
    swanlab_id: str | None
    sha256: dict[str, str] = field(default_factory=dict)
    """Of every other file of the checkpoint, by its name within it."""


def save_checkpoint(folder: Path, policy: Policy, state: TrainState) -> None:
    """Write a checkpoint under a temporary name and rename it, so that `folder` is whole or absent."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    policy.save(temporary)
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    state = replace(state, sha256={str(path.relative_to(temporary)): sha256(path) for path in files})
    for path in files:
        _sync_to_disk(path)
    write_whole(temporary / "state.json", json.dumps(asdict(state), indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    _sync_to_disk(folder.parent)


def load_state(folder: Path) -> TrainState:
    """Return a checkpoint's state; ValueError naming the file that is missing or was changed since."""
    try:
        state = TrainState(**json.loads((folder / "state.json").read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"checkpoint {folder} has no readable state.json ({error})") from error
    for name, expected in state.sha256.items():
        if not (folder / name).is_file() or sha256(folder / name) != expected:
            raise ValueError(f"checkpoint {folder} is damaged: {name} is missing or not what was written")
    return state


def newest_good_checkpoint(run: Path) -> Path | None:
    """Return the newest undamaged checkpoint of a run, naming those passed over; None when none was written yet.

    ValueError when all that were written are damaged.
    """
    folders = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    for folder in folders:
        try:
            load_state(folder)
            return folder
        except ValueError as error:
            tqdm.write(f"passed over: {error}")
    if folders:
        raise ValueError(f"every checkpoint of {run} is damaged; start again under another --run-name")
    return None


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
    schema = {"prompt_ids": polars.List(polars.Int32), "token_ids": polars.List(polars.Int32)}
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(exist_ok=True)
    polars.DataFrame(rows, schema_overrides=schema).write_parquet(temporary, compression="zstd")
    temporary.rename(path)


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
    """Return a hash over the bytes of a base model's config and weights."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
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
