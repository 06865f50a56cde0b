"""What models write in Markdown, as HTML of our own: headings, lists, tables, code, emphasis, and nothing
that leads anywhere. Pure.

Everything is escaped before any mark is read, and no tag is made but those below, so that no reading of the
text can let one through. Links stay text; only a page of a document (`#page-3`) becomes a button.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from html import escape
from typing import Final

from nemolocal.ui.drawing import text as safe

_CODE: Final = re.compile(r"(`{1,3})(?!`)(.{1,500}?)(?<!`)\1(?!`)")
_STRONG: Final = re.compile(r"\*\*(?=\S)([^*\n]{1,500})(?<=\S)\*\*")
_WEAK: Final = re.compile(r"(?<![\w*])\*(?=\S)([^*\n]{1,500})(?<=\S)\*(?![\w*])")
_PAGE: Final = re.compile(r"\[([^\[\]\n]{1,120})\]\(#page-(\d{1,7})\)")
_MARK: Final = re.compile(r"\[(\d{1,3}(?:, ?\d{1,3}){0,20})\]")
_HEADING: Final = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
_ITEM: Final = re.compile(r"\s*(?:[-*•+]|(\d{1,6})[.)])\s+(\S.*)$")
_FENCE: Final = re.compile(r"\s*(`{3,}|~{3,})")
_RULE: Final = re.compile(r"\s*(?:-{3,}|\*{3,}|_{3,})\s*$")
_COLUMNS: Final = re.compile(r"\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$")

Place = Callable[[int], str]
"""What a button for a page hands back, given the page."""


def prose(text: str, *, cited: Collection[int] = (), place: Place | None = None) -> str:
    """Markdown as HTML without line breaks. Marks `[n]` of `cited` numbers become buttons that open what they
    stand for; so do pages, where `place` tells what they hand back."""
    return "".join(_blocks(text.splitlines(), lambda line: _inline(line, cited, place)))


def _blocks(lines: list[str], inline: Callable[[str], str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        begin = at
        at += 1
        if not line.strip() or _RULE.match(line):
            continue
        if fence := _FENCE.match(line):
            while at < len(lines) and not lines[at].strip().startswith(fence[1]):
                at += 1
            yield f"<pre><code>{'&#10;'.join(escape(each) for each in lines[begin + 1 : at])}</code></pre>"
            at += 1
        elif heading := _HEADING.match(line):
            level = min(len(heading[1]) + 2, 6)
            yield f"<h{level}>{inline(heading[2])}</h{level}>"
        elif _ITEM.match(line):
            while at < len(lines) and _ITEM.match(lines[at]):
                at += 1
            yield _list(lines[begin:at], inline)
        elif "|" in line and at < len(lines) and "|" in lines[at] and _COLUMNS.match(lines[at]):
            while at < len(lines) and "|" in lines[at]:
                at += 1
            yield _table([line, *lines[begin + 2 : at]], inline)
        else:
            while at < len(lines) and _goes_on(lines[at]):
                at += 1
            yield f'<p dir="auto">{"<br>".join(map(inline, lines[begin:at]))}</p>'


def _goes_on(line: str) -> bool:
    """Whether a line belongs to the paragraph before it."""
    begins = (_RULE, _FENCE, _HEADING, _ITEM)
    return bool(line.strip()) and not any(each.match(line) for each in begins)


def _list(lines: list[str], inline: Callable[[str], str]) -> str:
    found = [item for line in lines if (item := _ITEM.match(line))]
    items = "".join(f'<li dir="auto">{inline(item[2])}</li>' for item in found)
    if found[0][1] is None:
        return f"<ul>{items}</ul>"
    return f'<ol start="{int(found[0][1])}">{items}</ol>'


def _table(lines: list[str], inline: Callable[[str], str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    head = "".join(f"<th>{inline(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{inline(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _inline(line: str, cited: Collection[int], place: Place | None) -> str:
    parts, end = [], 0
    for code in _CODE.finditer(line):
        parts += [_marked(line[end : code.start()], cited, place), f"<code>{safe(code[2])}</code>"]
        end = code.end()
    return "".join([*parts, _marked(line[end:], cited, place)])


def _marked(text: str, cited: Collection[int], place: Place | None) -> str:
    """A run of text without code. Escaping leaves the marks as they are and makes none."""
    blank_before, blank_after = text[:1].isspace(), text[-1:].isspace()
    text = f"{' ' * blank_before}{safe(text)}{' ' * blank_after}"
    if place is not None:
        to = place
        text = _PAGE.sub(lambda page: _page_button(page[1], to(int(page[2]))), text)
    text = _MARK.sub(lambda mark: _mark_buttons(mark[1], cited), text)
    return _WEAK.sub(r"<em>\1</em>", _STRONG.sub(r"<strong>\1</strong>", text))


def _page_button(label: str, ref: str) -> str:
    # The label is part of a text that is escaped already.
    return f'<button type="button" class="page-link" data-act="page" data-ref="{safe(ref)}">{label}</button>'


def _mark_buttons(numbers: str, cited: Collection[int]) -> str:
    found = [int(number) for number in numbers.split(",")]
    if not all(number in cited for number in found):
        return f"[{numbers}]"
    return "".join(
        f'<button type="button" class="cite" data-n="{n}" aria-label="Citation {n}">{n}</button>'
        for n in found
    )
