"""Many spellings to one, and the words that may stand for a number or behind it."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

_SYMBOLS = r"""×\times ÷\div ·\cdot ⋅\cdot π\pi ∞\infty √\sqrt °^\circ º^\circ ±\pm ≤\le ≥\ge ≠\ne ≈\approx ≡\equiv
    ∈\in ∪\cup ∩\cap ∅\emptyset ∴\therefore ℝ\mathbb{R} ℤ\mathbb{Z} ℕ\mathbb{N} ∛\sqrt[3] €\text{euro} £\text{pound}
    ¥\text{yuan}"""  # noqa: RUF001
_CHARACTERS = str.maketrans(
    {symbol[0]: symbol[1:] + " " for symbol in _SYMBOLS.split()}
    | dict.fromkeys("‐‑‒–—―−﹘﹣－⁃➖᠆־", "-")  # noqa: RUF001
    | dict.fromkeys("’‘ʼ＇′", "'")  # noqa: RUF001
    | {"。": ".", "、": ",", "٬": ",", "\ufe0f": ""}
)


def fold(text: str) -> str:
    """Write Unicode as ASCII and LaTeX, without `**`, quotes or `$` around it all, nor the sizes of brackets."""
    if not text.isascii():
        # Before NFKC, which makes 72 of 7² and 21/2 of 2½.
        text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda run: "^{" + _ascii(run[0]) + "}", text)
        text = re.sub("[₀-₉]+", lambda run: "_{" + _ascii(run[0]) + "}", text)
        text = re.sub("[¼-¾⅐-⅞]", lambda part: rf"\frac{{{_ascii(part[0]).replace('/', '}{')}}}", text)
        text = _ascii(re.sub(r"([√∛]\s*)(\d+)", r"\1{\2}", text))
    text = re.sub(
        r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|(?<=\\\\)\[[\d.]+[a-z]{2}\]", "", text
    )
    return re.sub(r"^(\*\*|\$\$|[*`\"'$])(.*)\1$", r"\2", text.strip(), flags=re.DOTALL).strip()


def _ascii(text: str) -> str:
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf").replace("\u2044", "/")
    return re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text)


ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NUMBER_WORDS = dict(zip(ONES, range(20), strict=True)) | {"onehundred": 100}
NUMBER_WORDS |= {ten + one: 10 * i + j for i, ten in enumerate(TENS, 2) for j, one in enumerate(["", *ONES[1:10]])}


def _base(match: re.Match[str]) -> str:
    base = next(filter(None, match.groups()))
    return f"_{{{NUMBER_WORDS.get(base.lower(), base)}}}"


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match[1], match[2], match[3] or match[4]
    numerator = int(whole + fixed + period) - int(whole + fixed or 0)
    return rf"\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


# For what is read as a number. Two lines a rule: pattern -> replacement, then an example and the reason.
_TABLE = r"""
\\(?:math(?:bf|it|sf|tt|normal|op)|bold(?:symbol)?|bm|(?:no)?limits|nonumber|boxed|fbox|underline)(?![A-Za-z]) ->
    \mathbf{204}  the look of an argument
\\(?:bf|rm|it|sf|tt|(?:display|text|(?:script)+)style|small|[lL]arge|LARGE|[hH]uge)(?![A-Za-z]) ->
    {\bf 204}  the look of all that follows
\\(?:(?:text)?color(?:\[\w*\])?|colorbox|[hv]space\*?|[hv]?phantom|label|tag)\s*\{[^{}]*\} ->
    \color{red}{204}  a command that shows nothing, with its argument
\\(?:begin|end)\s*\{(?:aligned|align|gathered|equation|split|array)\*?\}(?:\{[clr|]+\})?|& ->
    \begin{aligned}204\end{aligned}  a frame
(?:US)?\\\$ -> \\text{dollar}
    \$5  a dollar, as against the sign that opens mathematics
(?<!\\)\\[()\[\]]|\\?\#|\$ ->
    \(204\)  opens and closes mathematics
(,?)\s*\\!\s* -> \1
    12,\!345  a negative space
\\(?:[,;:>\ ]|(?:thin|en)space(?![A-Za-z]))|~|[^\S\n] -> @blank
    1\,000  a space
