"""What a person does with documents: have them read into the library, ask them, have them summarised, take
them away.

Brings together what reads, finds and answers (documents/), and the models that are asked. Knows nothing of
HTTP and of pages.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nemolocal.config import Config
from nemolocal.documents import answer as answers
from nemolocal.documents import retrieve
from nemolocal.documents import summarise as summaries
from nemolocal.documents.answer import Answer, AnswerDelta, Sources
from nemolocal.documents.finished import Finished
from nemolocal.documents.gather import Missing, gather
from nemolocal.documents.library import Hit, Library, Row
from nemolocal.documents.load.source import display_name, hash_of
from nemolocal.documents.parts import Document
from nemolocal.documents.reading import Reader
from nemolocal.documents.retrieve import N_HITS, Passage
from nemolocal.documents.summarise import OnProgress, Options, Summary
from nemolocal.errors import DocumentError, NemoLocalError
from nemolocal.generation import GenerationParams
from nemolocal.types import Message, TextModel
from nemolocal.vectors import Embedder, Reranker

log = logging.getLogger(__name__)

N_EMBEDDED_AT_ONCE: Final = 32
"""Pieces that go to the embedding model in one request."""
N_RANKED: Final = 24
"""Hits that a rerank model looks at."""
N_PASSAGES: Final = 12
N_PARALLEL: Final = 4
"""Parts of a summary that are written at the same time."""

OnPage = Callable[[str, int, int], None]
"""Told of which file how many pages are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Added:
    """A file that was to be read: what it is in the library, or why it is not there. `is_new` says that it
    was not read before."""

    path: str
    row: Row | None = None
    error: NemoLocalError | None = None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Finders:
    """How the models are found; each raises ModelNotFoundError where there is none."""

    model: Callable[[str | None], TextModel]
    embedder: Callable[[str | None], Embedder]
    reranker: Callable[[str | None], Reranker]


