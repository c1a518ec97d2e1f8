"""The reward: every kind of answer, every calling context, and nothing that hangs."""

import asyncio
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reward
from reward import Grader, last_boxed

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


def children() -> set[int]:
    """Process ids of this process's children, zombies too."""
    pids = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[1]) == os.getpid():
            pids.add(int(stat.parent.name))
    return pids


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


def test_boxed_real_responses_get_their_labels(grader: Grader):
    rows = [row for row in shared("real_responses.jsonl") if r"\boxed" in row["response"]]
    scores = grader.score_many([(row["response"], row["reference"]) for row in rows])
    assert len(rows) > 400
    assert [
        (row["reference"], score.answer)
        for row, score in zip(rows, scores, strict=True)
        if score.correct != row["correct"]
    ] == []


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


# ---- Extraction ----


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed {7}", "7"),
        ("\\boxed\n{7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\\boxed{7}", "7"),
        (r"\boxed{\boxed{ 7 }}", "7"),
        (r"\boxed{x = \boxed{7}}", r"x = \boxed{7}"),
        (r"\boxed{6} then \boxed{7}}}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"}} { \{ \boxed{7} {", "7"),
        (r"\boxed{7}, not \boxed{}, \boxed{ \ldots } or \boxed{\text{your answer}}", "7"),
        (r"Put it in \boxed{ ... so: \boxed{7}", "7"),
        (r"<think>\boxed{6}</think> \boxed{7}", "7"),
        (r"\boxed{7} \boxedminus{8} \boxed 9 \boxed\{9\} boxed{9}", "7"),
        (r"\boxed{6, \boxed{7}}", r"6, \boxed{7}"),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, answer: str):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("7", "no_box"),
        ("", "no_box"),
        (r"\boxed{}", "no_box"),
        (r"\boxed{   } \boxed{\text{your final answer here}}", "no_box"),
        (r"use \boxed but the set was {7}", "no_box"),
        (r"\boxedminus{7}", "no_box"),
        (r"<think> \boxed{7} </think> I do not know.", "no_box"),
        (r"\boxed{7", "unclosed"),
        (r"\boxed{7\}", "unclosed"),
        (r"\boxed{7} \boxed{", "unclosed"),
        (r"\boxed{7} \boxed{7 + {", "unclosed"),
        (r"<think> so \boxed{7}", "unclosed"),
    ],
)
def test_without_a_finished_box_there_is_no_answer(grader: Grader, text: str, verdict: str):
    score = grader.score(text, "7")
    assert (score.verdict, score.answer, score.reward, score.formatted) == (verdict, None, 0, False)


# ---- Plain numbers ----

