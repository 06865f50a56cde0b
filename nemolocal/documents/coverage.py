"""Which pages of a document a summary rests on, and which not, and why: together all of its pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nemolocal.documents.parts import Document, NotRead, Piece

NOTHING_ON_IT = "there is nothing on it but what all pages have"


@dataclass(frozen=True, slots=True)
class Coverage:
    """`read` are pages from 1, in order; `n_pieces_read` of `n_pieces` pieces were read."""

    pages: int
    read: tuple[int, ...]
    skipped: tuple[NotRead, ...]
    n_pieces: int
    n_pieces_read: int

    @property
    def is_whole(self) -> bool:
        return not self.skipped and self.n_pieces == self.n_pieces_read


def of(document: Document, pieces: Iterable[Piece], failed: Iterable[tuple[Piece, str]] = ()) -> Coverage:
    """What was read, given the pieces that were and those that could not be, each with its reason."""
    read_pieces, lost = list(pieces), list(failed)
    read = {page for piece in read_pieces for page in range(piece.page_from, piece.page_to + 1)}
    why = {each.page: each.why for each in document.not_read}
    for piece, reason in lost:
        for page in range(piece.page_from, piece.page_to + 1):
            why.setdefault(page, reason)
    # A page of which a part was lost is not read.
    partly = {page for piece, _ in lost for page in range(piece.page_from, piece.page_to + 1)}
    read -= partly
    for page in range(1, document.n_pages + 1):
        if page not in read:
            why.setdefault(page, NOTHING_ON_IT)
    skipped = tuple(NotRead(page, reason) for page, reason in sorted(why.items()) if page not in read)
    return Coverage(
        document.n_pages, tuple(sorted(read)), skipped, len(read_pieces) + len(lost), len(read_pieces)
    )
