"""The passages that a question is about: hits by words and by vectors together, each with what stands around
it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from nemolocal.documents.library import Hit, Library
from nemolocal.documents.parts import Piece
from nemolocal.documents.split import Count, estimate

N_HITS = 40
"""Pieces that are looked at, of each way of finding."""
RANK_OFFSET = 60
"""In reciprocal rank fusion, so that the first places of one way do not outdo everything (Cormack, Clarke and
Büttcher, 2009)."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document: characters `start` to `end` of its text. `where` is
    how a reader looks it up."""

    document_id: int
    document: str
    page_from: int
    page_to: int
    text: str
    score: float
    start: int
    end: int
    where: str = ""
    headings: tuple[str, ...] = ()


Rank = Callable[[str, Sequence[str]], Awaitable[Sequence[float]]]
"""How well each text answers a question."""


def fuse(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Several orders as one, by the sum of the reciprocal ranks; the best first."""
    scores: dict[tuple[int, int], float] = {}
    for ranking in rankings:
        for place, hit in enumerate(ranking, 1):
            at = (hit.document_id, hit.number)
            scores[at] = scores.get(at, 0.0) + 1 / (RANK_OFFSET + place)
    best = sorted(scores.items(), key=lambda each: (-each[1], each[0]))
    return [Hit(document, number, score) for (document, number), score in best]


def passages(
    library: Library,
    hits: Sequence[Hit],
    *,
    n_passages: int,
    n_tokens: int,
    count: Count = estimate,
) -> list[Passage]:
    """The best hits as passages, the best first, together no longer than `n_tokens`.

    First each hit alone, as many as have room; what is left is spent on their neighbours, which say what
    "it" and "this" are. Pieces that stand side by side become one passage.
    """
    pieces: dict[int, list[Piece]] = {}
    for hit in hits[:n_passages]:
        if hit.document_id not in pieces:
            pieces[hit.document_id] = library.pieces(hit.document_id)
    chosen: dict[tuple[int, int], float] = {}
    left = n_tokens
    for hit in hits[:n_passages]:
        left -= _take(chosen, pieces, hit.document_id, hit.number, hit.score, left, count)
    for hit in hits[:n_passages]:
        for number in (hit.number + 1, hit.number - 1):
            if 0 <= number < len(pieces[hit.document_id]) and (hit.document_id, hit.number) in chosen:
                left -= _take(chosen, pieces, hit.document_id, number, 0.0, left, count)
    return _merged(library, chosen, pieces)


def _take(
    chosen: dict[tuple[int, int], float],
    pieces: dict[int, list[Piece]],
    document_id: int,
    number: int,
    score: float,
    left: int,
    count: Count,
) -> int:
    """Choose a piece if there is room for it; the tokens that it takes."""
    if (document_id, number) in chosen:
        return 0
    n = count([pieces[document_id][number].text])[0]
    if n > left:
        return 0
    chosen[document_id, number] = score
    return n


def _merged(
    library: Library, chosen: dict[tuple[int, int], float], pieces: dict[int, list[Piece]]
) -> list[Passage]:
    found: list[Passage] = []
    documents = {id: library.document(id) for id, _ in chosen}
    last: tuple[int, int] | None = None
    for (id, number), score in sorted(chosen.items()):
        piece, document = pieces[id][number], documents[id]
        if last == (id, number - 1):
            before = found[-1]
            found[-1] = replace(
                before,
                text=f"{before.text}\n\n{piece.text}",
                end=piece.end,
                page_to=max(before.page_to, piece.page_to),
                where=document.where(before.page_from, max(before.page_to, piece.page_to)),
                score=max(before.score, score),
            )
        else:
            found.append(
                Passage(
                    document_id=id,
                    document=document.name,
                    page_from=piece.page_from,
                    page_to=piece.page_to,
                    text=piece.text,
                    score=score,
                    start=piece.start,
                    end=piece.end,
                    where=document.where(piece.page_from, piece.page_to),
                    headings=piece.headings,
                )
            )
        last = (id, number)
    return sorted(found, key=lambda passage: -passage.score)
