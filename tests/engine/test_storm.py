"""A storm of requests on a real engine in its own process, over small models with random weights.

Requests of all lengths and kinds, of which a third leave at a random moment, and at times more than the queue
takes. Each ends in exactly one way, the memory is free again, and what was said is what is said alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import Event, Failed, Finished, LoadSpec, Occupancy, Rejected
from nemolocal.errors import BusyError, NemoLocalError
from nemolocal.types import (
    Delta,
    Finish,
    GenerationParams,
    Prompt,
    SamplingParams,
    Segment,
    Started,
    TokenLogprob,
)
from tests import synthetic

pytestmark = [pytest.mark.model, pytest.mark.anyio]

N_CTX = 8192
N_SLOTS = 8
N_QUEUE = 48
N_AT_ONCE = 2 * N_SLOTS
N_TOO_MANY = 2 * (N_SLOTS + N_QUEUE)
N_LONGEST = 6000
TOKENS = (*range(3, 384), *[1, 2] * 6)  # of the tiny vocabulary; 1 and 2 are borders of turns
TOLERANCE = 0.015  # in log probability; one wrong token before an answer changes it by more
LONE = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Request:
    """What is asked, when it is left (after so many items, None: never), and what came of it."""

    prompt: Prompt
    params: GenerationParams
    leaves_after: int | None = None
    text: str = ""
    n_told: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    outcome: str = ""
    finish: Finish | None = None


class Ledger:
    """All events that an engine's process sent, by request."""

    def __init__(self, engine: EngineClient) -> None:
        self.events: dict[int, list[Event]] = {}
        dispatch = engine._dispatch

        def note(events: list[Event]) -> None:
            for event in events:
                if hasattr(event, "id"):
                    self.events.setdefault(event.id, []).append(event)
            dispatch(events)

        engine._dispatch = note  # type: ignore[method-assign]

    def check(self) -> None:
        """Nothing follows a last event, and nothing failed."""
        for events in self.events.values():
            assert not any(isinstance(event, Finished | Failed | Rejected) for event in events[:-1])
            assert not isinstance(events[-1], Failed)


def text(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.choices(TOKENS, k=n))


