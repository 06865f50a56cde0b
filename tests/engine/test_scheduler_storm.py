"""Random load over every form of the memory, with what must hold checked after every step.

Requests of all kinds come at any moment and some leave at any moment; the cache refuses batches now and then,
states are saved and put back. Whatever happens, each request has one last event, and its text is the one that
it has alone on an empty machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from nemolocal.engine import cache as cache_module
from nemolocal.engine import checkpoints
from nemolocal.engine.backend import Adapters
from nemolocal.engine.batching import Budget
from nemolocal.engine.cache import WarmState
from nemolocal.engine.messages import Chunk, Failed
from nemolocal.engine.prefixes import n_common
from nemolocal.engine.scheduler import Ended, Scheduler, StepEvent
from nemolocal.engine.speculation import Drafter, ModelDrafter, NgramDrafter, Wish
from nemolocal.errors import ContextLengthError
from nemolocal.types import FinishReason, GenerationParams, SamplingParams
from tests.engine.fake_backend import CONTROL, END, FakeBackend, next_token, repeating

N_CTX = 160
N_REQUESTS = 90


@dataclass(frozen=True)
class Form:
    """One kind of machine to load."""

    is_shared: bool = True
    can_rollback: bool = True
    n_slots: int = 4
    state_bytes: int = 0
    adapters: tuple[Adapters, ...] = ((),)
    drafter: str = ""
    refuses: bool = False
    warms: bool = False
    shifts: bool = False


@dataclass
class Asked:
    """A request, and what has come back."""

    prompt: list[int]
    params: GenerationParams
    adapters: Adapters
    events: list[StepEvent] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def last(self) -> list[Ended | Failed]:
        return [event for event in self.events if isinstance(event, Ended | Failed)]


class Guesser:
    """Guesses some tokens right and some wrong, at random."""

    def __init__(self, storm: Storm) -> None:
        self._storm = storm
        self.is_free = storm.rng.random() < 0.5

    def draft(self, wishes: Sequence[Wish]) -> dict[int, list[int]]:
        return {wish.id: self._guess(wish) for wish in wishes if self._storm.rng.random() < 0.8}

    def _guess(self, wish: Wish) -> list[int]:
        rng = self._storm.rng
        guesses: list[int] = []
        n_right = rng.randint(0, wish.n_most)
        scales = list(map(int, self._storm.asked[wish.id].adapters))
        for _ in range(rng.randint(1, wish.n_most)):
            right = self._storm.says([*wish.tokens, *guesses, *scales])
            guesses.append(right if len(guesses) < n_right else rng.randrange(1, 50))
        return guesses

    def forget(self, id: int) -> None: ...

    def close(self) -> None: ...


def alone(
    asked: Asked, says: Callable[[Sequence[int]], int], *, can_shift: bool
) -> tuple[list[int], FinishReason]:
    """The tokens of an answer by definition, and why it ended, stop strings left aside."""
    tokens = list(asked.prompt)
    said: list[int] = []
    n_prompt = len(tokens)
    shifts = asked.params.shift_context and can_shift
    n_left = N_CTX - n_prompt
    n_most = n_left if asked.params.max_tokens is None else asked.params.max_tokens
    while True:
        token = says([*tokens, *map(int, asked.adapters)])
        if token == END:
            return said, "stop"
        tokens.append(token)
        said.append(token)
        if len(said) >= n_most:
            return said, "length"
        if len(tokens) == N_CTX:
            n_kept = n_prompt if n_prompt <= N_CTX // 2 else N_CTX // 4
            n_dropped = (N_CTX - 1 - n_kept) // 2
            if not shifts:
                return said, "length"
            del tokens[n_kept : n_kept + n_dropped]


class Storm:
    """A scheduler on a fake machine, and everything that was asked of it."""

    def __init__(self, form: Form, seed: int) -> None:
        self.form, self.rng = form, random.Random(seed)
        self.says = repeating if form.drafter == "ngram" else next_token
        self.backend = self._machine()
        self.scheduler = Scheduler(self.backend, drafter=self._drafter(), state_bytes=form.state_bytes)
        self.asked: dict[int, Asked] = {}
        self.n_refused = 0
        self.saved: list[WarmState] = []
        self.stems = [self._text(self.rng.randint(1, 130)) for _ in range(4)]

    def _machine(self, *, n_drafted: int = 12) -> FakeBackend:
        return FakeBackend(
            n_ctx=N_CTX,
            n_slots=self.form.n_slots,
            n_batch=24,
            can_rollback=self.form.can_rollback,
            is_shared=self.form.is_shared,
            n_drafted=n_drafted,
            says=self.says,
        )

    def _drafter(self) -> Drafter | None:
        match self.form.drafter:
            case "ngram":
                return NgramDrafter()
            case "model":
                return ModelDrafter(self._machine(n_drafted=0))
            case "any":
                return Guesser(self)
        return None

    def _text(self, n: int) -> list[int]:
        """Some text with turns in it."""
        return [CONTROL if self.rng.random() < 0.05 else self.rng.randrange(1, 50) for _ in range(n)]

    def ask(self) -> None:
        """One more request, of any kind."""
        rng = self.rng
        prompt = [*rng.choice(self.stems)][: rng.choice([None, rng.randint(1, 130)])]
        prompt += self._text(rng.choice([0, 1, rng.randint(0, 60)]))
        if self.asked and rng.random() < 0.2:  # the next turn of an earlier one, or the same once more
            earlier = rng.choice(list(self.asked.values()))
            said, _ = alone(earlier, self.says, can_shift=False)
            prompt = [*earlier.prompt, *said[: rng.choice([0, None])], *self._text(rng.randint(0, 10))]
        if self.saved and rng.random() < 0.15:
            prompt = [*rng.choice(self.saved).tokens, *self._text(rng.randint(1, 10))]
        if self.scheduler.n_running and rng.random() < 0.1:  # goes on from what is just being said
            prompt = [*rng.choice(self.scheduler._running).tokens, *self._text(rng.randint(0, 2))]
        stop = (f"<{rng.randrange(1, 1000)}>", f"{rng.randrange(1, 10)}><{rng.randrange(1, 10)}")
        params = GenerationParams(
            sampling=SamplingParams(seed=rng.choice([None, None, 5])),
            max_tokens=rng.choice([1, rng.randint(1, 40), rng.randint(1, 300), None]),
            stop=stop[: rng.choice([0, 0, 1, 2])],
            reuse_cache=rng.choice([None, None, True, False]),
            n_logprobs=rng.choice([None, None, 0, 3]),
            speculate=rng.choice([None, True, True, False]),
            shift_context=self.form.shifts and rng.random() < 0.5,
        )
        if params.shift_context and params.max_tokens is None:
            params = GenerationParams(max_tokens=250, shift_context=True)
        id, asked = len(self.asked) + self.n_refused, Asked(prompt, params, rng.choice(self.form.adapters))
        warm = self._warm(prompt, asked.adapters)
        try:
            self.scheduler.add(id, prompt, params, adapters=asked.adapters, warm=warm)
        except ContextLengthError:
            assert len(prompt) >= N_CTX
            self.n_refused += 1
        else:
            assert len(prompt) < N_CTX
            self.asked[id] = asked

    def _warm(self, prompt: list[int], adapters: Adapters) -> WarmState | None:
        """A saved state that is of use for this prompt, as reading back from disk would find one."""
        if not self.saved or adapters != self.form.adapters[0] or self.rng.random() < 0.5:
            return None
        warm = max(self.saved, key=lambda warm: n_common(warm.tokens, prompt[:-1]))
        n = n_common(warm.tokens, prompt[:-1])
        is_of_use = n == len(warm.tokens) or (self.form.can_rollback and n > 0)
        return WarmState(warm.tokens, memoryview(bytearray(warm.state))) if is_of_use else None

    def save(self) -> None:
        """What the process does in a quiet moment."""
        cache = self.scheduler.cache
        if cache.can_park():
            cache.park_one()
        index = cache.unsaved(8, self.form.adapters[0])
        if index is not None and self.form.warms:
            self.saved.append(cache.freeze(index))

    def cancel(self) -> None:
        id = self.rng.choice(list(self.asked))
        if self.scheduler.cancel(id):
            assert not self.asked[id].last
            self.asked[id].is_cancelled = True

    def step(self) -> None:
        n = self.rng.choice([0, 1, 7, 24, 60])
        if self.form.refuses and self.rng.random() < 0.05:
            self.backend.n_refusals = self.rng.choice([1, 1, 1, 1, 1, 6])
        self.backend.memory.refuses_states = self.form.refuses and self.rng.random() < 0.1
        for event in self.scheduler.step(Budget(max(n, 1), self.rng.choice([1, n, 48]))):
            asked = self.asked[event.id]
            assert not asked.is_cancelled, "an event after leaving"
            assert not asked.last, "an event after the last one"
            asked.events.append(event)
        self.check_memory()

    def check_memory(self) -> None:
        """What the scheduler believes is what the machine holds."""
        memory, cache, scheduler = self.backend.memory, self.scheduler.cache, self.scheduler
        used = {sequence.slot: sequence for sequence in scheduler._running if sequence.slot is not None}
        assert len(used) == scheduler.n_running
        assert len(used) + len(cache.idle_lengths()) == self.form.n_slots
        assert not used.keys() & cache.idle_lengths().keys()
        for slot in cache._slots:
            assert slot.tokens == memory.held[slot.index] == memory.state[slot.index]
            assert slot.is_used == (slot.index in used)
            may_be_moved = slot.is_used and used[slot.index].n_kept is not None
            assert may_be_moved or not any(cell.is_moved for cell in memory.cells[slot.index])
            assert {cell.adapters for cell in memory.cells[slot.index]} <= {slot.adapters}
            assert slot.n_saved <= len(slot.tokens)
        has_begun = [sequence.n_cached is not None for sequence in scheduler._waiting]
        assert has_begun == sorted(has_begun, reverse=True), "one that was set back goes on first"
        new = [sequence.id for sequence in scheduler._waiting if sequence.n_cached is None]
        assert new == sorted(new)
        for index, sequence in used.items():
            assert memory.held[index] == sequence.tokens[: sequence.n_computed]
            assert sequence.n_computed < len(sequence.tokens) < N_CTX + 1
        assert scheduler.n_taken_cells == memory.n_taken
        if memory.is_shared:
            assert scheduler.n_free_cells == memory.n_cells - memory.n_taken
            held = {cell for index in used for cell in memory.cells[index]}
            assert cache.n_busy == len(held)

    def check_answers(self) -> None:
        can_shift = self.backend.memory.can_shift
        for asked in self.asked.values():
            if asked.is_cancelled:
                continue
            [last] = asked.last
            if isinstance(last, Failed):
                assert self.form.refuses
                assert not last.is_dead
                continue
            said, reason = alone(asked, self.says, can_shift=can_shift)
            self.check_answer(asked, last, said, reason)

    def check_answer(self, asked: Asked, last: Ended, said: list[int], reason: FinishReason) -> None:
        whole = "".join(f"<{token}>" for token in said)
        stops = [at for at in (whole.find(stop) for stop in asked.params.stop) if at >= 0]
        chunks = [event for event in asked.events if isinstance(event, Chunk)]
        assert all(chunk.text for chunk in chunks)
        assert "".join(chunk.text for chunk in chunks) == whole[: min(stops, default=None)]
        assert last.reason == ("stop" if stops else reason)
        usage = last.usage
        assert usage.prompt_tokens == len(asked.prompt)
        assert 0 <= usage.cached_tokens < len(asked.prompt)
        assert 0 <= usage.accepted_tokens <= usage.drafted_tokens
        assert usage.drafted_tokens == 0 or asked.params.speculate is not False
        if not stops:
            assert usage.completion_tokens == len(said) == sum(chunk.n_tokens for chunk in chunks)
        told = [logprob.chosen.token for chunk in chunks for logprob in chunk.logprobs]
        n_told = 0 if asked.params.n_logprobs is None else sum(chunk.n_tokens for chunk in chunks)
        assert told == said[:n_told]
        assert len(told) == n_told


LORA = ((1.0,), (0.0,), (3.0,))
FORMS = {
    "shared": Form(warms=True),
    "shared, parked": Form(state_bytes=20_000, shifts=True, adapters=LORA, warms=True),
    "shared, one slot": Form(n_slots=1, shifts=True, drafter="any"),
    "shared, guesses": Form(drafter="any", warms=True, refuses=True),
    "shared, looked up": Form(drafter="ngram", shifts=True, n_slots=6),
    "shared, draft model": Form(drafter="model", adapters=LORA),
    "shared, all at once": Form(
        drafter="any", adapters=LORA, refuses=True, warms=True, shifts=True, n_slots=6, state_bytes=9_000
    ),
    "shared, shifted": Form(shifts=True, n_slots=3, warms=True),
    "split": Form(is_shared=False, n_slots=6),
    "split, parked": Form(is_shared=False, state_bytes=5_000, refuses=True, drafter="any"),
    "split, draft model": Form(is_shared=False, drafter="model", shifts=True),
    "split, all at once": Form(
        is_shared=False, drafter="any", adapters=LORA, refuses=True, warms=True, shifts=True
    ),
    "no way back": Form(can_rollback=False),
    "no way back, split": Form(can_rollback=False, is_shared=False, state_bytes=5_000, warms=True),
    "checkpoints": Form(can_rollback=False, state_bytes=100_000, adapters=LORA, warms=True),
    "checkpoints, refusals": Form(can_rollback=False, state_bytes=5_000, warms=True, refuses=True),
}


@pytest.fixture(autouse=True)
def _small_things_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "N_WORTH_PARKING", 10)
    monkeypatch.setattr(cache_module, "N_IDLE_CELLS", 40)
    monkeypatch.setattr(checkpoints, "N_WORTH_KEEPING", 8)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FORMS)
def test_storm(name: str, seed: int) -> None:
    storm = Storm(FORMS[name], seed)
    rng, n_steps = storm.rng, 0
    while len(storm.asked) < N_REQUESTS or storm.scheduler.has_work():
        if len(storm.asked) < N_REQUESTS:
            for _ in range(rng.choice([0, 0, 0, 1, 1, 6])):
                storm.ask()
        if storm.asked and rng.random() < 0.1:
            storm.cancel()
        if rng.random() < 0.2:
            storm.save()
        storm.step()
        n_steps += 1
        assert n_steps < 20_000, "it comes to no end"
    storm.check_answers()
    assert sum(asked.is_cancelled for asked in storm.asked.values()) > 3
    assert all(sampler.n_closed == 1 for sampler in storm.backend.samplers)
    assert storm.scheduler.n_running == storm.scheduler.n_waiting == 0
    storm.scheduler.cache.forget_idle()
    assert storm.scheduler.n_free_cells == storm.backend.memory.n_cells
    assert storm.backend.memory.n_taken == 0
