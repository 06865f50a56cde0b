"""What an answer rests on: its marks and quotes, read leniently, each checked against the source that it
names.

The form that models are asked for is: statement "exact words" [1]. Small ones leave out the quote, put the
mark elsewhere or leave it out; what can be told by the program is told then, and all else is not verified.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from nemolocal.documents import quotes
from nemolocal.documents.parts import Document

N_SHOWN_MOST: Final = 400
"""Letters of a statement or quote that are shown where it does not stand in the source."""
N_STATEMENTS_MOST: Final = 500
"""Statements of one answer that are checked."""
N_REAL_QUOTE: Final = 16
"""Letters from which words in quotation marks are surely meant as a quote, and not as a name."""

_MARK: Final = re.compile(
    r"[\[【]\s*(?:[A-Za-zÀ-ÿ]{1,9}\.?\s*)?#?(\d{1,3}(?:\s*(?:[,;&]|and|und|et|y|e)\s*\d{1,3})*)\s*"
    r"(?:[,:;†][^\]】\n]{0,600})?[\]】]"
)
_QUOTE: Final = re.compile(r"(?:(?<![A-Za-z0-9])\"|[“„«»「『])([^\"“”„«»「」『』\n]{2,1000})[\"“”«»」』]")
_SENTENCE_END: Final = re.compile(r"[.!?]+(?=\s|$|[\[【])|[。！？]+|\n")
_ABSENT: Final = re.compile(
    r"not (?:\w+ ){0,3}(?:in|by) (?:(?:the|these|any of the|given|provided) ){0,2}"
    r"(?:documents?|sources?|text)\b|"
    r"(?:documents?|sources?|text) (?:do|does) not (?:say|mention|state|contain|provide|give)|"
    r"nicht in den (?:dokumenten|quellen)|"
    r"(?:dokumente|quellen) (?:enthalten|sagen|nennen) (?:es |dazu )?(?:nicht|kein)|"
    r"pas dans les (?:documents|sources)|"
    r"no (?:está|aparece|figura|se menciona|se encuentra)?\s*en los documentos|"
    r"non (?:è |si trova |presente )*nei documenti|"
    r"não (?:está|consta|aparece)?\s*nos documentos|"
    r"niet in de documenten|nie ma w dokumentach|"
    r"нет в документах|не (?:указано|упоминается|содержится) в документах|"
    r"不在(?:这些|該)?文[档件]中|文[档件檔]中?(?:没有|沒有|未)|"
    r"文書に(?:は)?(?:ありません|記載されていません|ない)|문서에 (?:없|나와 있지 않)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Citation:
    """What a statement rests on: the quote stands in the document at `start` to `end`, if it is `verified`.
    A source that there is not has no document, and page 0."""

    n: int
    document: str
    document_id: int
    page: int
    where: str
    quote: str
    verified: bool
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """What source `n` is of its document: characters `start` to `end` of its text."""

    n: int
    document_id: int
    document: Document
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.document.text[self.start : self.end]


@dataclass(frozen=True, slots=True)
class _Statement:
    """A sentence without its marks; the quotes in it, and each mark's numbers with the quote that goes with
    it."""

    text: str
    quoted: tuple[str, ...]
    marks: tuple[tuple[tuple[int, ...], str], ...]


def named(text: str, spans: Sequence[Span]) -> list[Citation]:
    """The citations that an answer names, by a mark or by a quote that stands in a source."""
    found: list[Citation] = []
    # One that says the same over and over is looked up once.
    for statement in list(dict.fromkeys(_statements(text)))[:N_STATEMENTS_MOST]:
        for numbers, quote in dict.fromkeys(statement.marks):
            found += _of_mark(numbers, quote, statement.text, spans)
        if not statement.marks:
            for quote in statement.quoted:
                found += [c for span in spans if (c := _quoted(span, quote))][:1]
    return _each_once(found)


def implied(text: str, spans: Sequence[Span]) -> list[Citation]:
    """For an answer that names nothing: the sentences that its statements rest on, where that can be told."""
    found: list[Citation] = []
    for said in list(dict.fromkeys(statement.text for statement in _statements(text)))[:N_STATEMENTS_MOST]:
        rests = [(best, span) for span in spans if (best := _supporting(span, said))]
        if rests:
            (start, end, _), span = max(rests, key=lambda each: each[0][2])
            found.append(_verified(span, start, end))
    return _each_once(found)


def absent(text: str) -> Literal["nowhere", "first", "later"]:
    """Whether an answer says that the documents do not say it: in its first sentence, later or nowhere."""
    found = _ABSENT.search(text)
    if not found:
        return "nowhere"
    return "later" if _SENTENCE_END.search(text, 0, found.start()) else "first"


def _statements(text: str) -> Iterator[_Statement]:
    """The sentences of an answer. A mark after the full stop belongs to the sentence before."""
    quoted = [(match.start(), match.end(), match[1]) for match in _QUOTE.finditer(text)]
    marks = [mark for mark in _MARK.finditer(text) if not _is_of_quote(mark, quoted)]
    starts = [mark.start() for mark in marks]
    begin, ends = 0, []
    closed = sorted([(a, b - 1) for a, b, _ in quoted] + [mark.span() for mark in marks])
    for match in _SENTENCE_END.finditer(text):
        # Of what begins before this place, the last two: a mark may stand in a quote, or hold one.
        at = bisect_left(closed, (match.start(), 0))
        if not any(match.start() < end for _, end in closed[max(at - 2, 0) : at]):
            ends.append(match.end())
    for end in [*ends, len(text)]:
        while (at := bisect_left(starts, end)) < len(marks):
            between = text[end : marks[at].start()]
            if between.strip() or "\n" in between:
                break
            end = marks[at].end()
        if end <= begin:
            continue
        yield _statement(
            text[begin:end],
            [(a - begin, b - begin, each) for a, b, each in quoted if begin <= a < end],
            [
                (mark.start() - begin, mark)
                for mark in marks[bisect_left(starts, begin) : bisect_left(starts, end)]
            ],
        )
        begin = end


def _statement(
    text: str, quoted: Sequence[tuple[int, int, str]], marks: Sequence[tuple[int, re.Match[str]]]
) -> _Statement:
    """Each quote goes with the mark after it, or, where there is none, with the last one before."""
    pairs: dict[int, str] = {}
    for start, end, quote in quoted:
        holding = [at for at, mark in marks if at <= start and end <= at + len(mark[0])]
        after = [at for at, mark in marks if at + len(mark[0]) >= end]
        chosen = (holding or after or [at for at, _ in marks[-1:]])[:1]
        for at in chosen:
            if len(quote) > len(pairs.get(at, "")):
                pairs[at] = _MARK.sub("", quote).strip()
    numbers = [(at, tuple(int(n) for n in re.findall(r"\d+", mark[1]))) for at, mark in marks]
    return _Statement(
        re.sub(r"\s+(?=[.,!?])", "", _MARK.sub("", text)).strip(),
        tuple(quote for _, _, quote in quoted),
        tuple((each, pairs.get(at, "")) for at, each in numbers),
    )


def _is_of_quote(mark: re.Match[str], quoted: Sequence[tuple[int, int, str]]) -> bool:
    """Whether a mark stands amid quoted words, so that it is the source's own. At their end it is the
    answer's."""
    return any(start < mark.start() and mark.end() < end - 2 for start, end, _ in quoted)


