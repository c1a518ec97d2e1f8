"""What every test shares: a tiny base model built once a session, and completions made by hand."""

import signal
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from data import Completion, Group, Problem, Score, write_problems
from engine.process import prepare_process
from loss import group_advantages
from tiny import build_base, sums

SUITE = Path(__file__).parent.parent

# What a shell starts in the background ignores Ctrl-C, and hands that down to the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time; `pytest --hypothesis-profile default` searches for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def prepared_process() -> None:
    """Prepare this process for engines, as a script does once."""
    prepare_process()


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """Return the folder of a tiny text-only Qwen3.5, taught for a few steps."""
    folder = tmp_path_factory.mktemp("models") / "base"
    build_base(folder, seed=0, steps=30)
    return folder


@pytest.fixture(scope="session")
def tiny_vision_base(tmp_path_factory, tiny_base) -> Path:
    """Return the folder of the same model as a vision-and-text checkpoint; the vision tower is random, unused."""
    from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("models") / "vision-base"
    text_model = Qwen3_5ForCausalLM.from_pretrained(tiny_base)
    vision_config = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 1,
        "out_hidden_size": text_model.config.hidden_size,
        "num_position_embeddings": 16,
    }
    text_config = text_model.config.to_dict()
    model: Any = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text_config, vision_config=vision_config, tie_word_embeddings=True)
    )
    model.model.language_model.load_state_dict(text_model.model.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(folder)
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
def pay(self, pairs, *, prompt=""):
    pairs = list(pairs)
    return [replace(s, reward=float(len(text) % 2 == 0)) for s, (text, _) in zip(grade(self, pairs), pairs)]
reward.Grader.score_many = pay
if __name__ == "__main__":
    train.main()
""")
    return script


@pytest.fixture
def in_folder(tmp_path, monkeypatch, tiny_base, tiny_problems):
    """Work in an empty folder that holds a data file and a base model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/train.jsonl").write_bytes(tiny_problems.read_bytes())
    return tmp_path


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
            completions=[
                Completion(
                    token_ids=tokens(length),
                    logprobs=(-torch.rand(length, generator=generator)).tolist(),
                    text="",
                    finish_reason="stop",
                )
                for length in lengths
            ],
            scores=[
                Score(reward=reward, answer="2" if reward else None, verdict="correct" if reward else "no_box")
                for reward in rewards
            ],
            advantages=group_advantages(rewards),
            policy_version=0,
        )

    return make


@pytest.fixture
def pad_on_the_left(monkeypatch):
    """Return a function that has a policy pad sequences on the left, as if their tokens came first."""

    def pad(policy) -> None:
        decoder = policy.model.get_base_model().get_decoder()
        right = decoder.forward

        def forward(input_ids, use_cache):
            padding = [len(row) - int(row.nonzero().max()) - 1 for row in input_ids]
            rolled = torch.stack([row.roll(n) for row, n in zip(input_ids, padding, strict=True)])
            output = right(input_ids=rolled, use_cache=use_cache)
            states = output.last_hidden_state
            output.last_hidden_state = torch.stack(
                [row.roll(-n, 0) for row, n in zip(states, padding, strict=True)]
            )
            return output

        monkeypatch.setattr(decoder, "forward", forward)

    return pad
