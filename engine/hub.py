"""Base models and tokenizers, on the Hugging Face hub or in a local folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from data import sha256


def model_folder(base_model: str, revision: str | None = None) -> Path:
    """Return the local folder of a model, downloading it from the hub if need be.

    ValueError, in one sentence, when it is neither a model folder nor to be had from the hub.
    """
    folder = Path(base_model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{base_model} is a folder without a config.json, so it holds no model")
        return folder
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.jinja", "*.txt", "*.safetensors"]
        return Path(snapshot_download(base_model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # many kinds: bad name, no such model, gated, no network
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"the model {base_model} is neither a folder here nor to be had from the Hugging Face hub ({reason}); "
            "give --base-model a folder, or download it where there is a network"
        ) from error


def load_tokenizer(base_model: str, revision: str | None = None) -> Any:
    """Return the model's own tokenizer; ValueError when it has no chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_model, revision=revision)
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {base_model} has no chat template; use an instruction-tuned model")
    return tokenizer


def base_fingerprint(folder: Path) -> str:
    """Return a hash over the bytes of a base model's config, tokenizer, chat template and weights."""
    names = ("config", "generation_config", "tokenizer", "tokenizer_config")
    named = [*(folder / f"{name}.json" for name in names), folder / "chat_template.jinja"]
    files = [path for path in named if path.exists()]
    files += sorted(folder.glob("*.safetensors"))
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()[:16]
