r"""The verdict of the chapter's own code, which stands beside ours and earns nothing.

Its evaluation takes a completion for right when the last complete box, stripped, without `,` and `$` and out of
`\text{}` or `\mathrm{}`, is an optionally signed integer equal to the reference; its training asks math-verify.
"""

from __future__ import annotations

import re

from grading.extraction import Box
from grading.workers import Comparison

PLAIN = re.compile(r"0|-?[1-9]\d{0,14}", re.ASCII)


def chapter_verdict(text: str, boxes: list[Box], reference: str, *, training: bool) -> bool | Comparison | None:
    """Return the chapter's verdict or what a worker is to find; None where neither is possible."""
    boxed = [box for box in boxes if text.startswith(r"\boxed", box.start)]
    if not training and not re.fullmatch(r"\s*[+-]?\d{1,1000}\s*", reference):
        return None
    if not boxed:
        return False
    content = max(boxed).content(text)
    if training:
        if PLAIN.fullmatch(content) and PLAIN.fullmatch(reference):
            return content == reference  # as math-verify has it, without asking
        return Comparison(content, reference, "chapter")
    bare = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", re.sub("[,$]", "", content)).strip()
    return re.fullmatch(r"[+-]?\d{1,1000}", bare, re.ASCII) is not None and int(bare) == int(reference)
