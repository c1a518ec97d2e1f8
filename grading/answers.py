r"""Read an answer and a reference, and decide whether they agree, or what a worker is to compare.

Where the reference is a number, the answer has to be one: arithmetic is exact here, closed forms such as `\sqrt{2}`
go to a worker, and a word that is no label, unit or scale word is refused. Words are compared as words. Any other
reference goes to math-verify with the answer, both as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from data import Verdict
from grading.arithmetic import NUMERAL, depths, evaluate
from grading.spelling import NUMBER_WORDS, RULES, Unit, fold, read_unit, tidy
from grading.workers import Comparison

MAX_CHARS = 1_000  # a longer box holds no honest answer; and so the patterns here cannot take long

_LEAD = re.compile(
    r"^(?:\s|\\(?:therefore|because|Rightarrow|implies|q?quad)(?![A-Za-z])|\\\\|[A-E][.)]\s|\([A-E]\))++(?!$)"
)
_TAIL = re.compile(r"(?:[\s.,;]|\\(?:q?quad|checkmark|blacksquare|square|qed)|\\)++$")
_LABEL = re.compile(
    r"(?:there (?:are|is)\b|(?:(?:the|my|our|final|correct)\s+)*(?:answer|ans|result|solution|total|sum|area|volume"
    r"|length|probability|答案?|结果)(?![a-z]))\s*(?:is\b|equals\b|[:是为])?",
    re.IGNORECASE,
)
_EQUALS = re.compile(r"\\(?:in|coloneqq|cong|simeq)(?![A-Za-z])|(?<![<>!=]):?=(?![=>])")
_NOT_A_NAME = re.compile(
    r"^\s*[*/^_]|[,;<>!?]|\\(?:n?le?q?q?|n?ge?q?q?|l[td]|gt|neq?|neg|not\w*|lor|vee|cup|q?quad|pm|mp|implies|iff|to"
    r"|n?mid|(?:[Ll]ong)?(?:[Ll]eft|[Rr]ight)+arrow)(?![A-Za-z])"
    r"|(?<![\\A-Za-z])(?!gcd|lcm|max|min)[A-Z]?[a-z]{2,}|[\u3400-\u9fff]"
)
_PERCENT = re.compile(r"\s*(?:\\?%|percent(?:age)?|pct)$")
_MODULUS = re.compile(r"[\s({]*\\?[pb]?mod[\s{]*(\d{1,20})[\s)}]*$")
_UNIT = re.compile(r"(?<![\\A-Za-z])[/\s]*[^\W\d_](?:[\s/.-]|\^\s*\{?[23]\}?|[^\W\d_])*(?<!-)$")
_GROUPS = re.compile(
    r"(?<![\d.])(\d{1,3})((?:,\d{3})+|(?:'\d{3})+|(?: \d{3})+|(?:\.\d{3}){2,}(?!\.))(?![\d,']| \d)"
)
_OPERATOR = r"(?:[*/^<>=]|\\(?:times|cdot|div|n?[lg](?:eq?|t)|neq?|neg|not)(?![A-Za-z]))"
_DANGLING = re.compile(rf"^\s*{_OPERATOR}|(?:{_OPERATOR}|[-+]|\\pm)\s*$")
# Closed forms of numbers, of which sympy can say whether they are equal: no letter, relation, list or word.
_CONSTANT = re.compile(
    r"(?:[\d\s.+\-*/^(){}\[\]_!|]|\\(?:[dtc]?frac|sqrt|times|cdot|div|[dt]?binom|pi|ln|log|exp|(?:arc)?(?:sin|cos|tan)"
    r"|sec|csc|cot|infty)(?![A-Za-z])|(?<![A-Za-z\\])[ei](?![A-Za-z]))+"
)


class Number(NamedTuple):
    """What a text says where it says one number and nothing else."""

    core: str  # LaTeX of the number alone
    value: Fraction | None = None  # where this process can tell
    percent: bool = False
    unit: Unit = Unit()


def read_number(text: str, prompt: str = "") -> Number | None:
    """Read a folded text as one number; `prompt` tells what is counted."""
    return Number(text, evaluate(text)) if re.fullmatch(r"-?\d+", text) else _read(tidy(text), prompt)


@lru_cache(maxsize=4096)
def read_reference(reference: str) -> Number | None:
    """Read a reference as one number, which an equation is not."""
    text = fold(reference)
    return None if _EQUALS.search(text) else read_number(text)


def _read(text: str, prompt: str) -> Number | None:
    text = _LEAD.sub("", _unwrap(_TAIL.sub("", text)))
    if label := _LABEL.match(text):
        text = _LEAD.sub("", text[label.end() :])
    left, sign, right = [*re.split(r"\\(equiv|approx)(?![A-Za-z])", text, maxsplit=1), "", ""][:3]
    if sign:
        exact = _read(left, prompt) if sign == "approx" else None
        return exact or (_read(right, prompt) if _is_name(left) else None)
    parts = _EQUALS.split(text)
    return _read_quantity(_unwrap(text), prompt) if len(parts) == 1 else _read_chain(parts, prompt)


def _read_chain(parts: list[str], prompt: str) -> Number | None:
    """The value of `m+n = 200+4 = 204` or `5 = x`: every part is a name or a number, and the numbers agree."""
    found = [_read(part, prompt) for part in parts]
    named = all(number or _is_name(part) for number, part in zip(found, parts, strict=True))
    numbers = [number for number in found if number]
    values = [number for number in numbers if number.value is not None]
    if not named or not numbers or not parts[-1].strip() or len({number.value for number in values}) > 1:
        return None
    return (values or numbers)[-1]


def _is_name(text: str) -> bool:
    return not _NOT_A_NAME.search(re.sub(r"\((?:\W*(?:[A-Za-z]|\d+)\b)*\W*\)", "", text))  # f(x, 2) is one


def _read_quantity(text: str, prompt: str) -> Number | None:
    words = re.sub("[^a-z]", "", text.lower())
    spelled = words.removeprefix("minus").removeprefix("negative")
    if spelled in NUMBER_WORDS and not re.search(r"\d", text):
        value = Fraction(NUMBER_WORDS[spelled] * (1 if spelled == words else -1))
        return Number(str(value), value)
    if modulus := _MODULUS.search(text):
        residue = _read(text[: modulus.start()], prompt)
        return residue if residue and residue.value is not None and 0 <= residue.value < int(modulus[1]) else None
    unit, bare = Unit(), _PERCENT.sub("", text)
    percent = bare != text
    if not percent and (suffix := _UNIT.search(bare)) and (known := read_unit(suffix[0], prompt)):
        unit, bare = known, bare[: suffix.start()]
    bare = _unwrap(_TAIL.sub("", bare))
    if "," in bare and bare.startswith(("(", "[", r"\{")):
        return None
    core = _GROUPS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), bare)
    core = core if unit.scale == 1 else f"({core})*{unit.scale}"
    value = evaluate(core)
    closed_form = _CONSTANT.fullmatch(core) and re.search(r"\w", core) and not _DANGLING.search(core)
    return Number(core, value, percent, unit) if closed_form or value is not None else None


def _unwrap(text: str) -> str:
    """Strip brackets that enclose the whole text; but `(100,200)` is a pair."""
    text = text.strip()
    if "," in text and text[0] != "{":
        return text
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    while len(text) > 1 and text[0] + text[-1] in ("()", "[]", "{}") and min(depths(text[1:-1])) >= 0:
        text = text[1:-1].strip()
    return text


# ---- Deciding ----

# More than an answer has, where the reference has nothing of the kind.
_HUGE = re.compile(
    r"\d{40}|\d[eE][-+]?\d|\|\s*\||\d{3}\s*!|[!)}\]]\s*!|binom\s*\{?[^{}]*\d{4}|\^\s*\{?\s*-?\d{5}"
    r"|\^\s*\{?[\d.]+\s*\^\s*\{?\d|\^\s*\{[^{}]*\^\s*\{[^{}]*\^"
)
_RATIO = re.compile(r"[\w\s.]+:[\w\s.:]+")
_SUM_OF_UNKNOWNS = re.compile(r"[^=]*[A-Za-z)}]\s*[-+][^=]*=")
# Restating the question is not answering it.
_UNDONE = re.compile(r"\\(?:sum|prod|i*int|oint|lim|[pb]?mod|gcd|lcm|det|max|min|sup|inf)(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:text(?!color)[a-z]*|mathrm|[mh]box|emph)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\s*\(?([A-Z])[).:](?!.*(?:\bor\b|\band\b|\b[A-Z]\b)).+", re.DOTALL)
_NONE = ["nosolution", "nosolutions", "none", "emptyset", r"\emptyset", r"\varnothing", "\\\\"]
_SYNONYMS = dict.fromkeys(_NONE, r"\emptyset") | dict.fromkeys(["allrealnumbers", r"\mathbbr"], r"\mathbb{R}")
_UNMATCHABLE = re.compile(
    r"[-\d./\s]+(?:\\text\s*\{)?\s*or\b[\s}]*[-\d./\s]+|\W*(?:the )?(?:final )?(?:answer|ans|solution)\b.*[:=].+",
    re.IGNORECASE,
)


def decide(answer: str, reference: str, prompt: str = "") -> Verdict | Comparison:
    """Decide what can be decided exactly; else return what a worker is to compare."""
    if max(len(answer), len(reference)) > MAX_CHARS:
        return "unparsed"
    said, gold = fold(answer), fold(reference)
    if re.search(r"\w", gold) and said.split() == gold.split():
        return "correct"
    if number := read_reference(reference):
        return _decide_number(read_number(said, prompt), number)
    if words := _in_words(gold):
        choice = _CHOICE.fullmatch(_TEXT.sub(r" \1 ", said)) if len(words) == 1 else None
        if words == (choice[1] if choice else _in_words(said, anything=True)):
            return "correct"
        if not words.startswith("\\"):
            return "wrong"
    if _SUM_OF_UNKNOWNS.match(gold) and read_number(said):
        return "wrong"  # x+y=5 is a line
    if said.count("'") != gold.count("'") or _RATIO.fullmatch(gold):
        return "wrong"  # to math-verify A' is A, and 1:2:3 is 1:3:2
    known = {"and", "or", *map(str.lower, _words(gold))}
    strange = any(word.lower() not in known and not read_unit(" " + word) for word in _words(said))
    if strange or _is_refused(said, gold) or (_UNDONE.search(said) and not _UNDONE.search(gold)):
        return "unparsed"
    return Comparison(said, gold, "expression")


def _decide_number(said: Number | None, gold: Number) -> Verdict | Comparison:
    if said is None:
        return "unparsed"
    same_unit = said.unit.dimension == gold.unit.dimension
    if not same_unit and said.unit.dimension and gold.unit.dimension:
        return "wrong"
    if gold.value is not None and said.value is not None:
        value = said.value * said.unit.size / gold.unit.size if same_unit and said.unit.dimension else said.value
        accepted = {gold.value}
        if said.percent and not gold.percent and gold.value.denominator != 1:
            # 50% is 50, a percentage that was asked for, or 1/2.
            accepted = {100 * gold.value, *([gold.value] if abs(gold.value) > 1 else [])}
        elif gold.percent and not said.percent:
            accepted |= {gold.value / 100}
        # The digits of a numeral such as 2003_6 are what some references have; two digits could be two guesses.
        numeral = NUMERAL.fullmatch(said.core)
        digits = numeral[1] if numeral and len(numeral[1]) > 2 else ""
        return "correct" if value in accepted or digits == gold.core else "wrong"
    if gold.value is not None and not re.search(r"[a-z!|]", re.sub(r"\\[dtc]?frac", "", said.core)):
        return "unparsed"  # arithmetic that `evaluate` could not finish has no other reader
    if said.percent != gold.percent or (same_unit and said.unit.size != gold.unit.size):
        return "wrong"
    return "unparsed" if _is_refused(said.core, gold.core) else Comparison(said.core, gold.core, "number")


def _is_refused(latex: str, gold: str) -> bool:
    too_much = max(depths(latex)) > 25 or (_HUGE.search(latex) and not _HUGE.search(gold))
    return bool(too_much or _DANGLING.search(latex))


def _words(latex: str) -> list[str]:
    r"""The words of a text; a few letters outside of `\text` are variables."""
    found = [word for text in _TEXT.findall(latex) for word in re.findall(r"[^\W\d_]+", text)]
    return found + re.findall(r"(?<![\\A-Za-z{])[A-Za-z]{4,}", _TEXT.sub("", latex))


def _in_words(latex: str, *, anything: bool = False) -> str:
    """What a text says in words, without blanks, brackets and articles; empty where that is no text in words."""
    text, num_texts = _TEXT.subn(r" \1 ", latex)
    text = re.sub(r"^[\s(]*(?:an?|the|option|choice)\s+(?=\S)", "", text, flags=re.IGNORECASE)
    word = re.sub(r"[\s{}()\[\].,;\"$!]|\\[,;: ]", "", text)
    word = word.casefold() if len(word) > 1 else word
    if word in _SYNONYMS:
        return _SYNONYMS[word]
    if not re.fullmatch(r"[\w:'-]+", word) or not re.search(r"[^\W\d_]", re.sub("and|or", "", word)):
        return ""
    return word if anything or num_texts or re.fullmatch(r"\(?[A-Z']+\)?|[A-Za-z ]{4,}", latex) else ""


def unreadable(reference: str) -> bool | Comparison:
    """Whether no answer could match the reference, or what a worker has to find correct lest that be so."""
    gold = fold(reference)
    if len(reference) > MAX_CHARS:
        return True
    if number := read_reference(reference):
        known = number.value is not None or _HUGE.search(number.core)
        return not known and Comparison(number.core, number.core, "number")
    if not gold or _UNMATCHABLE.fullmatch(gold):
        return True
    return not _in_words(gold) and Comparison(gold, gold, "expression")


def explain(answer: str, reference: str) -> Iterator[str]:
    """Say step by step how `decide` reads and compares the two."""
    text, gold = fold(answer), read_reference(reference)
    if gold is None:
        yield "the reference is no number, so the answer stays as it is written"
    else:
        for pattern, replacement, _, reason in RULES:
            before, text = text, pattern.sub(replacement, text)
            if before != text:
                yield f"{reason}: {before} -> {text}"
        yield f"the reference is read as {gold}"
        yield f"the answer is read as {read_number(fold(answer)) or 'no single number'}"
    decided = decide(answer, reference)
    yield f"a worker compares by {decided}" if isinstance(decided, Comparison) else f"the two are {decided}"
