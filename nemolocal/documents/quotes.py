"""Whether words stand in a text: exactly, but for blanks, letters of another case, hyphenation and the marks
that programs set in place of others."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence

N_LETTERS_LEAST = 3
SHARE_OF_WORDS = 0.6
"""Of a statement's telling words, that a sentence must have to be what it rests on."""

_SAME = {
    "“": '"',
    "”": '"',
    "„": '"',
    "«": '"',
    "»": '"',
    "‘": "'",
    "’": "'",
    "‚": "'",
    "–": "-",
    "—": "-",
    "‐": "-",
    "−": "-",
}
_ELLIPSIS = re.compile(r"\s*(?:\[?\.\.\.\]?|\[?…\]?)\s*")
_SENTENCE = re.compile(r"[^.!?。！？\n]+(?:[.!?。！？]+|\n|$)")
_WORD = re.compile(r"\w+")


def find(quote: str, text: str) -> tuple[int, int] | None:
    """Where a quote stands in a text, as offsets; parts that an ellipsis joins must follow each other. None
    where it does not, or is too short to tell."""
    plain, places = _plain(text)
    parts = [part for part in (_plain(each)[0] for each in _ELLIPSIS.split(quote)) if part]
    if not parts or sum(map(len, parts)) < N_LETTERS_LEAST:
        return None
    at = begin = plain.find(parts[0])
    for part in parts:
        at = plain.find(part, at) if at >= 0 else -1
        if at < 0:
            return None
        at += len(part)
    return places[begin], places[at - 1] + 1


def support(statement: str, text: str) -> tuple[int, int, float] | None:
    """The sentence of a text that has most of a statement's words, and all of its numbers: where it stands,
    and the share of them."""
    wanted = _telling(statement)
    numbers = {word for word in wanted if any(letter.isdigit() for letter in word)}
    if not wanted:
        return None
    best: tuple[int, int, float] | None = None
    for match in _SENTENCE.finditer(text):
        words = _telling(match[0])
        share = len(wanted & words) / len(wanted) if numbers <= words else 0.0
        if share > 0 and (best is None or share > best[2]):
            begin = match.start() + len(match[0]) - len(match[0].lstrip())
            best = begin, match.start() + len(match[0].rstrip()), share
    return best


def page_at(offset: int, starts: Sequence[int], pages: Sequence[int]) -> int:
    """The page of the block that holds an offset; `starts` and `pages` are those of the blocks."""
    return pages[max(bisect_right(starts, offset) - 1, 0)] if pages else 1


def _telling(text: str) -> set[str]:
    return {word.casefold() for word in _WORD.findall(text) if len(word) > 3 or word.isdigit()}


def _plain(text: str) -> tuple[str, list[int]]:
    """Letters and marks without blanks and hyphens, and where each stood."""
    letters: list[str] = []
    places: list[int] = []
    for at, letter in enumerate(text):
        if letter.isspace():
            continue
        for one in unicodedata.normalize("NFKC", _SAME.get(letter, letter)).casefold():
            if one != "-" and not one.isspace():
                letters.append(one)
                places.append(at)
    return "".join(letters), places