\{\s*([-+,.']|\\?%|\{[^{}]*\}|)\s*\} -> \1
    1{,}000  braces round what needs none
\\(?:text(?!color)[a-z]*|mathrm|[mh]box|operatorname\*?|emph)\s*\{([^{}]*)\} -> @words
    73 \text{ cm}  words, to be judged as such
(dollar|euro|pound|yuan|Rs)\.?\s*([-+]?[\d.,'\s]*\d) -> \2 \1
    dollar 5  a currency in front
\\underbrace\s*\{([^{}]*)\}\s*_\s*\{[^{}]*\} -> \1
    \underbrace{73}_{n}  a remark below
\^\s*(?:\{\s*(?:\\circ|\\degree|o)\s*\}|\\circ|\\degree)(?![A-Za-z])|\\degree(?![A-Za-z]) -> @degree
    90^\circ  degrees
([\d.]+)\s*degree\s*([\d.]+)\s*'(?!') -> (\1+\2/60) degree
    22 degree 30'  minutes of a degree
\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\} -> \\frac{\1}{\2}
    {3 \over 4}  plain TeX's fraction
(\\[dtc]?frac)\s*(\d|\\[a-z]+(?=\s*[\d{\\])) -> \1{\2}
    \frac12  a numerator without braces
(\\[dtc]?frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*(\d|\\[a-z]+(?![a-z\s]*\{)) -> \1{\2}
    \frac{\pi}2  a denominator without braces
(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?\s*(\d{1,99})\s*\}?|\((\d{1,99})\)) -> @repeating
    0.1\overline{6}  a repeating decimal
\\overline\s*\{(\w+)\} -> \1
    \overline{204}_5  a bar that marks a numeral
(?<=[0-9A-Z])\s*(?:[_\s]*[({]\s*(?:in\ )?[bB]ase[\s-]*(\w+)\s*[)}]|_?\s*(?:in\ )?[bB]ase[\s-]*(\w+)) -> @base
    2003 (base 6)  a numeral's base in words
(?<=[0-9A-Z])_\s*(?:\{[\s(]*(\w+)[\s)]*\}|\((\w+)\)|(\d{1,2})) -> @base
    2003_(6)  a numeral's base
(?<=[\d}])\s*x\s*(?=10\s*\^) -> *
    1.5 x 10^3  a letter for the sign
"""
_NAMED: dict[str, str | Callable[[re.Match[str]], str]] = {"@blank": " ", "@degree": " degree ", "@words": r" \1"}
_NAMED |= {"@base": _base, "@repeating": _repeating}
RULES = [
    (re.compile(pattern), _NAMED.get(replacement, replacement), example, reason)
    for pattern, replacement, example, reason in re.findall(r"(\S.*) -> ?(.*)\n    (.*?)  (.*)\n", _TABLE)
]


def tidy(text: str) -> str:
    """Apply every rule to a folded text."""
    for pattern, replacement, *_ in RULES:
        text = pattern.sub(replacement, text)
    return text


class Unit(NamedTuple):
    """What stands behind a number."""

    dimension: str = ""  # empty for things that are counted, and for no unit
    size: Fraction = Fraction(1)  # relative to others of its dimension
    scale: int = 1  # what the number is to be multiplied by: 1,000 in `5 thousand`


# A line a dimension: sizes within it, and their names.
_UNITS = """
1 mm millimeter millimetre, 10 cm centimeter centimetre, 1000 m meter metre 米, 1000000 km kilometer kilometre
127 in inch, 1524 ft foot feet, 4572 yd yard, 8046720 mi mile
1 s sec second 秒, 60 min minute, 3600 h hr hour, 86400 day 天, 604800 week
1 month, 12 yr year 年 岁
1 mg milligram, 1000 g gram 克, 1000000 kg kilogram
1 oz ounce, 16 lb
1 mL ml milliliter millilitre, 1000 L liter litre
1 cent, 100 dollar USD
1 degree deg 度
1 radian rad
1 euro
1 pound
1 rupee Rs
1 yuan 元
1 mph
1 per /
1 square sq ^2
1 cubic ^3
"""
_SCALES = {"hundred": 2, "k": 3, "thousand": 3, "million": 6, "billion": 9, "bn": 9, "trillion": 12}
_SCALES |= {"万": 4, "亿": 8}
_THINGS = """unit way point root solution pair triple tuple subset sequence number integer digit term value prime
    divisor factor side edge face triangle student person people ball coin ordered distinct different possible
    positive real of them 个 种 人 次 组 条 对 -"""
_KNOWN = {
    name: Unit(str(dimension), Fraction(size))
    for dimension, line in enumerate(_UNITS.strip().split("\n"))
    for size, *names in map(str.split, line.split(","))
    for name in names
}
_KNOWN |= {name: Unit(scale=10**power) for name, power in _SCALES.items()} | dict.fromkeys(_THINGS.split(), Unit())
_NOT_COUNTED = re.compile(r"(?:more|less|fewer|times|half|twice|than|over|under|not?|or|and|minus|plus|percent)$")


def read_unit(text: str, prompt: str = "") -> Unit | None:
    """Read `million square km` or `ordered pairs`; None if a word is neither known nor counted in the prompt."""
    if re.fullmatch(r"[A-Za-ln-z]|.*(?:/|\bper)\s*", text):
        return None  # 5k is a product; 5 k and 5m are not
    found: list[Unit] = []
    for word in re.findall(r"[A-Za-z]+|\^[23]|[^\s.]", re.sub("[{}]", "", text)):
        forms = [word, word.lower(), word.lower().removesuffix("s"), word.lower().removesuffix("es")]
        unit = next((_KNOWN[form] for form in forms if form in _KNOWN), None)
        if unit is None and not _is_counted(word.lower(), prompt):
            return None
        found.append(unit or Unit())
    scale, measured = math.prod(unit.scale for unit in found), [unit for unit in found if unit.dimension]
    if len(measured) > 1:  # a product of units can be compared with itself only
        return Unit(" ".join(sorted(f"{unit.dimension}:{unit.size}" for unit in measured)), scale=scale)
    return Unit(*measured[0][:2], scale) if measured else Unit(scale=scale)


def _is_counted(word: str, prompt: str) -> bool:
    asked = rf"(?:how many|number of)(?:\W+\w+){{0,5}}?\W+{re.escape(word)}\b"
    return word.isalpha() and not _NOT_COUNTED.match(word) and re.search(asked, prompt.lower()) is not None
