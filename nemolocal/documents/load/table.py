"""CSV and the like: a table, whose first row names the columns."""

from __future__ import annotations

import csv
import io

from nemolocal.documents.limits import Limits
from nemolocal.documents.load.source import OnPage, Source
from nemolocal.documents.load.text import text_of
from nemolocal.documents.parts import Block, Document

N_SNIFFED_CHARS = 20_000
DELIMITERS = ",;\t|"


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    text = text_of(source, limits)
    csv.field_size_limit(limits.max_chars)
    try:
        rows = [
            line
            for row in csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text))
            if (line := line_of(row))
        ]
    except csv.Error as error:
        raise source.damaged(error) from None
    on_page(1, 1)
    block = Block("table", "\n".join(rows), n_header_lines=1 if len(rows) > 1 else 0)
    return Document(source.name, "csv", source.sha256, (block,) if rows else (), unit="sheet")


def line_of(cells: list[str]) -> str:
    """A row as one line; "" where all of it is empty."""
    shown = [" ".join(cell.split()) for cell in cells]
    return " | ".join(shown) if any(shown) else ""


def _delimiter(text: str) -> str:
    """The mark that cuts the first lines into most cells, and all of them into equally many."""
    sample = text[:N_SNIFFED_CHARS]
    best, best_score = ",", (False, 0)
    for mark in DELIMITERS:
        try:
            widths = [len(row) for row in csv.reader(io.StringIO(sample, newline=""), delimiter=mark) if row][
                :-1
            ]
        except csv.Error:
            continue
        widths = widths or [len(next(csv.reader([sample.split("\n", 1)[0]], delimiter=mark), []))]
        score = (len(set(widths)) == 1 and widths[0] > 1, min(widths))
        if score > best_score:
            best, best_score = mark, score
    return best
