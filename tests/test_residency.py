"""Taking turns with the one place in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from nemolocal.engine.client import EngineClient
from nemolocal.errors import EngineError
from nemolocal.models.store import LocalModel
from nemolocal.residency import Candidates, Residency, Resident

pytestmark = pytest.mark.anyio


@dataclass
class FakeEngine:
    is_alive: bool = True
    n_closed: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def close(self) -> None:
        await self.gate.wait()
        self.n_closed += 1
        self.is_alive = False


@dataclass
class Loader:
    """Loads at once, unless told to wait or to fail; notes what was resident at each moment."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    picks: int = 0  # which of the candidates
    loaded: list[str] = field(default_factory=list)
    engines: list[FakeEngine] = field(default_factory=list)

    async def __call__(self, candidates: Candidates) -> Resident:
        assert all(not engine.is_alive for engine in self.engines), "two models at once"
        await self.gate.wait()
        if self.error:
            raise self.error
        chosen = candidates[self.picks if len(candidates) > 1 else 0]
        self.loaded.append(chosen.id)
        self.engines.append(FakeEngine())
        engine = cast(EngineClient, self.engines[-1])
        return Resident(chosen, engine, template=None, device="CPU")  # type: ignore[arg-type]


def model(name: str) -> Candidates:
    path = Path(f"/models/{name}.gguf")
    return (LocalModel(id=name, ref=name, path=path, parts=(path,), quant="Q4_0", bytes=1, kind="model"),)


@pytest.fixture
def loader() -> Loader:
    made = Loader()
    made.gate.set()
    return made


async def use(residency: Residency, name: str, done: asyncio.Event | None = None) -> None:
    async with residency.lease(model(name)) as resident:
        assert resident.model.id == name
        assert resident.engine.is_alive
        if done:
            await done.wait()
            assert resident.engine.is_alive


async def use_any(residency: Residency, candidates: Candidates) -> str:
    async with residency.lease(candidates) as resident:
        return resident.model.id


async def test_requests_for_one_model_share_a_load(loader: Loader) -> None:
    residency = Residency(loader)
    await asyncio.gather(*(use(residency, "a") for _ in range(20)))
    await use(residency, "a")
    assert loader.loaded == ["a"]
    assert residency.resident is not None
    assert residency.resident.n_leases == 0


async def test_swap_waits_for_running_requests(loader: Loader) -> None:
    residency, done = Residency(loader), asyncio.Event()
    running = [asyncio.create_task(use(residency, "a", done)) for _ in range(3)]
    await asyncio.sleep(0.01)
    other = asyncio.create_task(use(residency, "b"))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(use(residency, "a"))
    await asyncio.sleep(0.01)
    assert loader.loaded == ["a"]
    done.set()
    await asyncio.gather(*running, other, late)
    assert loader.loaded == ["a", "b", "a"]


async def test_mixed_load_loses_nothing(loader: Loader) -> None:
    residency = Residency(loader)

    async def soon(i: int) -> None:
        await asyncio.sleep(i % 7 / 1000)
        await use(residency, "abc"[i % 3])

    await asyncio.wait_for(asyncio.gather(*(soon(i) for i in range(150))), 10)
    assert residency.resident is not None
    assert residency.resident.n_leases == 0


async def test_failed_load_is_told_to_all_and_tried_again(loader: Loader) -> None:
    residency = Residency(loader)
    loader.error = EngineError("no")
    results = await asyncio.gather(*(use(residency, "a") for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["no"] * 3
    loader.error = None
    await use(residency, "a")
    assert loader.loaded == ["a"]


async def test_dead_engine_is_replaced(loader: Loader) -> None:
    residency = Residency(loader)
    await use(residency, "a")
    loader.engines[0].is_alive = False
    await use(residency, "a")
    assert loader.loaded == ["a", "a"]
    assert loader.engines[0].n_closed == 1


async def test_client_that_goes_away_does_not_stop_the_load(loader: Loader) -> None:
    residency = Residency(loader)
    loader.gate.clear()
    first, second = (asyncio.create_task(use(residency, "a")) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    loader.gate.set()
    await asyncio.wait_for(second, 5)
    assert residency.resident is not None
    assert residency.resident.n_leases == 0
    await asyncio.wait_for(use(residency, "b"), 5)


async def test_lease_of_a_client_that_left_at_the_last_moment_is_given_back(loader: Loader) -> None:
    residency = Residency(loader)
    loader.gate.clear()
    only = asyncio.create_task(use(residency, "a"))
    await asyncio.sleep(0.01)
    loader.gate.set()
    for _ in range(50):
        await asyncio.sleep(0)
        if residency.resident:
            only.cancel()
            break
    await asyncio.gather(only, return_exceptions=True)
    await asyncio.wait_for(use(residency, "b"), 5)
    assert loader.loaded == ["a", "b"]


async def test_close(loader: Loader) -> None:
    residency = Residency(loader)
    await use(residency, "a")
    await residency.close()
    assert residency.resident is None
    assert loader.engines[0].n_closed == 1


async def test_load_of_other_files_is_not_joined(loader: Loader) -> None:
    """A request for one quant is not served by what a plan chose for a request that left it open."""
    residency = Residency(loader)
    loader.gate.clear()
    both = asyncio.create_task(use_any(residency, (*model("a"), *model("b"))))
    await asyncio.sleep(0.01)
    one = asyncio.create_task(use_any(residency, model("a")))
    await asyncio.sleep(0.01)
    loader.picks = -1
    loader.gate.set()
    assert await both == "b"
    assert await one == "a"


async def test_swap_that_is_cancelled_leaves_no_engine_behind(loader: Loader) -> None:
    residency = Residency(loader)
    await use(residency, "a")
    engine = loader.engines[0]
    engine.gate.clear()
    swapping = asyncio.create_task(use(residency, "b"))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(residency.close())
    await asyncio.sleep(0.01)
    engine.gate.set()
    await asyncio.gather(closing, swapping, return_exceptions=True)
    assert engine.n_closed == 1
    assert not engine.is_alive
