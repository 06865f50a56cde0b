"""How near to each other the words of a question stand in a text.

BM25 counts words wherever they stand in a piece; a piece that answers mostly has them in one sentence or row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

SPANS: Final = (12, 24, 48)
"""In terms, of which a word has one to four: part of a sentence, a sentence, and two."""


def idf(n_with: int, n_all: int) -> float:
    """The weight of a term that so many of all pieces have, as in BM25."""
    return math.log(1 + (n_all - n_with + 0.5) / (n_with + 0.5))


def nearness(terms: Sequence[str], weights: Mapping[str, float]) -> float:
    """The weight of the terms that stand together at the best place, on average over `SPANS`: at most the
    sum of all weights."""
    places = [(at, term) for at, term in enumerate(terms) if term in weights]
    return sum(_best(places, weights, span) for span in SPANS) / len(SPANS)


def _best(places: Sequence[tuple[int, str]], weights: Mapping[str, float], span: int) -> float:
    inside: Counter[str] = Counter()
    total = best = 0.0
    first = 0
    for at, term in places:
        inside[term] += 1
        if inside[term] == 1:
            total += weights[term]
        while places[first][0] <= at - span:
            left = places[first][1]
            inside[left] -= 1
            if not inside[left]:
                total -= weights[left]
            first += 1
        best = max(best, total)
    return best
