"""The parts that a document is summarised in: runs of pieces that one prompt holds, along its headings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemolocal.documents.parts import Piece

SHARE_FULL = 0.4
"""A part that is so full ends where a chapter begins."""
SHARE_LAST = 0.15
"""A shorter rest goes to the part before, where it fits."""


@dataclass(frozen=True, slots=True)
class Part:
    """Pieces that follow each other; `title` is the heading that they stand under, "" without one."""

    title: str
    pieces: tuple[Piece, ...]
    n_tokens: int

    @property
    def page_from(self) -> int:
        return min(piece.page_from for piece in self.pieces)

    @property
    def page_to(self) -> int:
        return max(piece.page_to for piece in self.pieces)


def parts(pieces: Sequence[Piece], counts: Sequence[int], *, n_tokens: int) -> list[Part]:
    """All pieces, in their order, in parts of no more than `n_tokens` each; a longer piece is one alone."""
    found: list[Part] = []
    gathered: list[tuple[Piece, int]] = []
    for piece, n in zip(pieces, counts, strict=True):
        total = sum(each for _, each in gathered)
        is_new = bool(gathered) and piece.headings[:1] != gathered[-1][0].headings[:1]
        if gathered and (total + n > n_tokens or (is_new and total >= SHARE_FULL * n_tokens)):
            found.append(_part(gathered))
            gathered = []
        gathered.append((piece, n))
    if gathered:
        last = _part(gathered)
        if found and last.n_tokens < SHARE_LAST * n_tokens and found[-1].n_tokens + last.n_tokens <= n_tokens:
            before = found.pop()
            last = Part(before.title, before.pieces + last.pieces, before.n_tokens + last.n_tokens)
        found.append(last)
    return found


def _part(gathered: Sequence[tuple[Piece, int]]) -> Part:
    pieces = tuple(piece for piece, _ in gathered)
    return Part(_title(pieces), pieces, sum(n for _, n in gathered))


def _title(pieces: Sequence[Piece]) -> str:
    """The deepest heading that all of them stand under, else the first one's and the last one's."""
    shared: list[str] = []
    for level in zip(*(piece.headings for piece in pieces), strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    if shared:
        return shared[-1]
    ends = [piece.headings[0] for piece in (pieces[0], pieces[-1]) if piece.headings]
    return " – ".join(dict.fromkeys(ends))
