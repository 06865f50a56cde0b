"""Pieces hold everything once, in order, and what belongs together stays together."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from nemolocal.documents.parts import Block, Document, Piece
from nemolocal.documents.split import estimate, split

WORDS = ("harbour", "granite", "a", "of", "Grundstücksverkehrsgenehmigung", "港湾", "1742", "x=1;", "é", "🚢")


def document(*blocks: Block) -> Document:
    return Document(
        "d", "text", "0" * 64, blocks, n_pages=max((block.last_page for block in blocks), default=1)
    )


def sentences(n: int, *, word: str = "stone") -> str:
    return " ".join(f"Sentence {i} has a {word}." for i in range(n))


def assert_whole(doc: Document, pieces: tuple[Piece, ...]) -> None:
    """Every character that is not between blocks is in exactly one piece, in order."""
    covered = [False] * len(doc.text)
    at = 0
    for number, piece in enumerate(pieces):
        assert piece.number == number
        assert at <= piece.start < piece.end
        assert doc.text[piece.start : piece.end].strip("\n") in piece.text
        assert 1 <= piece.page_from <= piece.page_to <= doc.n_pages
        covered[piece.start : piece.end] = [True] * (piece.end - piece.start)
        at = piece.end
    for block, start in zip(doc.blocks, doc.starts, strict=True):
        assert all(covered[start : start + len(block.text)])


@pytest.mark.parametrize("seed", range(40))
def test_any_document_is_held_whole_and_within_the_size(seed: int) -> None:
    chance = random.Random(seed)
    blocks, page = [], 1
    for _ in range(chance.randrange(1, 40)):
        page += chance.randrange(3)
        blank = chance.choice((" ", "\n", "", ". "))
        text = blank.join(chance.choice(WORDS) for _ in range(chance.choice((1, 5, 60, 400))))
        kind = chance.choice(("heading", "paragraph", "list", "table", "code", "note"))
        blocks.append(
            Block(
                kind,
                text,
                page=page,
                page_to=page + chance.randrange(2),
                level=chance.randrange(1, 4),
                n_header_lines=chance.randrange(3),
            )
        )
        page = blocks[-1].last_page
    doc = document(*blocks)
    n_tokens = chance.choice((7, 50, 384))
    pieces = split(doc, n_tokens=n_tokens)
    assert_whole(doc, pieces)
    assert all(piece.n_tokens <= n_tokens for piece in pieces)


def test_no_blocks_no_pieces() -> None:
    assert split(document()) == ()


def test_a_table_that_fits_is_not_torn_and_a_longer_one_repeats_its_header() -> None:
    rows = [f"part {i} | {i * 7} EUR" for i in range(60)]
    table = Block("table", "\n".join(["name | price", *rows]), n_header_lines=1)
    doc = document(Block("paragraph", sentences(40)), table)
    assert [p.kinds for p in split(doc, n_tokens=600)] == [("paragraph",), ("table",)]
    torn = [p for p in split(doc, n_tokens=120) if p.kinds == ("table",)]
    assert len(torn) > 2
    assert all(p.text.startswith("name | price\n") for p in torn)
    assert [line for p in torn for line in p.text.split("\n")[1:]] == rows


def test_code_is_torn_at_lines_only() -> None:
    lines = [f"    total += price[{i}] * n[{i}]" for i in range(80)]
    pieces = split(document(Block("code", "\n".join(lines))), n_tokens=90)
    assert len(pieces) > 3
    assert [line for p in pieces for line in p.text.split("\n")] == lines


@pytest.mark.parametrize("n_sentences", [5, 11, 12, 13, 50])
def test_a_heading_stays_with_what_follows_it(n_sentences: int) -> None:
    doc = document(
        Block("paragraph", sentences(3)),
        Block("heading", "Part One", level=1, page=2, page_to=2),
        Block("heading", "The harbour", level=2, page=2, page_to=2),
        Block("paragraph", sentences(n_sentences), page=2, page_to=3),
    )
    pieces = split(doc, n_tokens=100)
    assert_whole(doc, pieces)
    under = [p for p in pieces if p.headings == ("Part One", "The harbour")]
    assert under[0].kinds == ("heading", "paragraph")
    assert under[0].start == doc.starts[1]
    assert len(under) == len(pieces) - 1


def test_the_path_of_headings_drops_what_has_ended() -> None:
    names = [("A", 1), ("A.1", 2), ("A.1.x", 3), ("B", 1), ("B.1", 2)]
    blocks = [
        b for name, level in names for b in (Block("heading", name, level=level), Block("paragraph", "Text."))
    ]
    paths = [piece.headings for piece in split(document(*blocks))]
    assert paths == [("A",), ("A", "A.1"), ("A", "A.1", "A.1.x"), ("B",), ("B", "B.1")]


def test_a_paragraph_over_pages_tells_about_where_each_part_is() -> None:
    doc = document(Block("paragraph", sentences(400), page=3, page_to=7))
    pieces = split(doc, n_tokens=100)
    assert (pieces[0].page_from, pieces[-1].page_to) == (3, 7)
    assert pieces[0].page_to <= 4
    assert pieces[-1].page_from >= 6


def test_tokens_are_those_of_the_count_that_is_given() -> None:
    def letters(texts: object) -> list[int]:
        return [len(text) for text in texts]  # type: ignore[attr-defined]

    pieces = split(document(Block("paragraph", "a" * 1000)), n_tokens=100, count=letters)
    assert all(len(piece.text) <= 100 for piece in pieces)
    assert "".join(piece.text for piece in pieces) == "a" * 1000


@pytest.mark.parametrize("text", ["word " * 80_000, "x" * 400_000, "字" * 200_000])
def test_one_very_long_line_takes_little_more_memory_than_its_pieces(text: str) -> None:
    doc = document(Block("paragraph", text))
    tracemalloc.start()
    pieces = split(doc, n_tokens=384)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pieces[-1].end == len(text)
    assert peak < 25_000_000


def test_the_estimate_counts_letters_of_other_scripts_singly() -> None:
    assert estimate(["", "the harbour", "港湾は石", "x" * 50]) == [0, 3, 4, 10]
