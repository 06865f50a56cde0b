"""Markdown: headings, lists, tables and fenced code as its author set them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.load.text import of_lines, paragraphs, text_of
from nemolocal.documents.parts import Block, BlockKind, Document

_HEADING = re.compile(r"^ {0,3}(#{1,6})\s+(.+?)\s*#*\s*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_LIST = re.compile(r"^\s*([-*+]|\d+[.)])\s+")
_ROW = re.compile(r"^\s*\|.*\|\s*$")
_RULE = re.compile(r"^\s*\|?[\s:|-]+\|?\s*$")


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    text = text_of(source, limits)
    on_page(1, 1)
    blocks = list(_blocks(text))
    title = next((block.text for _, block in blocks if block.kind == "heading"), "")
    return of_lines(source, "markdown", text, iter(blocks), title)


def _blocks(text: str) -> Iterator[tuple[int, Block]]:
    lines, at = text.replace("\x0c", "\n").split("\n"), 0
    while at < len(lines):
        line = lines[at]
        if heading := _HEADING.match(line):
            yield at, Block("heading", heading[2], level=len(heading[1]))
            at += 1
        elif fence := _FENCE.match(line):
            end = _end(lines, at + 1, _closes(fence[1]))
            code = "\n".join(lines[at + 1 : end]).strip("\n")
            if code.strip():
                yield at, Block("code", code)
            at = end + 1
        elif _ROW.match(line):
            end = _end(lines, at, lambda each: not _ROW.match(each))
            yield at, _table(lines[at:end])
            at = end
        else:
            end = _end(lines, at + 1, _begins_another)
            kind: BlockKind = "list" if _LIST.match(line) else "paragraph"
            for number, block in paragraphs("\n".join(lines[at:end])):
                yield at + number, Block(kind, block.text)
            at = end


def _end(lines: list[str], at: int, is_end: Callable[[str], bool]) -> int:
    return next((n for n in range(at, len(lines)) if is_end(lines[n])), len(lines))


def _closes(mark: str) -> Callable[[str], bool]:
    return lambda line: line.strip().startswith(mark)


def _begins_another(line: str) -> bool:
    return bool(_HEADING.match(line) or _FENCE.match(line) or _ROW.match(line))


def _table(lines: list[str]) -> Block:
    rows = [" | ".join(cell.strip() for cell in line.strip().strip("|").split("|")) for line in lines]
    is_ruled = len(lines) > 1 and bool(_RULE.match(lines[1]))
    kept = [rows[0], *rows[2:]] if is_ruled else rows
    return Block("table", "\n".join(kept), n_header_lines=1 if is_ruled else 0)
