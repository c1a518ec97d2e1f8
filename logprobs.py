"""Token log-probabilities of a frozen language-model head, without ever holding the logits.

With V words and N tokens the logits are N x V numbers, and autograd keeps several copies: 4,096 tokens of
Qwen3.5 (248,320 words) are 4 GB each in float32. But the head is frozen, so the gradient of a token's
log-probability with respect to its hidden state,

    d logp_t / d h_t = (W[y_t] - sum_v p_t(v) W[v]) / temperature,

can be formed chunk by chunk in the forward pass and only scaled in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(targets), dtype=compute_dtype, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            words = targets[rows, None]
            logits = (hidden[rows] @ weight.T).to(compute_dtype).div_(temperature)  # [chunk, V]
            log_normalizer = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(-1, words).squeeze(-1) - log_normalizer
            probabilities = (logits - log_normalizer[:, None]).exp_()
            entropies[rows] = log_normalizer - torch.linalg.vecdot(probabilities, logits)
            if gradient is not None:
                expected = probabilities.to(weight.dtype) @ weight  # [chunk, H]
                gradient[rows] = (weight[targets[rows]] - expected).div_(temperature)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0][:, None].to(gradient.dtype), None, None, None, None


def head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 256
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N] of each target and the entropy [N] at its position, both in nats.

    Args:
        hidden: final hidden states [N, H]; the log-probabilities carry a gradient back to them.
        weight: the frozen head [V, H]; it receives no gradient, and a trainable one is refused.
        targets: the words [N] that follow the hidden states.
        temperature: the logits are divided by it, as the sampler does.
        chunk_tokens: rows whose logits exist at one time.

    The entropies carry no gradient.
    """
    if weight.requires_grad:
        raise ValueError("the head is trainable; its gradient would be lost here")
    return _HeadLogprobs.apply(hidden, weight, targets, temperature, chunk_tokens)  # pyright: ignore[reportReturnType]
