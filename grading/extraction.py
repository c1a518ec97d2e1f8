r"""Find the answer in a completion: what the last complete box holds, in one pass over the text, whatever it is."""

from __future__ import annotations

import re
from typing import NamedTuple

from data import Verdict

_MARK = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
# A run of backslashes is one token, lest a megabyte of them be read again from each; an odd run escapes a brace.
_TOKEN = re.compile(r"(\\++)((?:boxed|fbox)(?![A-Za-z])\s*+\{|[{}])?|[{}]")
_FILLER = re.compile(
    r"\\(?:text\w*|mathrm|mbox|[lc]?dots|square|q?quad|underline)(?![A-Za-z])|\\[,;:!_ ]|[\s{}()\[\]<>.…,:_?$~*-]"
)
_PLACEHOLDER = re.compile(
    r"(?:(?:insert|put|write|enter|place|your|the|final|correct|numerical|numeric|integer|my|an?)*"
    r"(?:answer|result|solution|value|number|here)(?:goes)?(?:here)?|placeholder|(?:你的|最终)*答案)?",
    re.IGNORECASE,
)
_JOINT = re.compile(r"(?:[\s$,;]|\\(?:[()\[\],;]|q?quad|text\s*\{|mathrm\s*\{)|\b(?:or|and)\b|\})*")


class Box(NamedTuple):
    """Where a complete box starts and ends in its text, and where its content does."""

    start: int
    end: int
    first: int
    last: int

    def content(self, text: str) -> str:
        """What the box holds, stripped."""
        return text[self.first : self.last].strip()


def complete_boxes(text: str) -> tuple[list[Box], int]:
    r"""Return every complete `\boxed{...}` and `\fbox{...}`, and where the last open one starts, or -1."""
    mark = _MARK.search(text)
    boxes: list[Box] = []
    opened: list[tuple[int, int] | None] = []  # unclosed braces; a box is (its start, the start of its content)
    for token in _TOKEN.finditer(text, mark.start()) if mark else ():
        slashes, tail = token.groups()
        if tail and len(tail) > 1:
            opened.append(token.span())
        elif slashes and (not tail or len(slashes) % 2):
            continue
        elif token[0][-1] == "{":
            opened.append(None)
        elif opened and (box := opened.pop()):
            boxes.append(Box(box[0], token.end(), box[1], token.start()))
    return boxes, max((box[0] for box in opened if box), default=-1)


def find_answer(
    text: str, boxes: list[Box], last_open: int, *, in_thinking: bool = False
) -> tuple[str | None, Verdict | None]:
    """Return what the last box holds that is complete and no placeholder, and why it is no answer, if it is none.

    Takes what `complete_boxes` returned. Thinking is not the answer; `in_thinking` says that the prompt opens it. A
    box opened later that never closes means that the answer is not finished. Different boxes joined by "or", "and",
    a comma or nothing are several answers, and so none.
    """
    thinking_end = text.rfind("</think>")
    if text.find("<think>", max(thinking_end, 0)) >= 0 or (in_thinking and thinking_end < 0):
        return None, "unclosed"
    outer: list[Box] = []
    for box in boxes:
        inner: list[Box] = []
        while outer and outer[-1].start > box.start:
            inner.append(outer.pop())
        if box.start < thinking_end:
            continue
        if len(inner) == 1 and not (text[box.first : inner[0].start] + text[inner[0].end : box.last]).strip():
            box = box._replace(first=inner[0].first, last=inner[0].last)  # \boxed{\boxed{7}}
        outer.append(box)
    last_open = last_open if last_open > thinking_end else -1
    while outer and outer[-1].start > last_open:
        box = outer.pop()
        answer = box.content(text)
        if len(answer) <= 80 and _PLACEHOLDER.fullmatch(_FILLER.sub("", answer)):
            continue
        before = outer[-1] if outer else box
        joint = text[before.end : box.start]
        several = len(joint) < 60 and _JOINT.fullmatch(joint) and before.content(text).split() != answer.split()
        return answer, "unparsed" if several else None
    return None, "no_box" if last_open < 0 else "unclosed"
