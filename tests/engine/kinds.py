"""Tiny models of every kind, and conversations for them, in token ids."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import llama_cpp.llama_cpp as library
import pytest

from nemolocal.engine.llama.backend import LlamaBackend
from nemolocal.engine.llama.library import Log
from nemolocal.engine.messages import LoadSpec
from tests import synthetic
from tests.engine.referee import N_CTX, Referee

KINDS = ("llama", "deci", "nemotron", "qwen3", "qwen3moe", "gemma3", "nemotron_h", "nemotron_h_moe")
LAYOUTS = ("shared", "split")
N_WINDOW = 64  # tokens that a sliding window shows
N_SYSTEM = 130  # tokens: longer than the window, and worth a checkpoint
START, END, NEWLINE = 1, 2, 13


@dataclass(frozen=True)
class Kind:
    """One model file, how it is run, and who knows what it should say."""

    path: Path
    referee: Referee
    spec: LoadSpec
    log: Log

    def open(self, **changes: Any) -> LlamaBackend:
        return LlamaBackend(replace(self.spec, **changes), lambda share: None, log=self.log)


def open_kind(
    folder: Path,
    name: str,
    log: Log,
    *,
    kv_type: Literal["f16", "q8_0"] = "f16",
    n_adapters: int = 0,
    **changes: Any,
) -> Kind:
    """Write a model and open its referee; `changes` are to its dimensions."""
    dimensions = replace(synthetic.TINY[name], **changes)
    window = {"gemma3.attention.sliding_window": N_WINDOW} if name == "gemma3" else {}
    path = synthetic.write(folder / f"{name}.gguf", dimensions, is_attentive=True, overrides=window)
    has_ties = kv_type != "f16" or "moe" in name
    lora = [synthetic.write_lora(folder / f"{n}.gguf", dimensions, seed=n) for n in range(n_adapters)]
    spec = LoadSpec(
        str(path),
        n_ctx=2 * N_CTX,
        n_slots=4,
        n_batch=256,
        n_ubatch=64,
        n_threads=1,
        kv_type=kv_type,
        adapters=tuple((str(adapter), 1.0) for adapter in lora),
    )
    return Kind(path, Referee(path, kv_type=kv_type, has_ties=has_ties, adapters=lora), spec, log)


@contextmanager
def listening() -> Iterator[Log]:
    """Listens to llama.cpp for all models of a module, and gives the environment back, by way of which
    loading chooses devices."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            patch.setenv(name, "")
            patch.delenv(name)
        log = Log(library)
        yield log
        log.close()


def text(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, 384) for _ in range(n)]


def turn(rng: random.Random, n: int) -> list[int]:
    return [START, *text(rng, n), END, NEWLINE]


def opening(rng: random.Random) -> list[int]:
    """Where the assistant's turn begins."""
    return [START, *text(rng, 2)]


def conversation(seed: int, *, n_user: int = 30, system_seed: int = 0) -> list[int]:
    """A system prompt, a question and the beginning of the answer."""
    rng = random.Random(1000 + seed)
    return [*turn(random.Random(system_seed), N_SYSTEM), *turn(rng, n_user), *opening(rng)]


def next_turn(before: list[int], seed: int) -> list[int]:
    """The conversation goes on after an answer."""
    rng = random.Random(2000 + seed)
    return [*before, END, NEWLINE, *turn(rng, 30), *opening(rng)]
