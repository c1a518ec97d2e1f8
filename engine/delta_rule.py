"""The gated delta rule in float32, and how far the kernel that a model calls is from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
