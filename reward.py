r"""Decide whether the answer in a completion is right: safely, and the same way in training and evaluation.

The answer is what the last `\boxed{...}` holds. A plain number is decided here, exactly, with Python's integers
and fractions. Anything else goes to math-verify, in a worker process that may be killed: a completion is text
that an optimiser wrote, it may ask for 10^(10^8), and no signal or thread stops the C code that then runs.

`Grader` owns the workers. Each is an interpreter of its own that runs this file, so it does not matter which
thread, event loop or launcher calls, nor what the main script imports. `wrong` is a judgement; `timeout` and
`crash` say that there was none. They all pay 0, and they are never counted as one another.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

Verdict = Literal["correct", "wrong", "no_box", "unclosed", "unparsed", "timeout", "crash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one completion earned, and why.

    `verdict` is `correct`, `wrong`, `no_box` (none, or only empty and placeholder ones), `unclosed` (a box, or the
    thinking, was still open at the end), `unparsed` (the box holds no single finished answer that can be read),
    `timeout` (the comparison took too long) or `crash` (the worker died). `answer` is what the box holds.
    """

    reward: float
    answer: str | None
    verdict: Verdict

    @property
    def correct(self) -> bool:
        """The answer is right."""
        return self.reward == 1

    @property
    def formatted(self) -> bool:
        """The last box that was opened is complete and not a placeholder."""
        return self.answer is not None


# ---- Extraction: one pass over the text, whatever it is ----

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
# A run of backslashes is one token, lest a megabyte of them be read again from each; an odd run escapes a brace.
_BOX_TOKEN = re.compile(r"(\\++)((?:boxed|fbox)(?![A-Za-z])\s*+\{|[{}])?|[{}]")
_FILLER = re.compile(
    r"\\(?:text\w*|mathrm|mbox|[lc]?dots|square|q?quad|underline)(?![A-Za-z])|[\s{}()\[\]<>.…,:_?$~*-]"
)
_PLACEHOLDER = re.compile(
    r"(?:(?:insert|put|write|enter|place|your|the|final|correct|numerical|numeric|integer|my|an?)*"
    r"(?:answer|result|solution|value|number|here)(?:goes)?(?:here)?|placeholder|x{2,}|(?:你的|最终)*答案)?",
    re.IGNORECASE,
)


def last_boxed(text: str) -> str | None:
    r"""Return what the last complete `\boxed{...}` or `\fbox{...}` holds, passing over empty and placeholder ones.

    None without such a box, or when one opened later never closes: the answer was not finished. Linear time.
    """
    return _find_box(text)[0]


def _find_box(text: str) -> tuple[str | None, Verdict | None]:
    # Thinking is not the answer. Some templates open it in the prompt, so `</think>` may come alone.
    start = max(text.rfind("</think>"), 0)
    if text.find("<think>", start) >= 0:
        return None, "unclosed"
    first = _BOX.search(text, start)
    if first is None:
        return None, "no_box"
    opened: list[tuple[int, int] | None] = []  # unclosed braces; a box is (its start, the start of its contents)
    boxes: list[tuple[int, int, int, int]] = []  # complete boxes in no other: start, end, start and end of contents
    for token in _BOX_TOKEN.finditer(text, first.start()):
        slashes, tail = token.groups()
        if tail and len(tail) > 1:
            opened.append(token.span())
        elif slashes and (not tail or len(slashes) % 2):
            continue
        elif token[0][-1] == "{":
            opened.append(None)
        elif opened and (box := opened.pop()):
            marker, begin, end = *box, token.start()
            inner = []
            while boxes and boxes[-1][0] > marker:
                inner.append(boxes.pop())
            if len(inner) == 1 and not (text[begin : inner[0][0]] + text[inner[0][1] : end]).strip():
                begin, end = inner[0][2:]  # \boxed{\boxed{7}}
            boxes.append((marker, token.end(), begin, end))
    last_open = max((box[0] for box in opened if box), default=-1)
    for marker, _, begin, end in reversed(boxes):
        if last_open > marker:
            break
        answer = text[begin:end].strip()
        if len(answer) > 80 or not _PLACEHOLDER.fullmatch(_FILLER.sub("", answer)):
            return answer, None
    return None, "no_box" if last_open < 0 else "unclosed"


# ---- Reading: many spellings to one ----

_SYMBOLS = r"""×\times ÷\div ·\cdot ⋅\cdot ∙\cdot π\pi ∞\infty √\sqrt °^\circ º^\circ ˚^\circ ±\pm ≤\le ≥\ge ≠\ne
    ≈\approx ≡\equiv ∈\in ∪\cup ∩\cap ∅\emptyset ∴\therefore ⇒\Rightarrow ∑\sum ∏\prod ∫\int ⌊\lfloor ⌋\rfloor
    ⌈\lceil ⌉\rceil"""  # noqa: RUF001
