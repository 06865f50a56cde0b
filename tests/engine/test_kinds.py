"""Every kind of model through every way in which a text can come into its memory: read in chunks beside
others, continued, copied, put back from a checkpoint or from disk, set back, guessed ahead, shifted. Each
token that is said is compared with a fresh context that reads the same text in one go.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemolocal.engine.cache import WarmState
from nemolocal.engine.llama.backend import LlamaBackend
from nemolocal.engine.llama.library import Log
from nemolocal.errors import InvalidRequestError
from tests.engine.kinds import (
    KINDS,
    LAYOUTS,
    N_SYSTEM,
    Kind,
    conversation,
    listening,
    next_turn,
    open_kind,
    text,
    turn,
)
from tests.engine.referee import Stage

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with listening() as log:
        yield log


@pytest.fixture(scope="module", params=KINDS)
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, log: Log
) -> Iterator[Kind]:
    kind = open_kind(tmp_path_factory.mktemp("kinds"), request.param, log)
    yield kind
    kind.referee.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def backend(request: pytest.FixtureRequest, kind: Kind) -> Iterator[LlamaBackend]:
    backend = kind.open(kv_layout=request.param)
    yield backend
    backend.close()


@pytest.fixture
def stage(kind: Kind, backend: LlamaBackend) -> Stage:
    return Stage(backend, kind.referee)


def test_next_turns_of_a_conversation(stage: Stage) -> None:
    prompt = conversation(1)
    for n in range(4):
        id = stage.ask(prompt, 12)
        stage.run()
        # The last token of an answer is not in the memory yet.
        assert stage.usage(id).cached_tokens == (len(stage.text(id - 1)) - 1 if n else 0)
        prompt = next_turn(stage.text(id), n)
    stage.check()


def test_two_conversations_share_a_system_prompt_at_the_same_time(stage: Stage) -> None:
    first = stage.ask(conversation(1), 40)
    stage.run_until_said(first, 3)
    second = stage.ask(conversation(2), 20)
    third = stage.ask(conversation(3), 20)
    stage.run_until_said(second, 1)
    assert stage.scheduler.n_running == 3
    stage.run()
    n_known = N_SYSTEM + 3
    for id in (second, third):
        assert n_known <= stage.usage(id).cached_tokens <= n_known + 1  # a turn always begins with START
    stage.check()


def test_same_prompt_again(stage: Stage) -> None:
    ids = []
    for n in range(3):
        ids.append(stage.ask(conversation(1), 12 + n))
        stage.run()
    n_prompt = len(conversation(1))
    n_known = (
        n_prompt - 1 if stage.tap.memory.can_rollback else n_prompt - 3
    )  # where the answer's turn begins
    assert [stage.usage(id).cached_tokens for id in ids] == [0, n_known, n_known]
    stage.check()


def test_same_prompt_while_it_is_answered(stage: Stage) -> None:
    first = stage.ask(conversation(1), 30)
    stage.run_until_said(first, 5)
    again = [stage.ask(conversation(1), 12) for _ in range(2)]
    stage.run()
    assert all(stage.usage(id).cached_tokens >= len(conversation(1)) - 3 for id in again)
    stage.check()


def test_last_turn_is_edited(stage: Stage) -> None:
    first = stage.ask(conversation(1), 12)
    stage.run()
    second = stage.ask(next_turn(stage.text(first), 1), 12)
    stage.run()
    edited = stage.ask(next_turn(stage.text(first), 2), 12)
    stage.run()
    assert stage.usage(edited).cached_tokens >= len(stage.text(first)) + 2
    back = stage.ask(next_turn(stage.text(second), 3), 12)
    shorter = stage.ask(next_turn(conversation(1), 4), 12)
    stage.run()
    assert min(stage.usage(id).cached_tokens for id in (back, shorter)) >= N_SYSTEM + 3
    stage.check()


def test_cancelled_while_its_prompt_is_read(stage: Stage) -> None:
    long = conversation(1, n_user=300)
    stage.ask(long)
    stage.step(2)
    assert stage.scheduler.cancel(0)
    other = stage.ask([*long[:120], *text(random.Random(5), 100)], 12)
    whole = stage.ask(long, 12)
    stage.run()
    stage.check()
    assert stage.usage(whole).cached_tokens > 0
    assert len(stage.text(other)) == 120 + 100 + 12
    assert stage.text(0) == long


def test_cancelled_while_it_answers(stage: Stage) -> None:
    stage.ask(conversation(1), 60)
    beside = stage.ask(conversation(2), 50)
    stage.run_until_said(0, 20)
    assert stage.scheduler.cancel(0)
    said = stage.text(0)
    on = stage.ask(next_turn(said, 1), 12)
    edited = stage.ask([*said[:-10], *text(random.Random(5), 20)], 12)
    stage.run()
    assert stage.usage(on).cached_tokens >= len(said) - 1
    assert stage.usage(edited).cached_tokens > 0
    assert len(stage.text(beside)) == len(conversation(2)) + 50
    stage.check()


def test_many_at_once_and_gaps_between_them(stage: Stage) -> None:
    rng = random.Random(7)
    ids = [stage.ask(text(rng, n), n_new) for n, n_new in ((130, 40), (17, 4), (200, 8), (70, 35))]
    stage.run()
    after = [stage.ask([*stage.text(id), *text(rng, 25)], 24 - 6 * id) for id in ids]
    stage.run()
    memory = stage.tap.memory
    is_filled = any(row.tokens == [0] and not row.sampler for rows in stage.tap.batches for row in rows)
    assert is_filled == (memory.can_rollback and not memory.is_shared)
    assert [stage.usage(id).cached_tokens for id in after] == [len(stage.text(id)) - 1 for id in ids]
    stage.check()
    for id in (*ids, *after):
        stage.check_text(id)


def test_more_requests_than_slots(stage: Stage) -> None:
    rng = random.Random(9)
    for n in range(9):
        stage.ask([*turn(random.Random(n % 2), 100), *text(rng, rng.randint(1, 60))], rng.randint(1, 20))
    stage.run()
    stage.check()


def test_state_that_outlives_its_process(kind: Kind, stage: Stage) -> None:
    first = stage.ask(conversation(1), 12)
    stage.run()
    index = stage.scheduler.cache.unsaved(1, ())
    assert index is not None
    frozen = stage.scheduler.cache.freeze(index)
    warm = WarmState(list(frozen.tokens), memoryview(bytes(frozen.state)))
    stage.check()
    later = kind.open(kv_layout="shared" if stage.tap.memory.is_shared else "split")
    try:
        again = Stage(later, kind.referee)
        beside = again.ask(conversation(2, system_seed=3), 30)
        again.run_until_said(beside, 2)
        went_on = again.ask(next_turn(stage.text(first), 1), 12, warm=warm)
        again.run()
        assert again.usage(went_on).cached_tokens == len(stage.text(first)) - 1
        last = again.ask(next_turn(again.text(went_on), 2), 12)
        again.run()
        assert again.usage(last).cached_tokens == len(again.text(went_on)) - 1
        again.check()
    finally:
        later.close()


def test_state_of_which_only_the_beginning_is_of_use(stage: Stage) -> None:
    stage.ask(conversation(1), 12)
    stage.run()
    frozen = stage.scheduler.cache.freeze(stage.scheduler.cache.unsaved(1, ()) or 0)
    stage.scheduler.cache.forget_idle()
    id = stage.ask(conversation(2), 12, warm=frozen)
    stage.run()
    n_known = N_SYSTEM + 4 if stage.tap.memory.can_rollback else N_SYSTEM + 3  # a checkpoint still knows it
    assert stage.usage(id).cached_tokens in (0, n_known)
    stage.check()


def test_full_cache_sets_back_and_goes_on(kind: Kind) -> None:
    backend = kind.open(n_ctx=256)
    try:
        stage = Stage(backend, kind.referee)
        rng = random.Random(3)
        ids = [stage.ask(text(rng, n), 60) for n in (30, 50, 20, 40)]
        stage.run()
        assert len(stage.admitted) > len(ids), "nobody was set back"
        assert all(stage.usage(id).completion_tokens == 60 for id in ids)
        stage.check()
        for id in ids:
            stage.check_text(id)
    finally:
        backend.close()


def test_guessing_ahead_changes_nothing(kind: Kind, backend: LlamaBackend) -> None:
    stage = Stage(backend, kind.referee, speculates=True)
    few = [40, 41, 42]  # what is said with three words repeats itself
    ids = [stage.ask(text(random.Random(n), 80), 100, is_greedy=n > 0, favoured=few) for n in range(3)]
    stage.run()
    for id in ids:
        if backend.memory.can_rollback:
            assert 0 < stage.usage(id).accepted_tokens < stage.usage(id).drafted_tokens
        else:  # a guess could not be taken back
            assert stage.usage(id).drafted_tokens == 0
    after = stage.ask([*stage.text(ids[0]), *text(random.Random(9), 10)], 20)
    stage.run()
    assert stage.usage(after).cached_tokens == 80 + 100 - 1
    stage.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answer_goes_on_beyond_the_context(kind: Kind, layout: str) -> None:
    backend = kind.open(n_ctx=256, kv_layout=layout)
    try:
        stage = Stage(backend, kind.referee)
        prompt = text(random.Random(1), 90)
        if not backend.memory.can_shift:
            with pytest.raises(InvalidRequestError, match="full context"):
                stage.ask(prompt, 230, shift_context=True)
            return
        id = stage.ask(prompt, 230, shift_context=True)
        stage.run_until_said(id, 170)
        [(_, start, n)] = stage.tap.records[id].shifts
        # What is left of the answer was computed after what was dropped, so it is nobody's beginning.
        left = stage.text(id)[start + n :]
        other = stage.ask([*prompt, *left[:40], *text(random.Random(2), 10)], 8)
        stage.run()
        assert stage.usage(other).cached_tokens == start == 90
        stage.run()
        assert stage.usage(id).completion_tokens == 230
        again = stage.ask(prompt, 12)
        stage.run()
        assert stage.usage(again).cached_tokens == 89
        stage.check()
    finally:
        backend.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_device_and_host_choose_side_by_side(kind: Kind, layout: str) -> None:
    """The device picks the candidates of some answers, and hands over all logits of others; slots change
    from one to the other."""
    backend = kind.open(kv_layout=layout, sampling="device")
    try:
        stage = Stage(backend, kind.referee, speculates=True)
        prompt = conversation(1)
        for n in range(3):
            beside = [
                stage.ask(conversation(2 + i), 10 + i, has_logprobs=i == n, is_greedy=True) for i in (0, 1)
            ]
            id = stage.ask(prompt, 12, is_greedy=True, has_logprobs=n == 1)
            stage.run()
            assert [bool(stage.tap.records[i].logprobs) for i in (*beside, id)] == [n == 0, n == 1, n == 1]
            prompt = next_turn(stage.text(id), n)
        assert stage.usage(id).cached_tokens > N_SYSTEM
        stage.check()
    finally:
        backend.close()


@pytest.mark.parametrize("name", ["qwen3", "deci", "nemotron_h"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_cache(name: str, layout: str, tmp_path: Path, log: Log) -> None:
    """Quantized keys and values are copied, saved and put back like any others."""
    kind = open_kind(tmp_path, name, log, kv_type="q8_0", head_dim=32)
    backend = kind.open(kv_layout=layout)
    try:
        stage = Stage(backend, kind.referee)
        ids = [stage.ask(conversation(1), 30)]
        stage.run_until_said(0, 3)
        ids.append(stage.ask(conversation(2), 20))
        stage.run()
        ids.append(stage.ask(next_turn(stage.text(0), 1), 12))
        stage.run()
        frozen = stage.scheduler.cache.freeze(stage.scheduler.cache.unsaved(1, ()) or 0)
        stage.scheduler.cache.forget_idle()
        ids.append(stage.ask(next_turn(frozen.tokens, 2), 12, warm=frozen))
        stage.run()
        assert all(stage.usage(id).cached_tokens > N_SYSTEM for id in ids[1:])
        stage.check()
    finally:
        backend.close()
        kind.referee.close()
