"""Peak memory and time of the head's log-probabilities, forward and backward, beside full logits.

Hidden size 256, 248,320 words, bfloat16. Each measurement is a process of its own, whose peak of resident memory
is compared with that before the computation; the time is the best of several rounds after that.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.logprobs import head_logprobs

Kind = Literal["full logits", "in chunks"]
HIDDEN, WORDS, ROUNDS = 256, 248_320, 3


def measure(kind: Kind, num_tokens: int) -> tuple[float, float]:
    """Return peak memory over the baseline in GB, and seconds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (kind, num_tokens))


def _measure(kind: Kind, num_tokens: int) -> tuple[float, float]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, WORDS, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(WORDS, (num_tokens,))

    def compute() -> None:
        if kind == "in chunks":
            logprobs, _ = head_logprobs(hidden, head, targets)
        else:
            logits = head(hidden).float()
            logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])
        logprobs.sum().backward()

    head_logprobs(hidden[:2], head, targets[:2])[0].sum().backward()  # libraries' own buffers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - started)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6, min(seconds)


def main() -> None:
    """Print a small table."""
    rows: list[tuple[Kind, int]] = [("full logits", 1024), ("in chunks", 1024), ("in chunks", 4096)]
    print(f"{'':12} {'tokens':>6} {'peak over baseline':>19} {'time':>8} {'of full logits':>15}")
    full = None
    for kind, num_tokens in rows:
        gigabytes, seconds = measure(kind, num_tokens)
        full = full or seconds
        share = f"{seconds / full:.2f}" if num_tokens == 1024 else ""
        print(f"{kind:12} {num_tokens:>6} {gigabytes:>16.2f} GB {seconds:>6.2f} s {share:>15}")


if __name__ == "__main__":
    tyro.cli(main)
