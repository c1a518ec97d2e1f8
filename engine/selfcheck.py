"""Verify, before the first step, what a run takes for granted: template, tokenizer, kernels, engines, gradients."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

from tqdm import tqdm

from data import Datum, sampling_seed
from engine.batches import Batch, micro_batches
from engine.delta_rule import delta_kernel, delta_kernel_errors
from engine.gate import CheckError, mean_mismatch, rows_alone, score
from engine.model import delta_layers
from engine.policy import Policy
from engine.sampler import Sampler, SamplingConfig

BASELINE_LIMIT = 0.2
"""Nats a token between the two engines on the base model: above it, something is wrong before training begins."""
PADDING_TOKENS = 400
"""Of padding beside the completions that show whether the trainer reads it."""
KERNEL_LIMIT = 0.03
"""Relative error of a gated-delta-net kernel in bfloat16, output and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What `self_check` verified: a sentence a check, and the baseline mismatch for the gate."""

    findings: dict[str, str]
    baseline_mismatch: float


def self_check(
    policy: Policy,
    sampler: Sampler,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    texts: Sequence[str],
    sampling: SamplingConfig,
    *,
    adapter: Path,
) -> SelfCheck:
    """Verify, in seconds, all that a run takes for granted; CheckError at the first that does not hold.

    Args:
        policy: at any step; its gradients are cleared.
        sampler: samples a few short completions of the base model, and then loads the policy's adapter.
        tokenizer: of both.
        prompts: a few of the run, as token ids; they are answered.
        texts: of the training data, which the tokenizer has to return as they are.
        sampling: the run's; its temperature, and its cap where that is below 64 tokens.
        adapter: a folder to write the adapter to.
    """
    import torch

    with torch.random.fork_rng():  # a resumed run must not draw otherwise for having been checked again
        findings = {
            "chat template": _check_chat_template(tokenizer, prompts[0]),
            "end token": _check_end_token(tokenizer, policy),
            "tokenizer": _check_round_trip(tokenizer, texts),
            "gated delta net": _check_delta_kernels(policy),
        }
        sampler.unload_adapter()
        data = _sample_from_base(sampler, prompts, sampling)
        baseline, findings["engines"] = _check_engines(policy, data)
        findings["padding"] = _check_padding(policy, data, baseline)
        findings["gradients"] = _check_gradients(policy, data)
        policy.save_adapter(adapter)
        matched = sampler.load_adapter(adapter, version=0)
        findings["adapter"] = f"the sampler matched all of its {matched} modules"
    return SelfCheck(findings=findings, baseline_mismatch=baseline)


def _together(data: Sequence[Datum]) -> Batch:
    (batch,) = micro_batches(data, max_tokens=sys.maxsize)
    return batch


def _check_chat_template(tokenizer: Any, encoded: Sequence[int]) -> str:
    message = [{"role": "user", "content": "1 + 1?"}]
    without, prompt = (
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=add, enable_thinking=False)
        for add in (False, True)
    )
    if encoded[-1] == tokenizer.eos_token_id:
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


def _check_round_trip(tokenizer: Any, texts: Sequence[str]) -> str:
    for text in texts:
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        back = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if normalize("NFC", back).split() != normalize("NFC", text).split():
            raise CheckError(f"the tokenizer turns a question into other text: {back[:80]!r} for {text[:80]!r}")
    return f"{len(texts)} questions come back from the tokenizer as they went in"


def _sample_from_base(sampler: Sampler, prompts: Sequence[list[int]], sampling: SamplingConfig) -> list[Datum]:
    """Return two short completions of each prompt, one with advantage 1 and one with -1."""
    short = replace(sampling, max_tokens=min(64, sampling.max_tokens))
    seeds = [[sampling_seed("check", index, member) for member in range(2)] for index in range(len(prompts))]
    completions = dict(sampler.stream(prompts, short, seeds))
    return [
        Datum(token_ids=prompt + c.token_ids, sampling_logprobs=c.logprobs, advantage=advantage)
        for index, prompt in enumerate(prompts)
        for c, advantage in zip(completions[index], (1.0, -1.0), strict=True)
    ]


def _check_engines(policy: Policy, data: Sequence[Datum]) -> tuple[float, str]:
    with policy.without_adapter():
        mismatch = mean_mismatch(policy, rows_alone(_together(data)))
    if not mismatch <= BASELINE_LIMIT:
        raise CheckError(
            f"sampler and trainer differ by {mismatch:.3g} nats a token on the base model already (limit "
            f"{BASELINE_LIMIT}); they do not hold the same model, or one of them computes it wrongly"
        )
    return mismatch, (
        f"sampler and trainer differ by {mismatch:.2g} nats a token on the base model (limit {BASELINE_LIMIT})"
    )


def _check_padding(policy: Policy, data: Sequence[Datum], baseline: float) -> str:
    """Compare completions alone and beside a long one: rounding differs then, by less than engines do."""
    first, count = data[0], data[0].num_completion_tokens
    prompt = (first.token_ids[:-count] * PADDING_TOKENS)[:PADDING_TOKENS]
    batch = _together([*data, replace(first, token_ids=prompt + first.token_ids[-count:])])
    shift, limit = float((score(policy, rows_alone(batch)) - score(policy, [batch])).abs().mean()), 2 * baseline
    if not shift <= limit:
        raise CheckError(
            f"padding and the rest of the batch move a token's log-probability by {shift:.3g} nats (limit "
            f"{limit:.2g}, twice the mismatch between the engines); the trainer reads what it should not"
        )
    return f"it and the rest of the batch move a log-probability by {shift:.2g} nats (limit {limit:.2g})"


def _check_gradients(policy: Policy, data: Sequence[Datum]) -> str:
    batch = _together(data)
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
