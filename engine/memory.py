"""What a run needs, from the model's config alone: memory on a GPU, and what to set so that it fits.

What a reader could get wrong: these are estimates, made before any weights are loaded; `memory_dry_run`, at the
start of a run, is the proof. GB are 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from data import Datum
from engine.batches import collate
from engine.gate import CheckError
from engine.model import adapted_layers, delta_layers
from engine.policy import CPU_MICRO_BATCH_TOKENS, Policy, PolicyConfig
from engine.sampler import Sampler, SamplingConfig
from loss import LossFunction

if TYPE_CHECKING:
    from torch import nn

CARDS_GB = (24, 48, 80, 141)
MAX_MICRO_BATCH_TOKENS = 65_536
ENGINE_BYTES, ASLEEP_BYTES = 4e9, 2e9
"""What vLLM takes beside weights and caches (activations, CUDA graphs), and what it keeps of that asleep."""
TRAINER_BYTES = 2e9
"""CUDA's context, libraries' buffers, and the logits of a chunk."""
USABLE = 0.95
"""Share of a card that can be planned with; allocators leave gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes, by what they are for."""

    base_weights: float
    """In bfloat16; sampler and trainer hold a copy each."""
    adapter: float
    """In float32 weights, gradient, Adam's two moments, and the weights before the last update; in float64 the sum
    of the gradients."""
    token_activations: float
    """A token in a micro-batch, with gradient checkpointing: every layer's input, and one layer in full."""
    sequence_states: float
    """A sequence in the sampler: the recurrent states of its linear-attention layers."""
    token_cache: float
    """A token in the sampler: keys and values of its attention layers."""
    num_adapter_parameters: int

    @property
    def trainer_fixed(self) -> float:
        """What the trainer holds all the time."""
        return self.base_weights + self.adapter + TRAINER_BYTES

    def sampler(self, num_sequences: int, length: int) -> float:
        """Return what the sampler holds for so many sequences of `length` tokens at once."""
        return self.base_weights + ENGINE_BYTES + num_sequences * (self.sequence_states + length * self.token_cache)


def model_needs(config: PolicyConfig) -> Needs:
    """Return what a base model and its adapter need, from a model without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = AutoConfig.from_pretrained(config.base_model, revision=config.revision)
    text: Any = checkpoint.get_text_config()
    with torch.device("meta"):
        base: Any = AutoModelForCausalLM.from_config(text)
    layers = list(base.get_decoder().layers)
    linears = adapted_layers(base).values()
    num_adapter_parameters = sum(config.lora_rank * (m.in_features + m.out_features) for m in linears)
    mixers = delta_layers(base)
    states = [m.num_v_heads * m.head_k_dim * m.head_v_dim * 4 for m in mixers]  # float32
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return Needs(
        base_weights=2 * sum(parameter.numel() for parameter in base.parameters()),
        adapter=(5 * 4 + 8) * num_adapter_parameters,
        token_activations=2 * text.hidden_size * len(layers)
        + max(_layer_activations(layer, config.lora_rank) for layer in layers),
        sequence_states=sum(states) + sum(2 * m.conv_dim * m.conv_kernel_size for m in mixers),
        token_cache=(len(layers) - len(mixers)) * 2 * 2 * num_kv_heads * head_dim,
        num_adapter_parameters=num_adapter_parameters,
    )


def _layer_activations(layer: nn.Module, rank: int) -> float:
    """Return bytes a token of one layer in full: linear layers' and LoRA's inputs and outputs in bfloat16.

    Twice, for what norms and activations make of these, in part in float32; and as much again for gradients.
    """
    import torch

    linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    values = sum(2 * 2 * (m.in_features + rank + m.out_features) for m in linears)
    states = sum(m.num_v_heads * m.head_k_dim * m.head_v_dim * 4 for m in delta_layers(layer))  # float32
    return 2 * (values + states / 64)  # a state a chunk of 64 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to set on one card."""

    gpu_bytes: float
    sampler_bytes: float
    sleep: bool
    """The sampler hands its memory over during the update."""
    micro_batch_tokens: int

    @property
    def sampler_memory_fraction(self) -> float:
        """The share of the card that vLLM may take."""
        return round(self.sampler_bytes / self.gpu_bytes, 2)


