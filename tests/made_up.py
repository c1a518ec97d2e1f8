"""Evaluations, logs and checkpoints made by hand or by a seed, for the tests of what reads them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.sampler import SamplingConfig
from record.checkpoint import TrainState, prepare_checkpoint
from record.run import Run
from stats.curves import moving_average
from stats.evaluations import EvalHeader, Evaluation, Generation, ProblemResult
from stats.published_training import published_curves
from stats.reported import QUESTIONS_SHA256, SETTINGS


def seeded_evaluation(
    step: int, *, repeat: int = 1, num_problems: int = 6, n: int = 4, seed: int = 0
) -> Evaluation:
    """An evaluation whose later steps are boxed more often and cut off less often."""
    rng = np.random.default_rng([seed, step, repeat])
    results = []
    for i in range(num_problems):
        generations = []
        for _ in range(n):
            cut = rng.random() < 0.5 - step / 250
            formatted = not cut and rng.random() < 0.9
            correct = formatted and rng.random() < i / num_problems
            generations.append(
                Generation(
                    answer="7" if correct else "8" if formatted else None,
                    verdict="correct" if correct else "wrong" if formatted else "no_box",
                    correct=correct,
                    formatted=formatted,
                    completion_tokens=100 if cut else int(rng.integers(10, 60)),
                    finish_reason="length" if cut else "stop",
                    text="so it is",
                )
            )
        results.append(ProblemResult(id=f"p{i}", reference="7", generations=tuple(generations)))
    sampling = SamplingConfig(group_size=n)
    return _evaluation(step, repeat, results, base_model="some/model", dataset="sums.jsonl", sampling=sampling)


def _evaluation(
    step: int, repeat: int, results: list[ProblemResult], *, base_model: str, dataset: str, sampling: SamplingConfig
) -> Evaluation:
    header = EvalHeader(
        suite_version="0.1.0",
        engine="vllm 1",
        label=f"step-{step:06d}" if step else "base",
        step=step,
        repeat=repeat,
        seed=42,
        base_model=base_model,
        revision=None,
        base_fingerprint="f",
        adapter_sha256=None,
        dataset=dataset,
        dataset_sha256="d",
        problem_ids=tuple(result.id for result in results),
        problems_per_block=5,
        sampling=sampling,
    )
    return Evaluation(header=header, problems=tuple(results))


def write_evaluations(folder: Path, *evaluations: Evaluation) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for e in evaluations:
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in (e.header, *e.problems))
        (folder / f"{e.header.label}-{e.header.repeat}.jsonl").write_text(lines)
    return folder


def write_metrics(run: Path, num_steps: int) -> Path:
    """A run's log with a skipped step and, as of a run that is going on, half a line at its end."""
    run.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "step": step,
                "reward/accuracy": step / 100,
                "reward/format_rate": 0.5,
                "rollout/mean_completion_tokens": 50.0 - step,
                "rollout/truncated_fraction": 0.1,
                "gspo/loss": None if step == 2 else 0.001,
                "gspo/seq_ratio_mean": None if step == 2 else 0.9997,
                "gspo/sequence_clip_fraction": None if step == 2 else 0.13,
                "gspo/token_clip_fraction": None if step == 2 else 0.12,
                "gspo/train_sequences": 0 if step == 2 else 48,
                "gspo/normalization_sequences": 64,
                "gspo/skipped": step == 2,
                "update/token_clip_fraction": None if step == 2 else 0.12,
            }
        )
        for step in range(1, num_steps + 1)
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "rew']))
    return run


def chapter_evaluation(
    step: int, rights: list[int], *, repeat: int = 1, boxes: int = 12, tokens: int = 100
) -> Evaluation:
    """30 problems x 12 in the chapter's setting: so many right on each problem, the first `boxes` boxed."""
    results = []
    for i, right in enumerate(rights):
        generations = tuple(
            Generation(
                answer="7" if j < right else "8" if j < boxes else None,
                verdict="correct" if j < right else "wrong" if j < boxes else "no_box",
                correct=j < right,
                formatted=j < max(boxes, right),
                completion_tokens=tokens + j,
                finish_reason="stop" if j < max(boxes, right) else "length",
                text="so it is",
            )
            for j in range(12)
        )
        results.append(ProblemResult(id=f"p{i}", reference="7", generations=generations))
    sampling = SamplingConfig(group_size=12, max_tokens=8192)
    return _evaluation(
        step, repeat, results, base_model="Qwen/Qwen3.5-4B", dataset="aime25.jsonl", sampling=sampling
    )


