"""Models of this machine that embed or rank: loaded when they are asked, kept loaded while they work. Knows
nothing of HTTP and of how a reference finds a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import Embedded, Ranked
from nemolocal.errors import EngineError, InvalidRequestError
from nemolocal.models import matryoshka
from nemolocal.models.store import LocalModel, Purpose
from nemolocal.residency import Candidates, Resident
from nemolocal.totals import Totals
from nemolocal.types import Finish
from nemolocal.vectors import N_BYTES_FLOAT32, Scores, Vectors, shortened

Answer = TypeVar("Answer", Embedded, Ranked)

_DOES = {"chat": "writes text", "embed": "embeds texts", "rank": "ranks documents"}
_ROUTES = {
    "chat": "chat and completion requests",
    "embed": "POST /v1/embeddings",
    "rank": "POST /v1/rerank",
}


@dataclass(frozen=True, slots=True)
class Access:
    """How a model is come by: `lease` has it loaded, `answered` is told of each answer."""

    lease: Callable[[], AbstractAsyncContextManager[Resident]]
    totals: Totals
    answered: Callable[[Resident], None]

    async def ask(self, question: Callable[[EngineClient], Awaitable[Answer]]) -> Answer:
        """The loaded model's answer, counted."""
        async with self.lease() as resident:
            name = resident.name
            try:
                answer = await question(resident.engine)
            except EngineError:
                self.totals.failed(name)
                raise
            except asyncio.CancelledError:
                self.totals.cancelled(name)
                raise
            self.totals.finished(name, Finish("stop", answer.usage, answer.timings))
            self.answered(resident)
            return answer


class ServedEmbedder:
    """A model that embeds, as an Embedder."""

    def __init__(self, id: str, candidates: Candidates, access: Access) -> None:
        self.id = id
        self._candidates = candidates
        self._access = access

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], *, n_dimensions: int | None = None
    ) -> Vectors:
        async def question(engine: EngineClient) -> Embedded:
            if n_dimensions is not None:
                self._check_dimensions(n_dimensions, engine.info.n_embd)
            return await engine.embed(inputs)

        answer = await self._access.ask(question)
        vectors = answer.vectors
        if n_dimensions is not None:
            vectors = await asyncio.to_thread(_shortened, vectors, n_dimensions)
        return Vectors(vectors, answer.usage.prompt_tokens)

    def _check_dimensions(self, n_dimensions: int, n_embd: int) -> None:
        """Raises InvalidRequestError for a length that this model's vectors cannot have."""
        model = self._candidates[0]
        if n_dimensions > n_embd:
            raise InvalidRequestError(
                f"dimensions: The vectors of {self.id} have {n_embd} numbers.", param="dimensions"
            )
        names = (model.name, model.path.name, model.repo)
        if n_dimensions < n_embd and not matryoshka.can_shorten(model.architecture, *names):
            raise InvalidRequestError(
                f"dimensions: The vectors of {self.id} are not made to be cut; they have {n_embd} numbers.",
                param="dimensions",
                hint="Send the request without it.",
            )


class ServedReranker:
    """A model that ranks, as a Reranker."""

    def __init__(self, id: str, access: Access) -> None:
        self.id = id
        self._access = access

    async def rank(self, query: str, documents: Sequence[str]) -> Scores:
        answer = await self._access.ask(lambda engine: engine.rank(query, documents))
        return Scores(answer.scores, answer.usage.prompt_tokens)


def _shortened(vectors: Sequence[bytes], n_dimensions: int) -> tuple[bytes, ...]:
    if n_dimensions * N_BYTES_FLOAT32 == len(vectors[0]):
        return tuple(vectors)
    return tuple(shortened(vector, n_dimensions) for vector in vectors)


def check_purpose(id: str, model: LocalModel, wanted: Purpose) -> None:
    """Raises InvalidRequestError for a model that does something else than what is wanted."""
    if model.purpose != wanted:
        raise InvalidRequestError(
            f"{id} {_DOES[model.purpose]}; this needs a model that {_DOES[wanted]}.",
            param="model",
            hint=f"{id} answers {_ROUTES[model.purpose]}.",
        )
