"""Whether words stand in a text: exactly, but for blanks, letters of another case, hyphenation and the marks
that programs set in place of others. And which sentence of a text a statement rests on."""

from __future__ import annotations

import re
import unicodedata
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

N_LETTERS_LEAST: Final = 3
N_BETWEEN_MOST: Final = 2_000
"""Letters that an ellipsis may stand for."""
N_TRIED_MOST: Final = 5_000
"""Places where a quote may begin that are looked at; a quote that tells something has far fewer."""
SHARE_OF_WORDS: Final = 0.6
"""Of a statement's telling words, that a sentence must have to be what it rests on."""
N_WORDS_LEAST: Final = 2
"""Telling words that a statement and a sentence must share, where none of them holds a digit."""

_SAME: Final = (
    dict.fromkeys("“”„‟«»", '"')
    | dict.fromkeys("‘’‚‛", "'")
    | dict.fromkeys("–—‐‑‒―−", "-")
    | {"‹": "<", "›": ">"}
)
_UNSEEN: Final = frozenset("\u00ad\u200b\u200c\u200d\u2060\ufeff")
_ELLIPSIS: Final = re.compile(r"[\[(]?(?:\.\.\.|…)[\])]?")
_SENTENCE: Final = re.compile(r"[^\n。！？]+?(?:[.!?]+[\"'”’»)]*(?=\s|$)|(?=\n)|$|[。！？]+)")
_WORD: Final = re.compile(r"[^\W_]+")
_EAST_ASIAN: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_NOT: Final = frozenset(
    re.findall(
        r"\w+",
        "not no never none neither nor cannot without nicht kein keine keinen keiner keinem nie niemals ohne "
        "pas jamais aucun aucune sans nunca jamás ninguno ninguna sin non mai nessuno nessuna senza não "
        "nenhum nenhuma sem niet geen nooit zonder не нет никогда без nie bez",
    )
)


def find(quote: str, text: str) -> tuple[int, int] | None:
    """Where a quote stands in a text, as offsets; parts that an ellipsis joins must follow closely.
    None where it does not, begins or ends within a word, or is too short to tell."""
    parts = [part for part in (_plain(each)[0] for each in _ELLIPSIS.split(quote.strip())) if part]
    if not parts or sum(map(len, parts)) < N_LETTERS_LEAST:
        return None
    plain, places = _plain_of_source(text)
    begin, n_tried = plain.find(parts[0]), 0
    while begin >= 0 and (n_tried := n_tried + 1) <= N_TRIED_MOST:
        end = _end(parts, plain, begin)
        if end is not None:
            start, stop = places[begin], places[end - 1] + 1
            if not _tears(text, start) and not _tears(text, stop):
                return start, stop
        begin = plain.find(parts[0], begin + 1)
    return None


def support(statement: str, text: str) -> tuple[int, int, float] | None:
    """The sentence of a text that has most of a statement's telling words and all of its numbers: where it
    stands, and the share of them. None where no sentence shares enough of them, or says no where the
    statement says yes."""
    wanted = _telling(statement)
    if not wanted:
        return None
    numbers = {word for word in wanted if _has_digit(word)}
    is_denied = _denies(statement)
    best: tuple[int, int, float] | None = None
    for start, end, words, denies in _sentences_of_source(text):
        shared = wanted & words
        if not numbers <= shared or (len(shared) < N_WORDS_LEAST and not numbers):
            continue
        share = len(shared) / len(wanted)
        if share > (best[2] if best else 0.0) and denies == is_denied:
            best = start, end, share
    return best


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """Where the sentences of a text stand, without the blanks around them; a line is never part of two."""
    for match in _SENTENCE.finditer(text):
        stripped = match[0].strip()
        if stripped:
            start = match.start() + match[0].index(stripped)
            yield start, start + len(stripped)


def forget() -> None:
    """Let go of the texts that were looked through."""
    _plain_of_source.cache_clear()
    _sentences_of_source.cache_clear()


def page_at(offset: int, starts: Sequence[int], pages: Sequence[int]) -> int:
    """The page of the block that holds an offset; `starts` and `pages` are those of the blocks."""
    return pages[max(bisect_right(starts, offset) - 1, 0)] if pages else 1


def _end(parts: Sequence[str], plain: str, begin: int) -> int | None:
    end = begin + len(parts[0])
    for part in parts[1:]:
        at = plain.find(part, end, end + N_BETWEEN_MOST + len(part))
        if at < 0:
            return None
        end = at + len(part)
    return end


def _tears(text: str, at: int) -> bool:
    """Whether a word runs over this place; scripts without blanks between words have no such."""
    return (
        0 < at < len(text)
        and text[at - 1].isalnum()
        and text[at].isalnum()
        and not _EAST_ASIAN.match(text[at - 1])
        and not _EAST_ASIAN.match(text[at])
    )


def _telling(text: str) -> set[str]:
    """Longer words, whatever holds a digit, and pairs of letters where a script has no blanks."""
    found: set[str] = set()
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        for run in _EAST_ASIAN.findall(word):
            found.update(run[at : at + 2] for at in range(len(run) - 1))
        rest = _EAST_ASIAN.sub(" ", word).split()
        found.update(each for each in rest if len(each) > 3 or _has_digit(each))
    return found


def _has_digit(word: str) -> bool:
    return any(letter.isdigit() for letter in word)


def _denies(text: str) -> bool:
    folded = text.casefold()
    return bool(_NOT & set(_WORD.findall(folded))) or "n't" in folded.replace("’", "'")


# Both are kept, since an answer has several quotes and statements that are looked for in one text.


@lru_cache(maxsize=16)
def _plain_of_source(text: str) -> tuple[str, array[int]]:
    return _plain(text)


@lru_cache(maxsize=16)
def _sentences_of_source(text: str) -> tuple[tuple[int, int, frozenset[str], bool], ...]:
    """Where each sentence stands, its telling words, and whether it says no."""
    spans = ((start, end, text[start:end]) for start, end in sentences(text))
    return tuple((start, end, frozenset(_telling(each)), _denies(each)) for start, end, each in spans)


def _plain(text: str) -> tuple[str, array[int]]:
    """The letters and marks without blanks and hyphens, and where each stood. A minus sign stays."""
    letters: list[str] = []
    places = array("q")
    for at, letter in enumerate(text):
        if letter.isspace() or letter in _UNSEEN:
            continue
        letter = _SAME.get(letter, letter)
        if letter == "-" and not _is_minus(text, at):
            continue
        same = letter.lower() if letter.isascii() else unicodedata.normalize("NFKC", letter).casefold()
        for one in same:
            if not one.isspace():
                letters.append(one)
                places.append(at)
    return "".join(letters), places


def _is_minus(text: str, at: int) -> bool:
    return text[at + 1 : at + 2].isdigit() and not text[at - 1 : at].isalpha()
