"""Hits become passages: in order, with their surroundings, within the room that there is."""

from __future__ import annotations

import pytest

from nemolocal import config
from nemolocal.documents.library import Hit, Library
from nemolocal.documents.parts import Block, Document
from nemolocal.documents.retrieve import fuse, passages

N_PIECES = 9


@pytest.fixture
def library() -> Library:
    library = Library(config.load())
    for name in ("a", "b"):
        blocks = [
            Block(
                kind,
                f"{name} part {page}" + (" stone" * 300 if kind == "paragraph" else ""),
                page=page,
                level=1,
            )
            for page in range(1, N_PIECES + 1)
            for kind in ("heading", "paragraph")
        ]
        labels = tuple(f"p{page}" for page in range(1, N_PIECES + 1))
        library.add(
            Document(f"{name}.txt", "text", name * 64, tuple(blocks), n_pages=N_PIECES, labels=labels)
        )
    return library


def test_the_place_in_each_order_counts() -> None:
    one = [Hit(1, 0, 9.0), Hit(1, 1, 8.0), Hit(1, 2, 7.0)]
    two = [Hit(1, 2, 0.9), Hit(1, 1, 0.8), Hit(1, 3, 0.1)]
    assert [hit.number for hit in fuse([one, two])] == [2, 1, 0, 3]
    assert [hit.number for hit in fuse([one])] == [0, 1, 2]
    assert fuse([[], []]) == []


def test_hits_are_widened_and_neighbours_become_one(library: Library) -> None:
    hits = [Hit(2, 4, 3.0), Hit(1, 0, 2.0), Hit(2, 6, 1.0)]
    found = passages(library, hits, n_passages=3, n_tokens=100_000)
    assert [(p.document, p.page_from, p.page_to) for p in found] == [
        ("b.txt", 4, 8),
        ("a.txt", 1, 2),
    ]
    assert [p.score for p in found] == [3.0, 2.0]
    assert "p4" in found[0].where
    assert "p8" in found[0].where
    for passage in found:
        assert library.document(passage.document_id).text[passage.start : passage.end] == passage.text


@pytest.mark.parametrize("n_tokens", [0, 100, 400, 700, 1_500, 4_000])
def test_the_room_is_kept_to_and_hits_come_before_their_neighbours(library: Library, n_tokens: int) -> None:
    hits = [Hit(1, 4, 3.0), Hit(2, 1, 2.0), Hit(1, 7, 1.0)]
    pieces = {id: library.pieces(id) for id in (1, 2)}
    found = passages(library, hits, n_passages=3, n_tokens=n_tokens)
    covered = {
        (p.document_id, piece.number)
        for p in found
        for piece in pieces[p.document_id]
        if p.start <= piece.start < p.end
    }
    n_each = pieces[1][0].n_tokens
    assert sum(pieces[id][number].n_tokens for id, number in covered) <= n_tokens
    assert len(covered) == min(n_tokens // n_each, 9)
    wanted = [(hit.document_id, hit.number) for hit in hits]
    assert set(wanted[: len(covered)]) <= covered


def test_no_hits_no_passages(library: Library) -> None:
    assert passages(library, [], n_passages=5, n_tokens=1_000) == []


def test_only_so_many_hits_are_taken(library: Library) -> None:
    hits = [Hit(1, number, 1.0 / (number + 1)) for number in (0, 3, 6)]
    found = passages(library, hits, n_passages=1, n_tokens=100_000)
    assert [(p.page_from, p.page_to) for p in found] == [(1, 2)]


def test_a_table_over_two_pieces_says_its_header_in_each(library: Library) -> None:
    rows = "\n".join(f"stone {n} | {n * 3} EUR" for n in range(200))
    row = library.add(
        Document("t.csv", "csv", "c" * 64, (Block("table", f"name | price\n{rows}", n_header_lines=1),))
    )
    last = len(library.pieces(row.id)) - 1
    found = passages(library, [Hit(row.id, last, 1.0)], n_passages=1, n_tokens=500)
    assert found[0].text.startswith("name | price\n")
    assert found[0].text.endswith("stone 199 | 597 EUR")
