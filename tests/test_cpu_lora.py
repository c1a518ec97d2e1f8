"""One matrix product an adapter against vLLM's own gather of the adapter a token."""

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from cpu_lora import OneAdapterPunica


def test_the_product_equals_vllms_own_path_on_packed_slices_in_prefill_and_decode():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    widths = (64, 16, 16)
    a = tuple(normal(1, 1, 8, 32) for _ in widths)
    b = tuple(normal(1, 1, width, 8) for width in widths)
    x, y = normal(12, 32), normal(12, sum(widths))
    for is_prefill in (True, False):
        results = []
        for wrapper_class in (PunicaWrapperCPU, OneAdapterPunica):
            wrapper = wrapper_class(max_num_batched_tokens=64, max_batches=16, device="cpu")
            mapping = LoRAMapping(index_mapping=(1,) * 12, prompt_mapping=(1,) * 3, is_prefill=is_prefill)
            wrapper.update_metadata(mapping, [1], 1, 100)
            result = y.clone()
            wrapper.add_lora_linear(result, x, a, b, 0.5, widths)
            results.append(result)
        assert not torch.equal(results[0], y)
        torch.testing.assert_close(results[1], results[0], rtol=2**-7, atol=2**-7)
