"""A step's rollouts on disk, as Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data import Completion, Group, Problem, Score
from record.disk import writing


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
            "token_ids": completion.token_ids,
            "sampling_logprobs": completion.logprobs,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "reward": score.reward,
            "verdict": score.verdict,
            "answer": score.answer,
            "chapter_correct": score.chapter_correct,
            "chapter_formatted": score.chapter_formatted,
            "advantage": advantage,
        }
        for index, group in enumerate(groups)
        for completion, score, advantage in zip(group.completions, group.scores, group.advantages, strict=True)
    ]
    tokens = polars.List(polars.Int32)
    schema = {"prompt_ids": tokens, "token_ids": tokens, "answer": polars.String}
    schema |= {"chapter_correct": polars.Boolean, "chapter_formatted": polars.Boolean}
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
            completions=[
                Completion(
                    token_ids=row["token_ids"],
                    logprobs=row["sampling_logprobs"],
                    text=row["text"],
                    finish_reason=row["finish_reason"],
                )
                for row in rows
            ],
            scores=[
                Score(
                    reward=row["reward"],
                    answer=row["answer"],
                    verdict=row["verdict"],
                    chapter_correct=row.get("chapter_correct"),
                    chapter_formatted=row.get("chapter_formatted"),
                )
                for row in rows
            ],
            advantages=[row["advantage"] for row in rows],
            policy_version=rows[0]["policy_version"],
        )
        for rows in (part.to_dicts() for part in polars.read_parquet(path).partition_by("group"))
    ]
