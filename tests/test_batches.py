"""Sequences as tensors: what a batch holds, how much of it is padding, and who computes it."""

import itertools

import pytest
import torch

from data import training_data
from engine.batches import assign_to_ranks, even_micro_batches, micro_batches


def test_a_batch_holds_prompt_and_completion_padded_on_the_right(make_group):
    group = make_group([1, 0], prompt_length=2, lengths=[1, 3])
    (batch,) = micro_batches(training_data([group]), max_tokens=1000)
    short, long = group.completions
    assert batch.input_ids.tolist() == [
        group.prompt_ids + long.token_ids,
        [*group.prompt_ids, *short.token_ids, 0, 0],
    ]
    assert batch.completion_mask.tolist() == [[False, True, True, True], [False, True, False, False]]
    torch.testing.assert_close(batch.sampling_logprobs[0, 1:], torch.tensor(long.logprobs))
    torch.testing.assert_close(batch.sampling_logprobs[1, 1:2], torch.tensor(short.logprobs))
    assert batch.advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_micro_batches_hold_every_sequence_once_within_the_budget_and_a_longer_one_alone(make_group):
    groups = [make_group([1, 0, 0], lengths=[40, 4, 9], seed=seed) for seed in range(4)] + [make_group([1, 1, 1])]
    batches = list(micro_batches(training_data(groups), max_tokens=32))
    assert sum(len(batch.input_ids) for batch in batches) == 12  # the degenerate group stays out
    assert [batch.input_ids.shape for batch in batches[:4]] == [(1, 45)] * 4
    assert all(batch.input_ids.numel() <= 32 for batch in batches[4:])


def test_nine_tenths_of_a_micro_batch_are_real_on_lengths_like_the_chapters(make_group):
    """Completions of 2,000 to 3,000 tokens on average, capped at 4,096; prompts of 100 to 300."""
    generator = torch.Generator().manual_seed(0)
    for median in (1800, 2600):
        lengths = (median * torch.randn(64, generator=generator).mul(0.6).exp()).clamp(200, 4096).long().tolist()
        assert 2000 <= sum(lengths) / 64 <= 3000
        groups = [
            make_group([1, 0] * 4, prompt_length=100 + 25 * n, lengths=lengths[8 * n : 8 * n + 8]) for n in range(8)
        ]
        for budget in (14_336, 16_384, 32_768, 65_536):
            batches = even_micro_batches(training_data(groups), max_tokens=budget)
            real = sum(len(datum.token_ids) for datum in training_data(groups))
            assert real / sum(batch.input_ids.numel() for batch in batches) >= 0.9


def test_batches_are_assigned_to_ranks_evenly_by_tokens(make_group):
    """On completion lengths drawn like the chapter's, the busiest of eight ranks has little more than the mean."""
    lengths = (1800 * torch.randn(64, generator=torch.Generator().manual_seed(0)).mul(0.6).exp()).clamp(200, 4096)
    rows = lengths.long().view(8, 8).tolist()
    groups = [make_group([1, 0] * 4, prompt_length=200, lengths=row) for row in rows]
    for max_tokens, num_ranks in itertools.product((8_192, 16_384, 32_768, 65_536), (1, 2, 3, 4, 8)):
        batches = even_micro_batches(training_data(groups), max_tokens=max_tokens, num_ranks=num_ranks)
        assert max(batch.input_ids.numel() for batch in batches) <= max_tokens
        shares = assign_to_ranks(batches, num_ranks)
        assert sorted(map(id, batches)) == sorted(id(batch) for share in shares for batch in share)
        loads = [sum(batch.input_ids.numel() for batch in share) for share in shares]
        assert max(loads) <= 1.15 * sum(loads) / num_ranks
