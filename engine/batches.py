"""Sequences as tensors: micro-batches that are the same on any number of ranks.

What a reader could get wrong: sequences are padded on the right and no attention mask is passed, because every
layer looks only to the left, so a real token never sees padding (padding on the left would run through the
recurrent state of the gated-delta-net layers).

Letters: B sequences, L padded length. Column t of a [B, L-1] tensor speaks of token t + 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from data import Datum

if TYPE_CHECKING:
    from torch import Tensor

MIN_MICRO_BATCHES = 4
"""Of an update, so that one, two and four ranks compute the same ones."""
MAX_PADDING = 0.1
"""Share of the positions of an update's micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences that go through the model together, padded on the right."""

    input_ids: Tensor  # [B, L]
    completion_mask: Tensor  # [B, L-1] bool: the token that this column predicts is the completion's
    sampling_logprobs: Tensor  # [B, L-1] nats, 0 outside the completion
    advantages: Tensor  # [B]
    old_logprobs: Tensor | None = None
    """[B, L-1] nats, the trainer's before its first step on these sequences; None where that is still to come."""

    @property
    def mismatches(self) -> Tensor:
        """Trainer minus sampler at each of the N completion tokens, [N] nats; needs `old_logprobs`."""
        assert self.old_logprobs is not None
        return (self.old_logprobs - self.sampling_logprobs)[self.completion_mask]

    @property
    def num_positions(self) -> int:
        """B x L, padding included."""
        return self.input_ids.numel()

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` applied to each of its tensors: a device, or a choice of rows."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})


def micro_batches(data: Sequence[Datum], *, max_tokens: int) -> Iterator[Batch]:
    """Yield the sequences, longest first, at most `max_tokens` with padding at a time."""
    ordered = sorted(data, key=lambda datum: len(datum.token_ids), reverse=True)
    while ordered:
        count = max(1, max_tokens // len(ordered[0].token_ids))
        yield collate(ordered[:count])
        ordered = ordered[count:]


def even_micro_batches(data: Sequence[Datum], *, max_tokens: int, num_ranks: int = 1) -> list[Batch]:
    """Return micro-batches of about equally many tokens, as few as max_tokens and MAX_PADDING allow.

    Their number is a multiple of that of the ranks, and at least MIN_MICRO_BATCHES, where there are so many
    sequences. Rounding depends on what is computed together, so that a gradient is the same on any number of ranks
    only if its micro-batches are.
    """
    lengths = sorted((len(datum.token_ids) for datum in data), reverse=True)

    def starts(tokens: int) -> list[int]:
        """Return where `micro_batches` begins a batch."""
        found = [0]
        while (following := found[-1] + max(1, tokens // lengths[found[-1]])) < len(lengths):
            found.append(following)
        return found

    step = num_ranks * -(-MIN_MICRO_BATCHES // num_ranks)
    for wanted in range(step, len(lengths) + step, step) if lengths else ():
        # The smallest limit that leads to at most so many batches.
        tokens = bisect_left(range(sum(lengths)), -wanted, key=lambda tokens: -len(starts(tokens)))
        padded = sum(lengths[a] * (b - a) for a, b in pairwise([*starts(tokens), len(lengths)]))
        if tokens <= max_tokens and padded - sum(lengths) <= MAX_PADDING * padded:
            return list(micro_batches(data, max_tokens=tokens))
    return []


def assign_to_ranks(batches: Sequence[Batch], num_ranks: int) -> list[list[Batch]]:
    """Assign the batches, the largest first, each to the rank that has the fewest tokens so far."""
    assigned: list[list[Batch]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for batch in sorted(batches, key=lambda batch: batch.num_positions, reverse=True):
        rank = loads.index(min(loads))
        assigned[rank].append(batch)
        loads[rank] += batch.num_positions
    return assigned


def collate(data: Sequence[Datum]) -> Batch:
    """Return the sequences as one batch, in their order."""
    import torch

    length = max(len(datum.token_ids) for datum in data)
    input_ids = torch.zeros(len(data), length, dtype=torch.long)
    completion_mask = torch.zeros(len(data), length - 1, dtype=torch.bool)
    sampling_logprobs = torch.zeros(len(data), length - 1)
    for row, datum in enumerate(data):
        end = len(datum.token_ids)
        completion = slice(end - datum.num_completion_tokens - 1, end - 1)
        input_ids[row, :end] = torch.tensor(datum.token_ids)
        completion_mask[row, completion] = True
        sampling_logprobs[row, completion] = torch.tensor(datum.sampling_logprobs)
    return Batch(
        input_ids=input_ids,
        completion_mask=completion_mask,
        sampling_logprobs=sampling_logprobs,
        advantages=torch.tensor([datum.advantage for datum in data]),
    )


def halved(batches: Sequence[Batch]) -> list[Batch]:
    """Return every batch cut in two; one of a single sequence stays whole."""
    halves = []
    for batch in batches:
        middle = (len(batch.advantages) + 1) // 2
        halves += [
            batch.each(lambda tensor, rows=rows: tensor[rows]) for rows in (slice(middle), slice(middle, None))
        ]
    return [half for half in halves if len(half.advantages)]