_CHARACTERS = str.maketrans(
    {symbol[0]: symbol[1:] + " " for symbol in _SYMBOLS.split()}
    | dict.fromkeys("‐‑‒–—―−﹘﹣－⁃➖᠆־", "-")  # noqa: RUF001
    | dict.fromkeys("’‘ʼ＇", "'")  # noqa: RUF001
    | dict.fromkeys("“”", '"')
    | {"。": ".", "、": ",", "\ufe0f": ""}
)
_TEXT = r"\\(?:text(?!color)[a-z]*|mathrm|[mh]box|operatorname\*?|emph)\s*"
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?|limits|boxed|fbox|underline|ensuremath)(?![A-Za-z])", ""),
        (r"\\(?:math(?:bf|it|sf|tt|bb|cal|normal)|boldsymbol|bold|bm|pmb)(?![A-Za-z])", ""),
        (r"\\(?:bf|rm|it|sf|tt|(?:display|text|script)style|small|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])", ""),
        (r"\\(?:text)?color\s*(?:\[\w*\])?\s*\{[^{}]*\}|\\colorbox\s*\{[^{}]*\}", ""),
        (r"\\(?:[hv]space\*?|[hv]?phantom|label|tag)\s*\{[^{}]*\}", ""),
        (r"\\(?:begin|end)\s*\{(?:aligned|align|gathered|equation|split|array)\*?\}(?:\{[clr|]+\})?", ""),
        (r"\\(?:[,;:> ]|(?:thinspace|enspace)(?![A-Za-z]))|~|[^\S\n]", " "),
        (r",\s*\\!\s*|\\!", lambda match: match[0][0].strip("\\")),
        (r"(?:US)?\\?\$|(?<!\\)\\[()\[\]]|\\?#", ""),
        (r"[€£¥₹₩₽¢]|\\(?:pounds|euro|texteuro|yen|textdollar)(?![A-Za-z])", ""),
        (r"\\mathrm\s*\{\s*([dei])\s*\}", r"{\1}"),
        (r"\{\s*(\{[^{}]*\})\s*\}", r"\1"),
        (_TEXT + r"(\{(?:[^{}]*(?<!\^)\d[^{}]*|[^{}\w]*)\})", r"\1"),
        (_TEXT + r"(\{[^{}]*\})", r"\\text\1"),
        (r"\{(\\text\{[^{}]*\}|[-+,.]|\\?%)\}|(?<!\\)\{\s*\}", r"\1"),
        (r"\^\s*\{\s*(?:\\circ|\\degree)\s*\}|\^\s*(?:\\circ|\\text\{o\})|\\degree(?![A-Za-z])", r"\\degree "),
        (r"\\(?:[dtcs]|nice)frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\d)|\\sqrt\s*\(([^()]*)\)", lambda match: rf"\sqrt{{{match[1] or match[2]}}}"),
        (r"(\d*)\.(\d*)\\overline\s*\{(\d{1,99})\}", lambda match: _repeating(*match.groups())),
        (r"\\overline\s*(\{\d+\})", r"\1"),
        (r" {2,}", " "),
        (
            r"(?<=\d)[\s_({]*(?:\\text\{[\s(]*)?(?i:(?:in )?base)[\s}-]*(\d{1,2})[\s{}).]*$",
            lambda match: _in_base(match),
        ),
        (r"(?<=\d)_\s*(?:\{\s*\((\d{1,2})\)\s*\}|\((\d{1,2})\))", r"_{\1\2}"),
    ]
]


def _tidy(text: str) -> str:
    """Undo what only changes how an answer looks; what is left is LaTeX, with one spelling of each thing."""
    if not text.isascii():
        # Before NFKC, which makes 72 of 7² and 21/2 of 2½.
        text = re.sub("[⁰¹²³⁴-⁹⁻]{2,}", lambda run: "^{" + _ascii(run[0]) + "}", text)
        text = re.sub("[⁰¹²³⁴-⁹]", lambda digit: "^" + _ascii(digit[0]), text)
        text = re.sub("[₀-₉]+", lambda run: "_{" + _ascii(run[0]) + "}", text)
        text = re.sub("[¼-¾⅐-⅞]", lambda part: rf"\frac{{{_ascii(part[0]).replace('/', '}{')}}}", text)
        text = _ascii(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if r"\begin" not in text:
        text = text.replace("&", "")
    return re.sub(r"^(\*\*|[*`\"'])(.*)\1$", r"\2", text.strip(), flags=re.DOTALL).strip()


def _ascii(text: str) -> str:
    """Widths, digits and dashes of every script as ASCII, without the characters that nobody sees."""
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf").replace("\u2044", "/")
    return re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text)


