"""What every test shares: a tiny base model built once a session, and completions made by hand."""

import signal
from pathlib import Path

import hypothesis
import pytest
import torch

from data import Problem, write_problems
from reward import Score
from rollout import Completion, Group, Rollout, group_advantages
from tiny import build_base, sums

SUITE = Path(__file__).parent.parent

# What a shell starts in the background ignores Ctrl-C, and hands that down to the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time; `pytest --hypothesis-profile default` searches for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """Return the folder of a tiny text-only Qwen3.5, taught for a few steps."""
    folder = tmp_path_factory.mktemp("models") / "base"
    build_base(folder, seed=0, steps=30)
    return folder


@pytest.fixture(scope="session")
def tiny_vision_base(tmp_path_factory) -> Path:
    """Return the folder of the same kind of model as a vision-and-text checkpoint."""
    folder = tmp_path_factory.mktemp("models") / "vision-base"
    build_base(folder, seed=0, steps=30, vision=True)
    return folder


@pytest.fixture(scope="session")
def tiny_problems(tmp_path_factory) -> Path:
    """Return a file of small sums."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    write_problems(path, sums(seed=0))
    return path


@pytest.fixture(scope="session")
def paid_train(tmp_path_factory) -> Path:
    """Return a script that is train.py, but pays for an even number of characters.

    A base that was taught for seconds gets no sum right, and a run in which no weight moves would prove nothing.
    """
    script = tmp_path_factory.mktemp("scripts") / "train.py"
    script.write_text(f"""
import sys
from dataclasses import replace
sys.path.insert(0, {str(SUITE)!r})
import reward, train
grade = reward.Grader.score_many
def pay(self, pairs):
    pairs = list(pairs)
    return [replace(s, reward=float(len(text) % 2 == 0)) for s, (text, _) in zip(grade(self, pairs), pairs)]
reward.Grader.score_many = pay
if __name__ == "__main__":
    train.main()
""")
    return script


@pytest.fixture
def make_group():
    """Return a function that makes a group by hand, with arbitrary tokens."""

    def make(rewards, *, prompt_length=5, lengths=None, seed=0) -> Group:
        generator = torch.Generator().manual_seed(seed)

        def tokens(count):
            return torch.randint(3, 300, (count,), generator=generator).tolist()

        lengths = lengths or [3 + 2 * member for member in range(len(rewards))]
        return Group(
            problem=Problem(id="p", question="What is 1 + 1?", answer="2"),
            prompt_ids=tokens(prompt_length),
            rollouts=[
                Rollout(
                    completion=Completion(
                        token_ids=tokens(length),
                        logprobs=(-torch.rand(length, generator=generator)).tolist(),
                        text="",
                        finish_reason="stop",
                    ),
                    score=Score(
                        reward=reward, answer="2" if reward else None, verdict="correct" if reward else "no_box"
                    ),
                    advantage=advantage,
                )
                for reward, length, advantage in zip(rewards, lengths, group_advantages(rewards), strict=True)
            ],
            policy_version=0,
        )

    return make
