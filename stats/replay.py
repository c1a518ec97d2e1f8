"""A stored step's completions, scored again under several objectives at the weights that sampled them.

What a reader could get wrong: the weights have not moved yet, so a ratio other than 1, and every clip, is the
mismatch of trainer and sampler. The ratio's denominator is the sampler (the stored sampling_logprobs), each
objective is its published preset, and the step is one batch, however the run was trained. Rounding decides on
which side of a narrow clip a sequence falls; it is that of a run with one optimizer step a batch, on one, two or
four ranks. Letters: B sequences, L padded length, D numbers in the adapter, M objectives.
"""

from __future__ import annotations

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

from data import Group, training_data
from engine.batches import even_micro_batches
from engine.hub import base_fingerprint, model_folder
from engine.policy import Policy, PolicyConfig
from loss import PRESETS, Algorithm, Denominators, group_advantages, policy_loss
from record.checkpoint import load_state
from record.rollouts import read_rollouts
from record.run import Run
from stats.page import aligned

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One objective on the step; the clip fractions are of the sequences of non-degenerate groups.

    A part's share of the gradient g is <g_part, g> / |g|^2. Since g is a sum over sequences, the shares of all
    lengths sum to 1, and so do those of all signs. The share of a part that opposes the whole is negative.
    """

    algorithm: Algorithm
    loss: float
    grad_norm: float
    sequence_clip_fraction: float  # a sequence is clipped when all of its tokens are
    token_clip_fraction: float
    shares: Mapping[str, float] | None  # by part; None when the gradient is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """M objectives on one step, each gradient split by completion length, and again by the advantage's sign."""

    step: int
    num_sequences: int  # degenerate groups included: the denominators are the step's
    parts: Mapping[str, list[int]]  # each one's sequences, as their lengths in tokens; first quarters, then signs
    scored: list[Scored]  # [M]
    cosines: list[list[float | None]]  # [M, M], between the gradients; None when one of them is 0


def replay(
    run: Run, algorithms: Sequence[Algorithm], step: int | None = None, base_model: str | None = None
) -> Replay:
    """Score step N of a run again: its completions, at checkpoint N - 1 or, for step 1, the run's fresh adapter.

    The default is the newest step that has both. `base_model` is the base model's folder, if it was moved.
    ValueError, in one sentence, when anything is missing or unknown; FloatingPointError for a non-finite gradient.
    """
    unknown = [name for name in algorithms if name not in PRESETS]
    if unknown or not algorithms:
        raise ValueError(f"no objective is called {(unknown or [''])[0]!r}; choose from {', '.join(PRESETS)}")
    settings, sampling = run.settings, run.settings["sampling"]
    config = PolicyConfig(**settings["policy"] | ({"base_model": base_model} if base_model else {}))
    rollouts, checkpoint = _choose_step(run, step)
    if base_fingerprint(model_folder(config.base_model, config.revision)) != run.record["base_fingerprint"]:
        raise ValueError(
            f"{config.base_model} does not hold the weights that {run.folder} was trained on; name its --base-model"
        )
    policy = Policy(config, seed=settings["seed"], temperature=sampling["temperature"])
    if checkpoint:
        load_state(checkpoint)
        policy.load(checkpoint)
    return score(policy, read_rollouts(rollouts), algorithms, sampling["max_tokens"])


def _choose_step(run: Run, step: int | None) -> tuple[Path, Path | None]:
    """Return the step's rollouts and its weights, None for a fresh adapter; ValueError says what is missing."""
    rollouts, weights = run.rollouts, run.checkpoints
    possible = [number for number in rollouts if number == 1 or number - 1 in weights]
    if not rollouts:
        raise ValueError(
            f"{run.folder} has no stored rollouts to replay; was it trained with --save-rollouts none?"
        )
    step = possible[-1] if step is None and possible else step
    if step in possible:
        return rollouts[step], weights.get(step - 1)
    missing = f"rollouts of step {step}" if step and step not in rollouts else "checkpoint of the step before"
    can = str(possible)[1:-1] or "none"
    raise ValueError(f"{run.folder} has no {missing}; steps that can be replayed: {can}")