SCRIPTS = ["0123456789", "０１２３４５６７８９", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗"]  # noqa: RUF001
MINUSES = ["-", "−", "–", "—", "‐", "－", "- "]  # noqa: RUF001
SEPARATORS = ["", ",", "{,}", r"\,", "~", " ", r"\ ", "'", "\u202f", r",\!"]
WRAPPERS = ["#", "{#}", "(#)", "[#]", r"\{#\}", "$#$", "$$#$$", r"\(#\)", r"\[#\]", "**#**", r"\mathbf{#}"]
WRAPPERS += [r"\text{#}", r"\textbf{#}", r"\mathrm{#}", r"\mbox{#}", r"\boldsymbol{#}", r"\color{red}{#}"]
WRAPPERS += [
    r"{\color{blue}#}",
    r"\textcolor{red}{#}",
    r"\underline{#}",
    r"\fbox{#}",
    r"{\bf #}",
    r"\left(#\right)",
]
WRAPPERS += [r"\displaystyle #", r"\hspace{1em}#", r"\quad#", r"\phantom{0}#", r"\boldsymbol{\mathbf{#}}"]
WRAPPERS += [r"\begin{aligned}#\end{aligned}"]
FRAMES = [
    "#",
    "x = #",
    "# = x",
    "m+n = #",
    "f(3) = #",
    r"\text{Total} = #",
    r"\therefore #",
    r"N \equiv # \pmod{9999999999999}",
]
FRAMES += [r"\text{Answer: }#", "The final answer is #", "答案：#", r"\text{(A) }#", r"x \in \{#\}", r"\approx #"]  # noqa: RUF001
UNITS = [
    "#",
    "#.",
    "#,",
    "#。",
    "#.0",
    "#/1",
    r"# \text{ cm}",
    r"#\text{ cm}^2",
    "#cm",
    "# apples",
    r"#^\circ",
    "#°",
    "#个",
]
UNITS += [
    "# degrees",
    r"\$#",
    "€#",
    r"#\text{ dollars}",
    r"#\,\mathrm{km/h}",
    r"#\%",
    "# percent",
    r"#\text{ ways}",
]


@st.composite
def spellings(draw: st.DrawFn) -> tuple[int, str]:
    """An integer, and one of the ways in which a model might write it."""
    value = draw(st.integers(-(10**12), 10**12) | st.integers(-200, 200))
    digits = str(abs(value))
    if separator := draw(st.sampled_from(SEPARATORS)):
        digits = f"{abs(value):,}".replace(",", separator)
    else:
        digits = "0" * draw(st.integers(0, 3)) + digits
    digits = digits.translate(str.maketrans(SCRIPTS[0], draw(st.sampled_from(SCRIPTS))))
    sign = draw(st.sampled_from(MINUSES)) if value < 0 else draw(st.sampled_from(["", "+"]))
    unit = draw(st.sampled_from(UNITS))
    text = unit.replace("#", sign + digits)
    # What stands around a unit, as in $12\text{ cm}$, must not split a command from its text.
    wrapper = draw(st.sampled_from(WRAPPERS if unit == "#" else ["#", "$#$", "{#}", r"\displaystyle #"]))
    frame = draw(st.sampled_from(FRAMES if value >= 0 else FRAMES[:7]))
    assume(frame == "#" or wrapper != "**#**")
    assume("," not in text or not {frame, wrapper} & {"(#)", "[#]", r"\{#\}", r"\left(#\right)", r"x \in \{#\}"})
    return value, frame.replace("#", wrapper.replace("#", text))


@given(spellings())
@settings(max_examples=600, deadline=None)
def test_any_spelling_of_an_integer_is_that_integer_and_not_its_neighbour(spelling: tuple[int, str]):
    value, answer = spelling
    assert reward._decide(answer, str(value)) == "correct"
    for other in (value - 1, value + 1, -value if value else 7, value * 10 or 10, value * 1000 or 1000):
        assert reward._decide(answer, str(other)) == "wrong"


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6), st.integers(1, 99))
def test_fractions_and_decimals_are_exact(value: int, below: int, scale: int):
    fraction = rf"\frac{{{value * scale}}}{{{below * scale}}}"
    for answer in (fraction, rf"x = {fraction}", f"{value}/{below}", rf"\left({fraction}\right)"):
        assert reward._decide(answer, rf"\dfrac{{{value}}}{{{below}}}") == "correct"
        assert reward._decide(answer, rf"\dfrac{{{value + 1}}}{{{below}}}") == "wrong"
    assert reward._decide(f"{value}.5", str(value)) == "wrong"
    assert reward._decide(f"{value}.0000001", str(value)) == "wrong"
    assert reward._decide(rf"{value}.0 \times 10^3", str(1000 * value)) == "correct"


@given(st.integers(0, 100), st.sampled_from([str, str.title, str.upper, r"\text{{{}}}".format]))
def test_number_words_up_to_a_hundred_are_numbers(value: int, style):
    ones = reward._ONES
    tens = ["", "", *reward._TENS, "one hundred"]
    word = ones[value] if value < 20 else f"{tens[value // 10]}-{ones[value % 10]}".removesuffix("-zero")
    assert reward._decide(style(word), str(value)) == "correct"
    assert reward._decide(style(word), str(value + 1)) == "wrong"


