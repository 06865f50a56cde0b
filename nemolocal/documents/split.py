"""A document in pieces: runs of blocks that belong together, no longer than so many tokens."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nemolocal.documents.parts import Block, BlockKind, Document, Piece

N_TOKENS = 384
"""Of a piece where nothing else is asked for: a few paragraphs, which is what a question is about."""

Count = Callable[[Sequence[str]], list[int]]
"""How many tokens each of these texts is."""

_WORD = re.compile(r"[A-Za-z]+|[^\sA-Za-z]")
_CUTS = (re.compile(r"\n"), re.compile(r"(?<=[.!?。！？;；])\s*"), re.compile(r"\s+"))
N_LETTERS_OF_TOKEN = 5
N_LETTERS_MOST = 64
"""Of a token, more or less: a text with more for each that fits is too long without counting."""
N_LETTERS_OF_WINDOW = 100_000


def estimate(texts: Sequence[str]) -> list[int]:
    """Tokens without a model, rather too many than too few: long words are several, and so is what is no
    Latin letter one each."""
    return [
        sum(
            1 + (len(word) - 1) // N_LETTERS_OF_TOKEN for word in (match[0] for match in _WORD.finditer(text))
        )
        for text in texts
    ]


def split(document: Document, *, n_tokens: int = N_TOKENS, count: Count = estimate) -> tuple[Piece, ...]:
    """Pieces that hold all of the text, in its order and without overlap.

    A heading begins a new piece and stays with what follows it. A table and a block of code are not torn
    unless they are longer than `n_tokens` by themselves; each part of a torn table has its header lines.
    """
    parts = list(_parts(document, n_tokens, count))
    pieces: list[Piece] = []
    gathered: list[_Part] = []
    path: list[tuple[int, str]] = []
    headings: tuple[str, ...] = ()
    for part in parts:
        begins = part.kind == "heading" and any(each.kind != "heading" for each in gathered)
        if gathered and (begins or sum(each.n_tokens for each in gathered) + part.n_tokens > n_tokens):
            pieces.append(_piece(len(pieces), gathered, headings))
            gathered = []
        if part.kind == "heading":
            path = [*(each for each in path if each[0] < part.level), (part.level, part.text)]
        if not gathered or part.kind == "heading":
            headings = tuple(text for _, text in path)
        gathered.append(part)
    if gathered:
        pieces.append(_piece(len(pieces), gathered, headings))
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class _Part:
    """A block, or a part of one that is too long for a piece. `head` is what a torn table repeats."""

    kind: BlockKind
    text: str
    start: int
    end: int
    page_from: int
    page_to: int
    n_tokens: int
    level: int = 0
    head: str = ""


def _parts(document: Document, n_tokens: int, count: Count) -> Iterator[_Part]:
    n_headings = 0  # of the headings right before, which are to stay with what follows
    for block, start, n in zip(
        document.blocks, document.starts, _counts(document, n_tokens, count), strict=True
    ):
        room = n_tokens - n_headings if n_headings <= n_tokens // 2 else n_tokens
        if n <= (n_tokens if block.kind in ("table", "code", "heading") else room):
            end = start + len(block.text)
            yield _Part(block.kind, block.text, start, end, block.page, block.last_page, n, block.level)
        else:
            yield from _torn(block, start, room, n_tokens, count)
        n_headings = n_headings + n if block.kind == "heading" else 0


def _counts(document: Document, n_tokens: int, count: Count) -> Iterator[int]:
    """Tokens of each block; of one that is surely too long just that it is."""
    most = n_tokens * N_LETTERS_MOST
    counted = iter(count([block.text for block in document.blocks if len(block.text) <= most]))
    for block in document.blocks:
        yield next(counted) if len(block.text) <= most else n_tokens + 1


def _torn(block: Block, start: int, room: int, n_tokens: int, count: Count) -> Iterator[_Part]:
    """A long block at its lines, sentences or words, whichever is needed; `room` is for the first part."""
    head, n_head = _head(block, n_tokens, count)
    finest = n_tokens - n_head
    first = last = n = 0
    for _, end, n_unit in _windowed(block.text, max(min(room, finest), 1), count):
        if last > first and n + n_unit > (room if first == 0 else finest):
            yield _part(block, start, (first, last), n, (head, n_head))
            first, n = last, 0
        last, n = end, n + n_unit
    yield _part(block, start, (first, last), n, (head, n_head))


def _head(block: Block, n_tokens: int, count: Count) -> tuple[str, int]:
    """The header lines of a table and their tokens, unless they would fill half of each piece."""
    if block.kind != "table" or not block.n_header_lines:
        return "", 0
    head = "\n".join(block.text.split("\n", block.n_header_lines)[: block.n_header_lines])
    n_head = count([head])[0] if len(head) <= n_tokens * N_LETTERS_MOST else n_tokens
    return (head, n_head) if n_head <= n_tokens // 2 else ("", 0)


def _part(block: Block, start: int, span: tuple[int, int], n: int, head: tuple[str, int]) -> _Part:
    first, last = span
    share = (block.last_page - block.page) / len(block.text)
    is_first = first == 0
    return _Part(
        kind=block.kind,
        text=block.text[first:last],
        start=start + first,
        end=start + last,
        page_from=block.page + int(first * share),
        page_to=min(block.page + math.ceil(last * share), block.last_page),
        n_tokens=n + (0 if is_first else head[1]),
        level=block.level,
        head="" if is_first else head[0],
    )


def _windowed(text: str, room: int, count: Count) -> Iterator[tuple[int, int, int]]:
    """`_units` of one stretch of the text after another, since a text may be one line of many megabytes."""
    at = 0
    while at < len(text):
        end = min(at + N_LETTERS_OF_WINDOW, len(text))
        if end < len(text):
            border = max(text.rfind("\n", at, end), text.rfind(" ", end - N_LETTERS_OF_WINDOW // 8, end))
            end = border + 1 if border > at else end
        yield from _units(text, at, end, room, count)
        at = end


def _units(
    text: str, begin: int, end: int, room: int, count: Count, depth: int = 0
) -> Iterator[tuple[int, int, int]]:
    """(begin, end, tokens) of parts that fit, cut as coarsely as can be; at last at any letter."""
    if depth == len(_CUTS):
        step = max(room // 3, 1)  # a letter is at most some three tokens
        for at in range(begin, end, step):
            yield at, min(at + step, end), room
        return
    borders = [begin, *(match.end() for match in _CUTS[depth].finditer(text, begin, end)), end]
    spans = [(a, b) for a, b in itertools.pairwise(borders) if b > a]
    for (a, b), n in zip(spans, count([text[a:b] for a, b in spans]), strict=True):
        if n <= room:
            yield a, b, n
        else:
            yield from _units(text, a, b, room, count, depth + 1)


def _piece(number: int, parts: Sequence[_Part], headings: tuple[str, ...]) -> Piece:
    head = parts[0].head
    text = "\n\n".join(part.text for part in parts).strip("\n")
    return Piece(
        number=number,
        text=f"{head}\n{text}" if head else text,
        start=parts[0].start,
        end=parts[-1].end,
        page_from=min(part.page_from for part in parts),
        page_to=max(part.page_to for part in parts),
        n_tokens=sum(part.n_tokens for part in parts),
        headings=headings,
        kinds=tuple(dict.fromkeys(part.kind for part in parts)),
    )