def _repeating(whole: str, fixed: str, period: str) -> str:
    r"""0.1\overline{6} as a fraction."""
    numerator = int(whole + fixed + period) - int(whole + fixed or 0)
    return rf"\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _in_base(match: re.Match[str]) -> str:
    """2003 (base 6) as 2003_{6}, with the brackets behind it that were opened before it."""
    closing = re.sub(r"[^)}]", "", match[0])
    opened_before = max(0, len(closing) - len(re.sub(r"[^({]", "", match[0])))
    return f"_{{{match[1]}}}" + closing[len(closing) - opened_before :]


_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_ONES = [*_ONES.split(), "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBER_WORDS = dict(zip(_ONES, range(20), strict=True)) | {"hundred": 100, "onehundred": 100}
_NUMBER_WORDS |= {
    ten + one: 10 * i + j for i, ten in enumerate(_TENS, 2) for j, one in enumerate(["", *_ONES[1:10]])
}

# Words that take back or change the number beside them; every other word is a unit or a label.
_HEDGE = re.compile(
    r"(?<![A-Za-z\\])(?:or|and|not|no|if|when|where|let|but|so|to|about|around|approx\w*|maybe|perhaps|possibly"
    r"|probably|wrong|incorrect|false|at|least|most|more|less|than|over|under|below|above|almost|nearly|roughly"
    r"|guess|think|might|unless|plus|minus|times|hundred|thousand|\w*illion|dozen|half|\w+dths|tenths|mod\w*|base"
    r"|remainder|cannot|can|never|neither|nor|except|divided|squared|cubed|factorial|negative|sin|cos|tan|log|exp"
    r"|sqrt)(?![A-Za-z])|[不非或万亿千百十半约至]",
    re.IGNORECASE,
)
# Behind a number, what makes another one of it, though it looks like a unit.
_MULTIPLE = re.compile(
    r"(?<![A-Za-z\\])(?:pi|lakhs?|crores?|gross|hundreds|thousands|[a-z]{1,9}illions|dozens|halves|choose"
    r"|(?:third|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]{3,6}teen|[a-z]{3,5}tie|hundred|thousand"
    r"|[a-z]{1,9}illion)th)(?:s|(?=[\s}]*$)))(?![A-Za-z])"
    rf"|(?<![A-Za-z\\])(?:root|radical|point|power)(?: of)?[\s}}]+(?:oh|{'|'.join(_ONES + _TENS)})"
    r"|(?-i:\{\s*[ei]\s*\}*$)|分之|次方|阶乘|(?:平方|立方)根?$",
    re.IGNORECASE,
)
_BARE_UNIT = r"(?:[cmk]?m|[mk]g|k?mph|kph|km/h|m/s|in|ft|yd|mi|m[lL]|hrs?|min|sec|st|nd|rd|th|USD)"
_UNIT = re.compile(
    r"(?:\s*[/^{]*\\text\{(?:[^{}\d]|\^[23])*\}\}*(?:\^\s*\{?[23]\}?)?)+$"
    rf"|\s*\^?\{{?{_BARE_UNIT}\}}?(?:\^\s*\{{?[23]\}}?)?$"
    r"|\s+[^\W\d_]{3,}(?:[\s/.-]+[^\W\d_]+){0,6}(?:\^\s*\{?[23]\}?)?$|\s*[\u3400-\u9fff]{1,6}$"
)
_LABEL = re.compile(
    r"(?:\\text\{)?\s*((?:answer|ans|答案?|结果)|[^\W\d_]+(?: [^\W\d_]+){0,7}? ?(?=is\b|equals\b|\\colon|[:是为]))"
    r"(?:\s|is\b|equals\b|\\colon(?![A-Za-z])|[:是为}])*(?=[^A-Za-z\s:=])",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"^[\s{]*(?:\\text\{)?[\s{]*\([A-Z]\)[\s}]*(?=[^\s}])")
_LEAD = re.compile(r"^(?:\s|\\(?:therefore|because|Rightarrow|implies|q?quad)(?![A-Za-z])|\\\\)++")
_TAIL = re.compile(r"(?:[\s.,;]|\\(?:q?quad|checkmark|blacksquare|square|qed)|\\)++$")
_EQUALS = re.compile(r"\\(?:in|coloneqq|cong|simeq)(?![A-Za-z])|(?<![<>!=]):?=(?![=>])")
_NOT_A_NAME = re.compile(
    r"[,;<>!?]|\\(?:n?le?q?q?|n?ge?q?q?|l[td]|gt|neq?|neg|not\w*|lor|vee|cup|q?quad|pm|mp|implies|iff|to|n?mid"
    r"|(?:[Ll]ong)?(?:[Ll]eft|[Rr]ight)+arrow)(?![A-Za-z])"
)
_MODULUS = re.compile(r"[\s({]*(?:\\?[pb]?mod|\\text\{\s*mod\s*\})[\s{]*(\d{1,20})[\s)}]*$")
_GROUPS = re.compile(r"(?<![\d.])(\d{1,3})((?:,\d{3})+|(?:'\d{3})+|(?: \d{3})+)(?![\d,']| \d)")
# Closed forms of numbers, of which sympy can say whether they are equal: no letter, relation, list or word.
_CONSTANT = re.compile(
    r"(?:[\d\s.+\-*/^(){}\[\]_!|]|\\(?:frac|sqrt|times|cdot|div|[dt]?binom|pi|ln|log|exp|(?:arc)?(?:sin|cos|tan)"
    r"|sec|csc|cot|infty)(?![A-Za-z])|(?<![A-Za-z\\])[ei](?![A-Za-z]))+"
)


class _UnreadableError(ValueError):
    """The text does not say one number, says it with reserve, or is more arithmetic than an answer has."""


class _Reading(NamedTuple):
    """What a box or a reference says: all of it as tidy LaTeX, and the one value that it comes to, if it does."""

    latex: str
    core: str | None = None
    percent: bool = False
    number: Fraction | None = None

    @property
    def digits(self) -> Fraction | None:
        """The digits of a numeral such as `2003_6` as they stand, which is how a reference may have them.

        None for fewer than three, by which a box could hold two guesses.
        """
        numeral = re.fullmatch(rf"{_NUMERAL}\s*", self.core or "")
        return Fraction(numeral["digits"]) if numeral and len(numeral["digits"]) > 2 else None

    @property
    def is_number(self) -> bool:
        return self.core is not None and _CONSTANT.fullmatch(self.core) is not None


def _read(text: str, is_reference: bool = False) -> _Reading:
    latex = _tidy(text)
    # `m+n = 204` answers a question with 204, but `x^2+y^2 = 1` asks for the curve.
    if is_reference and (equals := _EQUALS.search(latex)) and re.search(r"[\d+*/^-]", latex[: equals.start()]):
        return _Reading(latex)
    try:
        core, percent = _core(latex)
    except _UnreadableError:
        return _Reading(latex)
    return _Reading(latex, core, percent, _evaluate(core))


_read_reference = lru_cache(maxsize=4096)(lambda text: _read(text, is_reference=True))


def _core(text: str) -> tuple[str, bool]:
    """Take the value out of its name, label, unit and brackets, and say whether it was a percentage."""
    text = _unwrap(_TAIL.sub("", _LEAD.sub("", text)))
    text = _LEAD.sub("", _CHOICE.sub("", text))
    if len(sides := re.split(r"\\(equiv|approx)(?![A-Za-z])", text, maxsplit=1)) > 1:
        left, sign, right = sides
        with suppress(_UnreadableError):
            exact = _core(left)
            if sign == "approx" and _CONSTANT.fullmatch(exact[0]):
                return exact  # in `\frac{1}{3} \approx 0.33`
        _check_name(left)
        return _core(right)
    parts = _EQUALS.split(text)
    if len(parts) > 1:
        return _solved(parts)
    if (label := _LABEL.match(text)) and not _HEDGE.search(label[1]):
        text = _LEAD.sub("", text[label.end() :])
    text = _unwrap(text)
    words = re.sub(r"\\text|[^a-z]", "", text.lower())
    sign = "-" if words.startswith(("minus", "negative")) else ""
    words = words.removeprefix("minus").removeprefix("negative")
    if words in _NUMBER_WORDS and not re.search(r"\d", text):
        return f"{sign}{_NUMBER_WORDS[words]}", False
    if modulus := _MODULUS.search(text):
        core, percent = _core(text[: modulus.start()])
        residue = _evaluate(core)
        if residue is None or not 0 <= residue < int(modulus[1]):
            raise _UnreadableError
        return core, percent
    bare = re.sub(r"\s*\\?%$|\s*(?:\\text\{\s*)?(?:percent|pct)\s*\}?$", "", text)
    percent = bare != text
    bare = re.sub(r"\s*\\degree\s*(?:\\text\{\s*)?[CF]?\}?$", "", bare)
    if not percent and (unit := _UNIT.search(bare)):
        if _HEDGE.search(unit[0]) or _MULTIPLE.search(unit[0]):
            raise _UnreadableError
        bare = bare[: unit.start()]
    bare = _unwrap(_TAIL.sub("", bare))
    if "," in bare and bare.startswith(("(", "[", r"\{")):
        raise _UnreadableError
    return _GROUPS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), bare), percent


