"""Prompts, seeds, advantages and groups; the engine itself is tested in test_engines.py."""

import itertools
import math

import pytest

from data import Completion, Problem, sampling_seed
from engine.hub import load_tokenizer, model_folder
from engine.sampler import SamplingConfig
from loss import group_advantages
from reward import Grader
from rollout import collect_groups, encode_prompt, fitting_problems
from tiny import sums


@pytest.fixture(scope="module")
def tokenizer(tiny_base):
    return load_tokenizer(str(tiny_base))


def test_advantages_equal_the_numbers_worked_by_hand():
    deviation = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)  # of 1 0 0 0 around 0.25, with n - 1
    expected = [0.75 / (deviation + 1e-8)] + [-0.25 / (deviation + 1e-8)] * 3
    assert group_advantages([1, 0, 0, 0]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rewards", [[0.0] * 8, [1.0] * 8, [0.1] * 3])
def test_rewards_that_agree_give_advantages_of_exactly_zero(rewards):
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_every_step_group_and_sample_has_a_seed_of_its_own():
    cases = itertools.product(range(100), range(8), range(8))
    seeds = {sampling_seed(42, "train", *case) for case in cases}
    assert len(seeds) == 6400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(42, "train", 1) == sampling_seed(42, "train", 1) != sampling_seed(43, "train", 1)


def test_the_prompt_is_the_chapters_through_the_models_own_template(tokenizer):
    assert tokenizer.decode(encode_prompt(tokenizer, "What is 1 + 1?")) == (
        "<|im_start|>user\nWhat is 1 + 1?\n\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_questions_whose_prompt_is_too_long_are_left_out(tokenizer):
    short = Problem(id="a", question="What is 1 + 1?", answer="2")
    long = Problem(id="b", question="What is 1 + 1? " * 50, answer="2")
    assert fitting_problems([short, long, short], tokenizer, 100) == [short, short]
    with pytest.raises(ValueError, match="no question fits into max_prompt_tokens = 100"):
        fitting_problems([long], tokenizer, 100)


def test_groups_come_in_the_problems_order_however_the_sampler_finishes(tokenizer):
    problems, texts, numbers = sums(seed=0)[:3], {}, (1, 4, 7)  # as on one of three ranks

    def sample(prompts, config, seeds):
        assert all(len(row) == config.group_size for row in seeds)
        assert seeds == [[sampling_seed(0, "train", 8, number, member) for member in (0, 1)] for number in numbers]
        for index in (2, 0, 1):
            texts[index] = [rf"\boxed{{{problems[index].answer}}}", "no box"]
            yield index, [completion(text) for text in texts[index]]

    def completion(text):
        return Completion(token_ids=[1, 2], logprobs=[-0.1, -0.2], text=text, finish_reason="stop")

    with Grader() as grader:
        groups = collect_groups(
            sample,
            grader,
            tokenizer,
            list(zip(numbers, problems, strict=True)),
            SamplingConfig(group_size=2),
            seed=0,
            step=8,
        )
    assert [group.problem for group in groups] == problems
    assert all(group.policy_version == 7 and not group.degenerate for group in groups)
    for index, group in enumerate(groups):
        assert [completion.text for completion in group.completions] == texts[index]
        assert group.prompt_ids == encode_prompt(tokenizer, problems[index].question)
    assert [score.verdict for score in groups[0].scores] == ["correct", "no_box"]
    assert groups[0].advantages == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_without_the_division_an_advantage_is_the_distance_from_the_mean(tokenizer):
    def sample(prompts, config, seeds):
        answers = (sums(seed=0)[0].answer, "none", "none", "none")
        yield (
            0,
            [
                Completion(token_ids=[1], logprobs=[-0.1], text=rf"\boxed{{{answer}}}", finish_reason="stop")
                for answer in answers
            ],
        )

    with Grader() as grader:
        (group,) = collect_groups(
            sample,
            grader,
            tokenizer,
            [(0, sums(seed=0)[0])],
            SamplingConfig(group_size=4),
            seed=0,
            step=1,
            divide_by_std=False,
        )
    assert group.advantages == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "message"),
    [([1, 2], [-0.5], "2 tokens came with 1 logprobs"), ([], [], "0 tokens"), ([1], [float("nan")], "not finite")],
)
def test_a_completion_whose_logprobs_do_not_fit_its_tokens_is_refused(token_ids, logprobs, message):
    with pytest.raises(ValueError, match=message):
        Completion(token_ids=token_ids, logprobs=logprobs, text="", finish_reason="stop")


@pytest.mark.parametrize(
    "setting", [{"group_size": 0}, {"max_tokens": 0}, {"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 0}]
)
def test_settings_that_cannot_be_sampled_with_are_refused_by_name(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} is 0"):
        SamplingConfig(**setting)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without a config\.json"):
        model_folder(str(tmp_path))


def test_a_tokenizer_without_a_chat_template_is_refused(tiny_base, tmp_path):
    tokenizer = load_tokenizer(str(tiny_base))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(str(tmp_path))
