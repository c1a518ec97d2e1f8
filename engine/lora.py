"""LoRA on a linear layer of a bfloat16 base: PEFT's, but for the arithmetic of its products.

What a reader could get wrong: the adapter itself is float32, so that no small update is lost. PEFT also multiplies
in float32, on copies of each layer's input and output; here both operands of each product are bfloat16, as the
sampler's are, and so is the adapter's gradient as it comes out of a micro-batch, before these are summed.
"""

from __future__ import annotations

import torch
from peft.tuners.lora import Linear
from torch import Tensor


class LoraLinear(Linear):
    """PEFT's layer with one adapter named "default", neither merged nor with dropout."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return W x + scaling B A x, [..., out], in the dtype of x [..., in]."""
        result = self.base_layer(x)
        if self.disable_adapters:
            return result
        a = self.lora_A["default"].get_parameter("weight").to(x.dtype)  # [rank, in]
        b = self.lora_B["default"].get_parameter("weight").to(x.dtype)  # [out, rank]
        shrunk = torch.nn.functional.linear(x, a)
        added = torch.addmm(result.view(-1, len(b)), shrunk.view(-1, len(a)), b.T, alpha=self.scaling["default"])
        return added.view_as(result)
