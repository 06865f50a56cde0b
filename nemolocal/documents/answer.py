"""A question answered from documents: all of their text where it fits the context, else the passages that
were found; with citations that the program has checked.

The documents come first in the prompt and are the same to the byte for each question, so that a second one
does not read them again. What the prompt looks like: fence.py; how answers are checked: citations.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Literal

from nemolocal.documents import citations, fence, quotes
from nemolocal.documents.citations import Citation as Citation
from nemolocal.documents.citations import Span
from nemolocal.documents.fence import Excerpt
from nemolocal.documents.parts import Document
from nemolocal.documents.retrieve import Passage
from nemolocal.documents.thinking import Thinking
from nemolocal.errors import ContextLengthError, NemoLocalError
from nemolocal.generation import GenerationParams, SamplingParams
from nemolocal.types import Delta, Finish, Message, TextModel, Usage

N_ANSWER: Final = 1_024
"""Tokens that an answer may have where nothing else is asked for."""
N_TEMPLATE: Final = 256
"""Tokens that a template may add to a prompt."""
N_LETTERS_A_TOKEN: Final = 12
"""No text has more letters for a token than this throughout: what is longer is not counted."""
N_REWRITTEN: Final = 80
SHARE_UNASKED: Final = 0.25
"""Of the context, that an answer takes at most where nothing else is asked for; the rest is for reading."""
SHARE_OF_CONTEXT: Final = 0.5
"""Of the context, that an answer takes at most, whatever is asked for."""
SHARE_OF_HISTORY: Final = 0.25
"""The conversation before the question never takes more of what the answer leaves than this."""
N_HISTORY: Final = 3
"""Questions with their answers that a question is read with."""

ALONE: Final = "Write the last question so that it can be understood without the rest. Only the question."
NOTHING_READ: Final = "There is no readable document to answer from."
NOTHING_FOUND: Final = "Not in the documents: nothing in them has to do with the question."
NOTHING_SAID: Final = "The model gave no answer."

Find = Callable[[Sequence[str], int], Awaitable[list[Passage]]]
"""The passages for these questions, together no longer than so many tokens, the best first."""
Mode = Literal["whole", "retrieval"]


@dataclass(frozen=True, slots=True)
class Sources:
    """What is asked: (id, document) each, and how passages of them are found. `unread` are files that could
    not be read at all, each with its reason."""

    documents: tuple[tuple[int, Document], ...]
    find: Find
    unread: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Unread:
    """A page, or with 0 all of a document, that was not read, and why."""

    document: str
    page: int
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer and how it came about. `is_cut` says that it ended for want of tokens."""

    text: str
    mode: Mode
    citations: tuple[Citation, ...] = ()
    passages: tuple[Passage, ...] = ()
    not_read: tuple[Unread, ...] = ()
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    is_found: bool = True
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text of the answer. `is_restart` says that all before it was the model's thinking, which could not
    be told from an answer until it ended."""

    text: str
    is_restart: bool = False


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the model is given to read: excerpts as they stand in the prompt, and what they are of."""

    mode: Mode
    text: str
    spans: tuple[Span, ...]
    passages: tuple[Passage, ...] = ()


async def answer(
    model: TextModel,
    question: str,
    sources: Sources,
    *,
    history: Sequence[Message] = (),
    params: GenerationParams | None = None,
) -> AsyncGenerator[AnswerDelta | Answer, None]:
    """Answer from documents: text as it comes, then the whole answer, once. Closing the iterator cancels.

    Raises ContextLengthError where the question alone leaves no room for a document, and what asking the
    model raises.
    """
    params = params or GenerationParams(SamplingParams(temperature=0.1))
    unread = _unread(sources)
    if not any(document.text.strip() for _, document in sources.documents):
        yield Answer(NOTHING_READ, "retrieval", not_read=unread, is_found=False)
        return
    n_asked = sum(await model.count_tokens([question, fence.RULES])) + N_TEMPLATE
    share = SHARE_OF_CONTEXT if params.max_tokens else SHARE_UNASKED
    n_new = max(min(params.max_tokens or N_ANSWER, int(model.n_ctx * share)), 1)
    room = model.n_ctx - n_new - n_asked
    if room <= 0:
        raise ContextLengthError(n_prompt=n_asked, n_ctx=model.n_ctx)
    turns, n_turns = await _recent(model, history, int(room * SHARE_OF_HISTORY))
    room -= n_turns
    reading, spent = await _whole(model, sources, room), Usage(0, 0)
    if reading is None:
        questions, spent = await _questions(model, question, turns)
        reading = await _found(model, sources, questions, room)
    if not reading.spans:
        yield Answer(NOTHING_FOUND, reading.mode, not_read=unread, usage=spent, is_found=False)
        return
    messages = [Message("system", fence.RULES), *_asked(reading.text, turns, question)]
    thinking, is_cut = Thinking(), False
    async with aclosing(model.chat(messages, replace(params, max_tokens=n_new))) as stream:
        async for item in stream:
            if isinstance(item, Delta):
                for text, is_restart in thinking.feed(item.text):
                    yield AnswerDelta(text, is_restart)
            elif isinstance(item, Finish):
                spent, is_cut = _sum(spent, item.usage), item.reason == "length"
    if rest := thinking.flush():
        yield AnswerDelta(rest)
    # In a thread: a long text is looked through, sentence by sentence.
    is_found, cited = await asyncio.to_thread(_judged, thinking.answer, reading.spans)
    if not thinking.answer:
        yield AnswerDelta(NOTHING_SAID)
    text = thinking.answer or NOTHING_SAID
    yield Answer(text, reading.mode, cited, reading.passages, unread, spent, is_found, is_cut)


