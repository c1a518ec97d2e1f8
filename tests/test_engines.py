"""The two engines against each other, for real: vLLM samples from the adapter that PEFT trains."""

import json
import math
from typing import Any

import pytest
import torch

from data import training_data
from engine.batches import micro_batches
from engine.hub import load_tokenizer
from engine.policy import Policy, PolicyConfig
from engine.sampler import AdapterError, Sampler, SamplerConfig, SamplingConfig
from reward import Grader
from rollout import collect_groups, encode_prompt
from tiny import build_tokenizer, sums

SAMPLING = SamplingConfig(group_size=4, max_tokens=24)


def policy_with_large_b(base):
    policy = Policy(PolicyConfig(base_model=str(base), lora_rank=8, gradient_checkpointing=False), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if ".lora_B." in name:
                parameter += 0.04 * torch.randn(parameter.shape, generator=generator)
    return policy


def mean_mismatch(policy, groups):
    """Return the mean |policy logprob - sampling logprob| of a completion token, in nats."""
    total = count = 0
    for batch in micro_batches(training_data(groups, degenerate=True), max_tokens=10_000):
        with torch.no_grad():
            logprobs, _ = policy.token_logprobs(batch)
        total += (logprobs - batch.sampling_logprobs).abs()[batch.completion_mask].sum().item()
        count += batch.completion_mask.sum().item()
    return total / count


@pytest.mark.parametrize("fixture", ["tiny_base", "tiny_vision_base"])
def test_the_sampler_runs_the_policy(fixture, request, tmp_path):
    base = request.getfixturevalue(fixture)
    tokenizer = load_tokenizer(str(base))
    policy = policy_with_large_b(base)
    policy.save(tmp_path)
    config = SamplerConfig(base_model=str(base), lora_rank=8, max_model_len=128)
    with Grader() as grader, Sampler(config) as sampler:

        def collect():
            problems = list(enumerate(sums(seed=0)[:8]))
            return collect_groups(sampler.stream, grader, tokenizer, problems, SAMPLING, seed=0, step=1)

        from_base = collect()
        assert sampler.load_adapter(tmp_path / "vllm", version=1) == 31
        adapted, again = collect(), collect()

        assert mean_mismatch(policy, adapted) < 0.01
        assert mean_mismatch(policy, from_base) > 0.05  # what a sampler still on the base would look like

        completions = [completion for group in adapted for completion in group.completions]
        assert [completion for group in again for completion in group.completions] == completions
        assert len({tuple(completion.token_ids) for completion in completions}) > len(completions) // 2
        for completion in completions:
            ended = completion.token_ids[-1] == tokenizer.eos_token_id
            assert ended if completion.finish_reason == "stop" else len(completion.token_ids) == SAMPLING.max_tokens

        sampler.unload_adapter()
        assert [g.completions[0] for g in collect()] == [g.completions[0] for g in from_base]

        if fixture == "tiny_vision_base":
            with pytest.raises(AdapterError, match="matched 0 of the 31 modules"):
                sampler.load_adapter(tmp_path, version=2)  # PEFT's own names: vLLM alone would not say a word


def test_logprobs_are_of_the_tempered_distribution(tiny_base):
    tokenizer = load_tokenizer(str(tiny_base))
    prompt = encode_prompt(tokenizer, "What is 3 + 4?")
    policy = Policy(PolicyConfig(base_model=str(tiny_base), lora_rank=8), seed=0, temperature=0.5)
    with Sampler(SamplerConfig(base_model=str(tiny_base), max_model_len=128)) as sampler:
        sampling = SamplingConfig(temperature=0.5, max_tokens=8)
        ((_, completions),) = sampler.stream([prompt], sampling, [[1, 2, 3]])
    for completion in completions:
        input_ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logits = policy.model(input_ids=input_ids).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits / 0.5, -1).gather(-1, torch.tensor(completion.token_ids)[:, None])
        assert math.fsum(completion.logprobs) == pytest.approx(expected.sum().item(), abs=0.05)


def test_an_unchanged_llama_checkpoint_is_sampled_and_trained(tmp_path):
    """A stranger's model: another architecture, with its own chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    base = tmp_path / "llama"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=384,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.to(torch.bfloat16).save_pretrained(base)
    assert json.loads((base / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    policy = policy_with_large_b(base)
    policy.save_adapter(tmp_path / "adapter")
    with (
        Grader() as grader,
        Sampler(SamplerConfig(base_model=str(base), lora_rank=8, max_model_len=128)) as sampler,
    ):
        assert sampler.load_adapter(tmp_path / "adapter", version=1) == 14
        problems = list(enumerate(sums(seed=0)[:2]))
        groups = collect_groups(sampler.stream, grader, tokenizer, problems, SAMPLING, seed=0, step=1)
    assert mean_mismatch(policy, groups) < 0.01
