"""What models write, as HTML: looks right, and lets no tag, link or picture through."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from nemolocal.ui.prose import prose
from tests.ui.test_page_safety import hostile

OURS = {
    "p", "br", "ul", "ol", "li", "h3", "h4", "h5", "h6", "pre", "code", "strong", "em", "button",
    "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip


class Tags(HTMLParser):
    """All tags with their attributes, as a browser would find them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


def test_the_usual_marks() -> None:
    html = prose(
        "# Head\n\nSome **bold**, *weak* and `co<de>`,\nnext line, 2 * 3 * 4, a_b_c.\n\n"
        "- one\n- two\n\n3. three\n4. four\n\n| a | b |\n|---|--:|\n| 1 | <2> |\n\n"
        "```py\nif a < b:\n    pass\n```\nend"
    )
    assert "<h3>Head</h3>" in html
    assert "Some <strong>bold</strong>, <em>weak</em> and <code>co&lt;de&gt;</code>,<br>next line" in html
    assert "2 * 3 * 4, a_b_c." in html
    assert html.count("<li ") == 4
    assert '<ol start="3">' in html
    assert "<tr><td>1</td><td>&lt;2&gt;</td></tr>" in html
    assert "<pre><code>if a &lt; b:&#10;    pass</code></pre>" in html
    assert html.endswith('<p dir="auto">end</p>')
    assert "\n" not in html


@pytest.mark.parametrize(
    "text", [hostile("evil.example"), "```\n<script>x", "**<b>**", "`<i>`", "| <u> | |\n|-|-|"]
)
def test_only_tags_of_ours_and_nothing_that_leads_elsewhere(text: str) -> None:
    tags = Tags(prose(text, cited={1}, place=lambda page: f"7/{page}"))
    assert tags.open == []
    assert {tag for tag, _ in tags.found} <= OURS
    for tag, attributes in tags.found:
        assert set(attributes) <= {
            "dir",
            "start",
            "type",
            "class",
            "data-act",
            "data-ref",
            "data-n",
            "aria-label",
        }
        assert tag == "button" or "class" not in attributes


def test_a_link_stays_text_but_for_a_page_of_the_document() -> None:
    html = prose(
        "[here](https://evil.example) [p. 3–4](#page-3) [x](#page-y) www.evil.example", place="7/{}".format
    )
    assert text_of(html) == "[here](https://evil.example) p. 3–4 [x](#page-y) www.evil.example"
    assert html.count("<button") == 1
    assert 'data-act="page" data-ref="7/3"' in html
    assert "<button" not in prose("[p. 3](#page-3)")


def test_marks_of_sources_open_what_they_stand_for() -> None:
    html = prose('It is so "as said" [1], and more [1, 2], but not [9].', cited={1, 2})
    assert re.findall(r'class="cite" data-n="(\d)"', html) == ["1", "1", "2"]
    assert "[9]" in html


def test_what_never_ends_costs_no_more_than_its_length() -> None:
    for text in ("**" * 50_000, "`" * 100_000, "[1" * 50_000, "- " * 50_000, "|" * 100_000, "*a" * 50_000):
        Tags(prose(text, cited={1}))