def _solved(parts: list[str]) -> tuple[str, bool]:
    """The value of `m+n = 200+4 = 204` or `5 = x`: every part is a name or a number, and the numbers agree."""
    found: list[tuple[str, bool, Fraction | None]] = []
    for part in map(str.strip, parts):
        try:
            core, percent = _core(part)
        except _UnreadableError:
            core, percent = "", False
        if _CONSTANT.fullmatch(core):
            found.append((core, percent, _evaluate(core)))
        else:
            _check_name(part)
    values = [reading for reading in found if reading[2] is not None]
    if not found or not parts[-1].strip() or len({value for *_, value in values}) > 1:
        raise _UnreadableError
    return (values or found)[-1][:2]


def _check_name(text: str) -> None:
    if _NOT_A_NAME.search(re.sub(r"\([^()]*\)", "", text)) or _HEDGE.search(text):
        raise _UnreadableError


def _unwrap(text: str) -> str:
    """Strip brackets that enclose the whole text; but `(100,200)` is a pair."""
    text = text.strip()
    if "," in text and text[0] != "{":
        return text
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    while len(text) > 1 and text[0] + text[-1] in ("()", "[]", "{}") and min(_depths(text[1:-1]), default=0) >= 0:
        text = text[1:-1].strip()
    return text


