"""The base model as the trainer holds it, and the LoRA adapter over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def load_base(base_model: str, revision: str | None, device: torch.device) -> tuple[Any, str]:
    """Return the frozen text model in bfloat16, and the prefix of its modules' names in the sampler.

    A vision-and-text checkpoint is trained as its text half, but served whole: other module names.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    checkpoint = AutoConfig.from_pretrained(base_model, revision=revision)
    wrapped = checkpoint.get_text_config() is not checkpoint
    with _float32_decays():
        base: Any = AutoModelForCausalLM.from_pretrained(base_model, revision=revision, dtype=torch.bfloat16)
    base.to(device)
    base.requires_grad_(False)
    _switch_dropout_off(base)
    return base, "base_model.model." + ("model.language_model." if wrapped else "model.")


@contextmanager
def _float32_decays() -> Iterator[None]:
    """While a model is loaded, keep A_log, the logarithm of a decay, in float32, as vLLM does.

    The attribute is private to transformers; checked with 5.19.
    """
    from transformers import PreTrainedModel

    before = PreTrainedModel._keep_in_fp32_modules_strict
    PreTrainedModel._keep_in_fp32_modules_strict = {"A_log"}
    try:
        yield
    finally:
        PreTrainedModel._keep_in_fp32_modules_strict = before


def _switch_dropout_off(model: Any) -> None:
    """Set the rate to 0 in every module, so that training computes what sampling does.

    Layers stay in training mode, without which transformers keeps every activation.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "dropout" in name or (name == "p" and "Dropout" in type(module).__name__)
            ):
                setattr(module, name, 0.0)


def add_adapter(base: Any, rank: int, alpha: int, *, revision: str | None, seed: int) -> Any:
    """Return the PEFT model with a fresh adapter (B = 0, A drawn from the seed) on every `adapted_layers`.

    The hook for LoRA layers of one's own is experimental in PEFT; checked with 0.21.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    from engine.lora import LoraLinear

    targets = sorted({name.rpartition(".")[2] for name in adapted_layers(base)})
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, revision=revision)
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    torch.manual_seed(seed)
    model: Any = get_peft_model(base, config)
    # PEFT keeps a set, whose order on disk would differ from process to process.
    model.peft_config["default"].target_modules = targets
    return model


def adapted_layers(model: Any) -> dict[str, Any]:
    """Return what the adapter is laid over, by name: every linear layer of a causal language model but its head."""
    import torch

    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}


def delta_layers(model: Any) -> list[Any]:
    """Return a model's or a block's gated-delta-net layers."""
    return [module for module in model.modules() if hasattr(module, "head_k_dim")]
