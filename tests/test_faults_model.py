"""Engines that are killed or made to hang while they work: real processes with a tiny model."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from nemolocal import config
from nemolocal.errors import EngineDiedError
from nemolocal.service import Service
from nemolocal.types import Delta, Finish, GenerationParams, SamplingParams, StreamItem
from tests import synthetic
from tests.profiles import machine

pytestmark = [pytest.mark.model, pytest.mark.anyio]

WATCHDOG_S = 1.5
ENDLESS = GenerationParams(SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=900)
SHORT = GenerationParams(SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=3)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """Over two copies of a tiny model."""
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    one = synthetic.write_tiny(folder / "one.gguf")
    shutil.copy(one, folder / "two.gguf")
    flags = {"ctx": 1024, "slots": 4, "threads": 1, "watchdog_s": WATCHDOG_S}
    made = Service(config.load(flags), detect=machine)
    yield made
    await made.close()


async def answer(service: Service, ref: str = "one", params: GenerationParams = SHORT) -> Finish:
    """The last item; checks that it comes once."""
    items: list[StreamItem] = [item async for item in service.find_model(ref).complete([1, 2, 3], params)]
    assert [isinstance(item, Finish) for item in items] == [False] * (len(items) - 1) + [True]
    assert isinstance(items[-1], Finish)
    return items[-1]


async def start(service: Service, ref: str, n: int) -> list[asyncio.Task[Finish]]:
    """Requests that go on for long, of which the first has begun to be answered."""
    begun = asyncio.Event()

    async def run() -> Finish:
        async for item in service.find_model(ref).complete([1, 2, 3], ENDLESS):
            if isinstance(item, Delta):
                begun.set()
            if isinstance(item, Finish):
                return item
        raise AssertionError("a stream without a last item")

    tasks = [asyncio.create_task(run()) for _ in range(n)]
    await asyncio.wait_for(begun.wait(), 30)
    return tasks


def process(service: Service, ref: str) -> psutil.Process:
    engine = next(x.engine for x in service._residency.residents if x.name == ref)
    return psutil.Process(engine.pid)


async def test_killed_engine_answers_everyone_and_is_loaded_anew(service: Service) -> None:
    await answer(service, "two")
    running = await start(service, "one", 6)
    killed = process(service, "one")
    killed.kill()
    results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert errors
    assert {type(error) for error in errors} == {EngineDiedError}
    assert "process ended" in str(errors[0])
    assert [card.id for card in service.list_models() if card.is_loaded] == ["two"]
    assert (await answer(service, "one")).reason == "length"
    assert process(service, "one").pid != killed.pid
    assert (await answer(service, "two")).reason == "length"
    totals = service.totals()
    assert (totals["one"].n_loads, totals["two"].n_loads) == (2, 1)
    assert totals["one"].n_failures == len(errors)


async def test_engine_that_hangs_is_ended_and_loaded_anew(service: Service) -> None:
    await answer(service, "two")
    running = await start(service, "one", 6)
    hung = process(service, "one")
    hung.suspend()
    before = time.monotonic()
    assert (await answer(service, "two")).reason == "length"  # the others do not notice
    results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert errors
    assert all("no sign of life" in str(error) for error in errors)
    assert {type(error) for error in errors} == {EngineDiedError}
    assert WATCHDOG_S * 0.5 < time.monotonic() - before < WATCHDOG_S * 3
    assert (await answer(service, "one")).reason == "length"
    assert not hung.is_running()


async def test_nothing_is_lost_when_engines_die_and_hang_under_load(service: Service) -> None:
    """Ten faults at random moments: every request ends in an answer or in one clear error."""
    dice, n_errors = random.Random(7), 0
    for fault in range(10):
        ref = dice.choice(["one", "two"])
        running = await start(service, ref, 5)
        running += [asyncio.create_task(answer(service, dice.choice(["one", "two"]))) for _ in range(5)]
        await asyncio.sleep(dice.random() * 0.05)
        struck = process(service, ref)
        if fault % 3:
            struck.kill()
        else:
            struck.suspend()
        late = [asyncio.create_task(answer(service, x)) for x in ("one", "two")]
        results = await asyncio.wait_for(asyncio.gather(*running, *late, return_exceptions=True), 30)
        assert all(isinstance(result, Finish | EngineDiedError) for result in results), results
        n_errors += sum(isinstance(result, EngineDiedError) for result in results)
        assert await answer(service, ref)
    assert service.status().state == "ready"
    assert n_errors > 10
    engines = [process(service, resident.name) for resident in service._residency.residents]
    await service.close()
    assert not any(engine.is_running() for engine in engines)
