"""What must hold: the page is one file, and no name breaks it."""

from __future__ import annotations

from dataclasses import replace

from made_up import BASE, PICTURES, another_base

from stats.page import html_page
from stats.report import report_markdown


def test_the_page_is_one_file_that_asks_for_nothing_else():
    markdown = report_markdown(another_base(BASE), [], PICTURES)
    page = html_page(markdown, {f"{name}.png": b"\x89PNG picture" for name in PICTURES})
    assert page.count("<img src=") == page.count('<img src="data:image/png;base64,iVBORyBwaWN0dXJl') == 3
    assert "http" not in page
    assert page.count('<div class="scroll"><table>') == markdown.count("\n| --- |")
    assert "<title>What 30 problems x 12 completions support</title>" in page


def test_names_cannot_break_the_page():
    odd = "a|b <script>alert(1)</script> *x* [y](z)"
    evaluations = another_base(BASE, replace(BASE, header=replace(BASE.header, label=odd, step=20)))
    page = html_page(report_markdown(evaluations, [], PICTURES), {})
    assert "<script>" not in page
    assert "<script>" not in html_page("# Title\n\n<script>alert(1)</script>\n", {})
    assert "<td>a|b &lt;script&gt;alert(1)&lt;/script&gt; *x* [y](z)</td>" in page
