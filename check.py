"""Prove that the numbers trained on are the policy's: once before the first step, and again at every step.

What a reader could get wrong: vLLM accepts an adapter that matches nothing, keeps serving an old one, or wakes up
with garbage, all without a word, and training then goes on for hours on answers that another model gave. But the
sampler's own log-probabilities say which model it was: the trainer scores a few of the step's completions as the
policy, as the policy before the last update, and as the base, and looks which of them the sampler agrees with.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from tqdm import tqdm

from data import Problem
from loss import LossConfig
from policy import Batch, Policy, delta_layers, micro_batches
from reward import Score
from rollout import (
    INSTRUCTION,
    Completion,
    Group,
    Rollout,
    Sampler,
    SamplingConfig,
    encode_prompt,
    sampling_seed,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PROBE_TOKENS = 300
"""Completion tokens that the gate scores at every step at the least, or all where there are fewer."""
FLOOR_LIMIT = 0.2
"""Nats a token between the two engines on the base model: above it, something is wrong before training begins."""
GAP_LIMIT = 0.02
"""Nats a token at a later step, or five times the floor where that is more."""
SUSPICIOUS, CERTAIN = 2.0, 5.0
"""Standard deviations of a sign test at which the gate looks closer, and at which it is sure."""
PADDING_TOKENS = 400
"""Of padding beside the completions that show whether the trainer reads it."""
KERNEL_LIMIT = 0.03
"""Relative error of a gated-delta-net kernel in bfloat16, output and gradients."""


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
    """Stands between a step's rollout and its update.

    It scores a few completions as the policy, as the policy before the last update and as the base. Only where
    these look wrong, it scores all of the step's and decides: by a sign test over tokens, since the gap between
    two engines has tails too heavy for a test on means. Completions of one prompt begin alike, and late in a run
    many are the same throughout: a token that follows what another one followed is no evidence of its own.
    """

    def __init__(self, policy: Policy, *, floor: float) -> None:
        """Remember the floor: nats a token between the engines on the base model, as `self_check` measured it."""
        self._policy = policy
        self._usual_gap = floor
        self.limit = max(5 * floor, GAP_LIMIT)

    def check(self, groups: Sequence[Group]) -> GateReading:
        """Return the reading of this rank's rollout; CheckError, saying which, when another model sampled it."""
        if not groups:
            return GateReading()
        probe = _probe(groups)
        gap, nearer = self._compare([probe])
        if not gap <= 2 * self._usual_gap or any(test.deviations > SUSPICIOUS for test in nearer.values()):
            self._examine(groups, probe)
            self._usual_gap = min(max(self._usual_gap, gap), self.limit)
        return GateReading(
            num_tokens=int(probe.completion_mask.sum()),
            token_gap=gap,
            base_share=nearer[BASE].share,
        )

    def check_update(self, token_gaps: Tensor) -> None:
        """Raise CheckError when the gap over all tokens of an optimizer step is too wide; [N] nats."""
        gap = float(token_gaps.abs().mean())
        if not gap <= self.limit:
            raise CheckError(
                f"sampler and trainer differ by {gap:.3g} nats a token over the step (limit {self.limit:.2g}), "
                "though not on the completions scored before: part of the batch was sampled or scored wrongly"
            )

    def _examine(self, groups: Sequence[Group], probe: Batch) -> None:
        """Raise CheckError, saying what is wrong, when all completions of the step confirm the suspicion."""
        batches = micro_batches(groups, max_tokens=self._policy.micro_batch_tokens, degenerate_too=True)
        gap, nearer = self._compare(list(batches))
        name, test = max(nearer.items(), key=lambda item: item[1].deviations)
        if test.deviations > CERTAIN and test.gap < gap and test.gap <= self.limit:
            raise CheckError(
                f"the sampler runs {name}: its log-probabilities are nearer to that one's than to the policy's at "
                f"{test.share:.0%} of {test.num_tokens} tokens"
            )
        padded, alone = (_gap(self._policy, rows) for rows in ([probe], _rows_alone(probe)))
        if padded > 2 * alone:
            raise CheckError(
                f"the trainer reads padding: it differs from the sampler by {padded:.3g} nats a token, and by "
                f"{alone:.3g} where it scores each completion alone"
            )
        if not gap <= self.limit:
            raise CheckError(
                f"sampler and trainer differ by {gap:.3g} nats a token (limit {self.limit:.2g}), which no other "
                "adapter explains: the sampler runs on damaged weights (as after a faulty wake-up), or the two "
                "engines do not hold the same model"
            )

    def _compare(self, batches: Sequence[Batch]) -> tuple[float, dict[str, _Nearer]]:
        """Return the gap to the sampler, and for each other model whether the sampler is nearer to it."""
        now, sampled, first = _scores(self._policy, batches), _sampled(batches), _first_of_their_kind(batches)
        others = {BASE: self._policy.without_adapter}
        if self._policy.has_previous:
            others[PREVIOUS] = self._policy.previous_adapter
        nearer = {}
        for name, being in others.items():
            with being():
                nearer[name] = _nearer(sampled, _scores(self._policy, batches), now, first)
        return float((now - sampled).abs().mean()), nearer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nearer:
    """At how many tokens the sampler is nearer to another model than to the policy.

    Those at which these two agree are left out, and so are those that repeat the evidence of others.
    """

    num_tokens: int
    share: float | None
    deviations: float  # of a sign test, from one half
    gap: float  # mean |other - sampler|, nats a token


