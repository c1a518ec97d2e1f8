"""Milliseconds to grade 64 ordinary completions of 4,096 tokens, beside math-verify on the last box.

Both run in this process, on one core: an ordinary answer never reaches a worker. The naive scheme is the common
one: look backwards for `\\boxed{`, count braces, parse, verify, and call every exception wrong. Best of several
rounds, as the machine may be shared. Run it from anywhere: `python bench/reward.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not this folder, where `reward` is this file

from reward import Grader  # noqa: E402

NUM_COMPLETIONS = 64
NUM_ROUNDS = 7
NUM_CHARS = 4_096 * 3  # mathematics runs to about three characters a token
STEP = r"""Let $x_{%d} = \frac{a_{%d}}{2^{k}}$, so that $\sum_{i=1}^{n} x_i^{2} \le \left(\frac{3}{4}\right)^{n}$.
Then $a_{%d} \equiv %d \pmod{\{7, 11\}}$, and we continue with the next case, **carefully**.

"""
SPELLINGS = [r"%s", r"%s", r"%s", r"\textbf{%s}", r"x = %s", r"%s^\circ", r"%s \text{ ways}", r"\frac{%s}{1}"]


def completions() -> list[tuple[str, str]]:
    """Return (completion, reference) pairs, every fourth of them wrong."""
    pairs = []
    for index in range(NUM_COMPLETIONS):
        steps = "".join(STEP % (i, i + index, i, index) for i in range(NUM_CHARS // len(STEP) + 1))
        answer = SPELLINGS[index % len(SPELLINGS)] % (100 + index)
        text = steps[:NUM_CHARS] + rf"$ The answer is $\boxed{{{answer}}}$."
        pairs.append((text, str(100 + index + (index % 4 == 0))))
    return pairs


def naive(pairs: list[tuple[str, str]]) -> list[float]:
    """Return the rewards of the common scheme."""
    from math_verify import parse, verify

    rewards = []
    for text, reference in pairs:
        start = text.rfind(r"\boxed{")
        depth, end = 1, start + 7
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        try:
            rewards.append(float(verify(parse(f"${reference}$"), parse(text[start:end]))))
        except Exception:
            rewards.append(0.0)
    return rewards


def best_milliseconds(grade: Callable[[list[tuple[str, str]]], list[float]], pairs: list[tuple[str, str]]) -> float:
    """Return the CPU time of the fastest round, after one that warms caches up."""
    seconds = []
    for _ in range(NUM_ROUNDS + 1):
        start = time.process_time()
        grade(pairs)
        seconds.append(time.process_time() - start)
    return 1000 * min(seconds[1:])


def main() -> None:
    """Print the table."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pairs = completions()
    with Grader() as grader:
        graders: dict[str, Callable[[list[tuple[str, str]]], list[float]]] = {
            "reward.py": lambda pairs: [score.reward for score in grader.score_many(pairs)],
            "math-verify on the last box": naive,
        }
        expected = [float(index % 4 != 0) for index in range(NUM_COMPLETIONS)]
        heading = f"{NUM_COMPLETIONS} completions of {len(pairs[0][0]):,} characters"
        print(f"{heading:38}      ms   µs each   right verdicts")
        for name, grade in graders.items():
            right = sum(got == want for got, want in zip(grade(pairs), expected, strict=True))
            milliseconds = best_milliseconds(grade, pairs)
            each = 1000 * milliseconds / NUM_COMPLETIONS
            print(f"{name:38}{milliseconds:8.1f}{each:10.0f}{right:11} of {NUM_COMPLETIONS}")


if __name__ == "__main__":
    main()
