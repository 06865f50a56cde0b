"""From runs of text with their places on a page to lines in the order in which they are read.

Pure geometry: knows no file format. Places are in points, y growing upwards, as in PDF.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

N_LINES_OF_COLUMN = 3
N_WORDS_OF_COLUMN = 3
"""Below so many words a line, what stands side by side is a table."""
N_BOXES_MOST = 4_000
N_GUTTERS_MOST = 40
"""How many places are tried; a page of figures has thousands of gaps."""
GUTTER = 0.9  # font sizes that are the least between columns
WIDE = 1.5  # font sizes, above which a gap parts the cells of a table


@dataclass(frozen=True, slots=True)
class Box:
    """A run of text: its left, bottom, right and top edge, which hang on its letters, and the font's size."""

    x0: float
    y0: float
    x1: float
    y1: float
    text: str
    size: float

    @property
    def middle(self) -> float:
        return (self.y0 + self.y1) / 2


@dataclass(frozen=True, slots=True)
class Line:
    """Boxes of one line, from the left; `text` has " | " between the cells of a table."""

    x0: float
    y0: float
    x1: float
    y1: float
    text: str
    size: float
    is_row: bool = False


def lines(boxes: Sequence[Box]) -> list[Line]:
    """The lines of a page: what stands in columns one column after the other."""
    found = [box for box in boxes if box.text.strip()]
    if len(found) > N_BOXES_MOST:
        return [_line(row) for row in _rows(found)]
    return _order(found)


def _order(boxes: Sequence[Box]) -> list[Line]:
    """By cuts: first bands that stand above each other, then columns within one."""
    if not boxes:
        return []
    rows = _rows(boxes)
    at = _gutter(rows)
    if at is not None:
        begin, end, x = at
        above = [box for row in rows[:begin] for box in row]
        beside = [box for row in rows[begin:end] for box in row]
        below = [box for row in rows[end:] for box in row]
        left = [box for box in beside if box.x1 <= x]
        right = [box for box in beside if box.x1 > x]
        return [*_order(above), *_order(left), *_order(right), *_order(below)]
    return [_line(row) for row in rows]


def _rows(boxes: Sequence[Box]) -> list[list[Box]]:
    """Boxes on one height together, from the top; within a row from the left."""
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda box: (-box.middle, box.x0)):
        last = rows[-1] if rows else None
        if last and abs(last[0].middle - box.middle) < 0.4 * min(last[0].size, box.size):
            last.append(box)
        else:
            rows.append([box])
    return [sorted(row, key=lambda box: box.x0) for row in rows]


def _gutter(rows: Sequence[Sequence[Box]]) -> tuple[int, int, float] | None:
    """Rows `begin` to `end` that a gutter parts into columns of running text, and where it is; None without.
    A row that stands on one side of it alone belongs to it, one that crosses it ends it."""
    least = GUTTER * statistics.median(box.size for row in rows for box in row)
    gaps: dict[int, list[float]] = {}
    for row in rows:
        for left, right in itertools.pairwise(row):
            if right.x0 - left.x1 >= least:
                gaps.setdefault(round(right.x0), []).append((left.x1 + right.x0) / 2)
    best: tuple[int, int, float] | None = None
    for places in sorted(gaps.values(), key=len, reverse=True)[:N_GUTTERS_MOST]:
        x = max(places)  # beside the longest line
        found = _span(rows, x)
        if found and (best is None or found[1] - found[0] > best[1] - best[0]):
            best = (*found, x)
    return best


def _span(rows: Sequence[Sequence[Box]], x: float) -> tuple[int, int] | None:
    """The longest run of rows that nothing crosses at `x`, where both sides are running text."""
    best: tuple[int, int] | None = None
    begin = 0
    for end in range(len(rows) + 1):
        if end == len(rows) or any(box.x0 < x < box.x1 for box in rows[end]):
            if _are_columns(rows[begin:end], x) and (best is None or end - begin > best[1] - best[0]):
                best = begin, end
            begin = end + 1
    return best


def _are_columns(rows: Sequence[Sequence[Box]], x: float) -> bool:
    left = [[box for box in row if box.x1 <= x] for row in rows]
    right = [[box for box in row if box.x1 > x] for row in rows]
    n_both = sum(bool(a and b) for a, b in zip(left, right, strict=True))
    if n_both < N_LINES_OF_COLUMN:
        return False
    if (_is_cells(right) and not _goes_on(left)) or (_is_cells(left) and not _goes_on(right)):
        return False
    sides = [[_n_words(row) for row in side if row] for side in (left, right)]
    return all(statistics.median(side) >= N_WORDS_OF_COLUMN for side in sides)


def _is_cells(side: Sequence[Sequence[Box]]) -> bool:
    """Whether most rows have short cells beside others, so that what stands next to them is a cell, too."""
    wide = [
        min(len(left.text.split()), len(right.text.split()))
        for row in side
        for left, right in itertools.pairwise(row)
        if right.x0 - left.x1 > WIDE * max(left.size, right.size)
    ]
    n_rows = sum(bool(row) for row in side)
    return len(wide) > n_rows / 2 and statistics.median(wide) < N_WORDS_OF_COLUMN


def _goes_on(side: Sequence[Sequence[Box]]) -> bool:
    """Whether lines begin as the middles of sentences do."""
    begins = [row[0].text.lstrip()[:1].islower() for row in side if row]
    return sum(begins) > len(begins) / 3


def _n_words(row: Sequence[Box]) -> int:
    """Of the longest run without a gap: many figures beside each other are no running text."""
    most = n = len(row[0].text.split())
    for left, right in itertools.pairwise(row):
        is_apart = right.x0 - left.x1 >= GUTTER * max(left.size, right.size)
        n = len(right.text.split()) + (0 if is_apart else n)
        most = max(most, n)
    return most


def _line(row: Sequence[Box]) -> Line:
    """Wide gaps part the cells of a table."""
    text, is_row = row[0].text.rstrip(), False
    for left, right in itertools.pairwise(row):
        gap, size = right.x0 - left.x1, max(left.size, right.size)
        if gap > WIDE * size:
            text, is_row = f"{text} | {right.text.strip()}", True
        elif gap > 0.15 * size or left.text.endswith(" ") or right.text.startswith(" "):
            text = f"{text} {right.text.strip()}"
        else:
            text += right.text.rstrip()
    return Line(
        min(box.x0 for box in row),
        min(box.y0 for box in row),
        max(box.x1 for box in row),
        max(box.y1 for box in row),
        text.strip(),
        max(box.size for box in row),
        is_row,
    )