class Papers:
    """The documents of this user. What is asynchronous runs on one loop."""

    def __init__(self, config: Config, find: Finders) -> None:
        self.library = Library(config)
        self.find = find
        self.finished = Finished(config)
        self._reader = Reader()

    async def close(self) -> None:
        await self._reader.close()

    # The library ---------------------------------------------------------------------------------

    async def add(
        self,
        paths: Sequence[str | Path],
        *,
        collection: str = "",
        password: str = "",
        on_page: OnPage = lambda name, n_done, n_all: None,
    ) -> AsyncIterator[Added]:
        """Read files, folders and patterns into the library, one after the other; what cannot be read stops
        nobody else. A file that is there already, by its content, is not read again."""
        for found in await asyncio.to_thread(gather, paths):
            if isinstance(found, Missing):
                yield Added(found.path, error=found.error)
                continue
            try:
                row, is_new = await self._added(found, collection, password, on_page)
            except NemoLocalError as error:
                log.info("%s is not read: %s", found.name, error)
                yield Added(str(found), error=error)
            else:
                yield Added(str(found), row, is_new=is_new)

    async def _added(self, path: Path, collection: str, password: str, on_page: OnPage) -> tuple[Row, bool]:
        known = await asyncio.to_thread(self.library.known, path)
        if known is None:
            known = await asyncio.to_thread(self._find_by_content, path)
        if known is not None:
            await asyncio.to_thread(self.library.place, known.id, path, collection)
            return known, False
        name = display_name(path.name)
        document = await self._reader.read(
            path, name=name, password=password, on_page=lambda n_done, n_all: on_page(name, n_done, n_all)
        )
        row = await asyncio.to_thread(self.library.add, document, path=path, collection=collection)
        return row, True

    def _find_by_content(self, path: Path) -> Row | None:
        try:
            return self.library.find(hash_of(path)) if path.is_file() else None
        except OSError as error:
            raise DocumentError(
                f"{display_name(path.name)} cannot be read: {error.strerror}.", kind="missing"
            ) from None

    async def read_bytes(self, name: str, data: bytes) -> Document:
        """A document that came as bytes, which is not kept. Raises DocumentError."""
        shown = display_name(name.replace("\\", "/").rsplit("/", 1)[-1])
        with tempfile.TemporaryDirectory(prefix="nemolocal-") as folder:
            # The name only tells one kind of text from another; it never names a place.
            path = Path(folder, f"document{Path(shown).suffix[:16]}")
            await asyncio.to_thread(path.write_bytes, data)
            return await self._reader.read(path, name=shown)

    # Summing up ----------------------------------------------------------------------------------

    async def summarise(
        self,
        id: int,
        *,
        ref: str | None = None,
        options: Options | None = None,
        n_parallel: int = N_PARALLEL,
        on_progress: OnProgress = lambda progress: None,
    ) -> Summary:
        """The summary of a document of the library; see documents/summarise.py."""
        document = await asyncio.to_thread(self.library.document, id)
        pieces = await asyncio.to_thread(self.library.pieces, id)
        model = self.find.model(ref)
        return await summaries.summarise(
            model,
            document,
            pieces,
            self.finished,
            options=options,
            n_parallel=n_parallel,
            on_progress=on_progress,
        )

    async def overall(
        self, of: Sequence[Summary], *, ref: str | None = None, options: Options | None = None
    ) -> str:
        """One text over several summaries."""
        text, _ = await summaries.overall(self.find.model(ref), of, self.finished, options=options)
        return text

    # Asking --------------------------------------------------------------------------------------

    async def passages(
        self, questions: Sequence[str], *, ids: Sequence[int], n_tokens: int, n_passages: int = N_PASSAGES
    ) -> list[Passage]:
        """What the documents say that has to do with the questions, the best first."""
        rankings: list[list[Hit]] = []
        for question in questions:
            rankings.append(await asyncio.to_thread(self.library.search, question, k=N_HITS, ids=ids))
        rankings += await self._by_vectors(questions, ids)
        hits = retrieve.fuse(rankings) if len(rankings) > 1 else rankings[0]
        hits = await self._reranked(questions[-1], hits)
        return await asyncio.to_thread(
            retrieve.passages, self.library, hits, n_passages=n_passages, n_tokens=n_tokens
        )

    async def _by_vectors(self, questions: Sequence[str], ids: Sequence[int]) -> list[list[Hit]]:
        """Nothing where no model of this machine embeds."""
        try:
            embedder = self.find.embedder(None)
        except NemoLocalError:
            return []
        try:
            missing = await asyncio.to_thread(self.library.without_vectors, embedder.id, ids)
            for at in range(0, len(missing), N_EMBEDDED_AT_ONCE):
                some = missing[at : at + N_EMBEDDED_AT_ONCE]
                made = await embedder.embed([text for _, text in some])
                kept = dict(zip((piece for piece, _ in some), made.values, strict=True))
                await asyncio.to_thread(self.library.keep_vectors, embedder.id, kept)
            asked = await embedder.embed(list(questions))
        except NemoLocalError as error:
            log.warning("documents are searched by their words alone: %s", error)
            return []
        return [
            await asyncio.to_thread(self.library.nearest, embedder.id, vector, k=N_HITS, ids=ids)
            for vector in asked.values
        ]

    async def _reranked(self, question: str, hits: list[Hit]) -> list[Hit]:
        """The first hits in the order of a rerank model, where there is one."""
        try:
            reranker = self.find.reranker(None)
        except NemoLocalError:
            return hits
        first = hits[:N_RANKED]
        texts = []
        for hit in first:
            pieces = await asyncio.to_thread(self.library.pieces, hit.document_id, [hit.number])
            texts.append(pieces[0].text)
        try:
            scores = (await reranker.rank(question, texts)).values if texts else ()
        except NemoLocalError as error:
            log.warning("hits stay in their order: %s", error)
            return hits
        ranked = sorted(zip(scores, first, strict=True), key=lambda each: -each[0])
        return [Hit(hit.document_id, hit.number, score) for score, hit in ranked]

    async def ask(
        self,
        question: str,
        *,
        ids: Sequence[int],
        ref: str | None = None,
        history: Sequence[Message] = (),
        unread: Sequence[Added] = (),
        params: GenerationParams | None = None,
    ) -> AsyncGenerator[AnswerDelta | Answer, None]:
        """Answer from documents of the library; see documents/answer.py. `unread` is told with the answer."""
        documents = [(id, await asyncio.to_thread(self.library.document, id)) for id in ids]

        async def find(questions: Sequence[str], n_tokens: int) -> list[Passage]:
            return await self.passages(questions, ids=ids, n_tokens=n_tokens)

        failed = tuple((display_name(Path(a.path).name), str(a.error)) for a in unread if a.error)
        sources = Sources(tuple(documents), find, failed)
        model = self.find.model(ref)
        stream = answers.answer(model, question, sources, history=history, params=params)
        async with aclosing(stream):
            async for item in stream:
                yield item
