"""The layer with bfloat16 products against PEFT's own, which multiplies in the adapter's dtype."""

import copy

import peft
import pytest
import torch

from engine.lora import LoraLinear


@pytest.fixture
def both():
    """Return PEFT's layer and ours over the same linear layer, with the same adapter, whose B is not 0."""
    torch.manual_seed(0)
    base, layers = torch.nn.Sequential(torch.nn.Linear(24, 40)), []
    for layer in (None, LoraLinear):
        config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["0"])
        if layer:
            config._register_custom_module({torch.nn.Linear: layer})
        layers.append(peft.get_peft_model(copy.deepcopy(base), config).get_submodule("base_model.model.0"))
    theirs, ours = layers
    theirs.lora_B["default"].weight.data.normal_()
    ours.load_state_dict(theirs.state_dict())
    assert type(ours) is LoraLinear
    return theirs, ours


def output_and_gradients(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * torch.linspace(-1, 1, y.shape[-1])).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


def test_output_and_gradients_are_pefts(both):
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    theirs, ours = (output_and_gradients(layer.double(), x) for layer in both)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_over_a_bfloat16_base_the_products_are_rounded_and_the_adapter_is_not(both):
    for layer in both:
        layer.base_layer.bfloat16()
    x = torch.randn(2, 5, 24, dtype=torch.bfloat16)
    expected, found = (output_and_gradients(layer, x) for layer in both)
    assert found[0].dtype == torch.bfloat16
    assert [p.dtype for p in both[1].parameters() if p.requires_grad] == [torch.float32] * 2
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.005 * theirs.float().norm()


def test_without_its_adapter_the_layer_is_the_base(both):
    _, layer = both
    x = torch.randn(3, 24)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer.enable_adapters(True)
    assert not torch.equal(layer(x), layer.base_layer(x))
