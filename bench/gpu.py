"""One prepared script for a machine with a GPU, under 8 minutes: does the update fit, how fast is it, is it right?

A randomly initialised model of Qwen3.5-4B's published shape goes through the suite's own Policy: log-probabilities
and gradient of 64 sequences with completions of up to 4,096 tokens. Printed are seconds, tokens a second, the share
of the card's bfloat16 peak, peak memory beside the plan's, and the error of the gated-delta-net kernels against a
float32 reference. Without a GPU it runs a tiny shape and says which numbers are missing.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.update import take_steps
from data import Completion, Group, Problem, Score, training_data
from engine.delta_rule import delta_kernel, delta_kernel_errors
from engine.memory import model_needs, plan_for
from engine.model import delta_layers
from engine.policy import Policy, PolicyConfig
from engine.process import prepare_process
from engine.sampler import SamplingConfig
from loss import LossConfig, group_advantages
from tiny import build_tokenizer

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bfloat16
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3.5-4B": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248_320,
    },
    "100 M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_768,
        "linear_num_key_heads": 12,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 384,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}


def build(folder: Path, shape: str) -> None:
    """Write a randomly initialised model to `folder`, straight in bfloat16 on the device."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    tokenizer = build_tokenizer()
    config = Qwen3_5TextConfig(tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, **SHAPES[shape])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen3_5ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rollout_like_the_chapters(max_tokens: int, *, prompt_tokens: int) -> list[Group]:
    """Return 8 groups of 8 completions whose lengths average about 60 % of the cap, as in the reported run."""
    rng = random.Random(0)
    groups = []
    for number in range(8):
        rewards = [float(rng.random() < 0.5) for _ in range(7)] + [1.0]
        rewards[0] = 0.0
        lengths = [max(4, min(max_tokens, round(max_tokens * rng.lognormvariate(-0.7, 0.6)))) for _ in rewards]
        completions = [
            Completion(
                token_ids=[rng.randrange(3, 300) for _ in range(length)],
                logprobs=[-1.0] * length,
                text="",
                finish_reason="stop",
            )
            for length in lengths
        ]
        groups.append(
            Group(
                problem=Problem(id=str(number), question="?", answer="0"),
                prompt_ids=[rng.randrange(3, 300) for _ in range(prompt_tokens)],
                completions=completions,
                scores=[Score(reward=reward, answer=None, verdict="no_box") for reward in rewards],
                advantages=group_advantages(rewards),
                policy_version=0,
            )
        )
    return groups


def main(output: Path | None = None) -> None:
    """Measure and print.

    Args:
        output: also write the numbers to this file, as JSON.
    """
    prepare_process()
    on_gpu = torch.cuda.is_available()
    shape, max_tokens, prompt_tokens = ("Qwen3.5-4B", 4096, 200) if on_gpu else ("tiny", 128, 16)
    sampling = SamplingConfig(max_tokens=max_tokens, max_prompt_tokens=2048 if on_gpu else 64)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), shape)
        config = PolicyConfig(base_model=folder)
        needs = model_needs(config)
        gpu_bytes = float(torch.cuda.get_device_properties(0).total_memory) if on_gpu else 80e9
        plan = plan_for(needs, sampling, num_sequences=64, gpu_bytes=gpu_bytes)
        budget = plan.micro_batch_tokens if plan and on_gpu else 16_384
        policy = Policy(PolicyConfig(base_model=folder, micro_batch_tokens=budget), seed=0)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "shape": shape,
        "micro_batch_tokens": budget,
    }
    layer, *_ = delta_layers(policy.model)
    errors = delta_kernel_errors(delta_kernel(layer), layer, policy.device)
    found |= {f"delta rule, error of {name}": error for name, error in errors.items()}
    groups = rollout_like_the_chapters(max_tokens, prompt_tokens=prompt_tokens)
    tokens = sum(len(datum.token_ids) for datum in training_data(groups, degenerate=True))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for name in ("first update", "second update"):
        started = time.perf_counter()
        (step,) = take_steps(policy, groups, LossConfig(), max_tokens=max_tokens)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        found[f"{name}, seconds"] = seconds
    # Two FLOPs a parameter and token forward, again for the recomputation, and again for the gradient of the
    # activations; the frozen weights need none of their own.
    flops = 3 * 2 * tokens * needs.base_weights / 2
    peak = next((value for name, value in PEAK_FLOPS.items() if name in found["device"]), None)
    found |= {
        "sequences": 64,
        "tokens": tokens,
        "padding": step.padding_fraction,
        "tokens a second": tokens / seconds,
        "share of peak FLOPs": flops / seconds / peak if peak else None,
        "peak memory, GB": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
        "planned memory, GB": (needs.trainer_fixed + budget * needs.token_activations) / 1e9,
    }
    for name, value in found.items():
        shown = "missing: needs a GPU" if value is None else f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:40} {shown}")
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