def _nearer(sampled: Tensor, other: Tensor, now: Tensor, first: Tensor) -> _Nearer:
    nearer = ((sampled - other).abs() < (sampled - now).abs())[first & (other != now)]
    gap = float((sampled - other).abs().mean())
    if not len(nearer):
        return _Nearer(num_tokens=0, share=None, deviations=0.0, gap=gap)
    share = float(nearer.float().mean())
    deviations = (2 * share - 1) * math.sqrt(len(nearer))
    return _Nearer(num_tokens=len(nearer), share=share, deviations=deviations, gap=gap)


def _scores(policy: Policy, batches: Sequence[Batch]) -> Tensor:
    """Return the policy's log-probabilities of all completion tokens, [N] nats."""
    import torch

    with torch.no_grad():
        return torch.cat([policy.token_logprobs(batch)[0].cpu()[batch.completion_mask] for batch in batches])


def _first_of_their_kind(batches: Sequence[Batch]) -> Tensor:
    """Return, [N] bool, which completion tokens count: the same token after the same tokens does so once."""
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


def _gap(policy: Policy, batches: Sequence[Batch]) -> float:
    return float((_scores(policy, batches) - _sampled(batches)).abs().mean())


def _probe(groups: Sequence[Group]) -> Batch:
    """Return a batch of a few completions: the longest, the middle one, and shorter ones while tokens are few."""
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    pairs.sort(key=lambda pair: len(pair[1].completion.token_ids))
    chosen = [pairs[-1], *reversed(pairs[: len(pairs) // 2])]
    totals = accumulate(len(rollout.completion.token_ids) for _, rollout in chosen)
    count = next((n for n, total in enumerate(totals, start=1) if n >= 2 and total >= PROBE_TOKENS), len(chosen))
    return _together([replace(group, rollouts=[rollout]) for group, rollout in chosen[:count]])


def _together(groups: Sequence[Group]) -> Batch:
    (batch,) = micro_batches(groups, max_tokens=sys.maxsize, degenerate_too=True)
    return batch


def _rows_alone(batch: Batch) -> list[Batch]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What `self_check` verified: a sentence a check, and the floor for the gate."""

    findings: dict[str, str]
    floor: float


def self_check(
    policy: Policy,
    sampler: Sampler,
    tokenizer: Any,
    problems: Sequence[Problem],
    sampling: SamplingConfig,
    *,
    adapter: Path,
) -> SelfCheck:
    """Verify, in seconds, all that a run takes for granted; CheckError at the first that does not hold.

    Args:
        policy: at any step; its gradients are cleared.
        sampler: samples a few short completions of the base model, and then loads the policy's adapter.
        tokenizer: of both.
        problems: some of the training data; the first few are asked.
        sampling: the run's; its temperature, and its cap where that is below 64 tokens.
        adapter: a folder to write the adapter to.
    """
    import torch

    with torch.random.fork_rng():  # a resumed run must not draw otherwise for having been checked again
        findings = {
            "chat template": _check_chat_template(tokenizer),
            "end token": _check_end_token(tokenizer, policy),
            "tokenizer": _check_round_trip(tokenizer, problems[:20]),
            "gated delta net": _check_delta_kernels(policy),
        }
        sampler.unload_adapter()
        groups = _sample_from_base(sampler, tokenizer, problems[:4], sampling)
        floor, findings["engines"] = _check_engines(policy, groups)
        findings["padding"] = _check_padding(policy, groups, floor)
        findings["gradients"] = _check_gradients(policy, groups)
        policy.save_adapter(adapter)
        matched = sampler.load_adapter(adapter, version=0)
        findings["adapter"] = f"the sampler matched all of its {matched} modules"
    return SelfCheck(findings=findings, floor=floor)


def rehearse(
    policy: Policy,
    sampler: Sampler,
    tokenizer: Any,
    sampling: SamplingConfig,
    loss: LossConfig,
    *,
    num_sequences: int,
) -> None:
    """Read the longest prompts, and form the gradients of the largest micro-batches that a run allows.

    What would run out of memory at some step does so here; weights and optimizer stay as they are. The sampler's
    caches need no rehearsal: vLLM takes them whole at its start. CheckError where one sequence alone is too much.
    """
    import torch

    words = tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    prompt = (words * sampling.max_prompt_tokens)[: sampling.max_prompt_tokens]

    def sequences(length: int) -> Group:
        tokens = max(1, length - len(prompt))
        completion = Completion(
            token_ids=(words * tokens)[:tokens], logprobs=[-1.0] * tokens, text="", finish_reason="length"
        )
        problem = Problem(id="rehearsal", question="rehearsal", answer="0")
        shown = prompt[: max(1, length - tokens)]
        rollouts = [_ungraded(completion, 1.0)] * num_sequences
        return Group(problem=problem, prompt_ids=shown, rollouts=rollouts, policy_version=0)

    longest = sampling.max_prompt_tokens + sampling.max_tokens
    filling = policy.micro_batch_tokens // -(-policy.micro_batch_tokens // longest)  # a batch of these is full
    with torch.random.fork_rng():
        for _ in sampler.stream([prompt] * num_sequences, replace(sampling, max_tokens=1), [[0]] * num_sequences):
            pass
        sampler.sleep()
        for length in {longest, max(2, filling)}:
            try:
                policy.rehearse([sequences(length)], loss, max_tokens=sampling.max_tokens)
            except torch.OutOfMemoryError as error:
                raise CheckError(
                    f"one sequence of {length} tokens does not fit into memory for training ({error}); lower "
                    "--max-tokens or --sampler-memory-fraction, or give --sampler-sleep on"
                ) from error
        sampler.wake()


def _check_chat_template(tokenizer: Any) -> str:
    message = [{"role": "user", "content": "1 + 1?"}]
    without, prompt = (
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=add, enable_thinking=False)
        for add in (False, True)
    )
    ends_with_answer = encode_prompt(tokenizer, "1 + 1?")[-1:] == [tokenizer.eos_token_id]
    if ends_with_answer:
        raise CheckError("the chat template ends a prompt with the end token, so that there is nothing to answer")
    if without == prompt:
        return f"a prompt ends in {prompt[-12:]!r}; the template has no generation prompt of its own"
    return f"a prompt ends in the generation prompt {prompt.removeprefix(without)!r}"


def _check_end_token(tokenizer: Any, policy: Policy) -> str:
    """Look whether the sampler stops where the chat template ends an answer.

    It does at the tokenizer's end token and at those of the generation config, which for a checkpoint without one
    are the model config's: Qwen3.5's names another than its chat template writes. A model that was never tuned to
    the template may end in a token of its own, so that a difference is a warning.
    """
    declared = policy.model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])} - {None}
    if not stops:
        raise CheckError("neither tokenizer nor model has an end token: every completion would run to its limit")
    known = f"the sampler stops at {' and '.join(repr(tokenizer.decode([stop])) for stop in sorted(stops))}"
    answered = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is two"}]
    text = tokenizer.apply_chat_template(answered, tokenize=False, enable_thinking=False)
    _, seen, end = text.rpartition("It is two")
    special = set(tokenizer.added_tokens_decoder)
    written = [token for token in tokenizer(end, add_special_tokens=False)["input_ids"] if token in special]
    if not seen or not written:
        return f"the chat template does not say how an answer ends; {known}"
    ends = f"by the chat template an answer ends with {tokenizer.decode(written[:1])!r}"
    if written[0] not in stops:
        tqdm.write(f"warning: {ends}, but {known}: completions may run on to their limit")
    return f"{ends}; {known}"


def _check_round_trip(tokenizer: Any, problems: Sequence[Problem]) -> str:
    for problem in problems:
        token_ids = tokenizer(problem.question, add_special_tokens=False)["input_ids"]
        back = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if normalize("NFC", back).split() != normalize("NFC", problem.question).split():
            raise CheckError(
                f"the tokenizer turns the question of problem {problem.id} into other text: {back[:80]!r} "
                f"for {problem.question[:80]!r}"
            )
    return f"{len(problems)} questions come back from the tokenizer as they went in"


def _sample_from_base(
    sampler: Sampler, tokenizer: Any, problems: Sequence[Problem], sampling: SamplingConfig
) -> list[Group]:
    prompts = [encode_prompt(tokenizer, problem.question) for problem in problems]
    short = replace(sampling, max_tokens=min(64, sampling.max_tokens))
    seeds = [[sampling_seed("check", index, member) for member in range(2)] for index in range(len(prompts))]
    groups = dict(sampler.stream(prompts, short, seeds))

    return [
        Group(
            problem=problem,
            prompt_ids=prompts[index],
            rollouts=[_ungraded(c, advantage) for c, advantage in zip(groups[index], (1.0, -1.0), strict=True)],
            policy_version=0,
        )
        for index, problem in enumerate(problems)
    ]


def _ungraded(completion: Completion, advantage: float) -> Rollout:
    return Rollout(
        completion=completion, score=Score(reward=0.0, answer=None, verdict="no_box"), advantage=advantage
    )


def _check_engines(policy: Policy, groups: Sequence[Group]) -> tuple[float, str]:
    with policy.without_adapter():
        floor = _gap(policy, _rows_alone(_together(groups)))
    if not floor <= FLOOR_LIMIT:
        raise CheckError(
            f"sampler and trainer differ by {floor:.3g} nats a token on the base model already (limit "
            f"{FLOOR_LIMIT}); they do not hold the same model, or one of them computes it wrongly"
        )
    return floor, f"sampler and trainer differ by {floor:.2g} nats a token on the base model (limit {FLOOR_LIMIT})"


def _check_padding(policy: Policy, groups: Sequence[Group], floor: float) -> str:
    """Compare completions alone and beside a long one: rounding differs then, by less than engines do."""
    long = replace(groups[0], prompt_ids=(groups[0].prompt_ids * PADDING_TOKENS)[:PADDING_TOKENS])
    batch = _together([*groups, replace(long, rollouts=long.rollouts[:1])])
    shift, limit = float((_scores(policy, _rows_alone(batch)) - _scores(policy, [batch])).abs().mean()), 2 * floor
    if not shift <= limit:
        raise CheckError(
            f"padding and the rest of the batch move a token's log-probability by {shift:.3g} nats (limit "
            f"{limit:.2g}, twice the gap between the engines); the trainer reads what it should not"
        )
    return f"it and the rest of the batch move a log-probability by {shift:.2g} nats (limit {limit:.2g})"


def _check_gradients(policy: Policy, groups: Sequence[Group]) -> str:
    batch = _together(groups)
    policy.optimizer.zero_grad()
    logprobs, _ = policy.token_logprobs(batch)
    (logprobs.sum(-1) * batch.advantages.to(logprobs.device)).sum().backward()
    heads = {name: p.grad for name, p in policy.parameters.items() if ".lora_B." in name}
    dead = [name.split(".lora_B.")[0] for name, grad in heads.items() if grad is None or not grad.count_nonzero()]
    policy.optimizer.zero_grad()
    if dead:
        raise CheckError(
            f"{len(dead)} adapter modules receive no gradient and would never learn: "
            f"{', '.join(dead[:5])}{', ...' if len(dead) > 5 else ''}"
        )
    return f"all {len(heads)} adapter modules receive one"


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the gated delta rule's output [B, L, heads, V], a token at a time: the reference for kernels.

    S_t = exp(g_t) S_{t-1}; S_t += k_t (beta_t (v_t - S_t^T k_t))^T; o_t = S_t^T q_t / sqrt(K), with q and k of unit
    length (Gated Delta Networks, arXiv:2412.06464, equation 10).

    Args:
        query: [B, L, heads, K], as are the keys.
        key: see query.
        value: [B, L, heads, V].
        g: log of the decay, [B, L, heads], at most 0.
        beta: write strength, [B, L, heads].
    """
    import torch

    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    state = value.new_zeros(*value[:, 0].shape[:2], key.shape[-1], value.shape[-1])  # [B, heads, K, V]
    outputs = []
    for t in range(query.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) / math.sqrt(query.shape[-1]))
    return torch.stack(outputs, dim=1)


def _check_delta_kernels(policy: Policy) -> str:
    """Compare the kernel that this model's layers call with `delta_rule` in float32, forward and backward."""
    layers = delta_layers(policy.model)
    if not layers:
        return "the model has no such layer"
    kernel = delta_kernel(layers[0])
    errors = delta_kernel_errors(kernel, layers[0], policy.device)
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= KERNEL_LIMIT:
        raise CheckError(
            f"the gated-delta-net kernel is wrong: {worst} is off by {errors[worst]:.1%} against a float32 "
            f"reference (limit {KERNEL_LIMIT:.0%}); on Hopper GPUs some Triton versions compute wrong gradients, "
            "install triton 3.7.1 or later"
        )
    # transformers puts a faster kernel, where it finds one, behind the name of its own.
    behind = inspect.getclosurevars(kernel).nonlocals.get("implementation", kernel)
    source = "flash-linear-attention" if behind.__module__.startswith("fla") else "PyTorch"
    if source == "PyTorch" and policy.device.type == "cuda":
        source += " (correct, but many times slower than flash-linear-attention, which `make gpu` installs)"
    largest = f"largest error {errors[worst]:.2%}, of {worst} (limit {KERNEL_LIMIT:.0%})"
    return f"{len(layers)} layers on {source}; {largest}"


def delta_kernel(layer: Any) -> Callable[..., Any]:
    """Return the function that a gated-delta-net layer calls for a sequence."""
    module: Any = sys.modules[type(layer).__module__]
    return getattr(layer, "chunk_gated_delta_rule", None) or module.torch_chunk_gated_delta_rule


def delta_kernel_errors(kernel: Callable[..., Any], layer: Any, device: torch.device) -> dict[str, float]:
    """Return the kernel's relative error against `delta_rule`, of its output and of each input's gradient."""
    import torch

    generator = torch.Generator().manual_seed(0)
    length, heads = 150, layer.num_v_heads  # more than two of the kernels' chunks of 64, and not a multiple

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, length, heads, *shape, generator=generator).to(device, torch.bfloat16)

    inputs = {
        "query": normal(layer.head_k_dim),
        "key": normal(layer.head_k_dim),
        "value": normal(layer.head_v_dim),
        "g": -torch.nn.functional.softplus(normal().float()),
        "beta": normal().sigmoid(),
    }
    weights = normal(layer.head_v_dim).float()
    results = []

    def by_kernel(query: Tensor, key: Tensor, value: Tensor, **others: Tensor) -> Tensor:
        return kernel(query, key, value, **others, use_qk_l2norm_in_kernel=True)[0]  # names of these three vary

    for run in (by_kernel, delta_rule):
        leaves = {
            name: (x.float() if run is delta_rule else x).detach().requires_grad_() for name, x in inputs.items()
        }
        output = run(**leaves)
        gradients = torch.autograd.grad((output.float() * weights).sum(), list(leaves.values()))
        results.append([output.detach(), *gradients])
    names = ["the output", *(f"the gradient of {name}" for name in inputs)]
    return {
        name: float((ours.float() - exact).norm() / exact.norm())
        for name, ours, exact in zip(names, *results, strict=True)
    }