# ---- Plain arithmetic ----

_MAX_CHARS = 1_000  # a longer box holds no honest answer; and so the patterns here cannot take long
_MAX_NESTING = 25
_MAX_BITS = 4_096  # of every numerator and denominator on the way to a value
_PRIORITY = {"+": 1, "-": 1, "*": 2, r"\times": 2, r"\cdot": 2, "/": 2, r"\div": 2, "^": 3}
_NUMERAL = r"(?P<digits>\d+)_\s*(?:(?P<base>\d{1,2})|\{\s*(?P<in_braces>\d{1,2})\s*\})"
_TOKEN = re.compile(
    rf"\s*(?:{_NUMERAL}"
    r"|(?P<number>\d*\.\d+|\d+\.?)(?:[eE](?P<exponent>[+-]?\d{1,4}))?(?![\d_eE])|(?P<symbol>\\[a-z]+|[-+*/^(){}]))\s*"
)


def _evaluate(text: str) -> Fraction | None:
    r"""Return the exact value of `1011_2`, `7.3 \times 10^1`, `2\frac{2}{3}` and the like, else None."""
    if max(_nesting(text), text.count("^")) > _MAX_NESTING:
        return None
    tokens: list[str | Fraction] = []
    position = 0
    try:
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                return None
            if token["symbol"]:
                tokens.append(token["symbol"])
            elif token["digits"]:
                base = int(token["base"] or token["in_braces"])
                tokens.append(Fraction(int(token["digits"], max(base, 1))))  # int() would guess for 0
            else:
                tokens.append(Fraction(token["number"]) * Fraction(10) ** int(token["exponent"] or 0))
            position = token.end()
        tokens.reverse()
        value = _arithmetic(tokens, 0)
    except (ValueError, ZeroDivisionError, IndexError):  # no such digit; undefined; cut off
        return None
    return None if tokens else value


def _arithmetic(tokens: list[str | Fraction], priority: int) -> Fraction:
    """Take a value, and the operators of at least `priority` behind it, from the end of `tokens`."""
    token = tokens.pop()
    if isinstance(token, Fraction):
        value = token + _mixed(tokens) if token.denominator == 1 else token
    elif token in ("-", "+") and priority in (0, 3):
        value = _arithmetic(tokens, max(priority, 2)) * (-1 if token == "-" else 1)
    elif token in ("(", "{"):
        value = _arithmetic(tokens, 0)
        if tokens.pop() != {"(": ")", "{": "}"}[token]:
            raise _UnreadableError
    elif token == r"\frac":
        value = _fraction(tokens)
    else:
        raise _UnreadableError
    while tokens and (rank := _PRIORITY.get(str(tokens[-1]), -1)) >= max(priority, 1):
        operator = tokens.pop()
        other = _arithmetic(tokens, 3 if rank == 3 else rank + 1)
        if operator == "^":
            size = max(value.numerator.bit_length(), value.denominator.bit_length())
            if other.denominator != 1 or abs(other) > _MAX_BITS or abs(other) * (size - 1) > _MAX_BITS:
                raise _UnreadableError
            value = value ** int(other)
        elif rank == 2:
            value = value / other if operator in ("/", r"\div") else value * other
        else:
            value = value + other if operator == "+" else value - other
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise _UnreadableError
    return value


def _fraction(tokens: list[str | Fraction]) -> Fraction:
    groups: list[Fraction] = []
    while len(groups) < 2:
        if tokens[-1] != "{":
            raise _UnreadableError
        groups.append(_arithmetic(tokens, 4))
    return groups[0] / groups[1]


def _mixed(tokens: list[str | Fraction]) -> Fraction:
    r"""The proper fraction that makes a whole number a mixed one: `2 2/3`, `2\frac{2}{3}`."""
    match tokens[-3:]:
        case [Fraction() as below, "/", Fraction() as above]:
            del tokens[-3:]
            part = above / below
        case [*_, r"\frac"]:
            tokens.pop()
            part = _fraction(tokens)
        case _:
            return Fraction(0)
    if not 0 < part < 1:
        raise _UnreadableError
    return part


