"""Exact arithmetic on what a box may hold: integers, fractions, decimals, powers, mixed numbers and numerals."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction
from itertools import accumulate

_MAX_BITS = 4_096  # of every numerator and denominator on the way to a value
NUMERAL = re.compile(r"([0-9A-Z]*\d|[0-9A-Z]{2,})_\{(\d{1,2})\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MIXED = re.compile(r"(?<!\*\*)(?<![\d.)/])(\d+)\s*(?:\(\((\d+)\)/\((\d+)\)\)|\s(\d+)/(\d+))")
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?")
_SYMBOLS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "^": "**", "{": "(", "}": ")"}
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def depths(text: str) -> list[int]:
    """How many brackets are open behind each bracket; 0 in front."""
    return [0, *accumulate(1 if bracket in "([{" else -1 for bracket in re.findall(r"[()\[\]{}]", text))]


def evaluate(latex: str) -> Fraction | None:
    r"""Return the exact value of `7.3 \times 10^1`, `2\frac{2}{3}`, `2003_{6}` and the like, else None."""
    if re.fullmatch(r"-?\d+", latex):
        return Fraction(int(latex))
    if max(*depths(latex), latex.count("^")) > 25:
        return None
    try:
        # int() would guess at base 0.
        text, changes = NUMERAL.sub(lambda digits: f"({int(digits[1], int(digits[2]) or 1)})", latex), 1
        while changes:
            text, changes = _FRACTION.subn(r"((\1)/(\2))", text)
        for symbol, replacement in _SYMBOLS.items():
            text = text.replace(symbol, replacement)
        text = _NUMBER.sub(lambda number: f"({Fraction(number[0])})", _MIXED.sub(_mixed, text))
        if re.fullmatch(r"[\d\s()+*/-]+", text):
            return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        pass  # cut off, undefined, or more arithmetic than an answer has
    return None


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match[1], match[2] or match[4], match[3] or match[5]
    if not 0 < int(above) < int(below):
        raise ValueError("a mixed number has a proper fraction")
    return f"({whole}+{above}/{below})"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return _value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            first, second = _value(left), _value(right)
            is_power = isinstance(op, ast.Pow)
            if not is_power or (second.denominator == 1 and abs(second) * _bits(first) <= _MAX_BITS):
                value = _OPERATIONS[type(op)](first, int(second) if is_power else second)
                if _bits(value) <= _MAX_BITS:
                    return value
    raise ValueError("not arithmetic, or too much of it")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
