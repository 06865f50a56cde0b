"""Engines that are killed, hang and are unloaded under load: every request ends in an answer or in one clear
error, and the next one finds an engine again."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from nemolocal import config
from nemolocal.errors import EngineDiedError, NemoLocalError
from nemolocal.service import Service
from nemolocal.types import Delta, Finish, GenerationParams, Message, SamplingParams, Started
from tests import synthetic
from tests.profiles import machine

pytestmark = [pytest.mark.model, pytest.mark.anyio]

N_CLIENTS = 7
PATIENCE_S = 100  # far more than anything takes: only a request that never ends meets it
WATCHDOG_S = 1.5


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    one = synthetic.write_tiny(folder / "one.gguf")
    shutil.copy(one, folder / "two.gguf")
    flags: dict[str, Any] = {"ctx": 1024, "slots": 3, "threads": 1, "queue": 64, "watchdog_s": WATCHDOG_S}
    service = Service(config.load(flags | {"max_models": 1}), detect=machine)
    yield service
    await service.close()


@dataclass
class Crowd:
    """Clients that ask without end, some of whom leave early, and what came of each request."""

    service: Service
    refs: tuple[str, ...]
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[NemoLocalError] = field(default_factory=list)
    recovered: set[str] = field(default_factory=set)  # models that answered since they were struck
    n_begun: int = 0
    is_over: bool = False

    async def client(self) -> None:
        while not self.is_over:
            self.n_begun += 1
            try:
                async with asyncio.timeout(PATIENCE_S):
                    outcome = await self.ask()
            except NemoLocalError as error:
                self.errors.append(error)
                outcome = type(error).__name__
                await asyncio.sleep(0.01)
            self.outcomes[outcome] += 1

    async def ask(self) -> str:
        """One request; how it ended, but for errors."""
        rng = self.rng
        words = "tell me of the thing " * rng.choice([1, 1, 3, 20])
        sampling = SamplingParams(ignore_eos=True, seed=rng.choice([None, 3]))
        params = GenerationParams(sampling, max_tokens=rng.randint(1, 60))
        leaves_after = rng.choice([None, None, rng.randint(0, 20)])
        ref = rng.choice(self.refs)
        model = self.service.find_model(ref)
        stream = model.chat([Message("user", words + str(rng.random()))], params)
        n_items, n_tokens = 0, 0
        try:
            if leaves_after == 0:  # also while a model is being loaded
                asking = asyncio.ensure_future(anext(stream))
                await asyncio.wait([asking], timeout=rng.random() / 2)
                asking.cancel()
                (result,) = await asyncio.gather(asking, return_exceptions=True)
                if failure := failure_behind(result):  # it failed before the client left, and was counted
                    raise failure
                return "left"
            async for item in stream:
                assert isinstance(item, Started) == (n_items == 0)
                n_items += 1
                if isinstance(item, Delta):
                    n_tokens += item.n_tokens
                elif isinstance(item, Finish):
                    assert n_tokens <= item.usage.completion_tokens == params.max_tokens
                    self.recovered.add(ref)
                    return "answered"
                if n_items == leaves_after:
                    return "left"
        finally:
            await stream.aclose()
        raise AssertionError("a stream that just stops")

    async def until_answered(self, n: int) -> None:
        """Wait until so many more requests were answered."""
        n += self.outcomes["answered"]
        async with asyncio.timeout(PATIENCE_S):
            while self.outcomes["answered"] < n:
                await asyncio.sleep(0.01)

    def check_errors(self) -> None:
        """Whoever met a disaster was told so once, in one line, and what to do."""
        assert {type(error) for error in self.errors} <= {EngineDiedError}
        for error in self.errors:
            assert re.search(r"process ended \(|no sign of life", error.message)
            assert "\n" not in str(error)
            assert "again" in error.hint


def failure_behind(result: Any) -> NemoLocalError | None:
    """The error that had come when a request was cancelled in its last moments."""
    while isinstance(result, BaseException):
        if isinstance(result, NemoLocalError):
            return result
        result = result.__context__
    return None


async def disaster(crowd: Crowd, kind: str) -> None:
    """Something happens to an engine that is in use, whatever it is doing. Not three times in a row to one
    model, which would then be left alone."""
    if kind == "unloaded":
        await crowd.service.unload(crowd.rng.choice(crowd.refs))
        return
    async with asyncio.timeout(PATIENCE_S):
        while not (used := [x for x in crowd.service._residency.residents if x.engine.n_active]) or (
            used[0].name not in crowd.recovered
        ):
            await asyncio.sleep(0)
    crowd.recovered.discard(used[0].name)
    process = psutil.Process(used[0].engine.pid)
    if kind == "killed":
        process.kill()
    else:
        process.suspend()


def n_engines() -> int:
    """How many processes hold models."""
    children = psutil.Process().children(recursive=True)
    return sum("spawn_main" in " ".join(child.cmdline()) for child in children)


@pytest.mark.parametrize(
    ("refs", "n_disasters"), [(("one",), 10), (("one", "two"), 4)], ids=["one model", "swapped for another"]
)
async def test_engines_that_die_hang_and_restart_under_load(
    service: Service, refs: tuple[str, ...], n_disasters: int
) -> None:
    rng = random.Random(7)
    crowd = Crowd(service, refs, rng)
    clients = [asyncio.create_task(crowd.client()) for _ in range(N_CLIENTS)]
    kinds = (["killed", "hangs", "unloaded", "killed"] * 3)[:n_disasters]
    rng.shuffle(kinds)
    for kind in kinds:
        await crowd.until_answered(rng.randint(1, 20))
        await asyncio.sleep(rng.random() / 20)
        await disaster(crowd, kind)
    await crowd.until_answered(1)
    crowd.is_over = True
    await asyncio.wait_for(asyncio.gather(*clients), PATIENCE_S)
    assert crowd.outcomes.total() == crowd.n_begun
    assert crowd.outcomes["left"] > 3
    n_struck = n_disasters - kinds.count("unloaded")
    assert n_struck <= len(crowd.errors) <= n_struck * N_CLIENTS
    crowd.check_errors()
    totals = service.totals().values()
    assert sum(total.n_requests for total in totals) == crowd.outcomes["answered"]
    assert sum(total.n_failures for total in totals) == len(crowd.errors)
    assert all(model.n_active == 0 for model in service.loaded())
    await service.close()
    assert n_engines() == 0


@pytest.mark.parametrize("n_answered", [0, 5], ids=["while a model is loaded", "while requests run"])
async def test_end_under_load(service: Service, n_answered: int) -> None:
    crowd = Crowd(service, ("one",), random.Random(8))
    clients = [asyncio.create_task(crowd.client()) for _ in range(N_CLIENTS)]
    async with asyncio.timeout(PATIENCE_S):
        while service.status().state != "loading":
            await asyncio.sleep(0)
    await crowd.until_answered(n_answered)
    crowd.is_over = True
    await asyncio.wait_for(service.close(), PATIENCE_S)
    await asyncio.wait_for(asyncio.gather(*clients), PATIENCE_S)
    assert crowd.outcomes.total() == crowd.n_begun
    assert crowd.errors
    assert all(re.search(r"was shut down|is ending", error.message) for error in crowd.errors)
    assert n_engines() == 0
