"""The head's log-probabilities against full logits, in float64."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine.logprobs import CHUNK_LOGITS, head_logprobs


def full_logits(hidden, head, targets, temperature, softcap):
    logits = head(hidden)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.log_softmax(logits / temperature, -1)
    return distribution.gather(-1, targets[:, None]).squeeze(-1), -(distribution.exp() * distribution).sum(-1)


def frozen_head(*, bias=False, num_words=29):
    torch.manual_seed(1)
    return torch.nn.Linear(6, num_words, bias=bias, dtype=torch.float64).requires_grad_(False)


def adapted_head():
    model: Any = torch.nn.Sequential(frozen_head())
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["0"])).double()
    head = adapted.base_model.model[0]
    torch.nn.init.normal_(head.lora_B["default"].weight)
    return head


HEADS = {
    "frozen": frozen_head,
    "with a bias": lambda: frozen_head(bias=True),
    "with an adapter": adapted_head,
    "trainable": lambda: frozen_head().requires_grad_(True),
}


@pytest.mark.parametrize("chunk_logits", [7, 29, 99, 11 * 29, 2000])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.0, 0.8), (0.7, 30.0)])
@pytest.mark.parametrize("kind", HEADS)
def test_values_entropies_and_gradients_equal_those_of_full_logits(
    kind, temperature, softcap, chunk_logits, monkeypatch
):
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", chunk_logits)
    generator = torch.Generator().manual_seed(1)
    below = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    inputs = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(29, (11,), generator=generator)
    upstream = torch.randn(11, generator=generator, dtype=torch.float64)
    head = HEADS[kind]()
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    gradients, values = [], []
    for compute in (
        lambda h: full_logits(h, head, targets, temperature, softcap),
        lambda h: head_logprobs(h, head, targets, temperature=temperature, softcap=softcap),
    ):
        parameter = below.clone().requires_grad_()
        logprobs, entropies = compute(inputs @ parameter)
        gradients.append(torch.autograd.grad((logprobs * upstream).sum(), [parameter, *trained]))
        values.append((logprobs.detach(), entropies.detach()))
    assert bool(trained) == (kind in ("with an adapter", "trainable"))
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-9)


def test_a_confident_tokens_gradient_survives_bfloat16():
    """Nearly all of 1 - p is lost when p = 0.999 is rounded before it is subtracted."""
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=False).requires_grad_(False).bfloat16()
    hidden = (40 * head.weight[:8]).detach().requires_grad_()
    targets = torch.arange(8)
    logprobs, _ = head_logprobs(hidden, head, targets)
    assert logprobs.exp().max() > 0.998
    (found,) = torch.autograd.grad(logprobs.sum(), hidden)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact, _ = full_logits(exact_hidden, head.double(), targets, 1.0, None)
    (expected,) = torch.autograd.grad(exact.sum(), exact_hidden)
    errors = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < 0.05


def test_log_probabilities_are_float32_over_a_bfloat16_model():
    hidden = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropies = head_logprobs(hidden, frozen_head().bfloat16(), torch.arange(4))
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert not entropies.requires_grad
