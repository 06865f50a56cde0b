"""What goes to disk and what comes back: the states of slots and of RAM, on a backend without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from nemolocal.engine.backend import Adapters
from nemolocal.engine.batching import Budget
from nemolocal.engine.cache import WarmState
from nemolocal.engine.scheduler import Ended, Scheduler
from nemolocal.engine.warm import WarmStore
from nemolocal.engine.warming import N_WORTH_SAVING, Warming
from nemolocal.types import GenerationParams
from tests.engine.fake_backend import FakeBackend

N = N_WORTH_SAVING
PLENTY = Budget(10_000, 10_000)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(n_ctx=32 * N, n_slots=4, n_batch=2048)


@pytest.fixture
def scheduler(backend: FakeBackend) -> Scheduler:
    return Scheduler(backend, state_bytes=1 << 20)


@pytest.fixture
def store(tmp_path: Path) -> WarmStore:
    return WarmStore(tmp_path / "states", key="model", limit_bytes=1 << 24)


@pytest.fixture
def warming(store: WarmStore, scheduler: Scheduler) -> Iterator[Warming]:
    warming = Warming(store, scheduler.cache, (), can_rollback=True, limit_bytes=1 << 20)
    yield warming
    warming.forget()
    warming.close()


def ask(scheduler: Scheduler, prompt: list[int], *, warm: WarmState | None = None) -> int:
    """Ask for one token; how many of the prompt's did not have to be read."""
    scheduler.add(1, prompt, GenerationParams(max_tokens=1), warm=warm)
    while scheduler.has_work():
        for event in scheduler.step(PLENTY):
            if isinstance(event, Ended):
                return event.usage.cached_tokens
    raise AssertionError("no last event")


def read(warming: Warming, prompt: list[int], adapters: Adapters = ()) -> WarmState | None:
    found: list[WarmState | None] = []
    is_done = threading.Event()

    def then(done: Future[WarmState | None]) -> None:
        found.append(done.result())
        is_done.set()

    if not warming.read(prompt, adapters, then):
        return None
    assert is_done.wait(10)
    return found[0]


def test_all_that_is_worth_it_is_saved_at_the_end(
    scheduler: Scheduler, store: WarmStore, warming: Warming
) -> None:
    prompts = [[id] * N for id in (1, 2, 3)]
    for prompt in prompts:
        ask(scheduler, prompt)
    warming.close()
    for prompt in prompts:
        entry = store.find(prompt)
        assert entry
        assert entry.n_common == N


def test_nothing_is_saved_of_a_model_that_failed(
    scheduler: Scheduler, store: WarmStore, warming: Warming
) -> None:
    ask(scheduler, [1] * N)
    warming.forget()
    warming.close()
    assert store.find([1] * N) is None


def test_what_is_only_in_ram_any_more_is_saved_too(
    scheduler: Scheduler, store: WarmStore, warming: Warming
) -> None:
    for id in range(1, 7):  # more than there are slots
        ask(scheduler, [id] * N)
        while scheduler.cache.can_park():
            scheduler.cache.park_one()
    warming.close()
    assert all(store.find([id] * N) for id in range(1, 7))


def test_what_came_back_from_ram_is_not_taken_for_saved(
    scheduler: Scheduler, store: WarmStore, warming: Warming
) -> None:
    ask(scheduler, [1] * N)
    scheduler.cache.park_one()
    scheduler.cache.forget_idle()
    assert ask(scheduler, [1] * (N + 1)) == N
    warming.close()
    assert store.find([1] * N)


def test_what_came_back_from_disk_is_not_saved_again(
    scheduler: Scheduler, store: WarmStore, warming: Warming
) -> None:
    store.save([1] * N, read_state(scheduler, [1] * N))
    warm = read(warming, [1] * (N + 1))
    assert ask(scheduler, [1] * (N + 1), warm=warm) == N
    assert not warming.may_save


def test_requests_that_wait_with_the_same_beginning_share_what_was_read_back(
    scheduler: Scheduler, store: WarmStore, warming: Warming
) -> None:
    store.save([1] * N, read_state(scheduler, [1] * N))
    first = read(warming, [1] * (N + 1))
    assert first
    assert read(warming, [1] * (N + 2)) is first


def test_what_waits_for_a_slot_stays_within_its_limit(scheduler: Scheduler, store: WarmStore) -> None:
    for id in (1, 2):
        store.save([id] * N, read_state(scheduler, [id] * N))
    warming = Warming(store, scheduler.cache, (), can_rollback=True, limit_bytes=100)
    first = read(warming, [1] * (N + 1))
    assert first  # one may be larger
    assert read(warming, [2] * (N + 1)) is None
    del first
    assert read(warming, [2] * (N + 1))
    warming.forget()
    warming.close()


def test_a_long_state_is_not_read_back_for_a_short_beginning(
    scheduler: Scheduler, store: WarmStore, warming: Warming
) -> None:
    system, n_long = [1] * 600, 20 * N
    store.save([*system, *[2] * n_long], bytes(8))
    assert read(warming, [*system, 3]) is None
    store.save([*system, *[4] * N], bytes(8))
    assert read(warming, [*system, 3])


def read_state(scheduler: Scheduler, prompt: list[int]) -> memoryview:
    """The state after a prompt, of which the scheduler remembers nothing then."""
    ask(scheduler, prompt)
    index = scheduler.cache.unsaved(1, ())
    assert index is not None
    state = scheduler.cache.freeze(index).state
    scheduler.cache.forget_idle()
    return state