RIGHT = {
    "1000": ["10^3", "1e3", "5*10^-2*20000", r"10\times10^{2}", "1,000.0", "２５０\u200b×4", "10³"],  # noqa: RUF001
    "73": [
        r"\frac{146}{2}",
        r"\dfrac{146}2",
        r"7.3 \times 10^1",
        r"\overline{73}",
        "1001001_2",
        "73_{10}",
        r"70+3 = 73",
    ],
    "204": [r"204 \pmod{1000}", r"204 \text{ (mod 1000)}", r"2^{2024} \equiv 204 \pmod{1000}", r"\gcd(x,y) = 204"],
    r"\frac{8}{3}": ["2 2/3", r"2\frac23", "2⅔", "8/3", r"2.\overline{6}"],
    "0.5": ["½", ".5", r"50\%", r"\frac12", "2^{-1}"],
    r"50\%": ["50", "0.5", r"50\%", "50 percent"],
    "2": [r"\sqrt[3]{8}", r"\sqrt{4}", r"\log_2 4"],
    r"\sqrt{2}": ["√2", r"\sqrt{٢}", r"\frac{2}{\sqrt2}", "2^{1/2}"],
    r"\pi": ["π", r"\frac{3\pi}{3}"],
    "x=5": ["5", "x = 5", "5 = x"],
    "5,7": [r"x=5 \text{ or } x=7", r"\{7,5\}", "5 and 7"],
    "5,-5": [r"\pm 5"],
    "(1,2)": ["1<x<2", r"x \in (1,2)"],
    "A": [r"\text{(A)}", "(A)", r"\textbf{A}"],
    r"\varnothing": [r"\emptyset", "∅", r"\text{no solution}", r"\{\}"],
    "2x+4y-3=0": [r"y=-\frac{1}{2}x+\frac{3}{4}"],
    "52_8": ["52_{8}", "52_8", "42", "52_{(8)}", "52 (base 8)"],
    "2003": [
        "2003_6",
        "2003_{(6)}",
        "2003 (base 6)",
        r"2003 \text{ in base } 6",
        r"2003_{\text{base }6}.",
        r"2003 \text{ (base } 6\text{)}",
        r"2003 \text{ (base } 6)",
        r"\text{2003 base 6}",
        "(2003 base 6)",
        "2003 Base 6",
        "2003_(6)",
    ],
    "435": ["2003_6", r"2003_{6} = 435"],
    "4": ["(11_2)+1", r"(11_2) + (1_2)", r"\frac{12_{10}}{3}"],
    "1": [
        r"1 \text{ root}",
        r"1 \text{ real root}",
        r"1\text{ point of intersection}",
        "1 month",
        "1 point",
        r"1 \text{ eighth grader}",
        "1 third-degree polynomial",
    ],
    "12:00": ["12:00"],
}
WRONG = {
    "12": ["1,2", "1 2", "1{,}2", "1\n2", r"1 \quad 2", "(1,2)", "1;2", "12x", "12!", "12:1"],
    "1000": ["1,00,0", "1, 000", "1.000", "10,00", "(1,000)"],
    "73": [
        r"\pm 73",
        "73 or 74",
        r"73 \text{ or } 74",
        r"\{72,73,74\}",
        "72,73",
        r"\ge 73",
        "< 73",
        r"x \ne 73",
        "73 +",
    ],
    "-5": ["--5", "5"],
    "5": [
        "negative 5",
        "5x",
        "5d",
        r"5\pi",
        "5i",
        r"5\text{ or so}",
        r"5\text{ more}",
        "5 thousand",
        "5 millions",
        "5 thirds",
        "5 halves",
        r"5\text{ sixths}",
        r"5\text{ sixth}",
        "5 third",
        "5 millionths",
        "5 power two",
        "5 power of two",
        "5 choose k",
        "5 point twentyfive",
        r"5\text{ root of two}",
        "5的立方根",
        r"5\text{ pi}",
        r"5\text{ i}",
        "5 point five",
        "5 root two",
        "5 choose two",
        "5分之一",
        "5的平方",
        "n=5k",
        "x=5, y=6",
        "x=5 or x=7",
    ],
    "2003": ["435", "2003_7 + 1", "2004_6", "2003_2.5", "2003_0", "2003_1"],
    "42": ["42_8", "42_{(8)}"],
    "50": [r"5000\%", "0.5"],
    "100200": ["(100,200)", "[100,200]", r"\{100,200\}", "100, 200"],
    "204": [r"1204 \pmod{1000}", r"204 \pmod{100}", "x = 203 = 204", r"\text{not } 204", r"204 \text{ is wrong}"],
    "44": [r"\gcd(2024,748)", "gcd(2024,748)", r"\operatorname{gcd}(2024,748)", r"\text{gcd}(2024,748)"],
    "9": [
        r"\int_0^3 x^2 dx",
        r"\sum_{k=1}^{9} 1",
        r"\lfloor 9.5 \rfloor",
        "⌊9.5⌋",
        r"\max(3,9)",
        r"19 \bmod 10",
        r"\lim_{x\to0}9",
    ],
    "0": [r"\frac{0}{0}", "", r"\emptyset", r"\text{none}"],
    r"\frac{1}{3}": ["0.333333", r"33\%", "0.3333333333333333"],
    r"\pi": ["3.14", "3.141593", r"\frac{22}{7}"],
    r"\frac{1}{2^{99}}": [r"\frac{1}{2^{98}}"],
    r"\sqrt{2}": ["1.414214", r"\pm\sqrt2", r"\sqrt{2} \text{ or } 2", r"\sqrt{2} +"],
    "52_8": ["52_9", "52", "52_5"],
    "(3,5)": ["8", "35", "(5,3)", "3.5"],
    r"\pm 2021": ["2021"],
    "2x": ["2", "3x", r"2x \text{ is wrong}", r"\int 2 dx"],
    "A": ["B", "A or B", r"\text{AB}"],
    "???": ["12", "???", ""],
    "x^2+y^2=1": ["1", "x^2+y^2=2"],
}


