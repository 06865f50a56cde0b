"""A fake for each border, so that the plain tests need no model, no GPU and no network."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NoReturn

from nemolocal import config
from nemolocal.errors import ContextLengthError, ModelNotFoundError
from nemolocal.papers import Finders, Papers
from nemolocal.service import LoadedModel, ModelCard, Service, Status
from nemolocal.shelf import Shelf
from nemolocal.totals import ModelTotals
from nemolocal.types import (
    Candidate,
    Delta,
    Finish,
    GenerationParams,
    Message,
    SamplingParams,
    Started,
    StreamItem,
    Timings,
    TokenLogprob,
    Usage,
)
from nemolocal.vectors import Scores, Vectors
from tests.profiles import machine


class FakeTextModel:
    """Answers with fixed pieces; a prompt counts one token a word. Records what it was asked."""

    def __init__(self, pieces: Sequence[str] = ("Hello", " there", "."), *, n_ctx: int = 8192) -> None:
        self.id = "fake"
        self.n_ctx = n_ctx
        self.pieces = tuple(pieces)
        self.delay_s = 0.0
        self.accept_delay_s = 0.0  # before the prompt is accepted, as while a model loads
        self.read_delay_s = 0.0  # between that and the first piece
        self.refusal: Exception | None = None  # raised in place of Started
        self.error: Exception | None = None  # raised after the first piece
        self.calls: list[tuple[tuple[Message, ...] | str | tuple[int, ...], GenerationParams]] = []
        self.n_closed_early = 0
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def chat(self, messages: Sequence[Message], params: GenerationParams) -> AsyncIterator[StreamItem]:
        self.calls.append((tuple(messages), params))
        return self._stream(sum(len(m.content.split()) for m in messages), params)

    def complete(self, prompt: str | Sequence[int], params: GenerationParams) -> AsyncIterator[StreamItem]:
        self.calls.append((prompt if isinstance(prompt, str) else tuple(prompt), params))
        return self._stream(len(prompt.split()) if isinstance(prompt, str) else len(prompt), params)

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    async def _stream(self, n_prompt: int, params: GenerationParams) -> AsyncIterator[StreamItem]:
        n_new = 0
        try:
            await asyncio.sleep(self.accept_delay_s)
            if self.refusal is not None:
                raise self.refusal
            if n_prompt + 1 > self.n_ctx:
                raise ContextLengthError(n_prompt=n_prompt, n_ctx=self.n_ctx)
            yield Started(n_prompt)
            await asyncio.sleep(self.read_delay_s)
            for piece in self.pieces:
                await asyncio.sleep(self.delay_s)
                if n_new == params.max_tokens or n_prompt + n_new == self.n_ctx:
                    break
                n_new += 1
                yield Delta(piece, logprobs=self._logprobs(piece, params))
                if self.error is not None:
                    raise self.error
        except (GeneratorExit, asyncio.CancelledError):
            self.n_closed_early += 1
            raise
        is_cut = n_new == params.max_tokens or n_prompt + n_new == self.n_ctx
        usage = Usage(n_prompt, n_new, self.cached_tokens, self.drafted_tokens, self.accepted_tokens)
        yield Finish("length" if is_cut else "stop", usage, Timings(0.0, 0.01, 0.02))

    def _logprobs(self, piece: str, params: GenerationParams) -> tuple[TokenLogprob, ...]:
        """Each piece is one token, whose rivals are "0", "1" and so on, ever less likely."""
        if params.n_logprobs is None:
            return ()
        top = [Candidate(n, str(n).encode(), -1.0 - n) for n in range(params.n_logprobs)]
        return (TokenLogprob(Candidate(99, piece.encode(), -0.5), tuple(top)),)


class FakeEmbedder:
    """Vectors of four numbers, of which two tell the length of the input. A token is a letter."""

    def __init__(self) -> None:
        self.id = "fake-embedder"
        self.delay_s = 0.0
        self.error: Exception | None = None
        self.calls: list[tuple[list[str | Sequence[int]], int | None]] = []
        self.n_closed_early = 0

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], *, n_dimensions: int | None = None
    ) -> Vectors:
        self.calls.append((list(inputs), n_dimensions))
        await self._wait()
        numbers = (
            (len(text) / (1 + len(text)), (1 + 2 * len(text)) ** 0.5 / (1 + len(text)), 0.0, 0.0)
            for text in inputs
        )
        return Vectors(tuple(struct.pack("<4f", *each) for each in numbers), sum(map(len, inputs)))

    async def rank(self, query: str, documents: Sequence[str]) -> Scores:
        """A document is the better the more of the query's words it has."""
        await self._wait()
        words = query.split()
        scores = (sum(word in document for word in words) / len(words) for document in documents)
        return Scores(tuple(scores), sum(len(query) + len(document) for document in documents))

    async def _wait(self) -> None:
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.n_closed_early += 1
            raise
        if self.error is not None:
            raise self.error


