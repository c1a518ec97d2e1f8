"""LoRA in vLLM on a CPU, for one adapter: a matrix product where vLLM gathers a copy of the adapter a token.

What a reader could get wrong: it is the same sum, rounded less often, by the trainer's own two products (lora.py),
and GPUs never come here. For 180 completions of the miniature it is more than five times as fast.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapterPunica(PunicaWrapperCPU):
    """For engines with `max_loras=1` whose requests all name that adapter, or all none."""

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Add scale x A^T B^T to the slices of y.

        Args:
            y: [N, sum of output_slices], changed in place.
            x: [N, in].
            lora_a_stacked: one [1, 1, rank, in] a slice.
            lora_b_stacked: one [1, 1, width, rank] a slice.
            scale: of the adapter.
            output_slices: their widths.
            kwargs: unused.
        """
        if self.no_lora:  # none of these requests names the adapter, whose weights may still be there
            return
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            shrunk = x @ a[0, 0].T  # [N, rank]
            y[:, start : start + width].addmm_(shrunk, b[0, 0].T, alpha=scale)
            start += width

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Add scale x A^T B^T to the logits y [N, V]; vLLM does so for heads without an adapter too, as zeros.

        Args:
            y: changed in place.
            x: [N, in].
            lora_a_stacked: [1, 1, rank, in].
            lora_b_stacked: [1, 1, V, rank], with more or fewer words where either is padded.
            scale: of the adapter.
            kwargs: unused.
        """
        num_words = min(y.shape[-1], lora_b_stacked.shape[-2])
        self.add_lora_linear(y, x, (lora_a_stacked,), (lora_b_stacked[:, :, :num_words],), scale, (num_words,))
