"""Continuous batching. Each step computes one batch in which every running answer has its next token and
prompts that are still being read have a chunk each, so a long prompt never stops the others' streams.

Pure Python over `Backend`: no ctypes, no clock, no thread, no I/O. What holds after every step: idle and
used slots are all slots, no slot has two sequences, and each request gets exactly one last event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nemolocal.engine import batching, checkpoints
from nemolocal.engine.backend import Adapters, Backend, CacheFullError, Row, Sampled
from nemolocal.engine.batching import Budget, Plan
from nemolocal.engine.cache import SlotCache, WarmState
from nemolocal.engine.messages import Chunk, Failed
from nemolocal.engine.prefixes import n_common
from nemolocal.engine.sequence import Sequence
from nemolocal.engine.speculation import Drafter, Speculation, Wish
from nemolocal.engine.text import TextStream
from nemolocal.errors import ContextLengthError, InvalidRequestError
from nemolocal.types import FinishReason, GenerationParams, Usage

N_WORTH_WAITING = 64  # tokens; a shorter common beginning is read twice rather than waited for
N_GUESSED_FOR = 8  # streams; with more of them a step is full of work and guesses no longer pay


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a request that went well; the worker adds the times."""

    id: int
    reason: FinishReason
    usage: Usage


StepEvent = Chunk | Ended | Failed