def _no_model(ref: str | None) -> NoReturn:
    raise ModelNotFoundError("No model here embeds or ranks.")


class FakeService(Service):
    """A service over one FakeTextModel and one FakeEmbedder, which also ranks."""

    def __init__(self, model: FakeTextModel | None = None, **flags: object) -> None:
        self.config = config.load(flags)
        self.model = model or FakeTextModel()
        self.embedder = FakeEmbedder()
        self.current = Status(
            state="ready", model=self.model.id, device="CPU", n_ctx=self.model.n_ctx, n_slots=4, progress=1.0
        )
        self.on_load: Callable[[str], None] = lambda ref: None
        self.started: list[tuple[str, ...]] = []
        self.n_closed = 0
        self.in_memory: list[LoadedModel] = []
        self.done: dict[str, ModelTotals] = {}
        self.kept_alive_s: list[float | None] = []  # what each call of find_model asked for
        self.shelf = Shelf(self.config, detect=lambda: machine(ram_gib=0.5))  # on which nothing new fits
        self.papers = Papers(self.config, Finders(lambda ref: self.model, _no_model, _no_model))

    async def start(self, refs: Sequence[str] = ()) -> None:
        self.started.append(tuple(refs))

    async def close(self) -> None:
        self.n_closed += 1
        await self.papers.close()

    async def unload(self, ref: str) -> None:
        self.in_memory = [model for model in self.in_memory if model.id != ref]

    def status(self) -> Status:
        return self.current

    def totals(self) -> dict[str, ModelTotals]:
        return self.done

    def loaded(self) -> list[LoadedModel]:
        return self.in_memory

    def list_models(self) -> list[ModelCard]:
        return [
            ModelCard(
                id=self.model.id,
                name="Fake",
                owned_by="tests",
                created=1_700_000_000,
                size_bytes=98_362_432,
                quant="Q4_1",
                n_params=134_515_008,
                n_ctx=self.model.n_ctx,
                is_loaded=True,
            )
        ]

    def find_model(self, ref: str | None, *, keep_alive_s: float | None = None) -> FakeTextModel:
        self.kept_alive_s.append(keep_alive_s)
        if ref not in (None, self.model.id):
            raise ModelNotFoundError(f"No model named '{ref}' is here.", hint="See GET /v1/models.")
        return self.model

    def find_embedder(self, ref: str | None, *, keep_alive_s: float | None = None) -> FakeEmbedder:
        self.kept_alive_s.append(keep_alive_s)
        if ref not in (None, self.embedder.id):
            raise ModelNotFoundError(f"No model named '{ref}' is here.", hint="See GET /v1/models.")
        return self.embedder

    def find_reranker(self, ref: str | None, *, keep_alive_s: float | None = None) -> FakeEmbedder:
        return self.find_embedder(ref, keep_alive_s=keep_alive_s)

    def admit(self, ref: str | None) -> FakeTextModel:
        return self.find_model(ref)

    async def load(self, ref: str) -> None:
        self.on_load(ref)

    def sampling_defaults(self, ref: str | None) -> SamplingParams:
        settings = self.config.settings
        return SamplingParams(
            temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, min_p=settings.min_p
        )
