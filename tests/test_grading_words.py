"""What may stand in an answer: units, scale words, honest spellings, closed forms, and what is no number at all."""

from collections.abc import Iterator

import pytest

from grading.answers import decide, read_number
from grading.spelling import RULES, fold, read_unit
from reward import Grader


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


def boxed(answer: str) -> str:
    return rf"Adding up, I get \boxed{{{answer}}}."


# ---- Words, units and scale ----


@pytest.mark.parametrize(
    "answer",
    [
        r"62\text{ halved}",
        r"62 \text{ refuted}",
        r"62 cancelled",
        r"\text{one less than the answer is } 62",
        r"\text{half the answer} = 62",
        r"3 \cdot \text{result} = 62",
        r"62^{\text{nd}} \text{ square}",
        "62左右",
        "62的三倍",
        r"62\text{ bis }63",
        r"62 \text{ squared}",
        r"62\text{ plums}",
        r"62\text{ per}",
        r"62\text{ cm} -",
        r"\text{Double} = 62",
        "两倍 = 62",
        r"\text{Area}^2 = 62",
    ],
)
def test_a_word_that_is_not_known_is_refused(answer: str):
    assert decide(answer, "62") == "unparsed"


def test_things_are_known_from_the_prompt_that_asks_for_their_number():
    prompt = (
        "How many plums are left? How many third-degree polynomials? Find the number of points of intersection."
    )
    for answer in ("62 plums", r"62\text{ third-degree polynomials}", r"62\text{ points of intersection}"):
        assert decide(answer, "62", prompt) == "correct"
    for question in (prompt, "How many more than half are not rotten?", "The plums cost 5."):
        for answer in ("62 more", "62 not", "62 half", "62 rotten plums"):
            assert decide(answer, "62", question) == "unparsed"
    assert decide("62 plums", "62", "The plums cost 5.") == "unparsed"


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        (r"7\text{ million}", "7000000", "correct"),
        (r"7\text{ million}", "7", "wrong"),
        (r"2.5 \text{ billion dollars}", "2500000000", "correct"),
        ("9亿", "900000000", "correct"),
        (r"7 \text{ k}", "7", "wrong"),
        ("7k", "7000", "unparsed"),
        (r"0.7\%", r"\frac{7}{10}", "wrong"),
        (r"70\%", r"\frac{7}{10}", "correct"),
        (r"12.5\%", "12.5", "correct"),
        (r"3 \text{ hours}", r"180 \text{ minutes}", "correct"),
        (r"3 \text{ hours}", r"3 \text{ minutes}", "wrong"),
        (r"3\text{ kg}", r"3\text{ g}", "wrong"),
        (r"3\text{ m}", r"3\text{ s}", "wrong"),
        (r"30\text{ rad}", r"30^\circ", "wrong"),
        (r"12^\circ 45'", r"12.75^\circ", "correct"),
        (r"8\pi\text{ m}", r"8\pi\text{ cm}", "wrong"),
        (r"9 \text{ cm}^2", r"9 \text{ square cm}", "correct"),
        (r"9 \text{ cm}^3", r"9 \text{ cm}^2", "wrong"),
        ("60 miles per hour", "60", "correct"),
        ("Rs. 40", "40", "correct"),
        (r"\$40", r"40\text{ euros}", "wrong"),
        ("7:15 AM", r"7:15 \text{ PM}", "wrong"),
        ("7:15 p.m.", r"7:15 \text{ PM}", "correct"),
    ],
)
def test_scale_words_and_units_count(answer: str, reference: str, verdict: str):
    assert decide(answer, reference) == verdict


def test_units_of_several_words_are_read_whole():
    assert read_unit("kilometres per hour") == read_unit("km/h")
    assert read_unit("/") is read_unit("g") is read_unit("cm wrong") is None


# ---- References that are no numbers, and closed forms ----