def plan_for(
    needs: Needs,
    sampling: SamplingConfig,
    *,
    num_sequences: int,
    gpu_bytes: float,
    free_bytes: float | None = None,
    sleep: bool | None = None,
    sampler_bytes: float | None = None,
) -> Plan | None:
    """Return what to set on a card with so many bytes, or None where the run does not fit.

    Preferred is to keep both engines in memory, with room for two longest sequences in a micro-batch, if need be by
    giving the sampler room for fewer sequences at a time; then to let the sampler sleep during the update.

    Args:
        needs: of the model.
        sampling: its lengths.
        num_sequences: that are sampled in a step.
        gpu_bytes: of the card.
        free_bytes: where others have some of the card, what is left.
        sleep: a fixed value; None lets the planner choose.
        sampler_bytes: likewise.
    """
    longest = sampling.max_prompt_tokens + sampling.max_tokens
    usable = USABLE * (gpu_bytes if free_bytes is None else free_bytes)
    wanted = [needs.sampler(max(1, round(share * num_sequences)), longest) for share in (1.0, 0.5, 0.25)]
    for asleep in (False, True) if sleep is None else (sleep,):
        for sampler in wanted if sampler_bytes is None else (sampler_bytes,):
            left = usable - needs.trainer_fixed - (ASLEEP_BYTES if asleep else sampler)
            tokens = min(int(left // needs.token_activations), MAX_MICRO_BATCH_TOKENS)
            required = (1 if asleep else 2) * longest
            if needs.trainer_fixed + sampler <= usable and tokens >= required:
                tokens = max(required, tokens // 1024 * 1024)
                return Plan(gpu_bytes=gpu_bytes, sampler_bytes=sampler, sleep=asleep, micro_batch_tokens=tokens)
    return None


def settings_here(
    needs: Needs,
    sampling: SamplingConfig,
    *,
    num_sequences: int,
    micro_batch_tokens: int | None,
    memory_fraction: float | None,
    sleep: Literal["auto", "on", "off"],
) -> tuple[int, float | None, Literal["on", "off"]]:
    """Return micro-batch tokens, vLLM's share of the GPU and whether the sampler sleeps during the update.

    Each is as given or, if left to the machine, what suits its GPU. ValueError when the run does not fit.
    """
    import torch

    if not torch.cuda.is_available():
        return micro_batch_tokens or CPU_MICRO_BATCH_TOKENS, memory_fraction, "off"
    free_bytes, gpu_bytes = map(float, torch.cuda.mem_get_info())
    plan = plan_for(
        needs,
        sampling,
        num_sequences=num_sequences,
        gpu_bytes=gpu_bytes,
        free_bytes=free_bytes,
        sleep=None if sleep == "auto" else sleep == "on",
        sampler_bytes=memory_fraction * gpu_bytes if memory_fraction else None,
    )
    if plan:
        micro_batch_tokens = micro_batch_tokens or plan.micro_batch_tokens
        memory_fraction = memory_fraction or plan.sampler_memory_fraction
        sleep = "on" if plan.sleep else "off"
    if not (memory_fraction and micro_batch_tokens):
        raise ValueError(
            f"by the plan, this run does not fit into the {free_bytes / 1e9:.0f} GB that are free (see --plan); to "
            "try all the same, give --sampler-memory-fraction and --micro-batch-tokens"
        )
    return micro_batch_tokens, memory_fraction, "on" if sleep == "on" else "off"


def describe(needs: Needs, sampling: SamplingConfig, *, num_sequences: int, cards: Sequence[float]) -> str:
    """Return the needs, and what would be set on cards of so many GB, as text for a terminal."""
    longest = sampling.max_prompt_tokens + sampling.max_tokens
    gb, mb = 1e9, 1e6
    rows = [
        ("base weights in bfloat16", needs.base_weights / gb, "GB, once for the sampler, once for the trainer"),
        ("adapter, gradient, Adam", needs.adapter / gb, f"GB, {needs.num_adapter_parameters:,} float32 parameters"),
        ("a token in training", needs.token_activations / mb, "MB, with gradient checkpointing"),
        ("a sequence's recurrent state", needs.sequence_states / mb, "MB in the sampler"),
        (f"its keys and values, {longest:,} tokens", longest * needs.token_cache / mb, "MB in the sampler"),
        (f"sampler with {num_sequences} sequences", needs.sampler(num_sequences, longest) / gb, "GB"),
    ]
    lines = [
        *(f"{name:36} {amount:8.2f} {unit}" for name, amount, unit in rows),
        "",
        f"{'card':>7} {'sampler fraction':>17} {'micro-batch tokens':>19}  {'sampler during the update'}",
    ]
    for card in cards:
        plan = plan_for(needs, sampling, num_sequences=num_sequences, gpu_bytes=card * 1e9)
        lines.append(
            f"{card:>4.0f} GB  does not fit: a smaller model, shorter completions or a lower rank would"
            if plan is None
            else f"{card:>4.0f} GB {plan.sampler_memory_fraction:>17.2f} {plan.micro_batch_tokens:>19,}  "
            f"{'sleeps' if plan.sleep else 'stays in memory'}"
        )
    return "\n".join(lines)


def memory_dry_run(
    policy: Policy,
    sampler: Sampler,
    words: list[int],
    sampling: SamplingConfig,
    loss: LossFunction,
    *,
    num_sequences: int,
) -> None:
    """Read the longest prompts, and form the gradients of the largest micro-batches that a run allows.

    What would run out of memory at some step does so here; weights and optimizer stay as they are. The sampler's
    caches need no dry run: vLLM takes them whole at its start. CheckError where one sequence alone is too much.

    Args:
        policy: trains.
        sampler: samples, and sleeps meanwhile if it may.
        words: some token ids, which are repeated.
        sampling: the lengths.
        loss: of any objective.
        num_sequences: that are sampled in a step.
    """
    import torch

    prompt = (words * sampling.max_prompt_tokens)[: sampling.max_prompt_tokens]

    def sequence(length: int) -> Datum:
        tokens = max(1, length - len(prompt))
        token_ids = prompt[: max(1, length - tokens)] + (words * tokens)[:tokens]
        return Datum(token_ids=token_ids, sampling_logprobs=[-1.0] * tokens, advantage=1.0)

    longest = sampling.max_prompt_tokens + sampling.max_tokens
    filling = policy.micro_batch_tokens // -(-policy.micro_batch_tokens // longest)  # a batch of these is full
    with torch.random.fork_rng():
        for _ in sampler.stream([prompt] * num_sequences, replace(sampling, max_tokens=1), [[0]] * num_sequences):
            pass
        sampler.sleep()
        for length in {longest, max(2, filling)}:
            count = min(num_sequences, max(1, policy.micro_batch_tokens // length))
            try:
                policy.dry_run(collate([sequence(length)] * count), loss)
            except torch.OutOfMemoryError as error:
                raise CheckError(
                    f"one sequence of {length} tokens does not fit into memory for training ({error}); lower "
                    "--max-tokens or --sampler-memory-fraction, or give --sampler-sleep on"
                ) from error
        sampler.wake()