async def _recent(model: TextModel, history: Sequence[Message], n_tokens: int) -> tuple[list[Message], int]:
    """The latest questions with their answers that are no longer than so many tokens, and their length.
    Questions that were not answered are left out, since templates want the roles to alternate."""
    pairs = [
        (fence.harmless(before.content), fence.harmless(after.content))
        for before, after in pairwise(history)
        if (before.role, after.role) == ("user", "assistant")
    ][-N_HISTORY:]
    counts = await model.count_tokens([text for pair in pairs for text in pair]) if pairs else []
    turns: list[Message] = []
    n_turns = 0
    for at in range(len(pairs) - 1, -1, -1):
        n_pair = counts[2 * at] + counts[2 * at + 1] + N_TEMPLATE // 4
        if n_turns + n_pair > n_tokens:
            break
        n_turns += n_pair
        turns[:0] = [Message("user", pairs[at][0]), Message("assistant", pairs[at][1])]
    return turns, n_turns


def _asked(text: str, turns: Sequence[Message], question: str) -> list[Message]:
    """The documents in the first message of the conversation, the question last."""
    questions = [*turns, Message("user", fence.harmless(question))]
    first = replace(questions[0], content=f"{text}\n\nQuestion: {questions[0].content}")
    return [first, *questions[1:]]


async def _whole(model: TextModel, sources: Sources, room: int) -> _Reading | None:
    """All of the documents, if there is room for them."""
    if sum(len(document.text) for _, document in sources.documents) > N_LETTERS_A_TOKEN * room:
        return None
    excerpts, spans = [], []
    for n, (id, document) in enumerate(sources.documents, 1):
        where = f"all {document.n_pages} {document.unit}s" if document.n_pages > 1 else ""
        excerpts.append(Excerpt(n, document.name, where, document.text))
        spans.append(Span(n, id, document, 0, len(document.text)))
    text = fence.block(excerpts)
    n_tokens = (await model.count_tokens([text]))[0]
    return _Reading("whole", text, tuple(spans)) if n_tokens <= room else None


async def _found(model: TextModel, sources: Sources, questions: Sequence[str], room: int) -> _Reading:
    """The passages that were found, as many of the best as there is room for, the best last, where it is
    next to the question."""
    documents = dict(sources.documents)
    found = [each for each in await sources.find(questions, room) if each.document_id in documents]
    while True:
        shown = found[::-1]
        excerpts = [_excerpt(n, passage) for n, passage in enumerate(shown, 1)]
        text = fence.block(excerpts)
        n_over = (await model.count_tokens([text]))[0] - room
        if n_over <= 0 or len(found) <= 1:
            break
        # Names and headings take room, too, and that of a passage is known only now.
        for n_tokens in await model.count_tokens([each.text for each in excerpts[:-1]]):
            n_over -= n_tokens
            found.pop()
            if n_over <= 0:
                break
    spans = [
        Span(n, each.document_id, documents[each.document_id], each.start, each.end)
        for n, each in enumerate(shown, 1)
    ]
    return _Reading("retrieval", text, tuple(spans), tuple(shown))


def _excerpt(n: int, passage: Passage) -> Excerpt:
    head = " › ".join(passage.headings)
    is_under = head and not passage.text.lstrip("# ").startswith(passage.headings[-1])
    return Excerpt(
        n, passage.document, passage.where, f"{head}\n{passage.text}" if is_under else passage.text
    )


async def _questions(model: TextModel, question: str, turns: Sequence[Message]) -> tuple[list[str], Usage]:
    """The question, and one that stands for itself where it follows others."""
    if not turns:
        return [question], Usage(0, 0)
    said = "\n".join(f"{turn.role}: {turn.content[:500]}" for turn in turns)
    request = f"{said}\nuser: {question[:2000]}\n\n{ALONE}"
    params = GenerationParams(SamplingParams(temperature=0.0), max_tokens=N_REWRITTEN)
    thinking, spent = Thinking(), Usage(0, 0)
    try:
        async with aclosing(model.chat([Message("user", request)], params)) as stream:
            async for item in stream:
                if isinstance(item, Delta):
                    for _ in thinking.feed(item.text):
                        pass
                elif isinstance(item, Finish):
                    spent = item.usage
    except NemoLocalError:
        return [question], spent
    thinking.flush()
    lines = thinking.answer.splitlines()
    rewritten = " ".join(lines[0].split()).strip("\"'") if lines else ""
    return ([question, rewritten] if rewritten and rewritten != question else [question]), spent


def _judged(text: str, spans: Sequence[Span]) -> tuple[bool, tuple[Citation, ...]]:
    """Whether the answer is one, and what it rests on. One that says first that there is none, or says so
    anywhere without naming anything that holds, is not; what it does name stands with it."""
    if not text:
        return False, ()
    try:
        return _weighed(text, spans)
    finally:
        quotes.forget()


def _weighed(text: str, spans: Sequence[Span]) -> tuple[bool, tuple[Citation, ...]]:
    named = citations.named(text, spans)
    absent = citations.absent(text)
    if absent != "nowhere":
        holds = tuple(citation for citation in named if citation.verified)
        if absent == "first" or not holds:
            return False, holds
    return True, tuple(named or citations.implied(text, spans))


def _unread(sources: Sources) -> tuple[Unread, ...]:
    pages = [Unread(d.name, each.page, each.why) for _, d in sources.documents for each in d.not_read]
    return (*(Unread(name, 0, why) for name, why in sources.unread), *pages)


def _sum(a: Usage, b: Usage) -> Usage:
    return Usage(
        a.prompt_tokens + b.prompt_tokens,
        a.completion_tokens + b.completion_tokens,
        a.cached_tokens + b.cached_tokens,
        a.drafted_tokens + b.drafted_tokens,
        a.accepted_tokens + b.accepted_tokens,
    )
