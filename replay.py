"""A stored step's rollouts, scored again under several objectives at the weights that sampled them.

What a reader could get wrong: nothing has moved yet, so a ratio other than 1, and every clip, is the gap between
two engines. The old policy is the sampler (the stored sampling_logprobs), each objective is its published preset,
and the step is one batch, however the run itself was trained. Rounding, which decides on which side of a narrow
clip a sequence falls, is as in the run's update, where that was one step, on one, two or four ranks, and in memory:
the micro-batches are the same.

Letters: B sequences, L padded length, D numbers in the adapter, M objectives.
"""

from __future__ import annotations

import json
import math
import operator
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from checkpoint import base_fingerprint, load_state, read_rollouts
from loss import PRESETS, Algorithm, StepTotals, policy_loss
from policy import Policy, PolicyConfig, even_micro_batches, step_totals
from rollout import Group, group_advantages, model_folder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One objective on the step; the clip fractions are of non-degenerate groups, as those of the training log.

    A part supplies <g_part, g> / |g|^2 of the gradient g. Since g is a sum over sequences, the shares of all
    lengths sum to 1, and so do those of all signs; a part that pulls against the whole has a negative share.
    """

    algorithm: Algorithm
    loss: float
    grad_norm: float
    sequence_clip_fraction: float  # a sequence is clipped when all of its tokens are
    token_clip_fraction: float
    shares: Mapping[str, float] | None  # by part; None when the gradient is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """M objectives on one step, each gradient cut into parts: by length, and again by the advantage's sign."""

    step: int
    num_sequences: int  # degenerate groups included: the denominators are the step's
    parts: Mapping[str, list[int]]  # each one's sequences, as their lengths in tokens; first quarters, then signs
    scored: list[Scored]  # [M]
    cosines: list[list[float | None]]  # [M, M], between the gradients; None when one of them is 0


def replay(
    run: Path, *, algorithms: Sequence[Algorithm], step: int | None = None, base_model: str | None = None
) -> Replay:
    """Score step N of a run again: its rollouts, at checkpoint N - 1 or, for step 1, the run's fresh adapter.

    The default is the newest step that has both. `base_model` says where the base model lies now, if it was moved.
    ValueError, in one sentence, when anything is missing or unknown; FloatingPointError for a gradient gone wrong.
    """
    unknown = [name for name in algorithms if name not in PRESETS]
    if unknown or not algorithms:
        raise ValueError(f"no objective is called {(unknown or [''])[0]!r}; choose from {', '.join(PRESETS)}")
    try:
        record = json.loads((run / "config.json").read_text())
        settings, fingerprint = record["settings"], record["base_fingerprint"]
        config, sampling = PolicyConfig(**settings["policy"]), settings["sampling"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run} is not a run of this suite: it has no readable config.json ({error})") from error
    rollouts, checkpoint = _choose_step(run, step)
    config = replace(config, base_model=base_model or config.base_model)
    if base_fingerprint(model_folder(config.base_model, config.revision)) != fingerprint:
        raise ValueError(
            f"{config.base_model} does not hold the weights that {run} was trained on; name its --base-model"
        )
    policy = Policy(config, seed=settings["seed"], temperature=sampling["temperature"])
    if checkpoint:
        load_state(checkpoint)
        policy.load(checkpoint)
    return compare(policy, read_rollouts(rollouts), algorithms, sampling["max_tokens"])


def _choose_step(run: Path, step: int | None) -> tuple[Path, Path | None]:
    """Return the step's rollouts and its weights, None for a fresh adapter; ValueError says what is missing."""
    rollouts = {int(path.stem.removeprefix("step-")): path for path in (run / "rollouts").glob("step-*.parquet")}
    weights = {int(path.name.removeprefix("step-")): path for path in (run / "checkpoints").glob("step-*")}
    possible = sorted(number for number in rollouts if number == 1 or number - 1 in weights)
    if not rollouts:
        raise ValueError(f"{run} has no stored rollouts to replay; was it trained with --save-rollouts none?")
    step = possible[-1] if step is None and possible else step
    if step in possible:
        return rollouts[step], weights.get(step - 1)
    missing = f"rollouts of step {step}" if step and step not in rollouts else "checkpoint of the step before"
    raise ValueError(f"{run} has no {missing}; steps that can be replayed: {str(possible)[1:-1] or 'none'}")


def compare(policy: Policy, groups: Sequence[Group], algorithms: Sequence[Algorithm], max_tokens: int) -> Replay:
    """Score a step's groups at the policy's weights, which stay as they are; errors as in `replay`."""
    training = [rollout for group in groups if not group.degenerate for rollout in group.rollouts]
    if not training:
        raise ValueError("every group of this step is degenerate, so no objective has a gradient; choose another")
    lengths = sorted(len(rollout.completion.token_ids) for rollout in training)
    cuts = statistics.quantiles(lengths, n=4, method="inclusive")
    quarters: dict[int, str] = {}  # by length; equal lengths stay together
    for _, (*quarter,) in groupby(lengths, key=lambda length: bisect_left(cuts, length)):
        quarters |= dict.fromkeys(quarter, f"{quarter[0]} to {quarter[-1]} tokens")
    parts: dict[str, list[int]] = {name: [] for name in quarters.values()}
    for rollout in sorted(training, key=lambda rollout: -rollout.advantage):
        length = len(rollout.completion.token_ids)
        for part in (quarters[length], _sign(rollout.advantage)):
            parts.setdefault(part, []).append(length)
    totals = step_totals(groups, max_tokens=max_tokens)
    pairs = [_score(policy, groups, algorithm, quarters, totals) for algorithm in tqdm(algorithms, leave=False)]
    units = [gradient / one.grad_norm if one.grad_norm else None for one, gradient in pairs]
    return Replay(
        step=groups[0].policy_version + 1,
        num_sequences=totals.num_sequences,
        parts=parts,
        scored=[one for one, _ in pairs],
        cosines=[[None if a is None or b is None else float(a @ b) for b in units] for a in units],
    )


