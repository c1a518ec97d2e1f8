"""The grader on the shared cases, its word on references, the chapter's verdict beside it, and the command line."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data import DataError, Problem, write_problems
from grading.chapter import chapter_verdict
from grading.extraction import complete_boxes, find_answer
from grading.workers import Comparison
from reward import Grader

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT.parent / "shared" / "cases"
DEADLINE = 10.0

# Judgement calls of the shared cases that are decided otherwise here, and why.
ARGUABLE = {
    "ext-009": r"\boxed 5: the brace is part of the format that is asked for",
    "ext-028": "boxed{204}: a box without its backslash is no box",
    "ext-035": "a dialogue that runs on: the last box is the answer, whoever is made to speak",
    "unit-014": "5000% for 5000: the percent sign is a unit, as 50% is for 50",
    "unit-032": "2 hours 30 minutes for 2.5: no unit is converted",
    "hack-013": "prose in the box is not an answer, whatever number ends it",
    "hang-020": "a sum of 5,000 terms: nothing longer than 1,000 characters is an answer",
    "hang-025": "100 kB of braces: the same",
}


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(deadline_seconds=DEADLINE) as grader:
        yield grader


def boxed(answer: str) -> str:
    return rf"Adding up, I get \boxed{{{answer}}}."


def shared(name: str) -> list[dict]:
    path = CASES / name
    if not path.exists():
        pytest.skip(f"the shared cases are not here: {path}")
    return [json.loads(line) for line in path.read_text().split("\n") if line]


# ---- The shared cases ----


def test_the_firm_cases_agree_and_none_outlasts_the_deadline(grader: Grader):
    differing, slow = set(), []
    for case in shared("reward_cases.jsonl"):
        start = time.monotonic()
        score = grader.score(case["text"], case["reference"])
        if time.monotonic() - start > DEADLINE + 1:
            slow.append(case["id"])
        if score.reward != case["right"]:
            differing.add((case["id"], case["arguable"]))
    assert not slow
    assert {name for name, arguable in differing if not arguable} == set()
    assert {name for name, arguable in differing if arguable} == set(ARGUABLE)


def test_the_second_set_has_at_most_eight_firm_cases_wrong_and_none_paid(grader: Grader):
    rows = [row for row in shared("reward_cases_2.jsonl") if not row["arguable"]]
    scores = grader.score_many([(row["text"], row["reference"]) for row in rows])
    differing = [(row["id"], s.correct) for row, s in zip(rows, scores, strict=True) if s.correct != row["right"]]
    assert len(differing) <= 8
    assert not any(paid for _, paid in differing)


def test_boxed_real_responses_get_their_labels(grader: Grader):
    rows = [row for row in shared("real_responses.jsonl") if r"\boxed" in row["response"]]
    scores = grader.score_many([(row["response"], row["reference"]) for row in rows])
    assert len(rows) > 400
    assert [
        (row["reference"], score.answer)
        for row, score in zip(rows, scores, strict=True)
        if score.correct != row["correct"]
    ] == []


def single_pairs() -> Iterator[tuple[str, str, bool]]:
    """math-verify's own pairs of one formula or one box each: completion, reference, verdict."""
    for row in shared("math_verify_cases.jsonl"):
        gold, said = row["gold"].strip(), row["pred"].strip()
        formulas = [re.fullmatch(r"\$\$?([^$]*)\$?\$", text) for text in (gold, said)]
        if row.get("expected") is None or gold.count(r"\boxed") > 1:
            continue
        reference = find_answer(gold, *complete_boxes(gold))[0] if r"\boxed" in gold else gold.strip("$")
        if said.count(r"\boxed") == 1 and reference is not None:
            yield said, reference, bool(row["expected"])
        elif all(formulas) and r"\boxed" not in gold + said:
            yield rf"\boxed{{{said.strip('$')}}}", gold.strip("$"), bool(row["expected"])


def test_pairs_of_math_verify_that_fit_one_box_get_its_verdicts_but_nine(grader: Grader):
    rows = list(single_pairs())
    assert len(rows) > 150
    scores = grader.score_many([row[:2] for row in rows])
    assert sum(score.correct != row[2] for row, score in zip(rows, scores, strict=True)) <= 9


