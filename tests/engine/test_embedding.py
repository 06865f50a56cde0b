"""The loop of the process that embeds and ranks, over a fake model, in a thread of the test."""

from __future__ import annotations

import multiprocessing
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from nemolocal.engine import embedding
from nemolocal.engine.backend import Row
from nemolocal.engine.embedding import N_CHARS_INLINE, EmbeddingWorker
from nemolocal.engine.messages import (
    Beat,
    Cancel,
    Embed,
    Embedded,
    Event,
    Failed,
    Rank,
    Ranked,
    Rejected,
    Shutdown,
)
from nemolocal.errors import EngineError
from tests.engine.running import in_thread


class FakeEmbedder:
    """A token is a character; a vector is the number of tokens and their sum."""

    def __init__(self, *, can_rank: bool = False, n_ctx: int = 64, n_batch: int = 16) -> None:
        self.n_ctx = n_ctx
        self.n_slots = 4
        self.n_batch = n_batch
        self.n_packed = 12
        self.can_rank = can_rank
        self.batches: list[list[Row]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_computing = threading.Event()
        self.delay_s = 0.0
        self.failure: EngineError | None = None
        self.on_life: Callable[[], None] = lambda: None
        self.n_lives = 0
        self._read: list[int] = []

    def tokenize(self, text: str | tuple[int, ...]) -> list[int]:
        time.sleep(self.delay_s)
        if isinstance(text, str):
            return [ord(letter) for letter in text]
        if max(text) > 999:
            raise ValueError(f"Token {max(text)} is outside the vocabulary of 1000 tokens.")
        return list(text)

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        return self.tokenize(f"{query}|{document}")

    def compute(self, rows: list[Row]) -> list[bytes]:
        self.is_computing.set()
        assert self.gate.wait(10)
        if self.failure:
            raise self.failure
        for _ in range(self.n_lives):
            self.on_life()
        self.batches.append(rows)
        assert all(row.start == 0 for row in rows) or len(rows) == 1
        results = []
        for row in rows:
            self._read = row.tokens if row.start == 0 else [*self._read, *row.tokens]
            assert len(self._read) == row.start + len(row.tokens)
            values = (1 / len(self._read),) if self.can_rank else (len(self._read), sum(self._read))
            results.append(b"" if 0 in self._read else struct.pack(f"<{len(values)}f", *values))
        return results

    def close(self) -> None:
        pass


def vector(*tokens: int) -> bytes:
    return struct.pack("<2f", len(tokens), sum(tokens))


class Running:
    """A worker in a thread, and the parent's end of its pipe."""

    def __init__(self, backend: FakeEmbedder, n_queue: int = 8) -> None:
        self.backend = backend
        self.pipe, theirs = multiprocessing.Pipe()
        self.worker = EmbeddingWorker(theirs, backend, n_queue=n_queue)
        self.thread = in_thread(self.worker.run, theirs)

    def embed(self, id: int, *inputs: str | tuple[int, ...]) -> None:
        self.pipe.send(Embed(id, inputs))

    def until(self, *ids: int) -> list[Event]:
        """All events until each of these requests has had its last one, signs of life left out."""
        seen: list[Event] = []
        awaited = set(ids)
        while awaited:
            assert self.pipe.poll(10), f"nothing more after {seen[-3:]}"
            events = [event for event in self.pipe.recv() if not isinstance(event, Beat)]
            seen += events
            awaited -= {event.id for event in events}
        return seen


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running(FakeEmbedder())
    yield made
    made.backend.gate.set()
    made.pipe.close()
    made.thread.join(10)
    assert not made.thread.is_alive()


def last(events: Sequence[Event], id: int) -> Event:
    found = [event for event in events if not isinstance(event, Beat) and event.id == id]  # type: ignore[union-attr]
    assert len(found) == 1
    return found[0]


def test_every_input_gets_its_vector_in_order(running: Running) -> None:
    running.embed(1, "ab", (1, 2, 3), "c")
    event = last(running.until(1), 1)
    assert isinstance(event, Embedded)
    assert event.vectors == (vector(97, 98), vector(1, 2, 3), vector(99))
    assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (6, 0)
    assert event.timings.queue_s >= 0
    assert event.timings.prompt_s > 0


def test_requests_share_batches(running: Running) -> None:
    running.backend.gate.clear()
    running.embed(1, "a")
    assert running.backend.is_computing.wait(10)
    running.embed(2, "bb")  # these wait in the pipe meanwhile
    running.embed(3, "cc", "d")
    running.backend.gate.set()
    events = running.until(1, 2, 3)
    assert [last(events, id).vectors for id in (2, 3)] == [  # type: ignore[union-attr]
        (vector(98, 98),),
        (vector(99, 99), vector(100)),
    ]
    assert max(len(rows) for rows in running.backend.batches) >= 3


def test_an_input_above_the_batch_is_read_in_parts_with_signs_of_life(running: Running) -> None:
    running.embed(1, (1,) * 40)
    messages = [running.pipe.recv() for _ in range(3)]
    assert messages[:2] == [[Beat()], [Beat()]]
    assert messages[2][0].vectors == (vector(*(1,) * 40),)
    assert [(row.start, len(row.tokens)) for rows in running.backend.batches for row in rows] == [
        (0, 16),
        (16, 16),
        (32, 8),
    ]


@pytest.mark.parametrize(
    ("inputs", "kind", "index"),
    [
        (("a", (1,) * 65), "context_length", 1),
        (("a", "b", (5, 1000)), "invalid", 2),
        (("",), "invalid", 0),
    ],
)
def test_one_bad_input_refuses_the_request_and_says_which(
    running: Running, inputs: tuple[str | tuple[int, ...], ...], kind: str, index: int
) -> None:
    running.embed(1, *inputs)
    event = last(running.until(1), 1)
    assert isinstance(event, Rejected)
    assert (event.kind, event.index) == (kind, index)
    if kind == "context_length":
        assert (event.n_prompt, event.n_ctx) == (65, 64)
    assert running.backend.batches == []


def test_a_batch_that_takes_long_shows_signs_of_life_but_not_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedding, "BEAT_S", 0.0)
    running = Running(FakeEmbedder())
    running.backend.n_lives = 3
    running.embed(1, "a")
    assert [running.pipe.recv() for _ in range(3)] == [[Beat()]] * 3
    assert isinstance(last(running.until(1), 1), Embedded)
    monkeypatch.setattr(embedding, "BEAT_S", 1000.0)
    running.embed(2, "a")
    assert isinstance(running.pipe.recv()[0], Embedded)
    running.pipe.send(Shutdown())
    running.thread.join(10)


