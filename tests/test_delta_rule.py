"""The reference for gated-delta-net kernels."""

import pytest
import torch

from engine.delta_rule import delta_rule


def test_the_reference_rule_equals_its_definition_on_one_head_of_size_one():
    """With unit keys and queries of size 1: S <- e^g S + beta (v - e^g S), output S."""
    value, g, beta = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.0, -0.5, -1.0]), torch.tensor([0.5, 0.25, 1.0])
    ones = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    output = delta_rule(
        1e6 * ones,
        1e6 * ones,
        value.double().view(1, 3, 1, 1),
        g.double().view(1, 3, 1),
        beta.double().view(1, 3, 1),
    )
    state, expected = 0.0, []
    for v, decay, write in zip(value.tolist(), g.double().exp().tolist(), beta.tolist(), strict=True):
        state = decay * state + write * (v - decay * state)
        expected.append(state)
    assert output.flatten().tolist() == pytest.approx(expected, abs=1e-6)
