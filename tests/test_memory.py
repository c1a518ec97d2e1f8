"""What a run needs, against numbers worked by hand from the config."""

import json

import pytest

from bench.gpu import SHAPES
from engine.memory import CARDS_GB, describe, model_needs, plan_for
from engine.policy import PolicyConfig
from engine.sampler import SamplingConfig
from record.disk import bytes_on_disk


@pytest.fixture(scope="module")
def shaped_like_the_reported_model(tmp_path_factory):
    """Return a folder with the config of a model of Qwen3.5-4B's published shape, and nothing else."""
    from transformers import Qwen3_5TextConfig

    folder = tmp_path_factory.mktemp("shape")
    Qwen3_5TextConfig(tie_word_embeddings=True, **SHAPES["Qwen3.5-4B"]).save_pretrained(folder)
    return folder


def test_the_needs_are_those_worked_by_hand(shaped_like_the_reported_model):
    needs = model_needs(PolicyConfig(base_model=str(shaped_like_the_reported_model)))
    mlp = 3 * [2560 + 9216]
    attention = [2560 + 2 * 16 * 256, 2560 + 4 * 256, 2560 + 4 * 256, 16 * 256 + 2560]
    delta = [2560 + 2 * 16 * 128 + 32 * 128, 2560 + 32 * 128, 2560 + 32, 2560 + 32, 32 * 128 + 2560]
    assert needs.num_adapter_parameters == 32 * (8 * sum(mlp + attention) + 24 * sum(mlp + delta))
    assert needs.base_weights == pytest.approx(2 * 4.2e9, rel=0.01)
    assert needs.adapter == 28 * needs.num_adapter_parameters
    assert needs.token_cache == 8 * 2 * 4 * 256 * 2  # layers, keys and values, heads, bfloat16
    assert needs.sequence_states == 24 * (32 * 128 * 128 * 4 + 2 * (2 * 16 * 128 + 32 * 128) * 4)


def test_a_larger_card_never_gets_less_and_none_gets_more_than_it_has(shaped_like_the_reported_model):
    needs = model_needs(PolicyConfig(base_model=str(shaped_like_the_reported_model)))
    sampling = SamplingConfig()
    plans = [plan_for(needs, sampling, num_sequences=64, gpu_bytes=gb * 1e9) for gb in range(20, 200, 4)]
    fitting = [plan for plan in plans if plan]
    assert plans[0] is None
    assert plans[-1]
    assert all(plan is not None for plan in plans[plans.index(fitting[0]) :])
    for plan in fitting:
        training = needs.trainer_fixed + plan.micro_batch_tokens * needs.token_activations
        assert training + (0 if plan.sleep else plan.sampler_bytes) <= plan.gpu_bytes
        assert needs.trainer_fixed + plan.sampler_bytes <= plan.gpu_bytes
        assert plan.micro_batch_tokens >= sampling.max_prompt_tokens + sampling.max_tokens
    assert not fitting[-1].sleep


def test_the_plan_names_every_card(shaped_like_the_reported_model):
    needs = model_needs(PolicyConfig(base_model=str(shaped_like_the_reported_model)))
    text = describe(needs, SamplingConfig(), num_sequences=64, cards=CARDS_GB)
    for card in CARDS_GB:
        assert f"{card:>4} GB" in text
    assert "8.41 GB, once for the sampler, once for the trainer" in text


def test_models_without_recurrent_layers_have_a_plan_too(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    needs = model_needs(PolicyConfig(base_model=str(tmp_path), lora_rank=8))
    assert needs.sequence_states == 0
    assert needs.token_cache == 2 * 2 * 32 * 2


def test_bytes_on_disk_are_those_worked_by_hand():
    settings = {
        "max_steps": 10, "save_every": 2, "keep_checkpoints": None, "groups_per_step": 3, "save_rollouts": "all",
        "sampling": {"group_size": 4, "max_tokens": 5},
    }  # fmt: skip
    token = 4 + 8 + 8  # id, log-probability, text

    def num_bytes(after_step=0, **changes):
        return bytes_on_disk(settings | changes, 1000, after_step=after_step)

    assert num_bytes() == 6 * 16_000 + 10 * 60 * token  # five checkpoints, and one more for a moment
    assert num_bytes(after_step=7) == 3 * 16_000 + 3 * 60 * token
    assert num_bytes(after_step=10) == num_bytes(after_step=12) == 16_000
    assert num_bytes(save_every=4) == 4 * 16_000 + 10 * 60 * token  # the last step is saved too
    assert num_bytes(save_every=0) == 2 * 16_000 + 10 * 60 * token
    assert num_bytes(keep_checkpoints=2) == 3 * 16_000 + 10 * 60 * token
    assert num_bytes(keep_checkpoints=7) == num_bytes()
    assert num_bytes(save_rollouts="none") == 6 * 16_000