def test_no_inputs_are_no_vectors(running: Running) -> None:
    running.embed(1)
    assert last(running.until(1), 1).vectors == ()  # type: ignore[union-attr]


def test_an_embedding_model_ranks_nothing(running: Running) -> None:
    running.pipe.send(Rank(1, "q", ("d",)))
    event = last(running.until(1), 1)
    assert isinstance(event, Rejected)
    assert (event.param, "ranks nothing" in event.message) == ("model", True)


def test_documents_are_scored_with_the_query() -> None:
    running = Running(FakeEmbedder(can_rank=True))
    running.pipe.send(Rank(1, "q", ("a", "abcdef")))
    running.embed(2, "a")
    events = running.until(1, 2)
    event = last(events, 1)
    assert isinstance(event, Ranked)
    assert event.scores == pytest.approx((1 / 3, 1 / 8))
    assert event.usage.prompt_tokens == 3 + 8
    refused = last(events, 2)
    assert isinstance(refused, Rejected)
    assert "embeds nothing" in refused.message
    running.pipe.send(Shutdown())
    running.thread.join(10)


def test_what_is_no_number_fails_its_request_alone(running: Running) -> None:
    running.backend.gate.clear()
    running.embed(1, "a", (0,), (0, 0), "b" * 12, "c")
    running.embed(2, "a")
    time.sleep(0.1)
    running.backend.gate.set()
    events = running.until(1, 2)
    failed = last(events, 1)
    assert isinstance(failed, Failed)
    assert not failed.is_dead
    assert "input 1" in failed.message
    assert isinstance(last(events, 2), Embedded)
    running.embed(3, "a")
    assert isinstance(last(running.until(3), 3), Embedded)


def test_a_cancelled_request_is_not_heard_of_again(running: Running) -> None:
    running.backend.gate.clear()
    running.embed(1, *["a" * 10] * 50)
    running.embed(2, (1,) * 60)
    running.pipe.send(Cancel(1))
    running.pipe.send(Cancel(2))
    running.pipe.send(Cancel(99))
    running.embed(3, "c")
    time.sleep(0.1)
    running.backend.gate.set()
    assert [event.id for event in running.until(3)] == [3]  # type: ignore[union-attr]
    assert len(running.backend.batches) <= 3


def test_a_request_that_is_cancelled_while_it_is_tokenized_is_not_read(running: Running) -> None:
    running.backend.delay_s = 0.2
    running.embed(1, "a" * 10, "b" * N_CHARS_INLINE)
    running.pipe.send(Cancel(1))
    time.sleep(0.1)
    running.backend.delay_s = 0.0
    running.embed(2, "c")
    assert [event.id for event in running.until(2)] == [2]  # type: ignore[union-attr]
    running.embed(3, "d")
    running.until(3)
    assert sum(len(rows) for rows in running.backend.batches) == 2


def test_long_inputs_are_tokenized_beside_the_others(running: Running) -> None:
    running.backend.n_ctx = 10 * N_CHARS_INLINE
    running.embed(1, *["a" * 1000] * 30)
    event = last(running.until(1), 1)
    assert isinstance(event, Embedded)
    assert event.usage.prompt_tokens == 30_000


def test_a_full_queue_turns_away() -> None:
    running = Running(FakeEmbedder(), n_queue=2)
    running.backend.gate.clear()
    for id in (1, 2, 3):
        running.embed(id, "a")
    event = last(running.until(3), 3)
    assert isinstance(event, Rejected)
    assert event.kind == "busy"
    running.backend.gate.set()
    running.until(1, 2)
    running.pipe.send(Shutdown())
    running.thread.join(10)


def test_a_model_that_fails_fails_everyone_and_ends(running: Running) -> None:
    running.backend.gate.clear()
    running.embed(1, "a")
    running.embed(2, "b")
    time.sleep(0.1)
    running.backend.failure = EngineError("The model could not compute a batch (-3).")
    running.backend.gate.set()
    events = running.until(1, 2)
    for id in (1, 2):
        failed = last(events, id)
        assert isinstance(failed, Failed)
        assert failed.is_dead
    running.thread.join(10)
    assert not running.thread.is_alive()
