"""What a text is found by: words as they stand, their stems, spellings without accents, codes and their
parts, and pairs of characters where words are not parted by blanks."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

N_LETTERS_OF_TERM = 64
N_SAMPLE_CHARS = 20_000
N_TERMS_OF_QUESTION = 128

STOP_WORDS: Final = {
    "english": (
        "the of and to in a is that it for on with as was at by be this are from or an which not "
        "what who when where how does do did has have had will would can could should there their "
        "they its i you we he she"
    ),
    "german": (
        "der die das und in zu den von mit ist im für auf des dem nicht ein eine einer eines einem "
        "einen als auch es an werden aus er hat dass sie nach wird bei um am sind noch wie über so "
        "zum zur wer was wann wo welche welcher welches"
    ),
    "french": (
        "le la les de des du et en un une à est que qui dans pour sur par au aux pas ne se ce il "
        "elle avec sont plus ou où quand quel quelle quels quelles comment"
    ),
    "spanish": (
        "el la los las de del y en un una que es por con para su al lo como más se no o qué quién "
        "cuándo dónde cuál cómo"
    ),
    "italian": (
        "il la le lo gli di del della e in un una che è per con da al si non sono come più chi "
        "quando dove quale"
    ),
    "portuguese": (
        "o a os as de do da e em um uma que é para com por no na não se mais como quem quando onde qual"
    ),
    "dutch": (
        "de het een en van in is dat op te zijn met voor niet aan er om ook als bij maar wie wat "
        "wanneer waar welke hoe"
    ),
}
_STOP: Final = {language: frozenset(words.split()) for language, words in STOP_WORDS.items()}
_TOKEN: Final = re.compile(r"\w+(?:[-./_,:'’]\w+)*", re.UNICODE)
_UNSPACED: Final = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff]+"
)
_UNSPACED_STOP: Final = re.compile(
    "为什么|為什麼|什么|什麼|多少|如何|怎么|怎麼|请问|請問|哪|谁|誰|的|了|吗|嗎|呢|是"
)
_INNER: Final = re.compile(r"[-./_,:'’]")
_UMLAUTS: Final = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss"})
_SPELT_OUT: Final = re.compile("(?<=[aou])e")


def language_of(text: str) -> str:
    """The language whose stop words are most frequent; "" where there are hardly any of any."""
    words = Counter(re.findall(r"[^\W\d_]+", text[:N_SAMPLE_CHARS].casefold()))
    n_words = sum(words.values())
    scores = {language: sum(words[word] for word in stop) for language, stop in _STOP.items()}
    best = max(scores, key=lambda language: scores[language])
    is_told = sum(word in words for word in _STOP[best]) > 1  # "y" alone makes nothing Spanish
    return best if is_told and scores[best] > 0.1 * n_words else ""


def terms(text: str, language: str) -> list[str]:
    """All terms of a text, in order; a word gives several, each once."""
    return [term for word in _words(text) for term in _forms(word, language)]


def match(question: str, language: str) -> str:
    """What to look for, as a query of FTS5: any of the terms. Nothing in a question is taken for syntax,
    since terms have no quotes. "" where there are no terms."""
    found = question_terms(question, language)[:N_TERMS_OF_QUESTION]
    # A single character is the first of pairs, or stands last in its run.
    return " OR ".join(
        f'"{term}"*' if _UNSPACED.fullmatch(term) and len(term) == 1 else f'"{term}"' for term in found
    )


def question_terms(text: str, language: str) -> list[str]:
    """The terms that a question has for texts of a language, each once, without its stop words unless it has
    no others."""
    own = language_of(text)
    stop = _STOP.get(language, frozenset()) | _STOP.get(own, frozenset() if language else _STOP["english"])
    words = list(_words(text))
    kept = [part for word in words if word not in stop for part in _UNSPACED_STOP.split(word) if part]
    found = [term for word in kept or words for term in _forms(word, language or own, is_question=True)]
    return list(dict.fromkeys(found))


def _words(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(unicodedata.normalize("NFKC", text).casefold()):
        yield match[0]


def _forms(word: str, language: str, *, is_question: bool = False) -> list[str]:
    if _UNSPACED.search(word):
        return list(_pairs(word, language, is_question=is_question))
    found = [word, *(part for part in _INNER.split(word) if part)] if _INNER.search(word) else [word]
    plain = [form for each in found for form in (each, _fold(each), each.translate(_UMLAUTS))]
    if language == "german":  # "groesse" is "Größe", and "grosse" where there are no umlauts
        plain += [_SPELT_OUT.sub("", each) for each in found]
    stems = [
        _fold(_stem(each, language)) for each in found if language and not any(c.isdigit() for c in each)
    ]
    return list(dict.fromkeys(form[:N_LETTERS_OF_TERM] for form in (*plain, *stems) if form))


def _pairs(word: str, language: str, *, is_question: bool) -> Iterator[str]:
    """Characters that stand beside each other, two by two, and in a text the last one by itself; what is
    between such runs are words again."""
    at = 0
    for run in _UNSPACED.finditer(word):
        yield from _between(word[at : run.start()], language)
        text = run[0]
        yield from (text[i : i + 2] for i in range(len(text) - 1))
        if len(text) == 1 or not is_question:
            yield text[-1]
        at = run.end()
    yield from _between(word[at:], language)


def _between(text: str, language: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        yield from _forms(match[0], language)


def _fold(word: str) -> str:
    """Without accents."""
    if word.isascii():
        return word
    parts = unicodedata.normalize("NFKD", word)
    return "".join(c for c in parts if not unicodedata.combining(c)).replace("ß", "ss")


@lru_cache(maxsize=50_000)
def _stem(word: str, language: str) -> str:
    return str(_stemmer(language).stemWord(word))


@lru_cache(maxsize=16)
def _stemmer(language: str) -> Any:
    import snowballstemmer

    return snowballstemmer.stemmer(language)
