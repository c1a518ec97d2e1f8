"""The optimizer steps of a rollout batch, as train.py takes them: for benches and tests of the update alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from data import Group, training_data
from engine.policy import Policy, TrainOutput
from loss import Denominators, LossConfig, make_loss
from rollout import mini_batches


def no_check(mismatches: Tensor) -> None:
    """Accept any mismatch."""


def take_steps(
    policy: Policy,
    groups: Sequence[Group],
    config: LossConfig,
    *,
    max_tokens: int,
    check_update: Callable[[Tensor], None] = no_check,
) -> list[TrainOutput]:
    """Take one optimizer step on each mini-batch of whole groups that has something to teach.

    Args:
        policy: trains.
        groups: the rollout batch; degenerate groups count in the denominators and are not computed.
        config: the objective, the old policy and the number of mini-batches.
        max_tokens: the longest completion that sampling allows.
        check_update: called once, with the mismatches of the whole batch, before the weights move; may raise.
    """
    parts, outputs = mini_batches(groups, config.mini_batches), list[TrainOutput]()
    batches = policy.begin_update([training_data(part) for part in parts])
    if len(batches) > 1:
        check_update(policy.mismatches(batches))
    for part, batch in zip(parts, batches, strict=True):
        lengths = [len(completion.token_ids) for group in part for completion in group.completions]
        loss = make_loss(config, Denominators.of(lengths, max_tokens=max_tokens))
        outputs.append(policy.forward_backward(batch, loss))
        if len(batches) == 1:
            check_update(outputs[0].sequences.mismatches)
        policy.optim_step()
    return outputs
