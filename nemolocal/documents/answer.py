"""A question answered from documents: all of their text where it fits the context, else the passages that
were found; with citations that the program has checked.

The documents come first in the prompt and are the same to the byte for each question, so that a second one
does not read them again.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from nemolocal.documents import fence, quotes
from nemolocal.documents.fence import Excerpt
from nemolocal.documents.parts import Document
from nemolocal.documents.retrieve import Passage
from nemolocal.errors import NemoLocalError
from nemolocal.generation import GenerationParams, SamplingParams
from nemolocal.types import Delta, Finish, Message, TextModel, Usage

N_ANSWER: Final = 1_024
"""Tokens that an answer may have where nothing else is asked for."""
N_TEMPLATE: Final = 256
"""Tokens that a template may add to a prompt."""
N_REWRITTEN: Final = 80
SHARE_OF_CONTEXT: Final = 0.5
"""An answer never takes more of the context than this."""
N_HISTORY: Final = 6
"""Turns of the conversation that a question is read with."""

ALONE: Final = "Write the last question so that it can be understood without the rest. Only the question."
NOTHING_READ: Final = "There is no readable document to answer from."
NOTHING_FOUND: Final = "Not in the documents: nothing in them has to do with the question."

_CITATION: Final = re.compile(r"\[(?:source\s*)?(\d{1,3})\]", re.IGNORECASE)
_QUOTED: Final = re.compile(r"[\"“„«]([^\"“”„«»]{3,600})[\"”“»]")
_SENTENCE: Final = re.compile(r"[^.!?。！？\n]*[.!?。！？\n]?")
_ABSENT: Final = re.compile(
    r"not (?:stated |mentioned |found )?in the (?:documents|sources|text)|nicht in den dokumenten|"
    r"pas dans les documents|no (?:está|aparece) en los documentos|non (?:è )?nei documenti|"
    r"文档中没有|文件中没有",
    re.IGNORECASE,
)

Find = Callable[[Sequence[str], int], Awaitable[list[Passage]]]
"""The passages for these questions, together no longer than so many tokens, the best first."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is asked: (id, document) each, and how passages of them are found. `unread` are files that could
    not be read at all, each with its reason."""

    documents: tuple[tuple[int, Document], ...]
    find: Find
    unread: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Citation:
    """What a statement rests on: the quote stands in the document at `start` to `end`, if it is
    `verified`."""

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
class Unread:
    """A page, or with 0 all of a document, that was not read, and why."""

    document: str
    page: int
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer and how it came about."""

    text: str
    mode: Literal["whole", "retrieval"]
    citations: tuple[Citation, ...] = ()
    passages: tuple[Passage, ...] = ()
    not_read: tuple[Unread, ...] = ()
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    is_found: bool = True


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text of the answer."""

    text: str


async def answer(
    model: TextModel,
    question: str,
    sources: Sources,
    *,
    history: Sequence[Message] = (),
    params: GenerationParams | None = None,
) -> AsyncGenerator[AnswerDelta | Answer, None]:
    """Answer from documents: text as it comes, then the whole answer, once. Closing the iterator cancels.

    Raises what asking the model raises.
    """
    params = params or GenerationParams(SamplingParams(temperature=0.1), max_tokens=N_ANSWER)
    unread = _unread(sources)
    if not sources.documents:
        yield Answer(NOTHING_READ, "retrieval", not_read=unread, is_found=False)
        return
    n_new = min(params.max_tokens or N_ANSWER, int(model.n_ctx * SHARE_OF_CONTEXT))
    params = replace(params, max_tokens=n_new)
    turns = [turn for turn in history if turn.role in ("user", "assistant")][-N_HISTORY:]
    asked = [question, fence.RULES, *(turn.content for turn in turns)]
    room = model.n_ctx - n_new - N_TEMPLATE - sum(await model.count_tokens(asked))
    mode: Literal["whole", "retrieval"] = "whole"
    spent = Usage(0, 0)
    excerpts, spans = _whole(sources)
    passages: list[Passage] = []
    text = fence.block(excerpts)
    # A token is at least some bytes: what is far too long is not counted.
    if len(text) > 12 * room or (await model.count_tokens([text]))[0] > room:
        mode = "retrieval"
        questions, spent = await _questions(model, question, turns)
        passages = await sources.find(questions, max(room - N_TEMPLATE, 0))
        if not passages:
            yield Answer(NOTHING_FOUND, mode, not_read=unread, usage=spent, is_found=False)
            return
        passages = passages[::-1]  # the most relevant last, next to the question
        excerpts, spans = _of_passages(passages, sources)
        text = fence.block(excerpts)
    messages = [Message("system", fence.RULES), *_asked(text, turns, question)]
    said: list[str] = []
    async with aclosing(model.chat(messages, params)) as stream:
        async for item in stream:
            if isinstance(item, Delta):
                said.append(item.text)
                yield AnswerDelta(item.text)
            elif isinstance(item, Finish):
                spent = _sum(spent, item.usage)
    whole = "".join(said).strip()
    is_found = not _ABSENT.search(whole)
    citations = tuple(cite(whole, spans)) if is_found else ()
    yield Answer(whole, mode, citations, tuple(passages), unread, spent, is_found)


def _asked(text: str, turns: Sequence[Message], question: str) -> list[Message]:
    """The documents in the first message of the conversation, the question last."""
    if not turns:
        return [Message("user", f"{text}\n\nQuestion: {question}")]
    first, *rest = turns
    if first.role != "user":
        return [Message("user", text), *turns, Message("user", question)]
    return [Message("user", f"{text}\n\nQuestion: {first.content}"), *rest, Message("user", question)]


async def _questions(model: TextModel, question: str, turns: Sequence[Message]) -> tuple[list[str], Usage]:
    """The question, and one that stands for itself where it follows others."""
    if not turns:
        return [question], Usage(0, 0)
    said = "\n".join(f"{turn.role}: {turn.content[:500]}" for turn in turns)
    request = f"{said}\nuser: {question}\n\n{ALONE}"
    params = GenerationParams(SamplingParams(temperature=0.0), max_tokens=N_REWRITTEN)
    text, spent = [], Usage(0, 0)
    try:
        async with aclosing(model.chat([Message("user", request)], params)) as stream:
            async for item in stream:
                if isinstance(item, Delta):
                    text.append(item.text)
                elif isinstance(item, Finish):
                    spent = item.usage
    except NemoLocalError:
        return [question], spent
    rewritten = " ".join("".join(text).split())
    return ([question, rewritten] if rewritten and rewritten != question else [question]), spent


@dataclass(frozen=True, slots=True)
class _Span:
    """What an excerpt is of its document."""

    n: int
    document_id: int
    document: Document
    start: int
    end: int


def _whole(sources: Sources) -> tuple[list[Excerpt], list[_Span]]:
    excerpts, spans = [], []
    for n, (id, document) in enumerate(sources.documents, 1):
        where = (
            f"all {document.n_pages} {document.unit}s"
            if document.n_pages > 1
            else f"the whole {document.unit}"
        )
        excerpts.append(Excerpt(n, document.name, where, document.text))
        spans.append(_Span(n, id, document, 0, len(document.text)))
    return excerpts, spans


def _of_passages(passages: Sequence[Passage], sources: Sources) -> tuple[list[Excerpt], list[_Span]]:
    documents = dict(sources.documents)
    excerpts, spans = [], []
    for n, passage in enumerate(passages, 1):
        document = documents[passage.document_id]
        head = " › ".join(passage.headings)
        text = (
            f"{head}\n{passage.text}"
            if head and not passage.text.startswith(passage.headings[-1])
            else passage.text
        )
        excerpts.append(Excerpt(n, document.name, passage.where, text))
        spans.append(_Span(n, passage.document_id, document, passage.start, passage.end))
    return excerpts, spans


def cite(text: str, spans: Sequence[_Span]) -> list[Citation]:
    """The citations of an answer, each checked against what it names. An answer that names nothing is given
    what its statements rest on, where that can be told."""
    found: list[Citation] = []
    sentences = [match for match in _SENTENCE.finditer(text) if match[0].strip()]
    for index, match in enumerate(sentences):
        numbers = [int(number) for number in _CITATION.findall(match[0])]
        said = _CITATION.sub("", match[0]).strip()
        if not said and index:  # the mark stands after the full stop
            said = _CITATION.sub("", sentences[index - 1][0]).strip()
        quoted = _QUOTED.findall(said)
        for number in dict.fromkeys(numbers):
            span = next((span for span in spans if span.n == number), None)
            if span is None:
                found.append(Citation(number, "", 0, 0, "", quoted[0] if quoted else "", False))
            else:
                found.append(_checked(span, said, quoted))
        if not numbers:
            found += _supported(said, quoted, spans)
    return list(dict.fromkeys(found))


def _checked(span: _Span, said: str, quoted: Sequence[str]) -> Citation:
    """A quote that stands in the source, else the sentence of it that a statement rests on."""
    text = span.document.text[span.start : span.end]
    for quote in quoted:
        if at := quotes.find(quote, text):
            return _citation(span, *at, verified=True)
    best = quotes.support(said, text)
    if best and not quoted and best[2] >= quotes.SHARE_OF_WORDS:
        return _citation(span, best[0], best[1], verified=True)
    name, id = span.document.name, span.document_id
    return Citation(span.n, name, id, 0, "", quoted[0] if quoted else said[:200], False)


def _supported(said: str, quoted: Sequence[str], spans: Sequence[_Span]) -> list[Citation]:
    for span in spans:
        for quote in quoted:
            if at := quotes.find(quote, span.document.text[span.start : span.end]):
                return [_citation(span, *at, verified=True)]
    best = [(quotes.support(said, span.document.text[span.start : span.end]), span) for span in spans]
    rests = [(found, span) for found, span in best if found and found[2] >= quotes.SHARE_OF_WORDS]
    if not rests:
        return []
    (start, end, _), span = max(rests, key=lambda each: each[0][2])
    return [_citation(span, start, end, verified=True)]


def _citation(span: _Span, start: int, end: int, *, verified: bool) -> Citation:
    document = span.document
    begin = span.start + start
    page = quotes.page_at(begin, document.starts, [block.page for block in document.blocks])
    return Citation(
        n=span.n,
        document=document.name,
        document_id=span.document_id,
        page=page,
        where=document.where(page),
        quote=" ".join(document.text[begin : span.start + end].split()),
        verified=verified,
        start=begin,
        end=span.start + end,
    )


def _unread(sources: Sources) -> tuple[Unread, ...]:
    pages = [Unread(d.name, each.page, each.why) for _, d in sources.documents for each in d.not_read]
    return (*(Unread(name, 0, why) for name, why in sources.unread), *pages)


def _sum(a: Usage, b: Usage) -> Usage:
    return Usage(
        a.prompt_tokens + b.prompt_tokens,
        a.completion_tokens + b.completion_tokens,
        a.cached_tokens + b.cached_tokens,
    )
