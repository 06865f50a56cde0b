"""What the parts of this package hand each other: a document as it was read, its blocks and its pieces.

Pages count from 1, whatever they are called in the file; where a format has no pages, its sheets, slides or
chapters are what is counted, and of a plain text parts of so many lines (`Document.unit`). Offsets are
characters of `Document.text`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

BlockKind = Literal["heading", "paragraph", "list", "table", "code", "note"]
Unit = Literal["page", "slide", "sheet", "chapter", "part"]

BETWEEN = "\n\n"
"""What stands between two blocks in a document's text."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of text that belongs together: never empty, lines ended by a plain newline.

    `level` is a heading's, 1 the highest. A table has one line for each row, its cells separated by " | ";
    its first `n_header_lines` lines are repeated on each piece of it. `page_to` is the last page that it
    reaches; a paragraph that runs over a page break is one block.
    """

    kind: BlockKind
    text: str
    page: int = 1
    page_to: int = 0
    level: int = 0
    n_header_lines: int = 0

    @property
    def last_page(self) -> int:
        return max(self.page, self.page_to)


@dataclass(frozen=True, slots=True)
class NotRead:
    """A page of which there is no text; `page` 0 stands for something beside the pages, named in `why`."""

    page: int
    why: str


@dataclass(frozen=True)
class Document:
    """A document as it was read. `sha256` is the hash of the file's bytes, `labels` what its pages are called
    where that differs from their number ("iv", "A-3"), `n_pages` at least 1, `n_ocr_pages` how many were read
    by OCR."""

    name: str
    kind: str
    sha256: str
    blocks: tuple[Block, ...]
    n_pages: int = 1
    unit: Unit = "page"
    title: str = ""
    labels: tuple[str, ...] = ()
    not_read: tuple[NotRead, ...] = ()
    n_ocr_pages: int = 0
    has_outline: bool = False
    """Whether its headings are the author's own rather than guessed from the looks."""

    @cached_property
    def text(self) -> str:
        return BETWEEN.join(block.text for block in self.blocks)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each block begins in the text."""
        lengths = (len(block.text) + len(BETWEEN) for block in self.blocks)
        return tuple(accumulate(lengths, initial=0))[: len(self.blocks)]

    def where(self, page: int, last: int = 0) -> str:
        """A place in the document as a reader looks it up: "p. 3–4", "slide 2", "lines 101–200"."""
        begin, end = self.label(page), self.label(max(last, page))
        if self.unit == "part":
            return begin if begin == end else f"{begin.split('–')[0]}–{end.rsplit('–', 1)[-1]}"
        name = "p." if self.unit == "page" else self.unit
        return f"{name} {begin}" if begin == end else f"{name} {begin}–{end}"

    def label(self, page: int) -> str:
        """What a reader calls the page."""
        return self.labels[page - 1] if 0 < page <= len(self.labels) else str(page)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document that is found and read as one: characters `start` to `end` of its text.

    `text` is what a model reads: for a later part of a table the header lines come first, which are not in
    that range. `headings` is the path of headings that it stands under, the highest first.
    """

    number: int
    text: str
    start: int
    end: int
    page_from: int
    page_to: int
    n_tokens: int
    headings: tuple[str, ...] = ()
    kinds: tuple[BlockKind, ...] = field(default=())
