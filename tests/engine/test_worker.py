"""The loop of the child process, over a fake backend, in a thread of the test."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest

from nemolocal.engine import worker
from nemolocal.engine.intake import N_CHARS_INLINE
from nemolocal.engine.messages import (
    Accepted,
    Beat,
    Cancel,
    Chunk,
    Count,
    Counted,
    Event,
    Failed,
    Finished,
    LoadSpec,
    Occupancy,
    Rejected,
    Shutdown,
    Submit,
)
from nemolocal.engine.worker import Worker
from nemolocal.types import GenerationParams, Prompt, Segment
from tests.engine.fake_backend import FakeBackend, answer
from tests.engine.running import in_thread

LONG = next(n for n in range(1, 999) if len(answer([n], 200)) == 200)


class Running:
    """A worker in a thread, and the parent's end of its pipe."""

    def __init__(self, backend: FakeBackend, n_queue: int) -> None:
        self.backend = backend
        self.pipe, theirs = multiprocessing.Pipe()
        self.worker = Worker(theirs, backend, LoadSpec("", backend.n_ctx, backend.n_slots, n_queue=n_queue))
        self.told: list[Occupancy] = []
        self.thread = in_thread(self.worker.run, theirs)

    def until(self, *ids: int) -> list[Event]:
        """All events of requests until each of these has had its last one."""
        seen: list[Event] = []
        awaited = set(ids)
        while awaited:
            assert self.pipe.poll(10), f"nothing more after {seen[-3:]}"
            events = self.pipe.recv()
            self.told += [event for event in events if isinstance(event, Occupancy)]
            seen += [event for event in events if not isinstance(event, Beat | Occupancy)]
            awaited -= {
                event.id for event in events if isinstance(event, Finished | Failed | Rejected | Counted)
            }
        return seen


@pytest.fixture
def running() -> Iterator[Running]:
    started = Running(FakeBackend(n_ctx=300, n_slots=2), n_queue=3)
    yield started
    started.pipe.close()
    started.thread.join(5)
    assert not started.thread.is_alive(), "the worker outlives its parent"


def submit(id: int, prompt: list[int], n_max: int = 5) -> Submit:
    return Submit(id, tuple(prompt), GenerationParams(max_tokens=n_max))


def test_events_of_a_request(running: Running) -> None:
    running.pipe.send(submit(1, [5, 6, 7]))
    events = running.until(1)
    assert events[0] == Accepted(1, 3)
    assert all(isinstance(event, Chunk) for event in events[1:-1])
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.usage.completion_tokens == len(answer([5, 6, 7], 5))
    timings = last.timings
    assert min(timings.queue_s, timings.prompt_s, timings.decode_s) >= 0.0


def test_refusals(running: Running) -> None:
    running.pipe.send(submit(1, [5] * 300))
    assert running.until(1) == [Rejected(1, "context_length", n_prompt=300, n_ctx=300)]
    running.pipe.send(submit(2, [5000]))
    [event] = running.until(2)
    assert isinstance(event, Rejected)
    assert event.kind == "invalid"
    running.pipe.send(submit(3, []))
    [event] = running.until(3)
    assert isinstance(event, Rejected)
    assert event.message == "The prompt is empty."


def test_tokens_are_counted_beside_the_streams(running: Running) -> None:
    running.pipe.send(submit(1, [LONG], n_max=200))
    running.pipe.send(Count(2, ("abc", "", "x" * 50)))
    events = running.until(1, 2)
    assert Counted(2, (3, 0, 50)) in events
    running.pipe.send(Count(3, ("abc",) * 1000))
    running.pipe.send(Cancel(3))
    running.pipe.send(Count(4, ("abcd",)))
    assert running.until(4)[-1] == Counted(4, (4,))


def test_full_queue(running: Running) -> None:
    for id in range(1, 8):
        running.pipe.send(submit(id, [LONG], 200))
    seen = running.until(*range(1, 8))
    busy = [event for event in seen if isinstance(event, Rejected)]
    assert busy
    assert all(event.kind == "busy" for event in busy)
    finished = {event.id for event in seen if isinstance(event, Finished)}
    assert finished | {event.id for event in busy} == set(range(1, 8))