def _depths(text: str) -> Iterable[int]:
    return accumulate(1 if bracket in "([{" else -1 for bracket in re.findall(r"[()\[\]{}]", text))


def _nesting(text: str) -> int:
    return max(_depths(text), default=0)


# ---- Deciding ----

# Restating the question is not answering it.
_UNDONE = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim(?:sup|inf)?|[pb]?mod|gcd|lcm|det|max|min|sup|inf|[lr]?floor|[lr]?ceil|partial"
    r"|(?:var)?phi\s*\(|text\{\s*(?:gcd|lcm|max|min|mod))(?![A-Za-z])|\\frac\s*\{\{?d\W"
    r"|(?<![A-Za-z\\])(?:mod|gcd|lcm|max|min|floor|ceil|sum|det)(?![A-Za-z])",
    re.IGNORECASE,
)
_OPERATOR = r"(?:[*/^<>=]|\\(?:times|cdot|div|n?[lg](?:eq?|t)|neq?|neg|not)(?![A-Za-z]))"
# What no honest answer is: a sign left over, a numeral as long as a line, a tower of powers, a huge factorial.
_REFUSED = re.compile(
    rf"^\s*{_OPERATOR}|(?:{_OPERATOR}|[-+]|\\pm)\s*$|\d{{40}}|\d[eE][-+]?\d|\|\s*\||\d{{3}}\s*!|[!)}}\]]\s*!"
    r"|binom\s*\{?[^{}]*\d{4}|\^\s*\{?\s*-?\d{5}|\^\s*\{?[\d.]+\s*\^\s*\{?\d|\^\s*\{[^{}]*\^\s*\{[^{}]*\^"
)


def _decide(answer: str, reference: str) -> Verdict | tuple[str, str]:
    """Decide what can be decided exactly; else return the (answer, reference) that a worker is to compare."""
    if max(len(answer), len(reference)) > _MAX_CHARS:
        return "unparsed"
    gold, said = _read_reference(reference), _read(answer)
    if gold.number is not None and said.number is not None:
        # A percent sign is a unit: 50% is 50. It divides by a hundred only where the reference is no integer.
        scale = said.percent - gold.percent
        scaled = (
            said.number / Fraction(100) ** scale if gold.percent or gold.number.denominator != 1 else said.number
        )
        return "correct" if gold.number in (said.number, scaled, said.digits) else "wrong"
    latex = said.latex
    if gold.is_number:
        if said.core is None or not said.is_number:
            return "unparsed"
        latex = said.core
        if gold.number is not None and not re.search(r"[a-z!|]", latex.replace(r"\frac", "")):
            return "unparsed"  # arithmetic that `_evaluate` could not finish has no other reader
    elif re.search(r"\w", latex) and latex.split() == gold.latex.split():
        return "correct"
    elif _letters(gold.latex) and _letters(latex):
        return "correct" if _letters(gold.latex) == _letters(latex) else "wrong"
    if _nesting(latex) > _MAX_NESTING or _REFUSED.search(latex):
        return "unparsed"
    hedges = {word.lower() for word in _HEDGE.findall(latex)} - {"and", "or"}
    if hedges - {word.lower() for word in _HEDGE.findall(gold.latex)}:
        return "unparsed"
    if _UNDONE.search(latex) and not _UNDONE.search(gold.latex):
        return "unparsed"
    return latex, gold.latex


def _letters(latex: str) -> str:
    r"""What an answer in words says (`\text{(A)}` is `A`), no solution being `emptyset`; else an empty string."""
    word = re.sub(r"\\text\{|[{}()\s.,'\"-]", "", latex)
    word = word.casefold() if len(word) > 1 else word
    if word in ("nosolution", "nosolutions", "none", "emptyset", r"\emptyset", r"\varnothing", "\\\\"):
        return "emptyset"
    return word if re.fullmatch(r"[^\W\d_]+", word) else ""


# ---- Workers ----

_READY_SECONDS = 300.0  # sympy takes 2 s to import, and many times that beside engines that are starting
_CPU_SECONDS = 2  # for one comparison; in CPU time, so that a reward does not depend on how busy the machine is
_LIBRARY_SECONDS = 10  # math-verify's own limit, in wall time; a fraction of a second would make it fail silently
_MEMORY_BYTES = 1 << 30
_MAX_TASKS = 500  # sympy's caches only grow