class Scheduler:
    """Waiting and running sequences of one backend. `step_cost` says what a step of so many rows takes, for
    the guesses of `drafter`."""

    def __init__(
        self,
        backend: Backend,
        *,
        drafter: Drafter | None = None,
        step_cost: Callable[[int], float] = lambda n_rows: 1.0,
        state_bytes: int = 0,
    ) -> None:
        self._backend = backend
        self._speculation: Speculation | None = None
        if drafter and backend.memory.can_rollback:
            self._speculation = Speculation(drafter, step_cost)
        self._cache = SlotCache(backend.memory, backend.n_slots, state_bytes=state_bytes)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission: the last is the youngest
        self._launched = Plan()
        self._is_launched = False
        self._n_steps = 0
        self._events: list[StepEvent] = []
        self.admitted: list[int] = []  # requests that got a slot in the last step

    # What the worker asks ------------------------------------------------------------------------

    @property
    def cache(self) -> SlotCache:
        return self._cache

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

    @property
    def n_cells(self) -> int:
        return self._backend.memory.n_cells

    @property
    def n_taken_cells(self) -> int:
        """Cells of the KV cache that hold something, be it a memory."""
        return self._cache.n_taken

    @property
    def n_prefilled(self) -> int:
        """Prompt tokens that the last step computed."""
        return self._launched.n_prefill

    @property
    def n_rows(self) -> int:
        """Tokens that the last step computed."""
        return self._launched.n_tokens

    def has_prompts(self) -> bool:
        """Whether any prompt is, or is about to be, read."""
        is_due = bool(self._waiting) and self._cache.has_idle_slot()
        return is_due or not all(sequence.is_decoding for sequence in self._running)

    def is_flowing(self) -> bool:
        """Whether any answer is being written."""
        return any(sequence.is_decoding for sequence in self._running)

    def add(
        self,
        id: int,
        tokens: list[int],
        params: GenerationParams,
        *,
        adapters: Adapters = (),
        warm: WarmState | None = None,
    ) -> None:
        """Queue a request. Raises ContextLengthError when the prompt leaves no room for a single token, and
        InvalidRequestError for a shift of the context that the model's memory cannot do."""
        backend = self._backend
        if params.shift_context and not backend.memory.can_shift:
            raise InvalidRequestError(
                "This model cannot go on past a full context: its memory of the middle cannot be taken out.",
                param="context_shift",
            )
        if len(tokens) + 1 > backend.n_ctx:
            raise ContextLengthError(n_prompt=len(tokens), n_ctx=backend.n_ctx)
        borders = []
        if self._cache.keeps_checkpoints:
            borders = checkpoints.borders(tokens, backend.vocab.is_control)
        n_left = backend.n_ctx - len(tokens)
        n_new_most = n_left if params.max_tokens is None else params.max_tokens
        self._waiting.append(
            Sequence(
                id=id,
                tokens=list(tokens),
                params=params,
                n_prompt=len(tokens),
                n_new_most=n_new_most if params.shift_context else min(n_new_most, n_left),
                sampler=backend.sampler(params.sampling, tokens, n_logprobs=params.n_logprobs),
                text=TextStream(params.stop),
                adapters=adapters,
                warm=warm,
                borders=borders,
            )
        )

    def cancel(self, id: int) -> bool:
        """Drop a request without a further event; false when it is not here (any more). Not between `launch`
        and `collect`: what is being computed must stay."""
        assert not self._is_launched
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

    def launch(self, budget: Budget) -> bool:
        """Begin a step; false when there is nothing to compute. `collect` must follow in any case."""
        assert not self._is_launched
        self._events, self.admitted, self._launched = [], [], Plan()
        self._n_steps += 1
        self._admit()
        chosen = self._plan(budget)
        while not chosen.entries and self._give_way():  # each waits for cells that the others hold
            chosen = self._plan(budget)
        while chosen.entries:
            try:
                self._backend.launch(chosen.batch())
            except CacheFullError:
                # Our count of cells is a bound, but llama.cpp's may be stricter (sliding windows).
                if not self._cache.forget_idle() and not self._give_way():
                    self._fail(chosen, "The KV cache has no place for this request.")
                chosen = self._plan(budget)
                continue
            self._launched, self._is_launched = chosen, True
            return True
        return False

    def collect(self) -> list[StepEvent]:
        """Finish the step; the events of all sequences in it."""
        entries, self._is_launched = self._launched.entries, False
        sampled = iter(self._backend.collect() if entries else [])
        for sequence, row in entries:
            if sequence is None:
                self._backend.memory.remove(row.slot, row.start)
            else:
                self._apply(sequence, row, next(sampled) if row.sampler else None)
        return self._events

    def step(self, budget: Budget) -> list[StepEvent]:
        """One whole step."""
        self.launch(budget)
        return self.collect()

    # The phases of a step ------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting sequences a slot, first come first served, while their prompts fit beside those that
        run."""
        while self._waiting and self._cache.has_idle_slot():
            sequence = self._waiting[0]
            reuse = sequence.params.reuses_cache
            if self._running and not self._has_place(sequence, reuse=reuse):
                return
            if not reuse and not self._running:
                # Where in the cache a sequence lies changes the rounding: the same place gives the same text.
                self._cache.forget_idle()
            self._waiting.popleft()
            sequence.slot, sequence.n_computed = self._cache.take(
                sequence.tokens, sequence.adapters, reuse=reuse, warm=sequence.warm
            )
            sequence.warm = None
            if sequence.n_cached is None:
                sequence.n_cached = sequence.n_computed
            self._running.append(sequence)
            self.admitted.append(sequence.id)

    def _has_place(self, sequence: Sequence, *, reuse: bool) -> bool:
        """Whether a sequence should start now, beside those that run. The head of the queue is asked about in
        each step, so what is cheap to know comes first."""
        is_shared, n_left = self._backend.memory.is_shared, 0
        if is_shared:
            n_promised = sum(other.n_pending + 1 for other in self._running)
            n_left = self._backend.memory.n_cells - self._cache.n_busy - n_promised
            if n_left < 2:  # a token is always computed, whatever is known, and the next one needs a cell
                return False
        if reuse and self._is_being_read(sequence):
            return False
        n_needed = len(sequence.tokens) + 1
        if is_shared and reuse and n_needed > n_left:
            n_needed -= self._cache.n_known(sequence.tokens, sequence.adapters, _slots(self._running))
        return not is_shared or n_needed <= n_left

    def _is_being_read(self, sequence: Sequence) -> bool:
        """Whether another request is reading the same beginning: it is read once, then shared."""
        reading = [
            other for other in self._running if not other.is_decoding and other.adapters == sequence.adapters
        ]
        if not self._backend.memory.can_rollback:
            n_coming = max((_n_to_come(other, sequence.tokens) for other in reading), default=0)
            if not n_coming:
                return False
            return n_coming - self._cache.n_at_hand(sequence.tokens, sequence.adapters) >= N_WORTH_WAITING
        elsewhere = set(range(self._backend.n_slots)) - set(_slots(reading))
        n_known = self._cache.n_known(sequence.tokens, sequence.adapters, elsewhere)
        return any(
            other.n_computed < n_shared and n_shared - n_known >= N_WORTH_WAITING
            for other in reading
            if (n_shared := n_common(other.tokens, sequence.tokens))
        )

    def _plan(self, budget: Budget) -> Plan:
        """What the running sequences compute next. With different adapters they take turns."""
        group = self._group()
        flowing = [sequence for sequence in self._running if sequence.is_decoding]
        guesses = self._guesses([sequence for sequence in flowing if sequence.adapters == group])
        n_guessed = sum(map(len, guesses.values()))
        while not self._cache.make_room(len(flowing) + n_guessed) and self._give_way():
            group, guesses, n_guessed = self._group(), {}, 0
            flowing = [sequence for sequence in self._running if sequence.is_decoding]
        members = [sequence for sequence in self._running if sequence.adapters == group]
        return batching.plan(members, self._cache, self._backend, budget=budget, guesses=guesses)

    def _group(self) -> Adapters:
        """The adapters whose turn it is."""
        groups = list(dict.fromkeys(sequence.adapters for sequence in self._running))
        return groups[self._n_steps % len(groups)] if groups else ()

    def _guesses(self, decoding: list[Sequence]) -> dict[int, list[int]]:
        """What the answers may go on with, where computing that ahead pays."""
        n_spare = self._backend.n_outputs - self._backend.n_slots
        if not self._speculation or not decoding or len(decoding) > N_GUESSED_FOR or not n_spare:
            return {}
        wishes = []
        for sequence in decoding:
            room = self._backend.n_ctx - len(sequence.tokens) - 1
            n_most = min(n_spare // len(decoding), sequence.n_new_most - sequence.n_new - 1, room)
            if n_most > 0 and sequence.params.guesses_ahead:
                assert sequence.slot is not None
                wishes.append(Wish(sequence.id, sequence.slot, sequence.tokens, n_most))
        return self._speculation.guesses(wishes, len(decoding))

    def _apply(self, sequence: Sequence, row: Row, sampled: Sampled | None) -> None:
        """Record what was computed, and what was sampled, of one sequence."""
        self._cache.extend(row.slot, row.tokens)
        if sampled is None:
            sequence.n_computed += len(row.tokens)
            if sequence.n_computed in sequence.borders:
                self._cache.checkpoint(row.slot)
            return
        n_right = len(sampled.tokens) - 1
        sequence.n_computed += len(row.tokens) - row.n_drafted + n_right
        if row.n_drafted:
            self._cache.truncate(row.slot, sequence.n_computed)
            sequence.n_drafted += row.n_drafted
            assert self._speculation
            self._speculation.observe(sequence.id, n_guessed=row.n_drafted, n_right=n_right)
        for index, token in enumerate(sampled.tokens):
            if self._backend.vocab.is_end(token):
                self._end(sequence, "stop")
                return
            sequence.tokens.append(token)
            sequence.n_new += 1
            sequence.n_accepted += index < n_right  # not what is right beyond the end
            sequence.n_unsent += 1
            sequence.logprobs += sampled.logprobs[index : index + 1]
            self._send(sequence, sequence.text.push(self._backend.vocab.piece(token)))
            if sequence.text.is_stopped:
                self._end(sequence, "stop")
                return
            if sequence.n_new >= sequence.n_new_most:
                self._end(sequence, "length")
                return
        if len(sequence.tokens) >= self._backend.n_ctx and not self._shift(sequence):
            self._end(sequence, "length")

    def _shift(self, sequence: Sequence) -> bool:
        """Make room in a full context by forgetting the older half of what follows the prompt (or, after a
        prompt of more than half the context, of what follows its first quarter)."""
        n_ctx = self._backend.n_ctx
        if not sequence.params.shift_context or sequence.slot is None:
            return False
        n_kept = sequence.n_prompt if sequence.n_prompt <= n_ctx // 2 else n_ctx // 4
        n_dropped = (sequence.n_computed - n_kept) // 2
        if n_dropped <= 0:
            return False
        if self._cache.shift(sequence.slot, n_kept, n_dropped):
            sequence.n_computed -= n_dropped
        else:  # others hold what would have to move: the rest is read anew
            self._cache.truncate(sequence.slot, n_kept)
            sequence.n_computed = n_kept
        del sequence.tokens[n_kept : n_kept + n_dropped]
        sequence.n_kept = n_kept
        return True

    # Ends ----------------------------------------------------------------------------------------

    def _send(self, sequence: Sequence, text: str) -> None:
        if text:
            self._events.append(Chunk(sequence.id, text, sequence.n_unsent, tuple(sequence.logprobs)))
            sequence.n_unsent = 0
            sequence.logprobs = []

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._send(sequence, sequence.text.finish())
        if sequence.text.is_stopped:
            reason = "stop"
        usage = Usage(
            prompt_tokens=sequence.n_prompt,
            completion_tokens=sequence.n_new,
            cached_tokens=sequence.n_cached or 0,
            drafted_tokens=sequence.n_drafted,
            accepted_tokens=sequence.n_accepted,
        )
        self._events.append(Ended(sequence.id, reason, usage))
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence out; its slot is idle at once and remembers what was computed."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._leave(sequence)
        sequence.sampler.close()
        if self._speculation:
            self._speculation.forget(sequence.id)

    def _leave(self, sequence: Sequence) -> None:
        """Give up the slot. What follows a shift was computed after other text, so it is not remembered."""
        assert sequence.slot is not None
        if sequence.n_kept is not None:
            self._cache.truncate(sequence.slot, min(sequence.n_kept, sequence.n_computed))
        self._cache.release(sequence.slot)
        sequence.slot, sequence.n_computed = None, 0

    def _fail(self, chosen: Plan, message: str) -> None:
        """Give up on the first of those that cannot be computed together."""
        sequence = next(sequence for sequence, _ in chosen.entries if sequence)
        self._events.append(Failed(sequence.id, message, is_dead=False))
        self._drop(sequence)

    def _give_way(self) -> bool:
        """Set the youngest sequence back to the head of the queue; it goes on later, its stream intact."""
        if len(self._running) < 2:
            return False
        sequence = self._running.pop()
        self._leave(sequence)
        self._waiting.appendleft(sequence)
        return True


def _n_to_come(reading: Sequence, prompt: list[int]) -> int:
    """Tokens up to the last checkpoint that a prompt being read will leave for one that begins like it."""
    n_shared = min(n_common(reading.tokens, prompt), len(prompt) - 1)
    return max((at for at in reading.borders if reading.n_computed < at <= n_shared), default=0)


def _slots(running: Iterable[Sequence]) -> list[int]:
    return [sequence.slot for sequence in running if sequence.slot is not None]
