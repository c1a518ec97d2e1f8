"""One matrix product an adapter against vLLM's own gather of the adapter a token."""

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from engine.cpu_lora import OneAdapterPunica


def results_of_both(add, y, *, num_tokens, is_prefill):
    """Return what `add` makes of a copy of y, by vLLM's wrapper and by ours."""
    results = []
    for wrapper_class in (PunicaWrapperCPU, OneAdapterPunica):
        wrapper = wrapper_class(max_num_batched_tokens=64, max_batches=16, device="cpu")
        mapping = LoRAMapping(
            index_mapping=(1,) * num_tokens, prompt_mapping=(1,) * num_tokens, is_prefill=is_prefill
        )
        wrapper.update_metadata(mapping, [1], 1, 100)
        result = y.clone()
        add(wrapper, result)
        results.append(result)
    return results


def test_the_product_equals_vllms_own_path_on_packed_slices_in_prefill_and_decode():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    widths = (64, 16, 16)
    a = tuple(normal(1, 1, 8, 32) for _ in widths)
    b = tuple(normal(1, 1, width, 8) for width in widths)
    x, y = normal(12, 32), normal(12, sum(widths))
    for is_prefill in (True, False):
        theirs, ours = results_of_both(
            lambda wrapper, result: wrapper.add_lora_linear(result, x, a, b, 0.5, widths),
            y, num_tokens=12, is_prefill=is_prefill,
        )  # fmt: skip
        assert not torch.equal(theirs, y)
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("num_words", [100, 128])
def test_an_adapter_on_the_head_adds_to_the_logits_as_vllms_own_path_does(num_words):
    """Whether the adapter has as many words as the logits, or more for padding."""
    generator = torch.Generator().manual_seed(0)
    a, b, x, y = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16)
        for shape in ((1, 1, 8, 32), (1, 1, 128, 8), (12, 32), (12, num_words))
    )
    theirs, ours = results_of_both(
        lambda wrapper, result: wrapper.add_lora_logits(result, x, a, b, 0.5), y, num_tokens=12, is_prefill=False
    )
    assert not torch.equal(theirs, y)
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)
