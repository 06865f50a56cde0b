"""Documents as a person handles them: read once, found again, asked, taken away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemolocal import config
from nemolocal.documents.answer import Answer, AnswerDelta
from nemolocal.errors import EngineError, ModelNotFoundError
from nemolocal.papers import Added, Finders, Papers
from nemolocal.vectors import Scores, Vectors
from tests.fakes import FakeEmbedder, FakeTextModel

pytestmark = pytest.mark.anyio


def no_model(ref: str | None) -> Any:
    raise ModelNotFoundError("There is none.")


@pytest.fixture
async def papers() -> AsyncIterator[Papers]:
    model = FakeTextModel(["The harbour code is QUARTZ-88."])
    made = Papers(config.load(), Finders(lambda ref: model, no_model, no_model))
    yield made
    await made.close()


def put(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


async def added(papers: Papers, *paths: Path, **options: Any) -> list[Added]:
    return [each async for each in papers.add(paths, **options)]


async def test_what_was_read_is_not_read_again(papers: Papers, tmp_path: Path) -> None:
    folder = put(tmp_path, a="One text.", b="Another one.", c="One text.", d="")
    first = await added(papers, folder, collection="work")
    assert [each.is_new for each in first] == [True, True, False, False]
    assert first[0].row == first[2].row
    assert first[3].error
    again = await added(papers, folder)
    assert [each.is_new for each in again] == [False] * 4
    assert [each.row for each in again] == [each.row for each in first]
    (tmp_path / "a.txt").write_text("One text, changed.")
    assert [each.is_new for each in await added(papers, folder)] == [True, False, False, False]
    assert {row.name for row in papers.library.rows("work")} == {"a.txt", "b.txt"}


async def test_pages_are_told_while_they_are_read(papers: Papers, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    await added(papers, put(tmp_path, a="Text."), on_page=lambda *page: told.append(page))
    assert told == [("a.txt", 1, 1)]


async def test_a_question_and_what_was_not_read(papers: Papers, tmp_path: Path) -> None:
    found = await added(papers, put(tmp_path, a="The harbour code is QUARTZ-88.", empty=""))
    ids = [each.row.id for each in found if each.row]
    said = [item async for item in papers.ask("What is the code?", ids=ids, unread=found)]
    assert isinstance(said[0], AnswerDelta)
    answer = said[-1]
    assert isinstance(answer, Answer)
    assert answer.citations[0].verified
    assert [each.document for each in answer.not_read] == ["empty.txt"]
    papers.library.remove(*ids)
    with pytest.raises(ModelNotFoundError):
        _ = [item async for item in papers.ask("What is the code?", ids=ids)]


async def test_bytes_are_read_and_not_kept(papers: Papers) -> None:
    document = await papers.read_bytes("../../etc/note.md", b"# Head\n\nWords.")
    assert (document.kind, document.name) == ("markdown", "note.md")
    assert papers.library.rows() == []


class Embedder(FakeEmbedder):
    """Vectors that tell whether a text is about ships."""

    async def embed(self, inputs: Any, *, n_dimensions: int | None = None) -> Vectors:
        self.calls.append((list(inputs), n_dimensions))
        if self.error:
            raise self.error
        import struct

        about = [any(word in text for word in ("ship", "vessel")) for text in inputs]
        return Vectors(tuple(struct.pack("<2f", float(x), float(not x)) for x in about), 1)


async def test_meaning_finds_what_words_do_not(papers: Papers, tmp_path: Path) -> None:
    found = await added(papers, put(tmp_path, a="The vessel leaves at noon.", b="The tower is tall and old."))
    ids = [each.row.id for each in found if each.row]
    assert await papers.passages(["When does the ship sail?"], ids=ids, n_tokens=500) == []
    embedder = Embedder()
    papers.find = Finders(papers.find.model, lambda ref: embedder, no_model)
    best = (await papers.passages(["When does the ship sail?"], ids=ids, n_tokens=500))[0]
    assert best.document == "a.txt"
    n_calls = len(embedder.calls)
    await papers.passages(["When does the ship sail?"], ids=ids, n_tokens=500)
    assert len(embedder.calls) == n_calls + 1  # the pieces have their vectors already
    embedder.error = EngineError("It died.")
    assert (await papers.passages(["tall tower"], ids=ids, n_tokens=500))[0].document == "b.txt"


async def test_a_rerank_model_has_the_last_word(papers: Papers, tmp_path: Path) -> None:
    found = await added(papers, put(tmp_path, a="harbour harbour harbour", b="harbour of the north"))
    ids = [each.row.id for each in found if each.row]

    class Reranker(FakeEmbedder):
        async def rank(self, query: str, documents: Any) -> Scores:
            return Scores(tuple(float("north" in text) for text in documents), 1)

    papers.find = Finders(papers.find.model, no_model, lambda ref: Reranker())
    best = await papers.passages(["harbour"], ids=ids, n_tokens=500)
    assert best[0].document == "b.txt"
