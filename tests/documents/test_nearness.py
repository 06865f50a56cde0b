"""Words that stand together weigh more than the same words apart."""

from __future__ import annotations

import random

import pytest

from nemolocal import config
from nemolocal.documents.library import Library
from nemolocal.documents.nearness import SPANS, idf, nearness
from nemolocal.documents.parts import Block, Document


def brute(terms: list[str], weights: dict[str, float], span: int) -> float:
    windows = [set(terms[at : at + span]) for at in range(max(len(terms), 1))]
    return max(sum(weights.get(term, 0.0) for term in window) for window in windows)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_window_is_found_at_every_span(seed: int) -> None:
    chance = random.Random(seed)
    terms = [chance.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(chance.randrange(0, 200))]
    weights = {letter: chance.random() for letter in chance.sample("abcdefghij", 5)}
    expected = sum(brute(terms, weights, span) for span in SPANS) / len(SPANS)
    assert nearness(terms, weights) == pytest.approx(expected)


def test_rare_terms_weigh_more_and_none_weighs_nothing() -> None:
    assert idf(1, 100) > idf(50, 100) > idf(100, 100) > 0
    assert nearness(["a"] * 50, {}) == nearness([], {"a": 1.0}) == 0


def test_a_piece_with_all_words_in_one_sentence_comes_first() -> None:
    filler = "nobody said a thing about that in all of the long years " * 4
    scattered = f"The harbour was old. {filler} The fee, the fee. {filler} Aldmere and the harbour. {filler}"
    together = f"{filler} {filler} {filler} The harbour fee of Aldmere is 17,40."
    library = Library(config.load())
    blocks = tuple(
        block
        for text in (scattered, scattered, together, scattered)
        for block in (Block("heading", "Part", level=1), Block("paragraph", text))
    )
    row = library.add(Document("d", "text", "d" * 64, blocks))
    hits = library.search("What is the harbour fee in Aldmere?", k=4)
    assert len(hits) == 4
    assert "17,40" in library.pieces(row.id, [hits[0].number])[0].text