def _of_mark(numbers: Sequence[int], quote: str, said: str, spans: Sequence[Span]) -> Iterator[Citation]:
    by_number = {span.n: span for span in spans}
    known = [by_number[n] for n in numbers if n in by_number]
    is_somewhere = any(_quoted(span, quote) for span in known)
    for n in dict.fromkeys(numbers):
        span = by_number.get(n)
        if span is None:
            yield Citation(n, "", 0, 0, "", (quote or said)[:N_SHOWN_MOST], verified=False)
            continue
        citation = _quoted(span, quote)
        # Where the quote is another source's of the same mark, or only a name, the statement decides.
        if citation is None and (is_somewhere or len(quote) < N_REAL_QUOTE):
            best = _supporting(span, said)
            citation = _verified(span, best[0], best[1]) if best else None
        yield citation or _unverified(span, quote or said)


def _quoted(span: Span, quote: str) -> Citation | None:
    at = quotes.find(quote, span.text) if quote else None
    return _verified(span, *at) if at else None


def _supporting(span: Span, said: str) -> tuple[int, int, float] | None:
    best = quotes.support(said, span.text)
    return best if best and best[2] >= quotes.SHARE_OF_WORDS else None


def _verified(span: Span, start: int, end: int) -> Citation:
    document = span.document
    start, end = span.start + start, span.start + end
    page = quotes.page_at(start, document.starts, [block.page for block in document.blocks])
    quote = " ".join(document.text[start:end].split())
    return Citation(
        n=span.n,
        document=document.name,
        document_id=span.document_id,
        page=page,
        where=document.where(page),
        quote=quote,
        verified=True,
        start=start,
        end=end,
    )


def _unverified(span: Span, quote: str) -> Citation:
    shown = " ".join(quote.split())[:N_SHOWN_MOST]
    return Citation(span.n, span.document.name, span.document_id, 0, "", shown, verified=False)


def _each_once(found: Sequence[Citation]) -> list[Citation]:
    return list(dict.fromkeys(found))
