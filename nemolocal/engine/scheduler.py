"""Continuous batching. Each step computes one batch in which every running answer has its next token and
prompts that are still being read have a chunk each, so a long prompt never stops the others' streams.

Pure Python over `Backend`: no ctypes, no clock, no thread, no I/O. What holds after every step: idle and
used slots are all slots, no slot has two sequences, and each request gets exactly one last event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nemolocal.engine.backend import Backend, Batch, CacheFullError, Row
from nemolocal.engine.cache import SlotCache, n_common
from nemolocal.engine.messages import Chunk, Failed
from nemolocal.engine.sequence import Sequence
from nemolocal.engine.text import TextStream
from nemolocal.errors import ContextLengthError
from nemolocal.types import FinishReason, GenerationParams, Usage

N_WORTH_WAITING = 64  # tokens; a shorter common beginning is read twice rather than waited for


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a request that went well; the worker adds the times."""

    id: int
    reason: FinishReason
    usage: Usage


StepEvent = Chunk | Ended | Failed


class Scheduler:
    """Waiting and running sequences of one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._cache = SlotCache(backend)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission: the last is the youngest
        self._events: list[StepEvent] = []
        self.n_prefilled = 0  # prompt tokens that the last step computed
        self.admitted: list[int] = []  # requests that got a slot in the last step

    # What the worker asks ------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_free_cells(self) -> int:
        """Cells of the KV cache that hold nothing, not even a memory."""
        return self._cache.n_free

    def is_flowing(self) -> bool:
        """Whether any answer is being written."""
        return any(sequence.is_decoding for sequence in self._running)

    def add(self, id: int, tokens: list[int], params: GenerationParams) -> None:
        """Queue a request. Raises ContextLengthError when the prompt leaves no room for a single token."""
        n_ctx = self._backend.n_ctx
        if len(tokens) + 1 > n_ctx:
            raise ContextLengthError(n_prompt=len(tokens), n_ctx=n_ctx)
        n_new = n_ctx if params.max_tokens is None else params.max_tokens
        self._waiting.append(
            Sequence(
                id=id,
                tokens=list(tokens),
                params=params,
                n_prompt=len(tokens),
                n_max=min(n_ctx, len(tokens) + n_new),
                sampler=self._backend.sampler(params.sampling, tokens),
                text=TextStream(params.stop),
            )
        )

    def cancel(self, id: int) -> bool:
        """Drop a request without a further event; false when it is not here (any more)."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.id == id:
                self._drop(sequence)
                return True
        return False

    def fail_all(self, message: str) -> list[StepEvent]:
        """Give up on every request, when the model can no longer be used."""
        everyone = [*self._running, *self._waiting]
        for sequence in everyone:
            self._drop(sequence)
        return [Failed(sequence.id, message) for sequence in everyone]

    def step(self, n_prefill: int) -> list[StepEvent]:
        """Compute one batch with at most `n_prefill` prompt tokens; the events of all sequences in it."""
        self._events, self.admitted = [], []
        self._admit()
        chosen, batch = self._plan(n_prefill)
        while not batch.rows and self._give_way():  # each waits for cells that the others hold
            chosen, batch = self._plan(n_prefill)
        while batch.rows:
            try:
                sampled = iter(self._backend.decode(batch))
            except CacheFullError:
                # Our count of cells is a bound, but llama.cpp's may be stricter (sliding windows).
                if not self._cache.forget_idle() and not self._give_way():
                    self._fail(chosen[0], "The KV cache has no place for this request.")
                chosen, batch = self._plan(n_prefill)
                continue
            for sequence, row in zip(chosen, batch.rows, strict=True):
                self._apply(sequence, row, next(sampled) if row.sampler else None)
            break
        return self._events

    # The phases of a step ------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting sequences a slot, first come first served, while their prompts fit beside those that
        run."""
        while self._waiting and self._cache.has_idle_slot():
            sequence = self._waiting[0]
            reuse = _reuses_cache(sequence.params)
            if self._running and not self._has_place(sequence, reuse=reuse):
                return
            if not reuse and not self._running:
                # Where in the cache a sequence lies changes the rounding: the same place gives the same text.
                self._cache.forget_idle()
            self._waiting.popleft()
            sequence.slot, sequence.n_computed = self._cache.take(sequence.tokens, reuse=reuse)
            if sequence.n_cached is None:
                sequence.n_cached = sequence.n_computed
            self._running.append(sequence)
            self.admitted.append(sequence.id)

    def _has_place(self, sequence: Sequence, *, reuse: bool) -> bool:
        """Whether a sequence should start now, beside those that run."""
        n_needed = len(sequence.tokens) + 1
        if reuse:
            if self._is_being_read(sequence.tokens):
                return False
            n_needed -= self._cache.n_known(sequence.tokens, _slots(self._running))
        n_promised = sum(other.n_pending + 1 for other in self._running)
        return self._cache.n_busy + n_promised + n_needed <= self._backend.n_ctx

    def _is_being_read(self, tokens: list[int]) -> bool:
        """Whether another request is reading the same beginning: it is read once, then shared."""
        if not self._backend.can_rollback:
            return False
        reading = [other for other in self._running if not other.is_decoding]
        elsewhere = set(range(self._backend.n_slots)) - set(_slots(reading))
        n_known = self._cache.n_known(tokens, elsewhere)
        return any(
            other.n_computed < n_shared and n_shared - n_known >= N_WORTH_WAITING
            for other in reading
            if (n_shared := n_common(other.tokens, tokens))
        )

    def _plan(self, n_prefill: int) -> tuple[list[Sequence], Batch]:
        """Choose what is computed: a token for every answer, then chunks of prompts, oldest first."""
        while not self._cache.make_room(sum(s.is_decoding for s in self._running)) and self._give_way():
            pass
        chosen, batch = [], Batch()
        n_left = self._backend.n_batch
        for sequence in self._running:
            if sequence.is_decoding and n_left:
                chosen.append(sequence)
                batch.rows.append(_row(sequence, 1))
                n_left -= 1
        self.n_prefilled = 0
        for sequence in self._running:
            if sequence.is_decoding:
                continue
            n = min(sequence.n_pending, n_left, n_prefill - self.n_prefilled)
            if n > 0 and not self._cache.make_room(batch.n_tokens + n):
                n = min(n, self._cache.n_free - batch.n_tokens)
            if n <= 0:
                break
            chosen.append(sequence)
            batch.rows.append(_row(sequence, n))
            n_left -= n
            self.n_prefilled += n
        return chosen, batch

    def _apply(self, sequence: Sequence, row: Row, token: int | None) -> None:
        """Record what was computed, and what was sampled, of one sequence."""
        self._cache.extend(row.slot, row.tokens)
        sequence.n_computed += len(row.tokens)
        if token is None:
            return
        if self._backend.is_end(token):
            self._end(sequence, "stop")
            return
        sequence.tokens.append(token)
        sequence.n_unsent += 1
        self._send(sequence, sequence.text.push(self._backend.piece(token)))
        if sequence.text.is_stopped:
            self._end(sequence, "stop")
        elif len(sequence.tokens) >= sequence.n_max:
            self._end(sequence, "length")

    # Ends ----------------------------------------------------------------------------------------

    def _send(self, sequence: Sequence, text: str) -> None:
        if text:
            self._events.append(Chunk(sequence.id, text, sequence.n_unsent))
            sequence.n_unsent = 0

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._send(sequence, sequence.text.finish())
        if sequence.text.is_stopped:
            reason = "stop"
        usage = Usage(sequence.n_prompt, sequence.n_new, sequence.n_cached or 0)
        self._events.append(Ended(sequence.id, reason, usage))
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence out; its slot is idle at once and remembers what was computed."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._cache.release(sequence.slot)
            sequence.slot = None
        sequence.sampler.close()

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._events.append(Failed(sequence.id, message, is_dead=False))
        self._drop(sequence)

    def _give_way(self) -> bool:
        """Set the youngest sequence back to the head of the queue; it goes on later, its stream intact."""
        if len(self._running) < 2:
            return False
        sequence = self._running.pop()
        assert sequence.slot is not None
        self._cache.release(sequence.slot)
        sequence.slot, sequence.n_computed = None, 0
        self._waiting.appendleft(sequence)
        return True


def _reuses_cache(params: GenerationParams) -> bool:
    """Whether a remembered beginning may be used; a seed that matters asks for the same text again."""
    if params.reuse_cache is not None:
        return params.reuse_cache
    return params.sampling.seed is None or params.sampling.temperature <= 0.0


def _slots(running: list[Sequence]) -> list[int]:
    return [sequence.slot for sequence in running if sequence.slot is not None]


def _row(sequence: Sequence, n: int) -> Row:
    """The next `n` pending tokens of a running sequence."""
    assert sequence.slot is not None
    start = sequence.n_computed
    is_last = n == sequence.n_pending
    tokens = sequence.tokens[start : start + n]
    return Row(sequence.slot, start, tokens, sequence.sampler if is_last else None)