def naive_box(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    depth = 0
    for end in range(start + 6, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start : end + 1]
    return None


def test_real_responses_are_graded_as_by_plain_math_verify_on_the_last_box(grader: Grader):
    from math_verify import parse, verify

    differing = []
    for row in shared("real_responses.jsonl"):
        answer = naive_box(row["response"])
        plain = answer is not None and verify(parse(f"${row['reference']}$"), parse(answer))
        if grader.score(row["response"], row["reference"]).correct != plain:
            differing.append((row["reference"], answer))
    assert differing == []  # hostile and sloppy answers differ, ordinary ones do not


# ---- References ----


def problems(*references: str) -> list[Problem]:
    return [Problem(id=f"p{row}", question="?", answer=reference) for row, reference in enumerate(references, 1)]


def test_references_that_an_answer_can_match_are_accepted(grader: Grader):
    good = ["204", "-3", r"\frac{1}{2}", "A", r"\text{Evelyn}", "(1,2)", r"\sqrt{2}", "x^2+y^2=1", r"\emptyset"]
    grader.check_references(
        problems(*good, "10^{10^{10}}", r"3 \text{ days}", r"x<-2 \text{ or } x>2", "5,7", "Answer: 12")
    )


def test_every_reference_that_no_answer_can_match_is_named_at_once(grader: Grader):
    bad = ["???", r"\frac{", "!!!", "1" * 1001, "4 or 5", "Answer: B", r"6 \text{ or } 9", "Answer: x=y"]
    with pytest.raises(DataError) as caught:
        grader.check_references(problems("204", *bad, "A"))
    lines = str(caught.value).split("\n")
    assert [line.split(":")[0] for line in lines] == [f"row {row}, id p{row}" for row in range(2, 10)]
    assert lines[4] == "row 6, id p6: no answer can match the reference '4 or 5'"


# ---- The chapter's own verdict ----


@pytest.mark.parametrize(
    ("text", "reference", "correct"),
    [
        (r"\boxed{204}", "204", True),
        (r"\boxed{ 1,204 }", "1204", True),
        (r"\boxed{$204$}", "204", True),
        (r"\boxed{\text{204}}", "204", True),
        (r"\boxed{\mathrm{+204}}", "204", True),
        (r"\boxed{-7}", "-7", True),
        (r"\boxed{204} and \boxed{", "204", True),
        (r"<think>\boxed{204}", "204", True),
        (r"\boxed{205}", "204", False),
        (r"\boxed{204.0}", "204", False),
        (r"\boxed{\frac{408}{2}}", "204", False),
        (r"\boxed{204 \text{ ways}}", "204", False),
        (r"\fbox{204}", "204", False),
        ("204", "204", False),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", None),
    ],
)
def test_the_chapters_evaluation_compares_integers(grader: Grader, text: str, reference: str, correct: bool | None):
    assert grader.score(text, reference).chapter_correct is correct


def test_plain_integers_are_decided_as_math_verify_decides_them(grader: Grader):
    numbers = ["0", "7", "-7", "204", "-204", "123456789012345"]
    pairs = [(said, reference) for said in numbers for reference in numbers]
    verdicts = grader._workers.settle([Comparison(said, reference, "chapter") for said, reference in pairs])
    assert [verdict == "correct" for verdict in verdicts] == [said == reference for said, reference in pairs]
    for said, reference in pairs:
        text = boxed(said)
        assert chapter_verdict(text, complete_boxes(text)[0], reference, training=True) is (said == reference)


def test_the_chapters_training_asks_math_verify_about_the_last_complete_box():
    slow = r"\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(1))))))))))"
    with Grader(num_workers=1, deadline_seconds=1.0, training=True) as grader:
        texts = [
            r"\boxed{\frac{408}{2}}",
            r"\boxed{204} \boxed{",
            r"\boxed{205}",
            "204",
            r"\boxed{204 \text{ rejected}}",
        ]
        scores = grader.score_many([(text, "204") for text in texts])
        assert [score.chapter_correct for score in scores] == [True, True, False, False, True]
        assert [score.correct for score in scores] == [True, False, False, False, False]
        assert grader.score(boxed(slow), "73").chapter_correct is None


# ---- From the shell ----


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "reward.py", *arguments], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_importing_it_imports_no_heavy_library():
    code = "import sys, reward; print(*{'math_verify', 'sympy', 'torch', 'tyro', 'numpy'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "\n"


def test_the_shell_says_why_step_by_step(tmp_path: Path):
    completion = tmp_path / "completion.txt"
    completion.write_text(r"So it is \boxed{1{,}000}.")
    status, out, error = run("--text", completion, "--reference", "1000")
    assert (status, error) == (0, "")
    assert out.startswith("verdict correct, reward 1\nanswer '1{,}000', reference '1000'\n- ")
    assert "- braces round what needs none: 1{,}000 -> 1,000\n" in out
    completion.write_text(r"So it is \boxed{1000 \text{ rejected}}.")
    _, out, _ = run("--text", completion, "--reference", "1000")
    assert out.startswith("verdict unparsed, reward 0\n")
    assert "- the answer is read as no single number\n" in out


def test_a_file_of_responses_is_graded_against_its_labels(tmp_path: Path):
    responses = tmp_path / "responses.jsonl"
    rows = [(r"\boxed{7}", "7", 1), (r"\boxed{8}", "7", 1), ("\\boxed{7}\u2028", "7", 1), (r"\boxed{8}", "7", None)]
    keys = ["text", "reference", "right"]
    responses.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    status, out, _ = run("--responses", responses)
    assert status == 0
    assert [line.split() for line in out.rstrip().split("\n")] == [
        ["line", "2:", "'8'", "for", "'7'", "is", "wrong,", "not", "right"],
        ["2", "correct", "right"],
        ["1", "wrong", "right"],
        ["1", "wrong", "not", "labelled"],
    ]


def test_responses_find_their_problem_by_its_id(tmp_path: Path):
    data, responses = tmp_path / "data.jsonl", tmp_path / "responses.jsonl"
    write_problems(data, [Problem(id="a", question="How many plums are left?", answer="3")])
    responses.write_text(json.dumps({"id": "a", "response": r"\boxed{3 \text{ plums}}", "correct": True}))
    assert run("--data", data, "--responses", responses)[1].split() == ["1", "correct", "right"]
    responses.write_text(json.dumps({"id": "b", "response": r"\boxed{3}"}))
    status, _, error = run("--data", data, "--responses", responses)
    assert status == 2
    assert "line 1: a text is missing, or a reference, or an id that --data has" in error


def test_bad_input_is_one_sentence_and_status_2(tmp_path: Path):
    completion = tmp_path / "completion.txt"
    completion.write_text("7")
    for arguments, sentence in [
        ((), "give --text and --reference, or --responses"),
        (("--text", completion), "give --text and --reference, or --responses"),
        (("--text", completion, "--reference", "???"), "no answer can match the reference '???'"),
        (("--text", tmp_path / "absent", "--reference", "7"), "No such file"),
        (("--responses", completion), "line 1: a JSON object is expected"),
    ]:
        status, out, error = run(*arguments)
        assert (status, out) == (2, "")
        assert sentence in error
        assert error.count("\n") == 1
