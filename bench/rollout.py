"""Milliseconds to turn vLLM's results for 64 completions of 4,096 tokens into `Completion` records, by part.

The results are built here as vLLM's engine builds them (flat log-probabilities of the sampled token alone), so
that nothing has to be sampled.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not this folder, where `rollout` is this file

from data import Completion  # noqa: E402
from tiny import build_tokenizer  # noqa: E402

NUM_COMPLETIONS, NUM_TOKENS, NUM_ROUNDS = 64, 4096, 5


def main() -> None:
    """Print a small table; best of several rounds."""
    from vllm.logprobs import FlatLogprobs

    rng = random.Random(0)
    results = []
    for _ in range(NUM_COMPLETIONS):
        flat, token_ids = FlatLogprobs(), [rng.randrange(3, 300) for _ in range(NUM_TOKENS)]
        for token_id in token_ids:
            flat.append_fast([token_id], [-rng.random()], [1], [None])  # pyright: ignore[reportArgumentType]
        results.append((token_ids, flat))
    tokenizer = build_tokenizer()

    def read() -> list[Completion]:
        return [
            Completion(token_ids=list(ids), logprobs=list(flat.logprobs), text="", finish_reason="length")
            for ids, flat in results
        ]

    def decode() -> list[str]:
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in results]

    for name, work in {"read ids and log-probabilities": read, "decode the text": decode}.items():
        seconds = []
        for _ in range(NUM_ROUNDS):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        print(f"{name:32} {1000 * min(seconds):8.1f} ms for {NUM_COMPLETIONS} x {NUM_TOKENS:,} tokens")


if __name__ == "__main__":
    main()