class _Worker:
    """One process that compares one pair at a time; started now, waited for when first asked."""

    def __init__(self, deadline_seconds: float):
        self.connection, theirs = Pipe()
        fd = theirs.fileno()
        arguments = ["--worker", str(fd), str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__), *arguments],
            env=os.environ | {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"},  # gmpy2 aborts the process
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the caller, who then closes us
        )
        theirs.close()
        self.deadline_seconds = deadline_seconds
        self.ready = False
        self.fit = True  # to be asked again: owes no reply
        self.num_tasks = 0

    def compare(self, answer: str | None, reference: str) -> str:
        try:
            if not self.ready and not self.connection.poll(_READY_SECONDS):
                raise RuntimeError(f"a grading worker was not ready after {_READY_SECONDS:.0f} s")
            self.ready = self.ready or self.connection.recv()
        except EOFError:
            raise RuntimeError("a grading worker died at its start: is math-verify installed?") from None
        self.num_tasks += 1
        self.fit = False
        try:
            self.connection.send((answer, reference))
            if not self.connection.poll(self.deadline_seconds):
                return "timeout"
            reply = self.connection.recv()
        except (EOFError, ConnectionError):
            return "timeout" if self.process.wait() == -signal.SIGXCPU else "crash"
        self.fit = reply != "crash" and self.num_tasks < _MAX_TASKS
        return reply

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _work(connection: Connection, parent: int) -> None:
    """Compare what comes over the pipe, until the parent is gone."""
    import logging
    import resource

    logging.disable()
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    def read(latex: str) -> list[Any]:
        config = LatexExtractionConfig(boxed_match_priority=-1)
        return parse(f"${latex}$", [config], "no_fallback", parsing_timeout=_LIBRARY_SECONDS, raise_on_error=True)

    def compare(answer: str | None, reference: str) -> str:
        gold = read(reference)
        if not gold or answer is None:
            return "good reference" if gold else "bad reference"
        said = read(answer)
        if not said:
            return "unparsed"
        # 12 decimals: at the library's 6, 3.141593 is pi.
        options: dict[str, Any] = {"float_rounding": 12, "allow_set_relation_comp": True, "raise_on_error": True}
        return "correct" if verify(gold, said, timeout_seconds=_LIBRARY_SECONDS, **options) else "wrong"

    def out_of_time(*_: object) -> NoReturn:
        raise TimeoutException

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, out_of_time)
    with suppress(TimeoutException):
        compare(r"\sqrt{8}", r"2\sqrt{2}")  # the first time builds tables
    # A parent that is gone closes the pipe, unless an engine that it forked holds the other end open too.
    with suppress(EOFError, ConnectionError):
        connection.send(True)
        while True:
            while not connection.poll(1):
                if os.getppid() != parent:
                    return
            answer, reference = connection.recv()
            # What C code does not hear, the kernel ends, even if the parent has died meanwhile.
            used = resource.getrusage(resource.RUSAGE_SELF)
            last_second = int(used.ru_utime + used.ru_stime) + 2 * _CPU_SECONDS + 1
            resource.setrlimit(resource.RLIMIT_CPU, (last_second, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
            try:
                reply = compare(answer, reference)
            except TimeoutException:  # a BaseException
                reply = "timeout"
            except MemoryError:
                reply = "crash"
            except Exception:  # sympy raises all kinds on what it cannot compare, and the verdict says so
                reply = "unparsed"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(reply)


class Grader:
    """Grades completions, with `num_workers` processes between entering and leaving; thread-safe.

    `deadline_seconds` counts from the moment that a worker gets a pair. Raises RuntimeError on entering if grading
    does not work where it is called from.
    """

    def __init__(self, *, num_workers: int = 2, deadline_seconds: float = 10.0):
        """Configure only; processes start on entering."""
        if num_workers < 1 or deadline_seconds <= 0:
            raise ValueError(f"num_workers={num_workers} and deadline_seconds={deadline_seconds} must be positive")
        self._num_workers = num_workers
        self._deadline_seconds = deadline_seconds
        self.seconds = 0.0
        """What `score_many` has taken so far."""
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def __enter__(self) -> Grader:
        """Start the workers, and check from here that right is told from wrong."""
        try:
            for _ in range(self._num_workers):
                self._start()
            half = r"\boxed{\frac{\sqrt{8}}{4}}"
            for text, reference, expected in [
                (r"\boxed{204}", "204", "correct"),
                (r"\boxed{205}", "204", "wrong"),
                (half, r"\frac{\sqrt{2}}{2}", "correct"),
                (half, r"\frac{\sqrt{3}}{2}", "wrong"),
            ]:
                # Some patience: engines that are starting may take every core for a while.
                tries = (self.score(text, reference).verdict for _ in range(5))
                verdict = next((verdict for verdict in tries if verdict != "timeout"), "timeout")
                if verdict != expected:
                    raise RuntimeError(f"grader self-test: {text} for {reference} is {verdict}, not {expected}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End every worker."""
        while self._workers:
            self._workers.pop().close()
        self._idle = queue.SimpleQueue()

    def score(self, text: str, reference: str) -> Score:
        """Grade one completion. A reference that cannot be read pays nothing: see `check_reference`."""
        return self.score_many([(text, reference)])[0]

    def score_many(self, pairs: Iterable[tuple[str, str]]) -> list[Score]:
        """Grade (completion, reference) pairs, in order; what needs a worker is spread over all of them."""
        started = time.perf_counter()
        scores: list[Score] = []
        harder: dict[int, tuple[str, str]] = {}
        for index, (text, reference) in enumerate(pairs):
            answer, verdict = _find_box(text)
            if answer is not None:
                decided = _decide(answer, reference)
                if isinstance(decided, tuple):
                    harder[index] = decided
                else:
                    verdict = decided
            scores.append(Score(reward=float(verdict == "correct"), answer=answer, verdict=verdict or "unparsed"))
        threads = ThreadPoolExecutor(self._num_workers)
        try:
            for index, verdict in zip(harder, threads.map(self._compare, harder.values()), strict=True):
                answer = scores[index].answer
                scores[index] = Score(reward=float(verdict == "correct"), answer=answer, verdict=verdict)
        finally:
            threads.shutdown(cancel_futures=True)  # Ctrl-C waits for the pairs in hand, not for the whole list
            self.seconds += time.perf_counter() - started
        return scores

    def check_reference(self, reference: str) -> None:
        """Raise ValueError, in one sentence, if `reference` is nothing that an answer could be compared with."""
        gold = _read_reference(reference[:_MAX_CHARS])
        readable = gold.number is not None or _letters(gold.latex) != ""
        if len(reference) > _MAX_CHARS or not (readable or self._compare((None, gold.latex)) == "good reference"):
            raise ValueError(f"the reference answer {_shown(reference)} cannot be read as mathematics")

    def _start(self) -> None:
        worker = _Worker(self._deadline_seconds)
        self._workers.append(worker)
        self._idle.put(worker)

    def _compare(self, pair: tuple[str | None, str]) -> Any:
        if not self._workers:
            raise RuntimeError("this grader has no workers: use it inside `with Grader() as grader:`")
        worker = self._idle.get()  # first in, first out: a new worker has time to start behind the others
        try:
            verdict = worker.compare(*pair)
        finally:  # also when interrupted: a reply that is still owed would go to the next question
            if worker in self._workers and not worker.fit:
                self._workers.remove(worker)
                worker.close()
                self._start()
            elif worker in self._workers:
                self._idle.put(worker)
        return "unparsed" if verdict == "bad reference" else verdict


# ---- From the shell ----


def main(text: Path | None = None, reference: str | None = None, cases: Path | None = None) -> None:
    """Grade one completion, or a file of cases, and say why.

    Args:
        text: a file that holds one completion.
        reference: the right answer to it.
        cases: JSON Lines with `text`, `reference` and `right` (1 or 0): prints each disagreement, then the counts.
    """
    if (text is None) != (reference is None) or (text is None) == (cases is None):
        _fail("give --text and --reference, or --cases")
    if text is not None and reference is not None:
        completion = _read_file(text)
        with Grader() as grader:
            try:
                grader.check_reference(reference)
            except ValueError as error:
                _fail(str(error))
            score = grader.score(completion, reference)
        print(f"verdict {score.verdict}, reward {score.reward:g}")
        print(f"answer {_shown(score.answer)}, reference {_shown(reference)}")
    elif cases is not None:
        lines = enumerate(_read_file(cases).split("\n"), 1)
        rows = [_parse_case(cases, number, line) for number, line in lines if line.strip()]
        with Grader() as grader:
            scores = grader.score_many([(text, reference) for _, text, reference, _ in rows])
        differing = [(row, score) for row, score in zip(rows, scores, strict=True) if score.correct != row[3]]
        for (number, _, reference, right), score in differing:
            print(f"line {number}: {_shown(score.answer)} for {_shown(reference)} is {score.verdict}", end="")
            print(f", but labelled {'right' if right else 'not right'}")
        print(f"{len(rows) - len(differing)} of {len(rows)} agree;", dict(Counter(s.verdict for s in scores)))


def _parse_case(path: Path, number: int, line: str) -> tuple[int, str, str, bool]:
    try:
        row = json.loads(line)
        return number, str(row["text"]), str(row["reference"]), bool(row["right"])
    except (ValueError, KeyError, TypeError):
        _fail(f"{path}, line {number}: expected a JSON object with text, reference and right")


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        _fail(f"cannot read {path}: {error.strerror}")


def _shown(answer: str | None) -> str:
    return "(none)" if answer is None else repr(answer if len(answer) <= 80 else answer[:77] + "...")


def _fail(message: str) -> NoReturn:
    print(f"reward.py: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(Connection(int(sys.argv[2])), int(sys.argv[3]))
    else:
        import tyro

        tyro.cli(main)
