"""Requests with different LoRA adapters side by side: each is what a context with just its scales says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal.engine.llama.adapters import LoraAdapters
from nemolocal.engine.llama.library import Log
from nemolocal.errors import EngineError
from tests import synthetic
from tests.engine.kinds import LAYOUTS, N_SYSTEM, Kind, conversation, listening, next_turn, open_kind
from tests.engine.referee import Stage

pytestmark = pytest.mark.model

SCALES = ((0.0, 0.0), (1.0, 0.0), (0.0, 0.5), (-0.7, 1.0))


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with listening() as log:
        yield log


@pytest.fixture(scope="module", params=["llama", "qwen3", "nemotron_h"])
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, log: Log
) -> Iterator[Kind]:
    kind = open_kind(tmp_path_factory.mktemp("adapters"), request.param, log, n_adapters=2)
    yield kind
    kind.referee.close()


@pytest.fixture(params=LAYOUTS)
def stage(request: pytest.FixtureRequest, kind: Kind) -> Iterator[Stage]:
    backend = kind.open(kv_layout=request.param)
    yield Stage(backend, kind.referee)
    backend.close()


def test_different_scales_at_the_same_time(kind: Kind, stage: Stage) -> None:
    ids = [stage.ask(conversation(1), 12, adapters=scales) for scales in SCALES]
    stage.run()
    assert max(len(rows) for rows in stage.tap.batches) == 1  # one set of adapters in a batch
    assert not any(stage.usage(id).cached_tokens for id in ids)
    stage.check()
    for id in ids:  # and the scales matter: with those of another request the referee would not agree
        stage.tap.records[id].adapters = SCALES[id - 1]
        assert not kind.referee.agrees(stage.parted(id))


def test_what_was_read_with_other_scales_is_not_used(stage: Stage) -> None:
    one, other = SCALES[1:3]
    first = stage.ask(conversation(1), 12, adapters=one)
    stage.run()
    for scales, n_known in ((other, 0), (one, N_SYSTEM), (other, N_SYSTEM), ((0.0, 0.0), 0)):
        id = stage.ask(next_turn(stage.text(first), 1), 8, adapters=scales)
        stage.run()
        assert (stage.usage(id).cached_tokens > N_SYSTEM) == bool(n_known)
    stage.check()


def test_scales_change_while_others_run(stage: Stage) -> None:
    first = stage.ask(conversation(1), 30, adapters=SCALES[1])
    stage.run_until_said(first, 3)
    same = stage.ask(conversation(2), 12, adapters=SCALES[1])
    other = stage.ask(conversation(2), 12, adapters=SCALES[2])
    stage.run()
    assert stage.usage(same).cached_tokens >= N_SYSTEM
    assert stage.usage(other).cached_tokens == 0
    stage.check()


def test_adapters_that_are_never_switched_are_noticed(
    kind: Kind, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraAdapters, "use", lambda *_: None)
    stage.ask(conversation(1), 8, adapters=SCALES[1])
    stage.run()
    with pytest.raises(AssertionError, match="request 0"):
        stage.check()


def test_adapter_for_another_model(kind: Kind, tmp_path: Path) -> None:
    foreign = synthetic.write_lora(tmp_path / "foreign.gguf", replace(synthetic.TINY["qwen2"], n_embd=96))
    with pytest.raises(EngineError, match="could not be loaded") as caught:
        kind.open(adapters=((str(foreign), 1.0),))
    assert "no reason given" not in caught.value.message
