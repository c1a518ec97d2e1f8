"""Command lines of tiny runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

SUITE = Path(__file__).parent.parent


def tiny_flags(base: Path, **flags: Any) -> list[str]:
    """Return the flags of train.py for three small steps of a run `t`."""
    settings = {
        "base_model": base, "run_name": "t", "max_steps": 3, "groups_per_step": 3, "group_size": 4,
        "max_prompt_tokens": 64, "max_tokens": 16, "lora_rank": 8, "learning_rate": 1e-2, "save_every": 2,
        "swanlab_mode": "disabled",
    }  # fmt: skip
    return [
        word for name, value in (settings | flags).items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def run_train(*arguments: object, script: Path = SUITE / "train.py") -> subprocess.CompletedProcess[str]:
    """Run train.py with these arguments to its end."""
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