@pytest.mark.parametrize(("reference", "answer"), [(key, answer) for key in RIGHT for answer in RIGHT[key]])
def test_another_way_to_write_the_answer_is_right(grader: Grader, reference: str, answer: str):
    assert grader.score(boxed(answer), reference).verdict == "correct"


@pytest.mark.parametrize(("reference", "answer"), [(key, answer) for key in WRONG for answer in WRONG[key]])
def test_what_does_not_say_the_answer_pays_nothing(grader: Grader, reference: str, answer: str):
    score = grader.score(boxed(answer), reference)
    assert score.reward == 0
    assert score.verdict in ("wrong", "unparsed", "no_box")


def test_references_are_checked_before_the_run(grader: Grader):
    for reference in (
        "204",
        "-3",
        r"\frac{1}{2}",
        "A",
        r"\text{Evelyn}",
        "(1,2)",
        r"\sqrt{2}",
        "x^2+y^2=1",
        r"\emptyset",
    ):
        grader.check_reference(reference)
    for reference in ("???", "", r"\frac{", "!!!", "1" * 1001):
        with pytest.raises(ValueError, match="cannot be read as mathematics"):
            grader.check_reference(reference)


# ---- Hostile text ----

FRAGMENTS = [*"0123456789.,'{}()[]^_/*+-=<>! \n$&%|\\:;?eé½²", r"\boxed{", r"\frac{", r"\text{", r"\sqrt", r"\quad"]
FRAGMENTS += [
    r"\equiv",
    r"\approx",
    r"\left",
    r"\overline{",
    r"\mathrm{",
    r"\{",
    "}{",
    "mod",
    "answer is ",
    "个",
    "🎉",
]
FRAGMENTS += ["apples", "\ud800", "\u202e", "\x00", "שלום", "<think>", "</think>", r"\\", r"\pm", " or ", "seven"]


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
@settings(max_examples=200, deadline=None)
def test_no_text_raises(text: str):
    last_boxed(text)
    reward._decide(text, "73")


