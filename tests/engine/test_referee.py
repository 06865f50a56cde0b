"""The comparison with a fresh context notices what it is there for: each fault that is put in here, in the
memory or in what is believed of it, makes an answer differ by more than rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemolocal.engine import cache
from nemolocal.engine.cache import WarmState
from nemolocal.engine.checkpoints import Checkpoints
from nemolocal.engine.llama.library import Log
from nemolocal.engine.llama.memory import LlamaMemory
from nemolocal.engine.states import SavedState
from nemolocal.errors import EngineError
from tests.engine.kinds import Kind, conversation, listening, next_turn, open_kind, text
from tests.engine.referee import N_CTX, Stage

pytestmark = pytest.mark.model

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with listening() as log:
        yield log


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path, log: Log) -> Iterator[Kind]:
    kind = open_kind(tmp_path, request.param, log)
    yield kind
    kind.referee.close()


# Scenes ------------------------------------------------------------------------------------------


def share(stage: Stage) -> None:
    """A second conversation begins like one that is still being answered."""
    first = stage.ask(conversation(1), 20)
    stage.run_until_said(first, 2)
    stage.ask(conversation(2), 12)
    stage.run()


def edit(stage: Stage) -> None:
    """Two conversations with system prompts of the same length; the second goes on from its middle."""
    for seed in (0, 1):
        stage.ask(conversation(1, system_seed=seed), 12)
        stage.run()
    stage.ask(conversation(2, system_seed=1), 12)
    stage.run()


def leave_gaps(stage: Stage) -> None:
    rng = random.Random(7)
    ids = [stage.ask(text(rng, n), n_new) for n, n_new in ((100, 30), (17, 4), (60, 30))]
    stage.run()
    stage.ask([*stage.text(ids[1]), *text(rng, 25)], 12)
    stage.run()


def shift(stage: Stage) -> None:
    stage.ask(text(random.Random(1), 90), 230, shift_context=True)
    stage.run()


def thaw_another(stage: Stage) -> None:
    """A saved state goes by the tokens of another conversation of the same length."""
    stage.ask(conversation(1), 12)
    stage.run()
    frozen = stage.scheduler.cache.freeze(stage.scheduler.cache.unsaved(1, ()) or 0)
    stage.scheduler.cache.forget_idle()
    other = [*conversation(2, system_seed=1), *text(random.Random(8), 11)]
    assert len(other) == len(frozen.tokens)
    stage.ask(next_turn(other, 1), 12, warm=WarmState(other, frozen.state))
    stage.run()


# Faults ------------------------------------------------------------------------------------------


def nothing(patch: Patch) -> None:
    """The fault is in the scene."""


def no_copy(patch: Patch) -> None:
    patch.setattr(LlamaMemory, "copy", lambda *_: None)


def foreign_state(patch: Patch) -> None:
    """What is kept is the first state of so many tokens that was saved, be it of another text."""
    saved: dict[int, memoryview] = {}
    save = LlamaMemory.save

    def first(memory: LlamaMemory, slot: int, **options: Any) -> memoryview:
        state = save(memory, slot, **options)
        return saved.setdefault(memory._library.llama_memory_seq_pos_max(memory._memory, slot), state)

    patch.setattr(LlamaMemory, "save", first)


def one_token_off(patch: Patch) -> None:
    """A checkpoint is believed to be one token further on than it is."""
    best = Checkpoints.best

    def one_more(self: Checkpoints, prompt: list[int], *rest: Any, **more: Any) -> SavedState | None:
        found = best(self, prompt, *rest, **more)
        return found and replace(found, tokens=prompt[: len(found.tokens) + 1])

    patch.setattr(Checkpoints, "best", one_more)


def one_too_many(patch: Patch) -> None:
    """The first token that differs is taken for one that is known."""
    n_common = cache.n_common
    patch.setattr(cache, "n_common", lambda a, b: min(n_common(a, b) + 1, len(a), len(b)))


def nothing_is_removed(patch: Patch) -> None:
    remove = LlamaMemory.remove
    patch.setattr(
        LlamaMemory, "remove", lambda self, slot, start: remove(self, slot, start) if start == 0 else True
    )


def shifted_too_far(patch: Patch) -> None:
    right = LlamaMemory.shift
    patch.setattr(LlamaMemory, "shift", lambda self, slot, start, n: right(self, slot, start - 1, n))


WRONG: list[tuple[str, str, Callable[[Stage], None], Callable[[Patch], None]]] = [
    ("llama", "shared", share, no_copy),
    ("llama", "split", share, no_copy),
    ("nemotron_h", "shared", share, no_copy),
    ("nemotron_h", "split", share, no_copy),
    ("gemma3", "shared", share, no_copy),
    ("gemma3", "split", share, no_copy),
    ("nemotron_h", "shared", edit, foreign_state),
    ("nemotron_h_moe", "split", edit, foreign_state),
    ("gemma3", "shared", edit, foreign_state),
    ("nemotron_h", "shared", share, one_token_off),
    ("gemma3", "split", share, one_token_off),
    ("llama", "shared", edit, one_too_many),
    ("deci", "split", edit, one_too_many),
    ("nemotron", "shared", edit, one_too_many),
    ("qwen3", "split", edit, one_too_many),
    ("qwen3moe", "shared", edit, one_too_many),
    ("llama", "split", leave_gaps, nothing_is_removed),
    ("llama", "shared", shift, shifted_too_far),
    ("qwen3", "split", thaw_another, nothing),
    ("nemotron_h", "shared", thaw_another, nothing),
]


@pytest.mark.parametrize(
    ("kind", "layout", "scene", "fault"),
    WRONG,
    indirect=["kind"],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_fault_is_noticed(
    kind: Kind,
    layout: str,
    scene: Callable[[Stage], None],
    fault: Callable[[Patch], None],
    monkeypatch: Patch,
) -> None:
    backend = kind.open(kv_layout=layout, n_ctx=256 if scene is shift else 2 * N_CTX)
    try:
        if fault is not nothing:
            play(scene, Stage(backend, kind.referee))
        fault(monkeypatch)
        with pytest.raises((AssertionError, EngineError), match=r"^request|could not compute"):
            play(scene, Stage(backend, kind.referee))
    finally:
        monkeypatch.undo()
        backend.close()


def play(scene: Callable[[Stage], None], stage: Stage) -> None:
    scene(stage)
    stage.check()
