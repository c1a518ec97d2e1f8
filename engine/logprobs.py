"""Token log-probabilities of a language-model head, without ever holding the logits.

With V words and N tokens the logits are N x V numbers, and autograd keeps several copies: 4,096 tokens of
Qwen3.5 (248,320 words) are 4 GB each in float32. But where the head is frozen, the gradient of a token's
log-probability with respect to its hidden state,

    d logp_t / d h_t = (W[y_t] - sum_v p_t(v) W[v]) / temperature,

can be formed chunk by chunk in the forward pass and only scaled in the backward pass. A head that is not a
frozen linear layer (one with an adapter, say) is recomputed chunk by chunk in the backward pass instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = {"cpu": 8_000_000, "cuda": 64_000_000}
"""Logits that exist at one time; 32 and 257 tokens of 248,320 words. On a CPU buffers of more than 32 MB are taken
from the system afresh each time, which costs more than the arithmetic; a GPU needs rows to be busy."""


class _FrozenHeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(targets), dtype=compute_dtype, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            words = targets[rows, None]
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)  # [chunk, V]
            slopes = None
            if softcap is not None:
                logits = logits.to(compute_dtype).div_(softcap).tanh_()
                slopes = 1 - logits.square() if gradient is not None else None
                logits.mul_(softcap)
            if temperature != 1:
                logits = logits.to(compute_dtype).div_(temperature)
            distribution = logits.log_softmax(-1, dtype=compute_dtype)
            del logits
            logprobs[rows] = distribution.gather(-1, words).squeeze(-1)
            probabilities = distribution.exp()
            entropies[rows] = -torch.linalg.vecdot(probabilities, distribution)
            if gradient is not None:
                # 1 - p of the chosen word before any rounding to bfloat16, to which 0.998 and 1 are the same.
                slope = probabilities.neg_().scatter_add_(-1, words, torch.ones_like(words, dtype=compute_dtype))
                slope = slope if slopes is None else slope.mul_(slopes)
                gradient[rows] = (slope.to(weight.dtype) @ weight).div_(temperature)  # [chunk, H]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0][:, None].to(gradient.dtype), *[None] * 6


def head_logprobs(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N] of each target and the entropy [N] at its position, both in nats.

    Args:
        hidden: final hidden states [N, H]; the log-probabilities carry a gradient back to them.
        head: hidden states to logits [N, V], with V as its `out_features`; where its parameters are trainable, they
            receive their gradient too.
        targets: the words [N] that follow the hidden states.
        temperature: the logits are divided by it, as the sampler does.
        softcap: logits are bent to softcap x tanh(logits / softcap) first, as some models do.

    The entropies carry no gradient.
    """
    chunk_tokens = max(1, CHUNK_LOGITS[hidden.device.type] // head.out_features)
    frozen = type(head) is torch.nn.Linear and not any(p.requires_grad for p in head.parameters())
    if frozen:
        return _FrozenHeadLogprobs.apply(  # pyright: ignore[reportReturnType]
            hidden, head.weight, head.bias, targets, temperature, softcap, chunk_tokens
        )
    parts = [
        checkpoint(_chunk_logprobs, states, head, words, temperature, softcap, use_reentrant=False)
        for states, words in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies).detach()


def _chunk_logprobs(
    hidden: Tensor, head: Any, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    distribution = (logits / temperature).log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets[:, None]).squeeze(-1), entropies
