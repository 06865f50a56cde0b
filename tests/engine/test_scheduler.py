"""Invariants of continuous batching, checked after every step on a backend that is strict about its cache."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from nemolocal.engine.batching import Budget
from nemolocal.engine.cache import N_IDLE_CELLS, WarmState
from nemolocal.engine.checkpoints import N_QUESTION
from nemolocal.engine.client import _translate
from nemolocal.engine.messages import Chunk, Failed
from nemolocal.engine.scheduler import Ended, Scheduler, StepEvent
from nemolocal.errors import ContextLengthError, EngineDiedError, EngineError
from nemolocal.types import GenerationParams, SamplingParams
from tests.engine.fake_backend import CONTROL, FakeBackend, answer

PLENTY = 10_000


def params(n_max: int | None = 8, **more: object) -> GenerationParams:
    return GenerationParams(max_tokens=n_max, **more)  # type: ignore[arg-type]


def run(scheduler: Scheduler, n_prefill: int = PLENTY, most: int = 100_000) -> list[StepEvent]:
    """Step until nothing is left to do."""
    events: list[StepEvent] = []
    for _ in range(most):
        if not scheduler.has_work():
            return events
        events += scheduler.step(Budget(n_prefill, n_prefill))
    raise AssertionError("the scheduler does not come to an end")


def text_of(events: list[StepEvent], id: int) -> str:
    return "".join(event.text for event in events if isinstance(event, Chunk) and event.id == id)


def ends_of(events: list[StepEvent], id: int) -> list[Ended]:
    return [event for event in events if isinstance(event, Ended) and event.id == id]


def expected(prompt: list[int], n_max: int) -> str:
    return "".join(f"<{token}>" for token in answer(prompt, n_max))


def test_one_request() -> None:
    scheduler = Scheduler(FakeBackend())
    scheduler.add(1, [5, 6, 7], params(8))
    events = run(scheduler)
    assert text_of(events, 1) == expected([5, 6, 7], 8)
    [end] = ends_of(events, 1)
    assert (end.usage.prompt_tokens, end.usage.cached_tokens) == (3, 0)
    assert end.usage.completion_tokens == len(answer([5, 6, 7], 8))


def test_answers_do_not_depend_on_company() -> None:
    prompts = {id: [id, id + 1, 3 * id] * id for id in range(1, 9)}
    scheduler = Scheduler(FakeBackend(n_ctx=512, n_slots=8))
    for id, prompt in prompts.items():
        scheduler.add(id, prompt, params(12))
    events = run(scheduler, n_prefill=5)
    for id, prompt in prompts.items():
        assert text_of(events, id) == expected(prompt, 12)


def test_long_prompt_does_not_stop_a_stream() -> None:
    backend = FakeBackend(n_ctx=2048, n_batch=64)
    scheduler = Scheduler(backend)
    prompt = next([n] for n in range(1, 999) if len(answer([n], 50)) == 50)
    scheduler.add(1, prompt, params(50))
    scheduler.step(Budget(16, 16))
    scheduler.add(2, [9] * 600, params(1))
    for _ in range(20):
        assert any(isinstance(event, Chunk) and event.id == 1 for event in scheduler.step(Budget(16, 16)))
        assert backend.batches[-1].n_tokens == 1 + 16


def test_step_never_exceeds_the_batch() -> None:
    backend = FakeBackend(n_ctx=4096, n_slots=4, n_batch=16)
    scheduler = Scheduler(backend)
    for id in range(4):
        scheduler.add(id, [id + 1] * 100, params(3))
    run(scheduler)
    assert max(batch.n_tokens for batch in backend.batches) == 16


def test_prompt_that_leaves_no_room_is_refused() -> None:
    scheduler = Scheduler(FakeBackend(n_ctx=64))
    scheduler.add(1, [1] * 63, params(5))
    with pytest.raises(ContextLengthError) as caught:
        scheduler.add(2, [1] * 64, params(5))
    assert (caught.value.n_prompt, caught.value.n_ctx) == (64, 64)
    [end] = ends_of(run(scheduler), 1)
    assert end.usage.completion_tokens <= 1


def test_answer_ends_at_the_context() -> None:
    backend = FakeBackend(n_ctx=40)
    prompt = next([n] for n in range(1, 999) if len(answer([n], 100)) == 100)
    scheduler = Scheduler(backend)
    scheduler.add(1, prompt, params(None))
    [end] = ends_of(run(scheduler), 1)
    assert end.reason == "length"
    assert end.usage.completion_tokens == 39


def test_next_turn_reads_only_what_is_new() -> None:
    scheduler = Scheduler(FakeBackend())
    first = [5, 6, 7]
    scheduler.add(1, first, params(8))
    run(scheduler)
    said = answer(first, 8)
    second = [*first, *said, 8, 9]
    scheduler.add(2, second, params(4))
    events = run(scheduler)
    [end] = ends_of(events, 2)
    # The last token of an answer is never computed, unless the end token was sampled after it.
    assert end.usage.cached_tokens in (len(first) + len(said), len(first) + len(said) - 1)
    assert text_of(events, 2) == expected(second, 4)


def test_shared_beginning_is_copied_and_the_other_memory_kept() -> None:
    backend = FakeBackend()
    scheduler = Scheduler(backend)
    shared = list(range(1, 41))
    scheduler.add(1, [*shared, 77], params(2))
    run(scheduler)
    scheduler.add(2, [*shared, 88], params(2))
    scheduler.add(3, [*shared, 77], params(2))
    events = run(scheduler)
    assert ends_of(events, 2)[0].usage.cached_tokens == 40
    assert ends_of(events, 3)[0].usage.cached_tokens == 40  # one token is always computed
    assert text_of(events, 2) == expected([*shared, 88], 2)


def test_prompt_asked_for_many_times_at_once_is_read_once() -> None:
    backend = FakeBackend(n_ctx=400, n_slots=4)
    scheduler = Scheduler(backend)
    prompt = [n % 97 + 1 for n in range(300)]
    for id in range(4):
        scheduler.add(id, prompt, params(10))
    events = run(scheduler)
    assert [ends_of(events, id)[0].usage.cached_tokens for id in range(4)] == [0, 299, 299, 299]
    assert sum(batch.n_tokens for batch in backend.batches) < 300 + 4 * 12
    assert all(text_of(events, id) == expected(prompt, 10) for id in range(4))


def test_shared_cells_are_counted_once() -> None:
    """Four answers to one document that takes three quarters of the cache run side by side."""
    backend = FakeBackend(n_ctx=400, n_slots=4)
    scheduler = Scheduler(backend)
    document = [n % 89 + 1 for n in range(300)]
    for id in range(4):
        scheduler.add(id, [*document, 200 + id], params(20))
    n_most = 0
    while scheduler.has_work():
        scheduler.step(Budget(PLENTY, PLENTY))
        n_most = max(n_most, scheduler.n_running)
    assert n_most == 4


def test_seeded_request_reads_its_whole_prompt() -> None:
    """And finds the cache as after a start, since where a sequence lies in it changes the rounding."""
    backend = FakeBackend()
    scheduler = Scheduler(backend)
    for id, more in enumerate([{}, {"sampling": SamplingParams(seed=1)}, {"reuse_cache": False}]):
        scheduler.add(id, [4, 5, 6, 7], params(2, **more))
        events = scheduler.step(Budget(PLENTY, PLENTY))
        if more:
            assert sum(bool(tokens) for tokens in backend.memory.held) == 1
        events += run(scheduler)
        assert ends_of(events, id)[0].usage.cached_tokens == 0


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": SamplingParams(seed=1), "reuse_cache": True},
        {"sampling": SamplingParams(seed=1, temperature=0.0)},
    ],
)
def test_seed_that_decides_nothing_reuses(more: dict[str, object]) -> None:
    scheduler = Scheduler(FakeBackend())
    for id in (1, 2):
        scheduler.add(id, [4, 5, 6, 7], params(2, **more))
        events = run(scheduler)
    assert ends_of(events, 2)[0].usage.cached_tokens == 3


def test_state_that_cannot_roll_back_serves_only_what_goes_on_from_its_end() -> None:
    backend = FakeBackend(can_rollback=False)
    scheduler = Scheduler(backend)
    scheduler.add(1, [5, 6, 7], params(3))
    run(scheduler)
    held = next(list(tokens) for tokens in backend.memory.held if tokens)
    scheduler.add(2, [5, 6, 9], params(3))
    assert ends_of(run(scheduler), 2)[0].usage.cached_tokens == 0
    scheduler.add(3, [*held, 1, 2], params(3))
    events = run(scheduler)
    assert ends_of(events, 3)[0].usage.cached_tokens == len(held)
    assert text_of(events, 3) == expected([*held, 1, 2], 3)


@pytest.mark.parametrize("can_rollback", [True, False])
def test_state_from_disk_is_not_put_in_the_place_of_a_longer_one(can_rollback: bool) -> None:
    backend = FakeBackend(can_rollback=can_rollback)
    scheduler = Scheduler(backend)
    scheduler.add(1, list(range(1, 31)), params(1))
    run(scheduler)
    index = scheduler.cache.unsaved(1, ())
    assert index is not None
    warm = scheduler.cache.freeze(index)
    scheduler.add(2, list(range(1, 61)), params(1))
    run(scheduler)
    scheduler.add(3, list(range(1, 91)), params(1), warm=warm)
    assert ends_of(run(scheduler), 3)[0].usage.cached_tokens == 60
    scheduler.cache.forget_idle()
    scheduler.add(4, list(range(1, 91)), params(1), warm=warm)
    assert ends_of(run(scheduler), 4)[0].usage.cached_tokens == 30


def test_stop_string_ends_and_is_not_shown() -> None:
    backend = FakeBackend()
    prompt = next([n] for n in range(1, 999) if len(answer([n], 6)) == 6)
    third = f"<{answer(prompt, 6)[2]}>"
    scheduler = Scheduler(backend)
    scheduler.add(1, prompt, params(6, stop=(third,)))
    events = run(scheduler)
    assert text_of(events, 1) == expected(prompt, 2)
    assert ends_of(events, 1)[0].reason == "stop"


def test_first_come_first_served() -> None:
    scheduler = Scheduler(FakeBackend(n_ctx=1024, n_slots=2))
    for id in range(10):
        scheduler.add(id, [id + 1] * 5, params(3))
    ended = [event.id for event in run(scheduler) if isinstance(event, Ended)]
    assert all(abs(place - id) <= 2 for place, id in enumerate(ended))


def test_full_cache_sets_the_youngest_back_and_its_stream_goes_on() -> None:
    backend = FakeBackend(n_ctx=60, n_slots=3)
    starts = [n for n in range(1, 999) if len(answer([n], 40)) == 40][:3]
    scheduler = Scheduler(backend)
    for id, start in enumerate(starts):
        scheduler.add(id, [start], params(40))
    events = run(scheduler)
    for id, start in enumerate(starts):
        assert text_of(events, id) == expected([start], 40)
        assert len(ends_of(events, id)) == 1


def test_cache_that_refuses_a_batch_is_answered() -> None:
    backend = FakeBackend()
    scheduler = Scheduler(backend)
    scheduler.add(1, [5, 6], params(4))
    scheduler.add(2, [7, 8], params(4))
    backend.n_refusals = 1
    events = run(scheduler)
    assert text_of(events, 1) == expected([5, 6], 4)
    assert text_of(events, 2) == expected([7, 8], 4)
    scheduler.add(3, [9], params(4))
    backend.n_refusals = 10
    [failed] = [event for event in run(scheduler) if isinstance(event, Failed)]
    assert (failed.id, failed.is_dead) == (3, False)
    with pytest.raises(EngineError) as caught:
        _translate(failed)
    assert not isinstance(caught.value, EngineDiedError)


def test_prompts_that_wait_for_each_others_cells_do_not_wait_for_ever() -> None:
    """A document lies in the cache twice, since one request had to read it whole; a third goes on from the
    idle copy, whose cells nobody had counted as taken."""
    document = [n % 89 + 1 for n in range(60)]
    scheduler = Scheduler(FakeBackend(n_ctx=150, n_slots=3, n_batch=64))
    scheduler.add(0, document, params(1))
    events = run(scheduler)
    other = next([n] for n in range(200, 999) if len(answer([n], 5)) == 5)
    scheduler.add(1, other, params(3))
    events += scheduler.step(Budget(PLENTY, PLENTY))
    whole, third = [*document, *range(500, 550)], [*document, *range(600, 620)]
    scheduler.add(2, whole, params(1, reuse_cache=False))
    events += scheduler.step(Budget(60, 60))
    while scheduler.n_running > 1:
        events += scheduler.step(Budget(0, 0))
    scheduler.add(3, third, params(1))
    events += run(scheduler, most=100)
    assert text_of(events, 2) == expected(whole, 1)
    assert text_of(events, 3) == expected(third, 1)


def test_full_context_whose_end_another_shares_is_gone_past() -> None:
    """What would have to move is in use elsewhere, so that it is read anew."""
    scheduler = Scheduler(FakeBackend(n_ctx=40, n_slots=2))
    start = next(n for n in range(1, 999) if len(answer([n], 39)) == 39)
    text = [start, *answer([start], 39)]
    scheduler.add(1, [start], params(60, shift_context=True))
    events = [event for _ in range(34) for event in scheduler.step(Budget(PLENTY, PLENTY))]
    other = [*text[:34], 5]
    scheduler.add(2, other, params(1))
    while len(events) < 39:
        events += scheduler.step(Budget(0, 0))
    assert scheduler.n_running == 2
    events += run(scheduler)
    assert text_of(events, 2) == expected(other, 1)
    assert ends_of(events, 2)[0].usage.cached_tokens == 34
    rest = [start, *text[1 + 19 :]]  # the older half of what follows the prompt is gone
    assert text_of(events, 1) == expected([start], 39) + expected(rest, 60 - 39)


def test_failed_model_ends_every_request() -> None:
    backend = FakeBackend(n_slots=2)
    scheduler = Scheduler(backend)
    for id in range(5):
        scheduler.add(id, [id + 1], params(50))
    scheduler.step(Budget(PLENTY, PLENTY))
    backend.is_broken = True
    with pytest.raises(EngineError):
        scheduler.step(Budget(PLENTY, PLENTY))
    assert {event.id for event in scheduler.fail_all("gone")} <= set(range(5))
    assert not scheduler.has_work()
    assert all(sampler.n_closed == 1 for sampler in backend.samplers)


@pytest.mark.parametrize("can_rollback", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_random_load(seed: int, can_rollback: bool) -> None:
    """Requests of all lengths come, share beginnings, and a third is cancelled at any step."""
    rng = random.Random(seed)
    backend = FakeBackend(n_ctx=300, n_slots=rng.randint(1, 6), n_batch=24, can_rollback=can_rollback)
    scheduler = Scheduler(backend)
    stems = [[rng.randrange(1, 50) for _ in range(rng.randint(1, 120))] for _ in range(4)]
    asked: dict[int, tuple[list[int], int]] = {}
    cancelled: set[int] = set()
    events: list[StepEvent] = []
    while len(asked) < 150 or scheduler.has_work():
        if len(asked) < 150 and rng.random() < 0.5:
            prompt = [*rng.choice(stems), *(rng.randrange(1, 50) for _ in range(rng.randint(0, 100)))]
            n_max = rng.randint(1, 60)
            asked[len(asked)] = prompt, n_max
            scheduler.add(len(asked) - 1, prompt, params(n_max))
        if asked and rng.random() < 0.15:
            victim = rng.choice(list(asked))
            if scheduler.cancel(victim):
                cancelled.add(victim)
        new = scheduler.step(Budget(rng.randint(1, 40), rng.randint(1, 40)))
        assert not any(event.id in cancelled for event in new)
        events += new
        assert scheduler.n_running <= backend.n_slots
        assert scheduler.n_free_cells == backend.n_ctx - backend.memory.n_taken
    last = Counter(event.id for event in events if isinstance(event, Ended | Failed))
    assert last == Counter(set(asked) - cancelled)
    for id, (prompt, n_max) in asked.items():
        if id not in cancelled:
            assert text_of(events, id) == expected(prompt, min(n_max, 300 - len(prompt)))
    assert len(cancelled) > 5
    assert all(sampler.n_closed == 1 for sampler in backend.samplers)


def parked_conversations(backend: FakeBackend, n: int) -> Scheduler:
    """A scheduler that has read `n` long prompts, each parked in a quiet moment."""
    scheduler = Scheduler(backend, state_bytes=1 << 20)
    for id in range(n):
        scheduler.add(id, [id + 1] * 600, params(1))
        run(scheduler)
        while scheduler.cache.can_park():
            scheduler.cache.park_one()
    return scheduler


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("can_rollback", [True, False])
def test_more_conversations_than_slots_are_remembered(can_rollback: bool, is_shared: bool) -> None:
    backend = FakeBackend(n_ctx=2048, n_slots=2, n_batch=512, can_rollback=can_rollback, is_shared=is_shared)
    scheduler = parked_conversations(backend, 5)
    prompt = [*[1] * 600, 7, 8]
    scheduler.add(9, prompt, params(3))
    events = run(scheduler)
    [end] = ends_of(events, 9)
    assert end.usage.cached_tokens == 600
    assert text_of(events, 9) == expected(prompt, 3)


def test_what_is_parked_makes_room_for_what_runs() -> None:
    backend = FakeBackend(n_ctx=8192, n_slots=16, n_batch=512)
    scheduler = parked_conversations(backend, 12)
    assert backend.memory.n_taken <= N_IDLE_CELLS + 600
    unparked = Scheduler(FakeBackend(n_ctx=8192, n_slots=16, n_batch=512))
    for id in range(12):
        unparked.add(id, [id + 1] * 600, params(1))
        run(unparked)
    assert unparked.cache.n_taken == 12 * 600
    scheduler.add(99, [3] * 610, params(1))
    assert ends_of(run(scheduler), 99)[0].usage.cached_tokens == 600


def test_parked_states_stay_within_their_limit() -> None:
    backend = FakeBackend(n_ctx=4096, n_slots=2, n_batch=512)
    scheduler = Scheduler(backend, state_bytes=5_000)  # one state of 600 tokens takes some 2,400 bytes
    for id in range(4):
        scheduler.add(id, [id + 1] * 600, params(1))
        run(scheduler)
        while scheduler.cache.can_park():
            scheduler.cache.park_one()
    scheduler.add(8, [1] * 610, params(1))
    assert ends_of(run(scheduler), 8)[0].usage.cached_tokens == 0
    scheduler.add(9, [4] * 610, params(1))
    assert ends_of(run(scheduler), 9)[0].usage.cached_tokens == 600


def test_what_has_no_place_in_ram_stays_in_its_slot() -> None:
    backend = FakeBackend(n_ctx=4 * N_IDLE_CELLS, n_slots=3, n_batch=512)
    scheduler = Scheduler(backend, state_bytes=1_000)
    document = [5] * (N_IDLE_CELLS + 100)
    scheduler.add(1, document, params(1))
    run(scheduler)
    while scheduler.cache.can_park():
        scheduler.cache.park_one()
    scheduler.add(2, [6] * 10, params(1))
    run(scheduler)
    scheduler.add(3, [*document, 1], params(1))
    assert ends_of(run(scheduler), 3)[0].usage.cached_tokens == len(document)


def test_a_new_conversation_leaves_another_one_that_begins_alike_its_memory() -> None:
    backend = FakeBackend(n_ctx=4096, n_batch=512, can_rollback=False)
    scheduler = Scheduler(backend, state_bytes=1 << 20)
    system, user = [CONTROL, *[1] * 100], [CONTROL, *[2] * 100]
    first = [*system, *user, *[3] * 300]
    scheduler.add(1, first, params(1))
    run(scheduler)
    scheduler.add(2, [*system, CONTROL, 4, 5], params(1))
    assert ends_of(run(scheduler), 2)[0].usage.cached_tokens == len(system)
    scheduler.add(3, [*first, 6], params(1))
    assert ends_of(run(scheduler), 3)[0].usage.cached_tokens == len(first)


def test_a_state_that_has_no_place_makes_nobody_forget() -> None:
    backend = FakeBackend(n_ctx=256, n_batch=256)
    scheduler = Scheduler(backend)
    scheduler.add(1, [1] * 100, params(1))
    run(scheduler)
    longer = WarmState([2] * 300, memoryview(bytearray(b"[false, [], []]")))
    scheduler.add(2, [2] * 120, params(1), warm=longer)
    run(scheduler)
    scheduler.add(3, [1] * 101, params(1))
    assert ends_of(run(scheduler), 3)[0].usage.cached_tokens == 100


@pytest.mark.parametrize("can_rollback", [True, False])
def test_choices_of_one_prompt_read_it_once(can_rollback: bool) -> None:
    backend = FakeBackend(n_ctx=8192, n_batch=512, can_rollback=can_rollback)
    scheduler = Scheduler(backend, state_bytes=1 << 20)
    prompt = [CONTROL, *[1] * 1200, CONTROL, *[2] * 300, CONTROL, 7]
    for id in range(4):
        scheduler.add(id, prompt, params(3))
    events = run(scheduler, n_prefill=200)
    assert all(text_of(events, id) == expected(prompt, 3) for id in range(4))
    n_read = sum(sum(len(row.tokens) for row in batch.rows) for batch in backend.batches)
    assert n_read < len(prompt) + 4 * 10


def test_a_checkpoint_that_is_not_kept_is_waited_for_but_not_for_ever() -> None:
    backend = FakeBackend(n_ctx=8192, n_batch=512, can_rollback=False)
    scheduler = Scheduler(backend, state_bytes=20)  # no state is so small
    prompt = [CONTROL, *[1] * 300, CONTROL, 7]
    for id in range(3):
        scheduler.add(id, prompt, params(3))
    events = run(scheduler, n_prefill=50)
    assert all(text_of(events, id) == expected(prompt, 3) for id in range(3))


@pytest.mark.parametrize("is_shared", [True, False])
def test_another_question_about_a_text_that_cannot_be_gone_back_in(is_shared: bool) -> None:
    """Its slot is given away meanwhile; the state before the first question is still there."""
    backend = FakeBackend(n_ctx=4096, n_slots=2, n_batch=512, can_rollback=False, is_shared=is_shared)
    scheduler = Scheduler(backend, state_bytes=1 << 20)
    text = [5 + i % 90 for i in range(2000)]
    scheduler.add(1, [*text, 300, 301], params(2))
    run(scheduler)
    while scheduler.cache.can_park():
        scheduler.cache.park_one()
    for id in (2, 3):
        scheduler.add(id, [600 + id] * 300, params(1))
        run(scheduler)
    prompt = [*text, 400, 401, 402]
    scheduler.add(9, prompt, params(3))
    events = run(scheduler)
    [end] = ends_of(events, 9)
    assert end.usage.cached_tokens == 2002 - N_QUESTION
    assert text_of(events, 9) == expected(prompt, 3)


def test_a_prompt_with_a_seed_is_always_cut_at_the_same_places() -> None:
    """However fast the last steps were: where a prompt is cut changes the rounding, and so the text."""
    cuts = set()
    for n_prefill in (16, 100, 500):
        backend = FakeBackend(n_ctx=2048, n_batch=512)
        scheduler = Scheduler(backend)
        scheduler.add(1, [7] * 700, params(2, sampling=SamplingParams(seed=5)))
        run(scheduler, n_prefill)
        cuts.add(tuple(batch.n_tokens for batch in backend.batches))
    assert len(cuts) == 1