@given(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=1000 * (DEADLINE + 1))
def test_no_mixture_of_mathematics_raises_or_hangs(pool: list[str], data: st.DataObject):
    text = "".join(data.draw(st.lists(st.sampled_from(pool), max_size=400)))
    last_boxed(text)
    reward._decide(text[: reward._MAX_CHARS], "73")
    reward._decide("73", text)


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "{",
        "}",
        "\\",
        "\\\\boxed{",
        "\\boxed ",
        "\\boxed{}",
        "\\boxed{7}",
        "\\boxed{{",
        "<think>",
        "</think>",
        " ",
    ],
)
def test_a_megabyte_of_anything_is_read_once(grader: Grader, piece: str):
    text = piece * (2**20 // len(piece))
    start = time.monotonic()
    assert grader.score(text + r" \boxed{8", "8").verdict == "unclosed"
    assert grader.score(r"\boxed{7}" + text, "8").reward == 0
    assert time.monotonic() - start < DEADLINE + 1


GATED = [
    "10^{10^{10}}", "9^{9^{9^9}}", "1000000000!", "73!!", r"e^{e^{e^{37.0}}}", r"\sqrt{10^{9999}}", "2^2^2^2^2",
    "7" * 5000, "7" * 900, "1e999999999", "(" * 300 + ")" * 300, r"\sqrt{" * 200 + "2" + "}" * 200, "|" * 80,
    r"\frac{1}{" * 60 + "2" + "}" * 60, "73 answer " * 90, r"4^{\frac{111111111111111111111}{2222222222222}}",
    "$1$ or " * 100, r"\prod_{k=1}^{100000000} k", "\ud800", "🎉" * 900, r"\int_0^1 \sin(\cos(\tan(x^{x^x}))) dx",
    r"\\quad" * 150 + "x", r"\begin{pmatrix}" + " & ".join("9" * 60) + r"\end{pmatrix}^{-1}",
]  # fmt: skip
SLOW = [r"\sin(" * 10 + "1" + ")" * 10, r"(\sqrt{2}+\sqrt{3})^{9999}", r"\binom{10^9}{10^8}"]  # past the gate
HOSTILE = [*[GATED[i % len(GATED)] for i in range(294)], *SLOW, *SLOW]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_300_hostile_strings_leave_nothing_behind():
    before = children()
    with Grader(deadline_seconds=1.0) as grader:
        gc.collect()
        memory = resident_bytes(os.getpid())
        scores = grader.score_many([(boxed(answer), "73") for answer in HOSTILE])
        assert {score.reward for score in scores} == {0}
        assert "timeout" in {score.verdict for score in scores}  # some do get through to the deadline
        assert grader.score(boxed(r"\frac{\sqrt{8}}{2}"), r"\sqrt{2}").correct
        assert grader.score(boxed("73"), "73").correct
        assert len(children() - before) == 2
        gc.collect()
        assert resident_bytes(os.getpid()) - memory < 20e6
        assert all(resident_bytes(pid) < 400e6 for pid in children() - before)
    assert children() == before


def test_a_worker_that_hangs_or_dies_is_replaced_and_named():
    slow = r"\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(1))))))))))"
    with Grader(num_workers=1, deadline_seconds=1.0) as grader:
        first = children()
        assert grader.score(boxed(slow), "73").verdict == "timeout"
        assert grader.score(boxed(r"\sqrt{4}"), "2").verdict == "correct"
        second = children()
        assert len(second) == len(first)
        assert second != first
        os.kill((second - first).pop(), signal.SIGKILL)
        assert grader.score(boxed(r"\sqrt{4}"), "2").verdict == "crash"
        assert grader.score(boxed(r"\sqrt{4}"), "2").verdict == "correct"


def test_workers_are_recycled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward, "_MAX_TASKS", 3)
    with Grader(num_workers=1) as grader:
        first = children()
        assert {grader.score(boxed(r"\sqrt{4}"), "2").verdict for _ in range(4)} == {"correct"}
        assert children() != first


# ---- Where it is called from ----


def test_a_grader_that_cannot_tell_right_from_wrong_refuses_to_start(monkeypatch: pytest.MonkeyPatch):
    before = children()
    monkeypatch.setattr(reward._Worker, "compare", lambda *_: "wrong")
    with pytest.raises(RuntimeError, match="self-test"), Grader():
        pass
    assert children() == before


def test_outside_its_block_a_grader_says_so():
    with pytest.raises(RuntimeError, match="with Grader"):
        Grader().score(boxed(r"\sqrt{4}"), "2")


PAIRS = [(boxed("73"), "73"), (boxed(r"\sqrt{16}"), "4"), (boxed(r"\sqrt{16}"), "5"), ("none", "5")]
VERDICTS = ["correct", "correct", "wrong", "no_box"]


def verdicts(grader: Grader) -> list[str]:
    return [score.verdict for score in grader.score_many(PAIRS)]


def test_it_works_on_a_worker_thread_and_started_there():
    found = []

    def work():
        with Grader() as grader:
            found.extend(verdicts(grader))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == VERDICTS


def test_many_threads_may_share_it(grader: Grader):
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(verdicts(grader))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [VERDICTS] * 8