def score(policy: Policy, groups: Sequence[Group], algorithms: Sequence[Algorithm], max_tokens: int) -> Replay:
    """Score a step's groups at the policy's weights, which stay as they are; errors as in `replay`."""
    data = training_data(groups)
    if not data:
        raise ValueError("every group of this step is degenerate, so no objective has a gradient; choose another")
    lengths = sorted(datum.num_completion_tokens for datum in data)
    cuts = statistics.quantiles(lengths, n=4, method="inclusive")
    quarters: dict[int, str] = {}  # by length; equal lengths stay together
    for _, (*quarter,) in groupby(lengths, key=lambda length: bisect_left(cuts, length)):
        quarters |= dict.fromkeys(quarter, f"{quarter[0]} to {quarter[-1]} tokens")
    parts: dict[str, list[int]] = {name: [] for name in quarters.values()}
    for datum in sorted(data, key=lambda datum: -datum.advantage):
        length = datum.num_completion_tokens
        for part in (quarters[length], _sign(datum.advantage)):
            parts.setdefault(part, []).append(length)
    all_lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    denominators = Denominators.of(all_lengths, max_tokens=max_tokens)
    pairs = [_score(policy, groups, name, quarters, denominators) for name in tqdm(algorithms, leave=False)]
    units = [gradient / one.grad_norm if one.grad_norm else None for one, gradient in pairs]
    return Replay(
        step=groups[0].policy_version + 1,
        num_sequences=len(all_lengths),
        parts=parts,
        scored=[one for one, _ in pairs],
        cosines=[[None if a is None or b is None else float(a @ b) for b in units] for a in units],
    )


def _sign(advantage: float) -> str:
    return ("zero", "positive", "negative")[(advantage > 0) - (advantage < 0)] + " advantages"


def _score(
    policy: Policy, groups: Sequence[Group], algorithm: Algorithm, quarters: Mapping[int, str], step: Denominators
) -> tuple[Scored, Tensor]:
    """Return an objective's values and its gradient [D], on the CPU in float64."""
    import torch

    objective, rescored = PRESETS[algorithm], []
    for group in groups:
        rewards = [score.reward for score in group.scores]
        advantages = group_advantages(rewards, divide_by_std=objective.divide_by_std)
        rescored.append(replace(group, advantages=advantages))
    loss, lengths, clipped = 0.0, [], []  # clipped tokens of each sequence
    gradients: dict[tuple[str, str], Tensor] = {}  # of the sequences of one quarter and one sign
    for batch in even_micro_batches(training_data(rescored), max_tokens=policy.micro_batch_tokens):
        batch = batch.each(lambda tensor: tensor.to(policy.device))
        mask, advantages = batch.completion_mask, batch.advantages
        with torch.no_grad():
            now = policy.token_logprobs(batch)[0].requires_grad_()
        output = policy_loss(now, batch.sampling_logprobs, mask, advantages, objective=objective, denominators=step)
        (slopes,) = torch.autograd.grad(output.loss, now)  # [B, L-1]
        loss += output.loss.item()
        lengths += mask.sum(-1).tolist()
        clipped += output.clipped.sum(-1).tolist()
        cells = [(quarters[n], _sign(a)) for n, a in zip(mask.sum(-1).tolist(), advantages.tolist(), strict=True)]
        for cell in sorted(set(cells)):  # backward through these sequences alone, from the loss's slopes
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
    heads, *rows = aligned(rows)
    rule = ["-" * len(heads[0]), *("-" * (len(head) - 1) + ":" for head in heads[1:])]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *rows])
    return f"""\
Step {replay.step} at the weights that sampled it; all {replay.num_sequences} sequences count in the denominators.

{table}

The old policy is the sampler (the stored logprobs). Caution: at the first optimizer step the ratio is only the gap
between the engines, and so is every clip. "from": what a part supplies, its gradient's projection on the whole over
the whole's squared norm. Losses and norms do not compare across columns, since their denominators differ.
"""
