"""Prove at every step that the policy sampled what it is about to be trained on.

What a reader could get wrong: vLLM accepts an adapter that matches nothing, keeps serving an old one, or wakes up
with damaged weights, without an error, and training then goes on for hours on answers that another model gave. The
sampler's own log-probabilities tell which model it was: the trainer scores a few of the step's completions as the
policy, as the policy before the last update, and as the base, and tests which of them the sampler agrees with.

Letters: N completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from data import Datum
from engine.batches import Batch, collate, micro_batches
from engine.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor

PROBE_TOKENS = 300
"""Completion tokens that the gate scores at every step at the least, or all where there are fewer."""
MISMATCH_LIMIT = 0.02
"""Nats a token, or five times the baseline mismatch where that is more."""
SUSPICIOUS, CERTAIN = 2.0, 5.0
"""Standard deviations of a sign test at which the gate scores the whole step, and at which it stops the run."""


class CheckError(RuntimeError):
    """What would be trained on is not what it should be; the weights have not moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReading:
    """What the gate saw in a step, on a few of the completions of its rank."""

    num_tokens: int | None = None
    token_gap: float | None = None
    """Mean |policy - sampler| of a token, in nats."""
    base_share: float | None = None
    """Tokens at which the sampler is nearer to the base model than to the policy; None where these two agree."""


BASE, PREVIOUS = "the base model", "the policy before the last update"


class Gate:
    """Tests, between a step's rollout and its update, whether the policy sampled it.

    It scores a few completions as the policy, as the policy before the last update and as the base. Where these
    raise a suspicion, it scores all of the step's and decides: by a sign test over tokens, since the mismatch of
    two engines has tails too heavy for a test on means. Tokens with the same prefix are not independent; each
    (prefix, token) pair counts once.
    """

    def __init__(self, policy: Policy, *, baseline_mismatch: float) -> None:
        """Take nats a token between the engines on the base model, as `self_check` measures them."""
        self._policy = policy
        self._usual_mismatch = baseline_mismatch
        self.limit = max(5 * baseline_mismatch, MISMATCH_LIMIT)

    def check(self, data: Sequence[Datum]) -> GateReading:
        """Return the reading of this rank's completions; CheckError when another model sampled them, naming it."""
        if not data:
            return GateReading()
        probe = collate(_probe(data))
        mismatch, tests = self._compare([probe])
        if not mismatch <= 2 * self._usual_mismatch or any(t.deviations > SUSPICIOUS for t in tests.values()):
            self._examine(data, probe)
            self._usual_mismatch = min(max(self._usual_mismatch, mismatch), self.limit)
        return GateReading(
            num_tokens=int(probe.completion_mask.sum()), token_gap=mismatch, base_share=tests[BASE].share
        )

    def check_update(self, mismatches: Tensor) -> None:
        """Raise CheckError when the mismatch over all tokens of an update is too large; [N] nats."""
        mismatch = float(mismatches.abs().mean())
        if not mismatch <= self.limit:
            raise CheckError(
                f"sampler and trainer differ by {mismatch:.3g} nats a token over the step (limit "
                f"{self.limit:.2g}), though not on the completions scored before: part of the batch was sampled or "
                "scored wrongly"
            )

    def _examine(self, data: Sequence[Datum], probe: Batch) -> None:
        """Raise CheckError, saying what is wrong, when all completions of the step confirm the suspicion."""
        batches = micro_batches(data, max_tokens=self._policy.micro_batch_tokens)
        mismatch, tests = self._compare(list(batches))
        name, test = max(tests.items(), key=lambda item: item[1].deviations)
        if test.deviations > CERTAIN and test.mismatch < mismatch and test.mismatch <= self.limit:
            raise CheckError(
                f"the sampler runs {name}: its log-probabilities are nearer to that one's than to the policy's at "
                f"{test.share:.0%} of {test.num_tokens} tokens"
            )
        padded, alone = (mean_mismatch(self._policy, rows) for rows in ([probe], rows_alone(probe)))
        if padded > 2 * alone:
            raise CheckError(
                f"the trainer reads padding: it differs from the sampler by {padded:.3g} nats a token, and by "
                f"{alone:.3g} where it scores each completion alone"
            )
        if not mismatch <= self.limit:
            raise CheckError(
                f"sampler and trainer differ by {mismatch:.3g} nats a token (limit {self.limit:.2g}), which no "
                "other adapter explains: the sampler runs on damaged weights (as after a faulty wake-up), or the "
                "two engines do not hold the same model"
            )

    def _compare(self, batches: Sequence[Batch]) -> tuple[float, dict[str, _SignTest]]:
        """Return the mean mismatch, and for each other model whether the sampler is nearer to it."""
        now, sampled, counted = score(self._policy, batches), _sampled(batches), _counted_once(batches)
        others = {BASE: self._policy.without_adapter}
        if self._policy.has_previous:
            others[PREVIOUS] = self._policy.previous_adapter
        tests = {}
        for name, as_other in others.items():
            with as_other():
                tests[name] = _sign_test(sampled, score(self._policy, batches), now, counted)
        return float((now - sampled).abs().mean()), tests


