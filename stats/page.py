"""Tables and lists in Markdown, and a report as one HTML file."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 68rem; margin: 0 auto; padding: 1rem; color: #1a1a1a }
h1 { font-size: 1.6rem; line-height: 1.25 }
h2 { font-size: 1.3rem; margin-top: 2.4em }
code { overflow-wrap: anywhere }
p:has(img), .scroll { overflow-x: auto }
img { max-width: 100%; min-width: 40rem; height: auto }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { padding: .35em .8em; border-bottom: 1px solid #ddd; white-space: nowrap; text-align: right }
th { border-bottom: 2px solid #888; vertical-align: bottom; white-space: normal; min-width: 4.5rem }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff }
"""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the cells padded to their columns' widths, the first column on the right, the others on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in rows]


def bullets(lines: Iterable[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def listed(names: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def plain(text: str) -> str:
    """Return text from a file's name or content with every Markdown character escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", text.replace("\n", " "))


def html_page(markdown: str, pictures: dict[str, bytes]) -> str:
    """Return a Markdown report as one HTML file; `pictures` are PNG bytes by their file names in the Markdown."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("js-default").render(markdown)  # js-default: with tables, without raw HTML
    for name, png in pictures.items():
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{base64.b64encode(png).decode()}"')
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    title = markdown.partition("\n")[0].removeprefix("# ")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )
