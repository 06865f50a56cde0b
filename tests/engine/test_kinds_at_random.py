"""Everything at once, at random: conversations that branch, go on, are asked again, cancelled, saved and put
back, greedy or drawn, by either way of sampling, in a cache that is too small for them. Whatever comes out is
what a fresh context says to the same text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemolocal.engine.batching import Budget
from nemolocal.engine.cache import WarmState
from nemolocal.engine.llama.library import Log
from tests.engine.kinds import LAYOUTS, listening, next_turn, open_kind, opening, text, turn
from tests.engine.referee import Stage

pytestmark = pytest.mark.model

N_CTX = 256
N_REQUESTS = 25
N_LONGEST = N_CTX - 30  # tokens of a prompt


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with listening() as log:
        yield log


@pytest.mark.parametrize("name", ["llama", "gemma3", "nemotron_h_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_at_random(name: str, layout: str, tmp_path: Path, log: Log) -> None:
    kind = open_kind(tmp_path, name, log)
    backend = kind.open(kv_layout=layout, n_ctx=N_CTX, sampling="device")
    try:
        for seed in (1, 2):
            stage = Stage(backend, kind.referee, speculates=True)
            play(stage, random.Random(seed))
            stage.check()
            assert sum(len(record.tokens) > 0 for record in stage.tap.records) > N_REQUESTS // 2
    finally:
        backend.close()
        kind.referee.close()


def play(stage: Stage, rng: random.Random) -> None:
    stems = [turn(rng, rng.randint(20, 150)) for _ in range(3)]
    saved: list[WarmState] = []
    while len(stage.tap.records) < N_REQUESTS or stage.scheduler.has_work():
        if len(stage.tap.records) < N_REQUESTS and rng.random() < 0.35:
            ask(stage, rng, stems, saved)
        if stage.tap.records and rng.random() < 0.06:
            stage.scheduler.cancel(rng.randrange(len(stage.tap.records)))
        index = stage.scheduler.cache.unsaved(30, ())
        if index is not None and rng.random() < 0.15:
            frozen = stage.scheduler.cache.freeze(index)
            saved.append(WarmState(frozen.tokens, memoryview(bytes(frozen.state))))
        if rng.random() < 0.5:
            n = rng.randint(1, 120)
            stage.budget = Budget(n, n)
        stage.step()


def ask(stage: Stage, rng: random.Random, stems: list[list[int]], saved: list[WarmState]) -> None:
    warm = rng.choice(saved) if saved and rng.random() < 0.3 else None
    prompt = a_prompt(stage, rng, stems)
    if warm and rng.random() < 0.7:
        prompt = next_turn(warm.tokens, rng.randrange(99))
    more: dict[str, Any] = {}
    if rng.random() < 0.3:
        more = {"favoured": [40, 41, 42]}
    elif rng.random() < 0.4:
        more = {"is_greedy": True, "has_logprobs": rng.random() < 0.4}
    stage.ask(prompt[:N_LONGEST], rng.randint(1, 60), warm=warm, **more)


def a_prompt(stage: Stage, rng: random.Random, stems: list[list[int]]) -> list[int]:
    """A new conversation, or one that has to do with an earlier one."""
    said = [id for id, record in enumerate(stage.tap.records) if record.tokens]
    what = rng.random()
    if what < 0.4 or not said:
        return [*rng.choice(stems), *turn(rng, rng.randint(1, 60)), *opening(rng)]
    id = rng.choice(said)
    if what < 0.7:
        return next_turn(stage.text(id), rng.randrange(99))
    if what < 0.85:
        return list(stage.tap.records[id].prompt)
    before = stage.text(id)
    return [*before[: rng.randint(1, len(before))], *text(rng, rng.randint(1, 20))]
