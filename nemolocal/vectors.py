"""What the layers hand each other of embedding and ranking, besides what types.py has for text.

This module imports nothing of ours.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

N_BYTES_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Vectors:
    """One vector for each input, in order: float32, little-endian, of length 1 by the L2 norm.
    `prompt_tokens` are those of all inputs."""

    values: tuple[bytes, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """How well each document answers the query, in the documents' order, from 0 to 1. `prompt_tokens` are
    those of all pairs."""

    values: tuple[float, ...]
    prompt_tokens: int


class Embedder(Protocol):
    """A model that turns texts into vectors."""

    @property
    def id(self) -> str: ...

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], *, n_dimensions: int | None = None
    ) -> Vectors:
        """Embed texts, or token ids, which get the special tokens that they lack. Prefixes such as "query: "
        are the caller's. `n_dimensions` asks for the first so many, made a vector of length 1 again.

        Raises InputLengthError, InvalidRequestError for a length that the model cannot give, BusyError and
        EngineError.
        """


class Reranker(Protocol):
    """A model that says how well documents answer a query."""

    @property
    def id(self) -> str: ...

    async def rank(self, query: str, documents: Sequence[str]) -> Scores:
        """Raises InputLengthError, BusyError and EngineError."""


def floats(vector: bytes) -> array[float]:
    """The numbers of a vector."""
    found = array("f", vector)
    assert found.itemsize == N_BYTES_FLOAT32
    if not _IS_LITTLE:
        found.byteswap()
    return found


def shortened(vector: bytes, n_dimensions: int) -> bytes:
    """The first numbers of a vector, divided by their own L2 norm."""
    first = floats(vector)[:n_dimensions]
    length = math.hypot(*first) or 1.0
    found = array("f", (value / length for value in first))
    if not _IS_LITTLE:
        found.byteswap()
    return found.tobytes()


_IS_LITTLE = array("H", [1]).tobytes()[0] == 1