def mixed(rng: random.Random, n: int, n_longest: int) -> list[list[Request]]:
    """`n` requests with up to `n_longest` tokens, mostly few; those in one list are choices of one answer."""
    stems = [text(rng, n_longest // part) for part in (150, 60, 20, 8, 2)]
    made: list[list[Request]] = []
    while n:
        prompt: Prompt = text(rng, round(n_longest ** (rng.random() ** 3)) if made else n_longest)
        if made and rng.random() < 0.4:
            prompt = (*rng.choice(stems), *text(rng, rng.randint(1, 60)))
        elif rng.random() < 0.1:
            prompt = (
                Segment("user", is_control=True),
                Segment("the thing and " * rng.randint(1, n_longest // 15)),
            )
        n_choices = min(n, rng.choice([1] * 8 + [2, 4]))
        params = [a_way(rng) for _ in range(n_choices)] if n_choices == 1 else [a_way(rng)] * n_choices
        group = [Request(prompt, each) for each in params]
        for request in group:
            if rng.random() < 1 / 3:
                request.leaves_after = rng.choice([0, 1, 2, rng.randint(3, 30)])
                request.params = replace(request.params, max_tokens=None)
        made.append(group)
        n -= n_choices
    return made


def a_way(rng: random.Random) -> GenerationParams:
    """Some of all that a request may ask for."""
    sampling = rng.choice(
        [
            LONE,
            LONE,
            SamplingParams(temperature=0.0),
            SamplingParams(),
            SamplingParams(seed=rng.randrange(99)),
            SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True),
            SamplingParams(repeat_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5),
            SamplingParams(mirostat_tau=5.0, seed=3),
            SamplingParams(dry_multiplier=0.8, xtc_probability=0.5),
            SamplingParams(typical_p=0.6, logit_bias=((40, 3.0), (41, -100.0))),
        ]
    )
    return GenerationParams(
        sampling=sampling,
        max_tokens=rng.choice([1, 2, rng.randint(1, 40), 60 if sampling == LONE else 30]),
        stop=rng.choice([(), (), ("w7", "xy"), ("e",)]),
        reuse_cache=rng.choice([None, None, None, True, False]),
        n_logprobs=rng.choice([None, 0, 3]),
        shift_context=rng.random() < 0.3,
        speculate=rng.choice([None, True, False]),
    )


def impossible(rng: random.Random) -> tuple[Request, str]:
    """A request that cannot be served, and the name of what is said to it."""
    return rng.choice(
        [
            (Request(text(rng, N_CTX), GenerationParams()), "ContextLengthError"),
            (Request(text(rng, 20_000), GenerationParams(max_tokens=1)), "ContextLengthError"),
            (Request((), GenerationParams()), "InvalidRequestError"),
            (Request((5, 384), GenerationParams()), "InvalidRequestError"),
            (
                Request((5,), GenerationParams(SamplingParams(logit_bias=((384, 1.0),)))),
                "InvalidRequestError",
            ),
            (Request((5,), GenerationParams(adapters=(("style", 1.0),))), "InvalidRequestError"),
        ]
    )


async def run(engine: EngineClient, request: Request) -> None:
    """One request from its beginning to its only end."""
    assert not request.outcome
    try:
        if request.leaves_after == 0:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await read(engine, request)
        else:
            await read(engine, request)
    except NemoLocalError as error:
        request.outcome = type(error).__name__
    else:
        request.outcome = "finished" if request.finish else "left"


async def read(engine: EngineClient, request: Request) -> None:
    n_items = 0
    async with aclosing(engine.generate(request.prompt, request.params)) as stream:
        async for item in stream:
            assert request.finish is None, "an item after the last one"
            assert isinstance(item, Started) == (n_items == 0)
            n_items += 1
            if isinstance(item, Delta):
                assert item.text
                request.text += item.text
                request.n_told += item.n_tokens
                request.logprobs += item.logprobs
            elif isinstance(item, Finish):
                request.finish = item
            if n_items == request.leaves_after and not request.finish:
                return


def check(request: Request) -> None:
    """An answer keeps to what was asked."""
    if not request.finish:
        return
    usage, params = request.finish.usage, request.params
    if not isinstance(request.prompt[0], Segment):
        assert usage.prompt_tokens == len(request.prompt)
    assert 0 <= usage.cached_tokens < usage.prompt_tokens
    if params.reuse_cache is False:
        assert usage.cached_tokens == 0
    assert (
        params.max_tokens is None or 1 <= usage.completion_tokens <= params.max_tokens or not request.n_told
    )
    assert request.n_told <= usage.completion_tokens
    assert usage.accepted_tokens <= usage.drafted_tokens
    assert usage.drafted_tokens == 0 or params.guesses_ahead
    assert not any(stop in request.text for stop in params.stop)
    if params.n_logprobs is None:
        assert not request.logprobs
    else:
        assert len(request.logprobs) == request.n_told
        assert all(len(each.top) == params.n_logprobs for each in request.logprobs)


async def storm(
    engine: EngineClient, rng: random.Random, n: int, *, n_longest: int = N_LONGEST, can_shift: bool = True
) -> list[Request]:
    """`n` requests, N_AT_ONCE of them at a time."""
    groups = mixed(rng, n, n_longest)
    for request in () if can_shift else itertools.chain.from_iterable(groups):
        request.params = replace(request.params, shift_context=False)
    gate = asyncio.Semaphore(N_AT_ONCE)

    async def one(request: Request) -> None:
        async with gate:
            if rng.random() < 0.2:
                go_on(rng, request, requests, n_longest)
            await run(engine, request)

    requests = [request for group in groups for request in group]
    await asyncio.gather(*map(one, requests))
    return requests


def go_on(rng: random.Random, request: Request, others: list[Request], n_longest: int) -> None:
    """Make a request the next turn of one that is answered, where it is known what that said."""
    earlier = rng.choice(others)
    if earlier.finish and earlier.logprobs and not isinstance(earlier.prompt[0], Segment):
        said = (each.chosen.token for each in earlier.logprobs)
        longer = (*earlier.prompt, *said, *text(rng, rng.randint(1, 30)))
        if len(longer) <= n_longest:
            request.prompt = longer


async def burst(
    engine: EngineClient, rng: random.Random, n: int, *, n_tokens: int, leaves_after: int | None = None
) -> None:
    """`n` at once: as many as slots and queue take are accepted, the others told to come again."""
    params = GenerationParams(LONE, max_tokens=4)
    requests = [Request(text(rng, n_tokens), params, leaves_after=leaves_after) for _ in range(n)]
    await asyncio.gather(*(run(engine, request) for request in requests))
    outcomes = [request.outcome for request in requests]
    accepted = "left" if leaves_after else "finished"
    assert outcomes[:N_QUEUE] == [accepted] * min(n, N_QUEUE)
    assert set(outcomes) == ({accepted, BusyError.__name__} if n == N_TOO_MANY else {accepted})


async def refusals(engine: EngineClient, rng: random.Random) -> None:
    for _ in range(20):
        request, error = impossible(rng)
        await run(engine, request)
        assert request.outcome == error


async def lone(engine: EngineClient, prompt: Prompt, *, n_cells: int) -> str:
    """What a request says that finds nobody and nothing in the engine; then its own cells are the only ones
    taken, and all slots are free."""
    request = Request(prompt, GenerationParams(LONE, max_tokens=8, reuse_cache=False))
    await run(engine, request)
    assert request.outcome == "finished"
    assert engine.n_active == 0
    async with asyncio.timeout(60):  # it is told after the last event
        while engine.occupancy != Occupancy(0, 0, n_cells, len(prompt) + 8 - 1):
            await asyncio.sleep(0.01)
    return request.text


async def check_alone(engine: EngineClient, requests: list[Request]) -> None:
    """Greedy answers of the storm are what is said alone, and as probable, but for what rounding changes."""
    greedy = [
        request
        for request in requests
        if request.finish and request.logprobs and request.params.sampling == LONE
    ]
    # Long repetitions round far more than other texts.
    greedy = [request for request in greedy if not isinstance(request.prompt[0], Segment)]
    assert len(greedy) > 5
    for request in greedy[:50]:
        again = Request(request.prompt, replace(request.params, reuse_cache=False, speculate=False))
        await run(engine, again)
        for one, other in zip(request.logprobs, again.logprobs, strict=False):
            assert abs(one.chosen.logprob - other.chosen.logprob) < TOLERANCE
            if one.chosen.token != other.chosen.token:
                break  # a tie, after which both texts are right


@asynccontextmanager
async def started(spec: LoadSpec, folder: Path) -> AsyncIterator[tuple[EngineClient, Ledger]]:
    engine = await EngineClient.start(
        replace(spec, n_threads=1, n_queue=N_QUEUE, n_ubatch=128), folder / "engine.log"
    )
    try:
        yield engine, Ledger(engine)
    finally:
        await engine.close()


def write(folder: Path, kind: str = "llama", name: str = "tiny", **shape: Any) -> str:
    return str(
        synthetic.write(
            folder / f"{name}.gguf", replace(synthetic.TINY[kind], **{"n_ctx_train": N_CTX} | shape)
        )
    )


async def test_a_thousand_mixed_requests(tmp_path: Path) -> None:
    # One small head: most of the work is attention over thousands of cells.
    path = write(tmp_path, layers=2, n_head=1, n_head_kv=1, head_dim=16)
    spec = LoadSpec(path, N_CTX, N_SLOTS, state_bytes=1 << 20)
    async with started(spec, tmp_path) as (engine, ledger):
        process, rng = psutil.Process(engine.pid), random.Random(1)
        few = text(rng, 50)
        before = await lone(engine, few, n_cells=N_CTX)
        await storm(engine, rng, 300)
        await burst(engine, rng, N_AT_ONCE, n_tokens=N_LONGEST, leaves_after=1)
        await storm(engine, rng, 100)
        before_bytes = process.memory_info().rss
        requests = await storm(engine, rng, 1000)
        after_bytes = process.memory_info().rss
        await burst(engine, rng, N_TOO_MANY, n_tokens=N_LONGEST, leaves_after=1)
        await burst(engine, rng, N_TOO_MANY, n_tokens=200)
        await refusals(engine, rng)
        assert await lone(engine, few, n_cells=N_CTX) == before
        await lone(engine, text(rng, N_CTX - 8), n_cells=N_CTX)  # llama.cpp has a place for as many tokens
        outcomes = Counter(request.outcome for request in requests)
        assert outcomes.keys() == {"finished", "left"}
        assert outcomes.total() == 1000
        assert 200 < outcomes["left"] < 400
        for request in requests:
            check(request)
        ledger.check()
        assert after_bytes <= before_bytes * 1.05
        await check_alone(engine, requests)


@pytest.mark.parametrize(
    "form",
    [
        "split",
        "draft model",
        "sampled where it is computed",
        "deci",
        "nemotron_h",
        "nemotron_h, split",
        "gemma3",
    ],
)
async def test_storm_over_other_forms_of_memory(tmp_path: Path, form: str) -> None:
    kind = form.split(",")[0]
    spec = LoadSpec(write(tmp_path, kind if kind in synthetic.TINY else "llama"), 1024, N_SLOTS)
    n_cells = spec.n_ctx
    if "split" in form:
        spec, n_cells = replace(spec, kv_layout="split"), spec.n_ctx * N_SLOTS
    elif form == "draft model":
        spec = replace(spec, draft=spec.path)
    elif form == "sampled where it is computed":
        spec = replace(spec, sampling="device")
    async with started(spec, tmp_path) as (engine, ledger):
        rng = random.Random(2)
        few = text(rng, 50)
        before = await lone(engine, few, n_cells=n_cells)
        can_shift = kind not in ("nemotron_h", "gemma3")
        requests = await storm(engine, rng, 150, n_longest=900, can_shift=can_shift)
        assert await lone(engine, few, n_cells=n_cells) == before
        assert {request.outcome for request in requests} == {"finished", "left"}
        for request in requests:
            check(request)
        assert sum(request.finish.usage.cached_tokens for request in requests if request.finish) > 1000
        ledger.check()
        await check_alone(engine, requests)
