"""The objectives against those of the TRL library (a development dependency, used only here).

`GRPOTrainer._compute_loss` is called as it is, on a stand-in that supplies the settings and the log-probabilities.
TRL divides by the sequences of its batch, so the denominators are set to those of the batch.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from loss import PRESETS, Denominators, policy_loss

PAIRS = {
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "grpo": {"loss_type": "grpo", "importance_sampling_level": "token"},
    "dr-grpo": {"loss_type": "dr_grpo", "importance_sampling_level": "token"},
    "dapo": {"loss_type": "dapo", "importance_sampling_level": "token"},
}


def trl_loss(settings, objective, policy_logprobs, old_logprobs, mask, advantages, max_tokens):
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = SimpleNamespace(
        **settings,
        model=SimpleNamespace(training=True),
        epsilon_low=objective.epsilon_low,
        epsilon_high=objective.epsilon_high,
        max_completion_length=max_tokens,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (
            policy_logprobs,
            torch.zeros_like(policy_logprobs),
            None,
        ),
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **kwargs: x),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_equal_trls_where_the_definitions_coincide(name):
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(6, 9, generator=generator, dtype=torch.float64)
    old = policy + 0.2 * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [4], [1], [7], [2], [6]])
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    denominators = Denominators(num_sequences=6, num_tokens=int(mask.sum()), max_tokens=9)
    losses, gradients = [], []
    for compute in (
        lambda logprobs: (
            policy_loss(logprobs, old, mask, advantages, objective=PRESETS[name], denominators=denominators).loss
        ),
        lambda logprobs: trl_loss(PAIRS[name], PRESETS[name], logprobs, old, mask, advantages, 9),
    ):
        logprobs = policy.clone().requires_grad_()
        losses.append(compute(logprobs))
        gradients.append(torch.autograd.grad(losses[-1], logprobs)[0])
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)