def test_long_prompt_is_tokenized_beside_the_streams(running: Running) -> None:
    running.pipe.send(submit(1, [LONG], 200))
    text = (Segment("x" * (N_CHARS_INLINE + 1)),)
    running.pipe.send(Submit(2, text, GenerationParams(max_tokens=5)))
    running.pipe.send(submit(3, [7], 5))
    seen = running.until(1, 2, 3)
    assert Rejected(2, "context_length", n_prompt=N_CHARS_INLINE + 1, n_ctx=300) in seen
    assert {event.id for event in seen if isinstance(event, Finished)} == {1, 3}


def test_cancel_frees_the_slot_within_a_step(running: Running) -> None:
    for id in (1, 2):
        running.pipe.send(submit(id, [LONG], 250))
    running.pipe.send(Cancel(1))
    running.pipe.send(Cancel(2))
    running.pipe.send(Cancel(99))
    running.pipe.send(submit(3, [5, 6, 7]))
    seen = running.until(3)
    assert not any(isinstance(event, Finished) and event.id in (1, 2) for event in seen)
    assert running.backend.samplers[0].n_closed == 1


def test_broken_model_answers_everyone_and_ends(running: Running) -> None:
    running.pipe.send(submit(1, [LONG], 250))
    running.backend.is_broken = True
    running.pipe.send(submit(2, [5]))
    seen = running.until(1)
    assert isinstance(seen[-1], Failed)
    running.thread.join(5)
    assert not running.thread.is_alive()


def test_how_full_it_is(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told at once when nothing is left to do, and while there is work when the time has come."""

    def until(*, n_running: int, n_waiting: int) -> Occupancy:
        while (running.told[-1].n_running, running.told[-1].n_waiting) != (n_running, n_waiting):
            assert running.pipe.poll(10), running.told
            running.told += [event for event in running.pipe.recv() if isinstance(event, Occupancy)]
        return running.told[-1]

    monkeypatch.setattr(worker, "OCCUPANCY_EVERY_S", 0.0)
    running.told += [event for event in running.pipe.recv() if isinstance(event, Occupancy)]
    assert running.told == [Occupancy(0, 0, 300, 0)]
    gate, collect = threading.Event(), running.backend.collect
    monkeypatch.setattr(running.backend, "collect", lambda: gate.wait(10) and collect())
    for id in (1, 2, 3):
        running.pipe.send(submit(id, [LONG], 200))
    gate.set()
    assert until(n_running=2, n_waiting=1).n_taken_cells > 0
    for id in (1, 2, 3):
        running.pipe.send(Cancel(id))
    assert until(n_running=0, n_waiting=0).n_taken_cells == running.backend.memory.n_taken
    running.pipe.send(Submit(5, (7, 8), GenerationParams(max_tokens=1, reuse_cache=False)))
    running.until(5)
    assert until(n_running=0, n_waiting=0).n_taken_cells == 2


def test_shutdown(running: Running) -> None:
    running.pipe.send(Shutdown())
    running.thread.join(5)
    assert not running.thread.is_alive()


def test_nothing_tokenizes_after_the_end(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is closed then, and its memory gone."""
    began, ended = threading.Event(), threading.Event()

    def tokenize(prompt: Prompt) -> list[int]:
        began.set()
        time.sleep(0.3)
        ended.set()
        return [1]

    monkeypatch.setattr(running.backend.vocab, "tokenize", tokenize)
    for id in (1, 2):
        running.pipe.send(Submit(id, (Segment("x" * (N_CHARS_INLINE + 1)),), GenerationParams()))
    assert began.wait(5)
    running.pipe.send(Shutdown())
    running.thread.join(5)
    assert ended.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fault_while_tokenizing_ends_the_worker(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the parent tells everyone; a request must not wait for ever."""

    def tokenize(prompt: Prompt) -> list[int]:
        raise MemoryError

    monkeypatch.setattr(running.backend.vocab, "tokenize", tokenize)
    running.pipe.send(Submit(1, (Segment("x" * (N_CHARS_INLINE + 1)),), GenerationParams()))
    running.thread.join(5)
    assert not running.thread.is_alive()
