"""What an answer says: which box counts, every kind of spelling, and whether it agrees with the reference."""

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grading.answers import decide
from grading.extraction import complete_boxes, find_answer
from grading.spelling import ONES, TENS
from reward import Grader


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


def boxed(answer: str) -> str:
    return rf"Adding up, I get \boxed{{{answer}}}."


def last_boxed(text: str) -> str | None:
    return find_answer(text, *complete_boxes(text))[0]


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


# ---- What stands around the box ----


@pytest.mark.parametrize("joint", [" or ", ", ", "", r"$ \text{ or } $", " and ", "; "])
def test_different_boxes_side_by_side_are_no_answer(grader: Grader, joint: str):
    text = rf"It is $\boxed{{61}}{joint}\boxed{{62}}$."
    assert [grader.score(text, reference).verdict for reference in ("61", "62")] == ["unparsed"] * 2
    assert grader.score(rf"$\boxed{{62}}{joint}\boxed{{ 62 }}$", "62").correct


def test_a_box_that_replaces_another_is_the_answer(grader: Grader):
    assert grader.score(r"First \boxed{61}, but I forgot one case, so \boxed{62}.", "62").correct


@pytest.mark.parametrize("empty", [r"\;", r"\_\_", r"\text{[your answer]}", r"\quad", ""])
def test_an_empty_box_cancels_nothing(grader: Grader, empty: str):
    assert grader.score(rf"It is \boxed{{62}}. Format: \boxed{{{empty}}}", "62").correct


@pytest.mark.parametrize(
    ("prompt", "text", "verdict"),
    [
        ("Add. <think>\n", r"maybe \boxed{62}", "unclosed"),
        ("Add. <think>\n", r"maybe \boxed{61}</think> \boxed{62}", "correct"),
        ("Add. <think>\n", r"maybe \boxed{62}</think> I do not know", "no_box"),
        ("Add. <think>\n\n</think>\n\n", r"\boxed{62}", "correct"),
        ("Add.", r"\boxed{62}", "correct"),
    ],
)
def test_thinking_that_the_prompt_opens_is_no_answer(grader: Grader, prompt: str, text: str, verdict: str):
    assert grader.score(text, "62", prompt=prompt).verdict == verdict


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
    assert decide(answer, str(value), "How many apples are there?") == "correct"
    for other in (value - 1, value + 1, -value if value else 7, value * 10 or 10, value * 1000 or 1000):
        assert decide(answer, str(other), "How many apples are there?") == "wrong"


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6), st.integers(1, 99))
@settings(deadline=None)
def test_fractions_and_decimals_are_exact(value: int, below: int, scale: int):
    fraction = rf"\frac{{{value * scale}}}{{{below * scale}}}"
    for answer in (fraction, rf"x = {fraction}", f"{value}/{below}", rf"\left({fraction}\right)"):
        assert decide(answer, rf"\dfrac{{{value}}}{{{below}}}") == "correct"
        assert decide(answer, rf"\dfrac{{{value + 1}}}{{{below}}}") == "wrong"
    assert decide(f"{value}.5", str(value)) == "wrong"
    assert decide(f"{value}.0000001", str(value)) == "wrong"
    assert decide(rf"{value}.0 \times 10^3", str(1000 * value)) == "correct"


@given(st.integers(0, 100), st.sampled_from([str, str.title, str.upper, r"\text{{{}}}".format]))
def test_number_words_up_to_a_hundred_are_numbers(value: int, style):
    ones = ONES
    tens = ["", "", *TENS, "one hundred"]
    word = ones[value] if value < 20 else f"{tens[value // 10]}-{ones[value % 10]}".removesuffix("-zero")
    assert decide(style(word), str(value)) == "correct"
    assert decide(style(word), str(value + 1)) == "wrong"


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
        "1 month",
        "1 point",
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