def _sign(advantage: float) -> str:
    return ("zero", "positive", "negative")[(advantage > 0) - (advantage < 0)] + " advantages"


def _score(
    policy: Policy, groups: Sequence[Group], algorithm: Algorithm, quarters: Mapping[int, str], totals: StepTotals
) -> tuple[Scored, Tensor]:
    """Return an objective's values and its gradient [D], on the CPU in float64."""
    import torch

    objective = PRESETS[algorithm]
    rescored: list[Group] = []
    for group in groups:
        rewards = [rollout.score.reward for rollout in group.rollouts]
        pairs = zip(group.rollouts, group_advantages(rewards, divide_by_std=objective.divide_by_std), strict=True)
        rescored.append(replace(group, rollouts=[replace(rollout, advantage=a) for rollout, a in pairs]))
    loss, lengths, clipped = 0.0, [], []  # clipped tokens of each sequence
    gradients: dict[tuple[str, str], Tensor] = {}  # of the sequences of one quarter and one sign
    for batch in even_micro_batches(rescored, max_tokens=policy.micro_batch_tokens):
        batch = batch.each(lambda tensor: tensor.to(policy.device))
        mask, advantages = batch.completion_mask, batch.advantages
        with torch.no_grad():
            now = policy.token_logprobs(batch)[0].requires_grad_()
        output = policy_loss(now, batch.sampling_logprobs, mask, advantages, objective=objective, totals=totals)
        (slopes,) = torch.autograd.grad(output.loss, now)  # [B, L-1]
        loss += output.loss.item()
        lengths += mask.sum(-1).tolist()
        clipped += output.clipped.sum(-1).tolist()
        cells = [(quarters[n], _sign(a)) for n, a in zip(mask.sum(-1).tolist(), advantages.tolist(), strict=True)]
        for cell in sorted(set(cells)):  # the loss's slopes, sent back through these sequences alone
            rows = torch.tensor([other == cell for other in cells], device=policy.device)
            logprobs, _ = policy.token_logprobs(batch.each(operator.itemgetter(rows)))
            pieces = torch.autograd.grad(logprobs, list(policy.parameters.values()), slopes[rows])
            gradient = torch.cat([piece.flatten() for piece in pieces]).cpu().double()
            gradients[cell] = gradients[cell] + gradient if cell in gradients else gradient
    whole = sum(gradients.values(), torch.zeros(()))
    norm = float(whole.norm())
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise FloatingPointError(f"{algorithm}: the loss is {loss} and the gradient's norm {norm}")
    shares: dict[str, float] = defaultdict(float)
    for cell, gradient in gradients.items():
        for part in cell:
            shares[part] += float(gradient @ whole) / norm**2 if norm else 0.0
    return Scored(
        algorithm=algorithm,
        loss=loss,
        grad_norm=norm,
        sequence_clip_fraction=statistics.fmean(map(operator.eq, clipped, lengths)),
        token_clip_fraction=sum(clipped) / sum(lengths),
        shares=dict(shares) if norm else None,
    ), whole


def format_replay(replay: Replay) -> str:
    """Return a Markdown table, one column an objective, and how to read it."""
    rows = [
        ["", *(one.algorithm for one in replay.scored)],
        ["loss", *(f"{one.loss:+.3e}" for one in replay.scored)],
        ["gradient norm", *(f"{one.grad_norm:.3e}" for one in replay.scored)],
        ["sequences clipped", *(f"{one.sequence_clip_fraction:.1%}" for one in replay.scored)],
        ["tokens clipped", *(f"{one.token_clip_fraction:.1%}" for one in replay.scored)],
    ]
    for one, cosines in zip(replay.scored, replay.cosines, strict=True):
        rows.append([f"cosine with {one.algorithm}", *("-" if c is None else f"{c:+.3f}" for c in cosines)])
    num_tokens = sum(map(sum, replay.parts.values())) / 2  # each sequence is in two parts
    for part, lengths in replay.parts.items():
        name = f"from {part} ({len(lengths)} sequences, {sum(lengths) / num_tokens:.0%} of tokens)"
        rows.append([name, *("-" if one.shares is None else f"{one.shares[part]:.1%}" for one in replay.scored)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    table = "\n".join(
        "| " + " | ".join(f"{c:{'>' if i else '<'}{widths[i]}}" for i, c in enumerate(row)) + " |" for row in rows
    )
    return f"""\
Step {replay.step} at the weights that sampled it; all {replay.num_sequences} sequences count in the denominators.

{table}

The old policy is the sampler (the stored logprobs). Caution: at the first optimizer step the ratio is only the gap
between the engines, and so is every clip. "from": what a part supplies, its gradient's projection on the whole over
the whole's squared norm. Losses and norms do not compare across columns, since their denominators differ.
"""
