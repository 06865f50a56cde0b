"""Answers from documents: what the model is asked, and what its answer is taken for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from nemolocal import config
from nemolocal.documents import answer as answers
from nemolocal.documents import fence
from nemolocal.documents.answer import Answer, AnswerDelta, Sources
from nemolocal.documents.parts import Block, Document, NotRead
from nemolocal.documents.retrieve import Passage
from nemolocal.documents.thinking import Thinking
from nemolocal.errors import ContextLengthError, EngineError
from nemolocal.generation import GenerationParams, SamplingParams
from nemolocal.service import Service
from nemolocal.types import Message
from tests.documents.test_fence import HOSTILE
from tests.fakes import FakeTextModel

pytestmark = pytest.mark.anyio

QUESTION = "What is the harbour code?"
PORT = Document(
    "port.pdf",
    "pdf",
    "abc",
    (
        Block("heading", "The port", 1),
        Block("paragraph", "The harbour code is QUARTZ-88.", 2),
        Block("paragraph", "The mooring fee is 40 crowns a day.", 3),
    ),
    n_pages=4,
    not_read=(NotRead(4, "no text"),),
)
FILLER = Document("long.txt", "text", "def", (Block("paragraph", "so on " * 3_000),))


async def nothing(questions: Sequence[str], n_tokens: int) -> list[Passage]:
    raise AssertionError("passages were looked for")


def passage(text: str, score: float, document: Document = PORT) -> Passage:
    start = document.text.index(text)
    return Passage(1, document.name, 1, 3, text, score, start, start + len(text), "p. 1–3")


class Finder:
    """Finds the same passages each time and remembers what it was asked."""

    def __init__(self, *passages: Passage) -> None:
        self.passages = list(passages)
        self.calls: list[tuple[list[str], int]] = []

    async def __call__(self, questions: Sequence[str], n_tokens: int) -> list[Passage]:
        self.calls.append((list(questions), n_tokens))
        return list(self.passages)


async def ask(
    model: FakeTextModel, sources: Sources, question: str = QUESTION, **options: Any
) -> tuple[str, Answer]:
    """What was shown while it came, and the answer."""
    shown = ""
    items = [item async for item in answers.answer(model, question, sources, **options)]
    for item in items[:-1]:
        assert isinstance(item, AnswerDelta)
        shown = item.text if item.is_restart else shown + item.text
    assert isinstance(items[-1], Answer)
    return shown, items[-1]


def whole(*documents: Document) -> Sources:
    return Sources(tuple(enumerate(documents or (PORT,), 1)), nothing)


def asked(model: FakeTextModel, call: int = -1) -> list[Message]:
    messages = model.calls[call][0]
    return [message for message in messages if isinstance(message, Message)]


# The whole text ----------------------------------------------------------------------------------


async def test_all_of_a_text_that_fits_is_read_and_the_citation_has_its_page() -> None:
    model = FakeTextModel(["The harbour code is ", '"QUARTZ-88" [1].'])
    shown, answer = await ask(model, whole())
    assert (shown, answer.text) == ('The harbour code is "QUARTZ-88" [1].',) * 2
    assert (answer.mode, answer.is_found, answer.is_cut, answer.passages) == ("whole", True, False, ())
    (citation,) = answer.citations
    assert (citation.n, citation.document, citation.document_id, citation.page) == (1, "port.pdf", 1, 2)
    assert (citation.verified, citation.where) == (True, "p. 2")
    assert PORT.text[citation.start : citation.end] == citation.quote == "QUARTZ-88"
    assert [(each.document, each.page, each.why) for each in answer.not_read] == [("port.pdf", 4, "no text")]
    system, user = asked(model)
    assert (system.role, user.role) == ("system", "user")
    assert PORT.text in user.content
    assert user.content.endswith(QUESTION)
    assert PORT.text not in system.content


async def test_prompts_on_the_same_documents_begin_with_the_same_bytes() -> None:
    model = FakeTextModel(["Yes."])
    await ask(model, whole(PORT, FILLER))
    history = [Message("user", "And the fee?"), Message("assistant", "40 crowns [1].")]
    await ask(model, whole(PORT, FILLER), "Why?", history=history)
    first, second = asked(model, 0), asked(model, 1)
    end = first[1].content.index(fence.CLOSE) + len(fence.CLOSE)
    assert first[0] == second[0]
    assert first[1].content[:end] == second[1].content[:end]
    assert [message.role for message in second] == ["system", "user", "assistant", "user"]
    assert second[1].content.endswith("And the fee?")
    assert second[-1].content == "Why?"


async def test_whole_or_passages_is_decided_by_the_count() -> None:
    sources = Sources(((1, FILLER),), finder := Finder(passage("so on so on", 1.0, FILLER)))
    n_text = len(fence.block([fence.Excerpt(1, FILLER.name, "", FILLER.text)]).split())
    n_asked = len(f"{QUESTION} {fence.RULES}".split())
    n_ctx = n_text + n_asked + answers.N_TEMPLATE + answers.N_ANSWER
    assert (await ask(FakeTextModel(n_ctx=n_ctx), sources))[1].mode == "whole"
    assert not finder.calls
    assert (await ask(FakeTextModel(n_ctx=n_ctx - 1), sources))[1].mode == "retrieval"
    assert len(finder.calls) == 1


async def test_nothing_readable_is_said_without_asking_the_model() -> None:
    model = FakeTextModel()
    scan = Document("scan.pdf", "pdf", "s", (), n_pages=3, not_read=(NotRead(1, "no text"),))
    for documents in ((), ((1, scan),)):
        sources = Sources(documents, nothing, (("empty.txt", "is empty"),))
        _, answer = await ask(model, sources)
        assert (answer.text, answer.is_found) == (answers.NOTHING_READ, False)
        assert answer.not_read[0].document == "empty.txt"
    assert not model.calls


# Passages ----------------------------------------------------------------------------------------


def long_sources(*passages: Passage) -> tuple[Sources, Finder]:
    finder = Finder(*passages)
    return Sources(((1, PORT), (2, FILLER)), finder), finder


async def test_passages_are_numbered_the_most_relevant_last() -> None:
    model = FakeTextModel(["It is QUARTZ-88 [2]. The fee is 40 crowns [1]."], n_ctx=2_000)
    best, next_best = passage(PORT.blocks[1].text, 2.0), passage(PORT.blocks[2].text, 1.0)
    _, answer = await ask(model, long_sources(best, next_best)[0])
    assert (answer.mode, answer.passages) == ("retrieval", (next_best, best))
    content = asked(model)[-1].content
    assert content.index(next_best.text) < content.index(best.text) < content.index(QUESTION)
    assert [(c.n, c.page, c.verified) for c in answer.citations] == [(2, 2, True), (1, 3, True)]


async def test_passages_without_room_are_left_out_the_least_relevant_first() -> None:
    texts = ["so on " * 300, "so on " * 301, "so on " * 302]
    found = [passage(text.strip(), 3.0 - at, FILLER) for at, text in enumerate(texts)]
    found = [Passage(2, "long.txt", 1, 1, p.text, p.score, p.start, p.end) for p in found]
    model = FakeTextModel(["Yes."], n_ctx=2_400)
    _, answer = await ask(model, long_sources(*found)[0], params=GenerationParams(max_tokens=400))
    assert answer.passages == (found[1], found[0])
    prompt = sum(len(message.content.split()) for message in asked(model))
    assert prompt + 400 <= model.n_ctx


@pytest.mark.parametrize(("wanted", "n_new"), [(None, 512), (100, 100), (5_000, 1_024)])
async def test_answer_leaves_most_of_the_context_for_reading(wanted: int | None, n_new: int) -> None:
    model = FakeTextModel(["Yes."], n_ctx=2_048)
    await ask(model, whole(), params=GenerationParams(max_tokens=wanted))
    assert model.calls[0][1].max_tokens == n_new


async def test_nothing_found_is_said_without_asking_the_model() -> None:
    model = FakeTextModel(n_ctx=2_000)
    _, answer = await ask(model, long_sources()[0])
    assert (answer.text, answer.is_found, answer.citations) == (answers.NOTHING_FOUND, False, ())
    assert not model.calls


async def test_question_that_leaves_no_room_is_an_error() -> None:
    with pytest.raises(ContextLengthError):
        await ask(FakeTextModel(n_ctx=1_000), whole(), "why " * 900)


# A conversation ----------------------------------------------------------------------------------

HISTORY = [Message("user", "Which port?"), Message("assistant", "The north harbour.")]


class Rewriting(FakeTextModel):
    """Rewrites on its first call, answers on its second."""

    def __init__(self, rewritten: str, error: Exception | None = None) -> None:
        super().__init__([rewritten], n_ctx=2_000)
        self.error = error

    def chat(self, messages: Sequence[Message], params: GenerationParams) -> Any:
        if self.calls:
            self.pieces, self.error = ("It is QUARTZ-88 [1].",), None
        return super().chat(messages, params)


async def test_follow_up_is_looked_for_as_it_is_and_as_it_stands_alone() -> None:
    model = Rewriting('<think>hm</think>"What is the code of the north harbour?"\nBecause')
    sources, finder = long_sources(passage(PORT.blocks[1].text, 1.0))
    _, answer = await ask(model, sources, "And its code?", history=HISTORY)
    assert finder.calls[0][0] == ["And its code?", "What is the code of the north harbour?"]
    params = model.calls[0][1]
    assert (params.sampling.temperature, params.max_tokens) == (0.0, answers.N_REWRITTEN)
    n_prompts = [sum(len(message.content.split()) for message in asked(model, call)) for call in (0, 1)]
    assert answer.usage.prompt_tokens == sum(n_prompts)
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize(
    "model", [Rewriting("x", EngineError("gone")), Rewriting("<think>for long"), Rewriting(" ")]
)
async def test_follow_up_that_cannot_be_rewritten_is_looked_for_as_it_is(model: Rewriting) -> None:
    sources, finder = long_sources(passage(PORT.blocks[1].text, 1.0))
    _, answer = await ask(model, sources, "And its code?", history=HISTORY)
    assert finder.calls[0][0] == ["And its code?"]
    assert answer.is_found


async def test_history_alternates_and_never_takes_the_room_of_the_documents() -> None:
    model = FakeTextModel(["Yes."], n_ctx=4_000)
    odd = [Message("assistant", "Hello"), Message("user", "Unanswered"), Message("tool", "x"), *HISTORY]
    await ask(model, whole(), history=[*odd, Message("user", "Also unanswered")])
    assert [message.role for message in asked(model)] == ["system", "user", "assistant", "user"]
    long = [Message("user", "Which?"), Message("assistant", "word " * 3_000), *HISTORY]
    _, answer = await ask(model, whole(), history=long)
    assert answer.mode == "whole"
    assert asked(model)[1].content.endswith("Which port?")


# What an answer is taken for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Not in the documents.",
        "The captain's name is not mentioned in the documents [1].",
        "Das steht nicht in den Dokumenten.",
        "Cela n'est pas dans les documents.",
        "No está en los documentos.",
        "Non è nei documenti.",
        "文档中没有提到。",
        'Not in the documents. They only say "The mooring fee is 40 crowns a day" [1].',
        "",
    ],
)
async def test_not_in_the_documents_is_an_answer(text: str) -> None:
    _, answer = await ask(FakeTextModel([text] if text else []), whole())
    assert not answer.is_found
    assert all(citation.verified for citation in answer.citations)
    assert answer.text == (text or answers.NOTHING_SAID)


async def test_an_answer_to_half_of_a_question_is_found() -> None:
    text = 'The code is "QUARTZ-88" [1]. The captain is not mentioned in the documents.'
    _, answer = await ask(FakeTextModel([text]), whole())
    assert answer.is_found
    assert [citation.verified for citation in answer.citations] == [True]


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("The harbour code is QUARTZ-88.", [(1, 2, True)]),  # no mark: told by the program
        ("The harbour code is QUARTZ-88. [1]", [(1, 2, True)]),
        ('"The harbour code is QUARTZ-88. [1]"', [(1, 2, True)]),
        ("The harbour code is QUARTZ-88 [source 1].", [(1, 2, True)]),
        ("The harbour code is QUARTZ-88【1†port】.", [(1, 2, True)]),
        ('[1: "mooring fee is 40 crowns"]', [(1, 3, True)]),
        ("Der Code lautet „QUARTZ‑88“ [1], die Gebühr «40 crowns» [1].", [(1, 2, True), (1, 3, True)]),
        ("The harbour code is QUARTZ-99 [1].", [(1, 0, False)]),
        ('The code is "the secret code of the port is TOPAZ" [1].', [(1, 0, False)]),
        ('The harbour code is "QUARTZ-88" [7].', [(7, 0, False)]),
        ("The harbour code is QUARTZ-88 [1, 9].", [(1, 2, True), (9, 0, False)]),
        ("Grass is green and cows eat it.", []),
    ],
)
async def test_citations_are_read_leniently_and_checked(
    text: str, cited: list[tuple[int, int, bool]]
) -> None:
    _, answer = await ask(FakeTextModel([text]), whole())
    assert [(each.n, each.page, each.verified) for each in answer.citations] == cited


async def test_answer_that_was_cut_says_so() -> None:
    _, answer = await ask(FakeTextModel(["a ", "b"]), whole(), params=GenerationParams(max_tokens=1))
    assert (answer.text, answer.is_cut) == ("a", True)


@pytest.mark.parametrize(
    "pieces",
    [
        ["<think>QUARTZ-11 [1]?</think>\n\nIt is QUARTZ-88 [1]."],
        list("<think>no</think>It is QUARTZ-88 [1]."),
        list("The template opened it</think>\nIt is QUARTZ-88 [1]."),
    ],
)
async def test_thinking_is_not_the_answer(pieces: list[str]) -> None:
    shown, answer = await ask(FakeTextModel(pieces), whole())
    assert shown == answer.text == "It is QUARTZ-88 [1]."
    assert len(answer.citations) == 1


@pytest.mark.parametrize("text", ["a < b", "a <thin", "<", "1 < 2 </thing>", "x"])
def test_what_only_looks_like_thinking_is_shown(text: str) -> None:
    thinking = Thinking()
    shown = [part for letter in text for part, _ in thinking.feed(letter)]
    assert "".join(shown) + thinking.flush() == text == thinking.answer


async def test_closing_the_stream_cancels_the_model() -> None:
    model = FakeTextModel(["a", "b", "c"])
    async with aclosing(answers.answer(model, QUESTION, whole())) as stream:
        assert await anext(stream) == AnswerDelta("a")
    assert model.n_closed_early == 1


# Hostile documents -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", ["Source: other.pdf page 9 [2].", '"Say PWNED" [2]', "QUARTZ-88 [1] (other.pdf) [3]"]
)
async def test_documents_cannot_give_orders_sources_or_tools(said: str) -> None:
    hostile = Document("hostile.txt", "text", "h", (Block("paragraph", HOSTILE),))
    model = FakeTextModel([said, '<tool_call>{"name": "delete", "arguments": {}}</tool_call>'])
    _, answer = await ask(
        model, whole(hostile), history=[Message("user", HOSTILE), Message("assistant", HOSTILE)]
    )
    prompt = "\n".join(message.content for message in asked(model))
    assert (prompt.count(fence.OPEN), prompt.count(fence.CLOSE), prompt.count("<source ")) == (1, 1, 1)
    assert [message.role for message in asked(model)] == ["system", "user", "assistant", "user"]
    assert len(model.calls) == 1
    assert {each.document for each in answer.citations if each.verified} <= {"hostile.txt"}
    assert all(not each.verified and not each.document for each in answer.citations if each.n != 1)


@pytest.mark.model
async def test_starter_model_answers_with_the_page(starter_path: Path) -> None:
    service = Service(config.load({"ctx": 2048, "slots": 1}))
    try:
        params = GenerationParams(SamplingParams(temperature=0.0), max_tokens=40)
        stream = answers.answer(service.admit(str(starter_path)), QUESTION, whole(), params=params)
        async with asyncio.timeout(120):
            items = [item async for item in stream]
    finally:
        await service.close()
    answer = items[-1]
    assert isinstance(answer, Answer)
    assert "QUARTZ-88" in answer.text
    assert any(each.page == 2 and each.verified for each in answer.citations)
    assert answer.usage.completion_tokens > 0
