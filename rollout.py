"""Problems in, scored groups of completions with advantages out.

Letters: P prompt tokens, G completions in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from data import Completion, Group, Problem, sampling_seed
from engine.sampler import SamplingConfig
from loss import group_advantages
from reward import Grader

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def encode_prompt(tokenizer: Any, question: str) -> list[int]:
    """Return the token ids [P] of a question as the chapter asks it, ready for the model to answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def fitting_problems(problems: Sequence[Problem], tokenizer: Any, max_prompt_tokens: int) -> list[Problem]:
    """Return the problems whose prompt fits; ValueError when none does."""
    fitting = [p for p in problems if len(encode_prompt(tokenizer, p.question)) <= max_prompt_tokens]
    if not fitting:
        raise ValueError(f"no question fits into max_prompt_tokens = {max_prompt_tokens}; raise it")
    return fitting


Sample = Callable[
    [Sequence[list[int]], SamplingConfig, Sequence[Sequence[int]]], Iterable[tuple[int, list[Completion]]]
]
"""(prompts, config, seeds) -> (prompt index, its completions), in any order; `Sampler.stream` is the real one."""


def collect_groups(
    sample: Sample,
    grader: Grader,
    tokenizer: Any,
    numbered: Sequence[tuple[int, Problem]],
    config: SamplingConfig,
    *,
    seed: int,
    step: int,
    divide_by_std: bool = True,
) -> list[Group]:
    """Sample and grade one group for each problem, in the problems' order.

    Each (seed, step, number of the group, sample) has a sampling seed of its own, wherever it is sampled. A group
    is graded as soon as it is complete, between two steps of the engine.

    Args:
        sample: the sampler.
        grader: of the answers.
        tokenizer: with the model's chat template.
        numbered: problems, each with its number within the step.
        config: of the sampling.
        seed: of the run.
        step: counted from 1; the policy has been updated step - 1 times.
        divide_by_std: see `group_advantages`.
    """
    prompts = [encode_prompt(tokenizer, problem.question) for _, problem in numbered]
    seeds = [
        [sampling_seed(seed, "train", step, number, member) for member in range(config.group_size)]
        for number, _ in numbered
    ]
    groups: dict[int, Group] = {}
    for index, completions in sample(prompts, config, seeds):
        _, problem = numbered[index]
        pairs = [(completion.text, problem.answer) for completion in completions]
        scores = grader.score_many(pairs, prompt=tokenizer.decode(prompts[index]))
        groups[index] = Group(
            problem=problem,
            prompt_ids=prompts[index],
            completions=completions,
            scores=scores,
            advantages=group_advantages([score.reward for score in scores], divide_by_std=divide_by_std),
            policy_version=step - 1,
        )
    return [groups[index] for index in range(len(numbered))]


def mini_batches(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """Return every count-th group, from each start; without parts in which every group is degenerate."""
    parts = [groups[start::count] for start in range(count)]
    return [part for part in parts if not all(group.degenerate for group in part)]
