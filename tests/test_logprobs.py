"""The head's log-probabilities against full logits, in float64."""

import pytest
import torch

from logprobs import head_logprobs


def full_logits(hidden, weight, targets, temperature):
    distribution = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return distribution.gather(-1, targets[:, None]).squeeze(-1), -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 11, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_entropies_and_gradients_equal_those_of_full_logits(chunk_tokens, temperature):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(29, 6, generator=generator, dtype=torch.float64)
    below = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    inputs = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(29, (11,), generator=generator)
    upstream = torch.randn(11, generator=generator, dtype=torch.float64)
    gradients, values = [], []
    for compute in (
        lambda h: full_logits(h, weight, targets, temperature),
        lambda h: head_logprobs(h, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens),
    ):
        parameter = below.clone().requires_grad_()
        logprobs, entropies = compute(inputs @ parameter)
        (logprobs * upstream).sum().backward()
        gradients.append(parameter.grad)
        values.append((logprobs.detach(), entropies.detach()))
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-9)


def test_a_trainable_head_is_refused_because_its_gradient_would_be_lost():
    with pytest.raises(ValueError, match="trainable"):
        head_logprobs(torch.zeros(1, 2), torch.zeros(3, 2, requires_grad=True), torch.zeros(1, dtype=torch.long))


def test_log_probabilities_are_float32_over_a_bfloat16_model():
    hidden = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropies = head_logprobs(hidden, torch.randn(16, 8, dtype=torch.bfloat16), torch.arange(4))
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert not entropies.requires_grad