BASE_RIGHTS = [0] * 10 + [3] * 5 + [6] * 5 + [9] * 5 + [12] * 5
BASE = chapter_evaluation(0, BASE_RIGHTS, boxes=6, tokens=6000)


def another_base(*evaluations: Evaluation) -> list[Evaluation]:
    return [replace(e, header=replace(e.header, base_model="runs/tiny/base")) for e in evaluations]


SEVEN = [
    seeded_evaluation(0),
    seeded_evaluation(0, repeat=2),
    *(seeded_evaluation(step) for step in (20, 40, 60, 80, 100)),
]
PICTURES = {name: f"{name}.png" for name in ("benchmark", "pass-at-k", "problems", "training")}


POLICY = SimpleNamespace(checkpoint_bytes=100, save=lambda folder: (folder / "weights").write_text("w"))


def save_checkpoint(
    run: Run, step: int, *, keep: int | None = None, interrupted: bool = False, policy: Any = POLICY
) -> None:
    """Write a checkpoint of a few bytes, of the base model `b` with the fingerprint `f`."""
    state = TrainState(
        step=step,
        problems_taken=0,
        seed=0,
        base_model="b",
        base_fingerprint="f",
        swanlab_id=None,
        interrupted=interrupted,
    )
    prepare_checkpoint(run.checkpoint_path(step), policy, state)
    run.publish_checkpoint(step, keep=keep)


def newest_good_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint from which a run would be resumed."""
    run = Run(folder)
    return run.checkpoint_to_resume(None, base_fingerprint=run.record["base_fingerprint"])


def reported_record(**changes: object) -> dict:
    """A config.json with every reported setting; `changes` by the names of `SETTINGS`, with _ for a blank."""
    record: dict = {
        "format": 2,
        "base_fingerprint": "b",
        "data": {"sha256": "d", "questions_sha256": QUESTIONS_SHA256},
    }
    for setting in SETTINGS:
        *path, name = setting.path.split("/")
        inner = record
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = changes.get(setting.name.replace(" ", "_"), setting.published)
    return record


def write_reported_run(run: Path, *, seed: int = 0, steps: int = 100, gain: float = 0.0) -> Path:
    """A made-up run of the reported configuration, and no measurement.

    Its curves are the published ones, smoothed, with half of what single steps add to them (both runs met the same
    questions), a drift of its own, and the noise of eight questions a step; `gain` is added to the reward.
    """
    rng = np.random.default_rng(seed)
    published = {key: values[:steps] for key, values in published_curves().items()}
    smooth = {key: moving_average(values, 11) for key, values in published.items()}
    drift = 0.004 * np.cumsum(rng.normal(size=steps))

    def share(key: str, add: float = 0.0) -> np.ndarray:
        """A rate of each of eight questions, right or not in eight completions, [S, 8] counts."""
        rate = (smooth[key] + published[key]) / 2 + drift + add
        mean = rate.clip(0.05, 0.95)[:, None] * np.ones(8)
        return rng.binomial(8, rng.beta(0.6 * mean, 0.6 * (1 - mean)))

    right, boxed = share("reward/chapter_accuracy", gain), share("reward/chapter_format_rate")
    trained = 8 * ((right > 0) & (right < 8)).sum(1)
    clipped = rng.binomial(trained, (64 * smooth["gspo/sequence_clip_fraction"] / smooth["gspo/train_sequences"]))
    tokens = smooth["rollout/mean_completion_tokens"] * (1 - drift) * rng.normal(1, 0.08, size=steps)
    columns = {
        "step": np.arange(1, steps + 1),
        "reward/accuracy": right.sum(1) / 64,
        "reward/format_rate": boxed.sum(1) / 64,
        "reward/chapter_accuracy": right.sum(1) / 64,
        "reward/chapter_format_rate": boxed.sum(1) / 64,
        "rollout/mean_completion_tokens": tokens,
        "rollout/truncated_fraction": tokens / 16_000,
        "gspo/loss": rng.normal(2.7e-5, 5e-5, size=steps),
        "gspo/seq_ratio_mean": smooth["gspo/seq_ratio_mean"] + rng.normal(0, 6e-5, size=steps),
        "gspo/sequence_clip_fraction": clipped / 64,
        "gspo/token_clip_fraction": (clipped / 64 * rng.normal(1.2, 0.2, size=steps)).clip(0, 1),
        "gspo/train_sequences": trained,
        "gspo/normalization_sequences": np.full(steps, 64),
        "time/step_seconds": rng.normal(60, 4, size=steps),
    }
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps(reported_record()))
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    lines = [json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows]
    (run / "metrics.jsonl").write_text("".join(lines))
    return run