@dataclass(frozen=True, slots=True, kw_only=True)
class _SignTest:
    """At how many tokens the sampler is nearer to another model than to the policy.

    Tokens at which these two agree are left out, and so are repeated (prefix, token) pairs.
    """

    num_tokens: int
    share: float | None
    deviations: float  # of a sign test, from one half
    mismatch: float  # mean |other - sampler|, nats a token


def _sign_test(sampled: Tensor, other: Tensor, now: Tensor, counted: Tensor) -> _SignTest:
    nearer = ((sampled - other).abs() < (sampled - now).abs())[counted & (other != now)]
    mismatch = float((sampled - other).abs().mean())
    if not len(nearer):
        return _SignTest(num_tokens=0, share=None, deviations=0.0, mismatch=mismatch)
    share = float(nearer.float().mean())
    deviations = (2 * share - 1) * math.sqrt(len(nearer))
    return _SignTest(num_tokens=len(nearer), share=share, deviations=deviations, mismatch=mismatch)


def score(policy: Policy, batches: Sequence[Batch]) -> Tensor:
    """Return the policy's log-probabilities of all completion tokens, [N] nats."""
    import torch

    with torch.no_grad():
        return torch.cat([policy.token_logprobs(batch)[0].cpu()[batch.completion_mask] for batch in batches])


def _counted_once(batches: Sequence[Batch]) -> Tensor:
    """Return, [N] bool, which completion tokens count: each (prefix, token) pair does so once."""
    import torch

    seen: set[int] = set()
    first = []
    for batch in batches:
        for token_ids, mask in zip(batch.input_ids.tolist(), batch.completion_mask.tolist(), strict=True):
            history = hash(token_ids[0])
            for token_id, in_completion in zip(token_ids[1:], mask, strict=True):
                history = hash((history, token_id))
                if in_completion:
                    first.append(history not in seen)
                    seen.add(history)
    return torch.tensor(first)


def _sampled(batches: Sequence[Batch]) -> Tensor:
    import torch

    return torch.cat([batch.sampling_logprobs[batch.completion_mask] for batch in batches])


def mean_mismatch(policy: Policy, batches: Sequence[Batch]) -> float:
    """Return the mean |policy - sampler| of a completion token, in nats."""
    return float((score(policy, batches) - _sampled(batches)).abs().mean())


def _probe(data: Sequence[Datum]) -> list[Datum]:
    """Return a few sequences: the longest, the middle one, and shorter ones while tokens are few."""
    ordered = sorted(data, key=lambda datum: datum.num_completion_tokens)
    chosen = [ordered[-1], *reversed(ordered[: len(ordered) // 2])]
    totals = accumulate(datum.num_completion_tokens for datum in chosen)
    count = next((n for n, total in enumerate(totals, start=1) if n >= 2 and total >= PROBE_TOKENS), len(chosen))
    return chosen[:count]


def rows_alone(batch: Batch) -> list[Batch]:
    """Return each row as a batch of its own, without padding."""
    ends = [int(mask.nonzero().max()) + 2 for mask in batch.completion_mask]
    return [
        Batch(
            input_ids=batch.input_ids[row : row + 1, :end],
            completion_mask=batch.completion_mask[row : row + 1, : end - 1],
            sampling_logprobs=batch.sampling_logprobs[row : row + 1, : end - 1],
            advantages=batch.advantages[row : row + 1],
        )
        for row, end in enumerate(ends)
    ]
