import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
from data import (
    DataError,
    Problem,
    ProblemStream,
    read_problems,
    training_data,
    training_order,
    write_problems,
)

# A busy machine is no fault of the code.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


def some_problems(count):
    return [Problem(id=f"p{n}", question=f"What is {n} + 1?", answer=str(n + 1)) for n in range(count)]


def line(**fields):
    return json.dumps({"id": "p0", "question": "1 + 1?", "answer": "2"} | fields)


@unhurried
@given(st.lists(st.builds(Problem, id=TEXT, question=TEXT, answer=TEXT), min_size=1, unique_by=lambda p: p.id))
def test_any_problems_come_back_as_they_were_written(tmp_path_factory, problems):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write_problems(path, problems)
    assert read_problems(path) == problems


def test_a_record_is_not_cut_at_the_characters_where_splitlines_cuts(tmp_path):
    question = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\rj\nk"
    path = tmp_path / "problems.jsonl"
    # Written raw, as the file of another tool may hold them, apart from those that JSON must escape.
    path.write_bytes((json.dumps({"id": "a", "question": question, "answer": "1"}, ensure_ascii=False)).encode())
    assert "\u2028" in path.read_text("utf-8")
    assert [problem.question for problem in read_problems(path)] == [question]


def test_a_file_may_lack_the_last_line_end_have_more_fields_and_use_crlf(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_bytes((line(source="mine") + "\r\n" + line(id="p1")).encode())
    assert [problem.id for problem in read_problems(path)] == ["p0", "p1"]


@pytest.mark.parametrize(
    ("second_line", "complaint"),
    [
        ('{"id": "p1", "question"', "not JSON"),
        ("", "not JSON"),
        (b'{"id": "p1", "question": "caf\xe9?", "answer": "2"}', "not JSON in UTF-8"),
        ("[" * 100_000, "not JSON"),
        ('["p1", "1 + 1?", "2"]', "a JSON object is expected"),
        ('{"id": "p1", "question": "1 + 1?"}', "answer missing"),
        ('{"id": "p1"}', "question and answer missing"),
        (line(id="p1", question=" \n"), "question must be a non-empty string"),
        (line(id="p1", answer=""), "answer must be a non-empty string"),
        (line(id="p1", answer=2), "answer must be a non-empty string, not 2"),
        (line(id=None), "id must be a non-empty string"),
        (line(id="p1", question="\ud800"), "surrogate"),
        (line(), "an earlier line has the id 'p0' too"),
    ],
)
def test_the_first_broken_line_is_named_with_file_and_number(tmp_path, second_line, complaint):
    path = tmp_path / "broken.jsonl"
    second_line = second_line if isinstance(second_line, bytes) else second_line.encode()
    path.write_bytes(b"\n".join([line().encode(), second_line, line(id="p2").encode(), b"{"]))
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 2: ") as caught:
        read_problems(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_blank_line_is_broken_even_at_the_end(tmp_path):
    (tmp_path / "blank.jsonl").write_text(line() + "\n\n")
    with pytest.raises(DataError, match=r"blank\.jsonl, line 2: not JSON"):
        read_problems(tmp_path / "blank.jsonl")


def test_questions_stay_legible_on_disk(tmp_path):
    write_problems(tmp_path / "problems.jsonl", [Problem(id="a", question="求 1 + 1", answer="2")])
    assert "求 1 + 1" in (tmp_path / "problems.jsonl").read_text("utf-8")


def test_an_empty_file_is_an_error(tmp_path):
    for content in ("", "\n"):
        (tmp_path / "empty.jsonl").write_text(content)
        with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
            read_problems(tmp_path / "empty.jsonl")


def test_a_repeated_id_is_not_written_and_the_old_file_stays(tmp_path):
    path = tmp_path / "problems.jsonl"
    write_problems(path, some_problems(2))
    with pytest.raises(DataError, match="two problems have the id 'p0'"):
        write_problems(path, some_problems(1) * 2)
    assert read_problems(path) == some_problems(2)


def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "problems.jsonl"
    write_problems(path, some_problems(2))

    def fail(descriptor):
        assert os.fstat(descriptor).st_size > 0, "the text must be flushed before it is synced"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_problems(path, some_problems(5))
    assert os.listdir(tmp_path) == ["problems.jsonl"]
    assert read_problems(path) == some_problems(2)


def test_the_stream_keeps_the_order_and_begins_again_at_its_end():
    problems = some_problems(20)
    stream = ProblemStream(problems)
    assert [stream.take(20) for _ in range(3)] == [problems] * 3


def test_the_training_order_is_pinned_to_the_seed():
    # A resumed run relies on this order: a change here breaks every run begun before it.
    def order(seed):
        return [problem.id for problem in training_order(some_problems(6), seed=seed)]

    assert order(42) == ["p3", "p1", "p2", "p4", "p0", "p5"]
    assert order(43) != order(42)


def test_the_training_order_holds_every_problem_once_with_its_texts_stripped():
    problems = some_problems(50)
    padded = [replace(p, question=f" {p.question}\n", answer=f"\t{p.answer} ") for p in problems]
    order = training_order(padded, seed=42)
    assert order != problems
    assert sorted(order, key=problems.index) == problems
    assert padded[0].question == " What is 0 + 1?\n"  # what was given stays


def test_training_data_leaves_degenerate_groups_out_but_on_demand(make_group):
    groups = [make_group([1, 0], seed=1), make_group([1, 1], seed=2)]
    assert [group.degenerate for group in groups] == [False, True]
    every = training_data(groups, degenerate=True)
    assert training_data(groups) == every[:2]
    for group, datums in zip(groups, (every[:2], every[2:]), strict=True):
        for completion, advantage, datum in zip(group.completions, group.advantages, datums, strict=True):
            assert datum.token_ids == group.prompt_ids + completion.token_ids
            assert datum.sampling_logprobs == completion.logprobs
            assert datum.num_completion_tokens == len(completion.token_ids)
            assert datum.advantage == advantage


@unhurried
@given(
    size=st.integers(1, 7),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    cut=st.integers(0, 6),
)
def test_num_taken_is_the_whole_state_however_the_stream_is_cut(size, counts, cut):
    whole = ProblemStream(some_problems(size)).take(sum(counts))
    stream = ProblemStream(some_problems(size))
    dealt = []
    for number, count in enumerate(counts):
        if number == cut:
            stream = ProblemStream(some_problems(size), num_taken=stream.num_taken)
        dealt += stream.take(count)
    assert dealt == whole
    assert stream.num_taken == sum(counts)


def test_a_take_larger_than_the_data_deals_every_problem_equally_often():
    dealt = ProblemStream(some_problems(3)).take(12)
    assert [dealt.count(problem) for problem in some_problems(3)] == [4, 4, 4]


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(DataError, match="no problems"):
        ProblemStream([])
    with pytest.raises(ValueError, match="num_taken must be at least 0, not -1"):
        ProblemStream(some_problems(1), num_taken=-1)
    stream = ProblemStream(some_problems(1))
    with pytest.raises(ValueError, match="at least 1, not 0"):
        stream.take(0)
    assert stream.num_taken == 0


def test_a_problem_is_frozen_and_takes_text_only():
    problem = some_problems(1)[0]
    with pytest.raises(AttributeError):
        problem.answer = "3"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DataError, match="answer must be a non-empty string, not 3"):
        Problem(id="a", question="1 + 2?", answer=3)  # pyright: ignore[reportArgumentType]