@pytest.mark.parametrize(
    ("answer", "reference", "correct"),
    [
        ("ℤ", r"\mathbb{Z}", True),  # noqa: RUF001
        (r"\big(1, √8\big)", r"(1,2\sqrt{2})", True),
        ("-y", "y", False),
        ("p-q", "pq", False),
        ("B", "B'", False),
        ("y", "y'", False),
        (r"\frac{3+\sqrt7}{4}, \frac{3-\sqrt7}{4}", r"\frac{3\pm\sqrt{7}}{4}", True),
        (r"\frac{3+\sqrt7}{4}", r"\frac{3\pm\sqrt{7}}{4}", False),
        ("qp", "pq", True),
        ("2:4:5", "2:5:4", False),
        ("3", "x+y=3", False),
        ("y<-5 \\text{ or } y>5", "|y|>5", True),
        ("3y > 12", "y > 4", True),
        ("y \\ge 4", "y > 4", False),
        (r"\text{all real numbers}", r"\mathbb{R}", True),
        (r"(-\infty,\infty)", r"\mathbb{R}", True),
        (r"\text{a parabola}", r"\text{parabola}", True),
        (r"\text{hyperbola}", r"\text{parabola}", False),
        (r"\textbf{(D)}\ 7", "D", True),
        (r"\text{D. } 7", "D", True),
        (r"\text{Choice D}", "D", True),
        ("(D) or (E)", "D", False),
        (r"2y \text{ is false}", "2y", False),
        (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}", False),
    ],
)
def test_what_is_no_number_is_compared_as_it_is_written(grader: Grader, answer: str, reference: str, correct: bool):
    assert grader.score(boxed(answer), reference).correct is correct


@pytest.mark.parametrize("huge", ["150!", r"\binom{3000}{1500}", "3^{200000}", "9^{9^{9}}", r"\sqrt{10^{9999}}"])
def test_what_is_the_same_text_is_right_whatever_its_size(huge: str):
    assert decide(f"$ {huge} $", huge) == "correct"


@pytest.mark.parametrize(
    ("answer", "reference", "correct"),
    [
        ("e^{-50}", "e^{-51}", False),
        ("e^{-400}", "e^{-401}", False),
        (r"\frac{1}{88!}", r"\frac{1}{89!}", False),
        ("2.71828182845904523536028747135266249", "e", False),
        (r"\frac{\ln(5280^3+744)}{\sqrt{67}}", r"\pi", False),
        (r"\frac{7\sqrt{2}}{3^{90}}", r"\frac{7\sqrt{3}}{3^{90}}", False),
        ("8^{60000}", "2^{180000}", True),
        ("2^{180000}+1", "2^{180000}", False),
        (r"0.3\sqrt{2}", r"\frac{3\sqrt{2}}{10}", True),
        (r"2-5\mathrm{i}", "2-5i", True),
        (r"2+5\mathrm{i}", "2-5i", False),
        (r"\frac\pi6", r"\frac{\pi}{6}", True),
    ],
)
def test_closed_forms_agree_to_a_hundred_digits(grader: Grader, answer: str, reference: str, correct: bool):
    assert grader.score(boxed(answer), reference).correct is correct


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("2.345.678", "2345678"),
        ("2{.}345{.}678", "2345678"),
        ("2٬345٬678", "2345678"),
        (r"0.\dot{6}", r"\frac{2}{3}"),
        ("0.(6)", r"\frac{2}{3}"),
        (r"1.\bar{2}", r"\frac{11}{9}"),
        ("CD_{16}", "205"),
        (r"\text{Area} = 205", "205"),
        (r"31_{\text{four}}", "13"),
        (r"\overline{31}_4", "13"),
        (r"{5 \over 8}", "0.625"),
        (r"\underbrace{13}_{\text{total}}", "13"),
        (r"\frac{\boxed{26}}{\boxed{2}}", "13"),
        (r"2.6 \text{ x } 10^{4}", "26000"),
        (r"\text{There are } 13 \text{ of them}", "13"),
    ],
)
def test_honest_spellings_are_paid(answer: str, reference: str):
    assert decide(answer, reference) == "correct"
    assert decide(answer, reference + "1") != "correct"


@pytest.mark.parametrize(("pattern", "replacement", "example", "reason"), RULES)
def test_each_rule_changes_its_example_into_a_number(pattern, replacement, example: str, reason: str):
    assert pattern.sub(replacement, example) != example, reason
    assert read_number(fold(example)) is not None
