"""Service: the one object that the command line, the port and the page hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemolocal.config import Config
from nemolocal.types import TextModel


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model that can be named in a request. `size_bytes` is the file's, `n_ctx` the planned or loaded
    context (None before a plan exists)."""

    id: str
    name: str
    owned_by: str
    created: int
    size_bytes: int
    quant: str
    n_params: int | None
    n_ctx: int | None
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class Status:
    """What the service is doing. `progress` is the share of the load, 0 to 1. `device` reads like
    "RTX 4090" or "CPU"; `problem` is one line when the last load failed."""

    state: Literal["idle", "loading", "ready", "failed"]
    model: str = ""
    device: str = ""
    n_ctx: int = 0
    n_slots: int = 0
    progress: float = 0.0
    problem: str = ""


class Service:
    config: Config

    async def start(self, refs: Sequence[str] = ()) -> None:
        """Begin to load the named models in the background; returns at once."""
        raise NotImplementedError

    async def close(self) -> None:
        """Unload everything; waits for the engines' processes to end."""
        raise NotImplementedError

    def status(self) -> Status:
        raise NotImplementedError

    def list_models(self) -> list[ModelCard]:
        """The models on this machine, the loaded one first."""
        raise NotImplementedError

    def find_model(self, ref: str | None) -> TextModel:
        """The model that answers to `ref` (None: the loaded or configured or only one). It is loaded on its
        first use. Raises ModelNotFoundError at once when no local model answers to the reference."""
        raise NotImplementedError

    async def load(self, ref: str) -> None:
        """Load a model, unloading the one before it once its requests have ended. Raises on failure."""
        raise NotImplementedError
