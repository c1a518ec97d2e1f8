"""LoRA on a linear layer of a bfloat16 base: PEFT's, but for the arithmetic of its products.

What a reader could get wrong: the adapter itself is float32, so that no small update is lost. PEFT also multiplies
in float32, on copies of each layer's input and output; here the products are the base's bfloat16, as the sampler's
are, and the last one is added to the base's as it is made.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor


class LoraLinear(lora.Linear):
    """PEFT's layer with one adapter named "default", neither merged nor with dropout."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return W x + scaling B A x, [..., out], in the dtype of x [..., in]."""
        result = self.base_layer(x)
        if self.disable_adapters:
            return result
        a, b = (adapter["default"].get_parameter("weight").to(x.dtype) for adapter in (self.lora_A, self.lora_B))
        shrunk = torch.nn.functional.linear(x, a)  # [..., rank]
        added = torch.addmm(result.flatten(0, -2), shrunk.flatten(0, -2), b.T, alpha=self.scaling["default"])
        return added.view_as(result)
