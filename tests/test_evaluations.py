"""What must hold: a summary is the chapter's numbers, each by hand; unfinished files are told from broken ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from made_up import seeded_evaluation, write_evaluations
from numpy.testing import assert_allclose

from engine.sampler import SamplingConfig
from stats.estimates import wilson_interval
from stats.evaluations import (
    EvalHeader,
    Evaluation,
    Generation,
    ProblemResult,
    format_table,
    majority_credit,
    read_evaluation,
    read_evaluations,
    summarise,
)
from stats.published import PUBLISHED, Published

PRINTED = {
    "base": ("41.11", "56.67", "46.67", "6489.8"),
    "base, run 2": ("40.56", "66.67", "47.50", "6442.5"),
    "step 20": ("41.11", "73.33", "62.22", "5775.4"),
    "step 40": ("37.78", "60.00", "87.22", "4785.8"),
    "step 60": ("35.00", "63.33", "92.50", "4438.7"),
    "step 80": ("34.72", "73.33", "97.78", "3886.9"),
    "step 100": ("33.89", "66.67", "99.44", "3358.1"),
}


def header(num_problems: int, n: int) -> EvalHeader:
    return EvalHeader(
        suite_version="0.1.0",
        engine="vllm 1",
        label="base",
        step=0,
        repeat=1,
        seed=42,
        base_model="some/model",
        revision=None,
        base_fingerprint="f",
        adapter_sha256=None,
        dataset="sums.jsonl",
        dataset_sha256="d",
        problem_ids=tuple(f"p{i}" for i in range(num_problems)),
        problems_per_block=5,
        sampling=SamplingConfig(group_size=n),
    )


def generation(answer: str | None, *, correct: bool = False, tokens: int = 10, cut: bool = False) -> Generation:
    return Generation(
        answer=answer,
        verdict="correct" if correct else "no_box" if answer is None else "wrong",
        correct=correct,
        formatted=answer is not None,
        completion_tokens=tokens,
        finish_reason="length" if cut else "stop",
        text="so it is",
    )


def evaluation(*problems: list[Generation]) -> Evaluation:
    results = tuple(
        ProblemResult(id=f"p{i}", reference="7", generations=tuple(generations))
        for i, generations in enumerate(problems)
    )
    return Evaluation(header=header(len(problems), len(problems[0])), problems=results)


RIGHT = generation("7", correct=True, tokens=4)


def test_every_number_of_a_summary_by_hand():
    summary = summarise(
        evaluation(
            [RIGHT, RIGHT, generation("8"), generation(None, tokens=100, cut=True)],
            [generation("8"), generation("8"), generation("9", tokens=100, cut=True), RIGHT],
            [generation(None), generation(None), generation(None), generation("1", tokens=20)],
        )
    )
    assert (summary.num_problems, summary.val_n) == (3, 4)
    assert (summary.num_correct, summary.num_passed) == (3, 2)
    assert_allclose(summary.average.value, 3 / 12, rtol=1e-12)
    assert_allclose(summary.passed.value, 2 / 3, rtol=1e-12)
    assert_allclose(summary.format_rate.value, 8 / 12, rtol=1e-12)
    tokens = 4 + 4 + 10 + 100 + 10 + 10 + 100 + 4 + 10 + 10 + 10 + 20
    assert_allclose(summary.mean_tokens.value, tokens / 12, rtol=1e-12)
    assert_allclose(summary.truncated_fraction.value, 2 / 12, rtol=1e-12)
    assert_allclose(summary.finished_average.value, 3 / 10, rtol=1e-12)
    assert_allclose(summary.finished_format.value, 7 / 10, rtol=1e-12)
    assert_allclose(summary.majority.value, 1 / 3, rtol=1e-12)  # 7 beats 8 once; 8 beats 7; 1 stands alone
    # c = 2, 1, 0 of 4: 1 - C(4-c, k)/C(4, k)
    by_hand = [(2 / 4 + 1 / 4) / 3, (1 - 1 / 6 + 1 - 3 / 6) / 3, (1 + 1 - 1 / 4) / 3, 2 / 3]
    assert_allclose([e.value for e in summary.pass_at_k], by_hand, rtol=1e-12)
    assert summary.verdicts == {"correct": 3, "wrong": 5, "no_box": 4}
    assert_allclose((summary.passed.low, summary.passed.high), wilson_interval(2 / 3, 3), rtol=1e-12)
    assert summary.pass_at_k[-1] == summary.passed


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_the_chapters_rows_come_out_of_their_counts(row: Published):
    # Right answers: one on each passed problem, the rest filling these problems up; the rest of the boxes anywhere.
    rights = [1] * row.num_passed + [0] * (30 - row.num_passed)
    for i in range(row.num_passed):
        rights[i] += min(11, row.num_correct - sum(rights))
    boxes = row.num_formatted - row.num_correct
    total = round(row.mean_tokens * 360)
    problems = []
    for right in rights:
        wrong = min(12 - right, boxes)
        boxes -= wrong
        problems.append(
            [RIGHT] * right
            + [generation("8", tokens=4)] * wrong
            + [generation(None, tokens=4)] * (12 - right - wrong)
        )
    problems[-1][-1] = replace(problems[-1][-1], completion_tokens=total - 359 * 4)
    summary = summarise(evaluation(*problems))
    numbers = (summary.average, summary.passed, summary.format_rate)
    ours = [f"{100 * estimate.value:.2f}" for estimate in numbers] + [f"{summary.mean_tokens.value:.1f}"]
    assert tuple(ours) == PRINTED[row.name]
    assert (summary.num_correct, summary.num_passed) == (row.num_correct, row.num_passed)
    values = [f"{100 * row.values[field]:.2f}" for field in ("average", "passed", "format_rate")]
    assert (*values, f"{row.values['mean_tokens']:.1f}") == PRINTED[row.name]


def test_votes_go_to_right_answers_together_and_to_wrong_ones_as_written():
    def credit(*generations: Generation) -> float:
        return majority_credit(ProblemResult(id="p", reference="1/2", generations=generations))

    half, also_half = generation("1/2", correct=True), generation("0.5", correct=True)
    assert credit(half, also_half, generation("3"), generation("4")) == 1
    assert credit(half, generation("x + 1"), generation("x+1")) == 0
    assert credit(half, generation("3"), generation(None)) == 0.5
    assert credit(half, generation("3"), generation("4")) == pytest.approx(1 / 3, rel=1e-12)
    assert credit(generation(None), generation(None)) == 0


def test_an_evaluation_of_one_completion_a_problem_has_a_summary():
    summary = summarise(evaluation([RIGHT], [generation("8")]))
    assert summary.average.value == summary.passed.value == summary.majority.value == 0.5
    assert len(summary.pass_at_k) == 1


def test_a_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no finished problem"):
        summarise(Evaluation(header=header(3, 2), problems=()))


def write_one(path: Path, of: Evaluation) -> Path:
    path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in (of.header, *of.problems)))
    return path


def test_an_evaluation_reads_back_in_the_order_of_the_data_set(tmp_path: Path):
    whole = evaluation([RIGHT], [generation("8")], [generation(None)])
    shuffled = replace(whole, problems=(whole.problems[2], whole.problems[0], whole.problems[1]))
    assert read_evaluation(write_one(tmp_path / "e.jsonl", shuffled)) == whole


def test_a_half_written_last_line_is_a_problem_that_is_missing(tmp_path: Path):
    whole = evaluation([RIGHT], [generation("8")])
    path = write_one(tmp_path / "e.jsonl", whole)
    path.write_bytes(path.read_bytes()[:-5])
    read = read_evaluation(path)
    assert read.problems == whole.problems[:1]
    assert not read.complete


def test_texts_with_any_character_read_back_equal(tmp_path: Path):
    odd = "a\u2028b\x0cc\x85d\ud83e \\boxed{\u0663} 你好"
    whole = evaluation([replace(RIGHT, text=odd, answer="9" * 5000)])
    assert read_evaluation(write_one(tmp_path / "e.jsonl", whole)) == whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [], "line 1: not an evaluation"),
        (lambda lines: ['{"id": "x", "question": "y", "answer": "z"}', *lines[1:]], "line 1: not an evaluation"),
        (lambda lines: [lines[0], lines[1][:-9], lines[2]], "line 2: not an evaluation"),
        (lambda lines: [*lines, lines[1]], "line 4: .*'p0' comes twice"),
        (
            lambda lines: [lines[0], lines[1].replace('"p0"', '"q"')],
            "line 2: .*'q' comes twice or is not in the header",
        ),
        (
            lambda lines: [lines[0].replace('"group_size": 2', '"group_size": 3'), lines[1]],
            "2 generations instead of 3",
        ),
        (lambda lines: [lines[0], "[]"], "line 2: not an evaluation"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path: Path, damage, message: str):
    path = write_one(tmp_path / "e.jsonl", evaluation([RIGHT, RIGHT], [RIGHT, RIGHT]))
    path.write_text("".join(line + "\n" for line in damage(path.read_text().split("\n")[:-1])))
    with pytest.raises(ValueError, match=f"e.jsonl, {message}" if message.startswith("line") else message):
        read_evaluation(path)


def test_the_table_has_every_number_and_its_interval():
    table = format_table([summarise(evaluation([RIGHT, RIGHT], [generation("8"), generation(None, cut=True)]))])
    heads, numbers, intervals = table.split("\n")
    assert heads.split() == ["Average@2", "Pass@2", "Format", "cut", "off", "mean", "tokens", "correct", "passed"]
    assert numbers.split() == ["base", "50.00%", "50.00%", "75.00%", "25.00%", "7.0", "2/4", "1/2"]
    assert len(intervals.split()) == 5


def test_the_base_comes_first_even_before_an_adapter_that_does_not_say_its_step(tmp_path: Path):
    foreign = replace(seeded_evaluation(0), header=replace(seeded_evaluation(0).header, label="adapter"))
    write_evaluations(
        tmp_path, seeded_evaluation(20), foreign, seeded_evaluation(0, repeat=2), seeded_evaluation(0)
    )
    names = [e.header.name for e in read_evaluations(tmp_path)]
    assert names == ["base", "base, run 2", "adapter", "step 20"]


def test_an_evaluation_that_is_still_going_is_left_out_and_named(tmp_path: Path, capsys):
    going = seeded_evaluation(20)
    write_evaluations(tmp_path, seeded_evaluation(0), replace(going, problems=going.problems[:2]))
    assert [e.header.name for e in read_evaluations(tmp_path)] == ["base"]
    assert "step-000020-1.jsonl has 2 of 6 problems so far" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (seeded_evaluation(20, n=3), "completions a problem 4 against 3"),
        (seeded_evaluation(20, num_problems=5), r"problems sums.jsonl \(6\) against sums.jsonl \(5\)"),
        (
            replace(seeded_evaluation(20), header=replace(seeded_evaluation(20).header, dataset_sha256="e")),
            "texts of the problems d against e",
        ),
        (
            replace(seeded_evaluation(20), header=replace(seeded_evaluation(20).header, base_fingerprint="g")),
            "base model",
        ),
        (
            replace(
                seeded_evaluation(20),
                header=replace(seeded_evaluation(20).header, sampling=SamplingConfig(group_size=4, top_p=0.9)),
            ),
            "sampling settings",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, other: Evaluation, named: str):
    write_evaluations(tmp_path, seeded_evaluation(0), other)
    with pytest.raises(ValueError, match=f"cannot be compared: {named}"):
        read_evaluations(tmp_path)