def test_it_works_inside_asyncio():
    async def work():
        with Grader() as grader:
            here = verdicts(grader)
            return here, *await asyncio.gather(*[asyncio.to_thread(verdicts, grader) for _ in range(3)])

    assert asyncio.run(work()) == (VERDICTS,) * 4


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "main_script.py"
    path.write_text(f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom reward import Grader\n{body}")
    return path


def test_it_works_under_torchrun_and_workers_do_not_run_the_main_script(tmp_path: Path):
    # Unguarded on purpose: a worker that imported the main script would start graders without end.
    body = f"""open(r"{tmp_path}/runs", "a").write("run\\n")
with Grader(num_workers=1) as grader:
    found = [score.verdict for score in grader.score_many({PAIRS!r})]
open(rf"{tmp_path}/{{os.environ['RANK']}}", "w").write(" ".join(found))
"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, script(tmp_path, body)], check=True, capture_output=True, timeout=120)
    assert [(tmp_path / rank).read_text().split() for rank in "01"] == [VERDICTS] * 2
    assert (tmp_path / "runs").read_text() == "run\n" * 2


def start_and_list_workers(tmp_path: Path, busy: bool) -> tuple[subprocess.Popen[str], list[int], int]:
    """Return a process that grades, its workers, and a child that it forked, which holds all its pipes open."""
    slow = r"\boxed{\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(1))))))))))}"
    body = f"""import signal
with Grader() as grader:
    engine = os.fork()
    if engine == 0:
        os.closerange(0, 3)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pause()
    print(engine, *[worker.process.pid for worker in grader._workers], flush=True)
    while {busy}:
        grader.score_many([({slow!r}, "73")] * 50)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, script(tmp_path, body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    engine, *workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    return process, workers, engine


def gone(pid: int, seconds: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path, busy: bool):
    process, workers, engine = start_and_list_workers(tmp_path, busy)
    process.kill()
    process.communicate()
    try:
        assert all(gone(pid, 2 * DEADLINE) for pid in workers)
    finally:
        os.kill(engine, signal.SIGKILL)


def test_ctrl_c_ends_grading_at_once_and_the_workers_too(tmp_path: Path):
    process, workers, engine = start_and_list_workers(tmp_path, busy=True)
    os.killpg(process.pid, signal.SIGINT)
    start = time.monotonic()
    _, error = process.communicate(timeout=60)
    os.kill(engine, signal.SIGKILL)
    assert process.returncode == -signal.SIGINT
    assert time.monotonic() - start < DEADLINE + 1
    assert error.count("\nKeyboardInterrupt\n") == 1  # the workers' own would confuse
    assert all(gone(pid, 1) for pid in workers)


# ---- From the shell ----


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "reward.py", *arguments], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_importing_it_imports_no_heavy_library():
    code = "import sys, reward; print(*{'math_verify', 'sympy', 'torch', 'tyro', 'numpy'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "\n"


def test_the_shell_says_why(tmp_path: Path):
    completion = tmp_path / "completion.txt"
    completion.write_text(r"So it is \boxed{1{,}000}.")
    assert run("--text", completion, "--reference", "1000") == (
        0,
        "verdict correct, reward 1\nanswer '1{,}000', reference '1000'\n",
        "",
    )
    cases = tmp_path / "cases.jsonl"
    rows = [(r"\boxed{7}", "7", 1), (r"\boxed{8}", "7", 1), ("\\boxed{7}\u2028", "7", 1)]
    cases.write_text(
        "\n".join(json.dumps(dict(zip(["text", "reference", "right"], row, strict=True))) for row in rows)
    )
    status, out, _ = run("--cases", cases)
    assert status == 0
    assert out.split("\n")[:2] == [
        "line 2: '8' for '7' is wrong, but labelled right",
        "2 of 3 agree; {'correct': 2, 'wrong': 1}",
    ]


def test_bad_input_is_one_sentence_and_status_2(tmp_path: Path):
    completion = tmp_path / "completion.txt"
    completion.write_text("7")
    for arguments, sentence in [
        ((), "give --text and --reference, or --cases"),
        (("--text", completion), "give --text and --reference, or --cases"),
        (("--text", completion, "--reference", "???"), "the reference answer '???' cannot be read as mathematics"),
        (("--text", tmp_path / "absent", "--reference", "7"), "No such file"),
        (("--cases", completion), "line 1: expected a JSON object with text, reference and right"),
    ]:
        status, out, error = run(*arguments)
        assert (status, out) == (2, "")
        assert sentence in error
        assert error.count("\n") == 1
