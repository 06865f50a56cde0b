"""Taking turns with the room in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from nemolocal import residency as residency_module
from nemolocal.engine.client import EngineClient
from nemolocal.errors import DoesNotFitError, EngineError
from nemolocal.models.store import LocalModel
from nemolocal.residency import Candidates, MakeRoom, Residency, Resident, Start

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "SETTLE_S", 0.0)


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
class Machine:
    """A machine with room for `n_places` models. Loads at once, unless told to wait or to fail."""

    n_places: int = 1
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    errors: list[Exception] = field(default_factory=list)  # of the next loads
    refusals: list[Exception] = field(default_factory=list)  # of the next decisions
    picks: int = 0  # which of the candidates
    loaded: list[str] = field(default_factory=list)
    engines: dict[str, FakeEngine] = field(default_factory=dict)  # the last of each model
    n_decisions: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def decide(self, candidates: Candidates, residents: Sequence[Resident]) -> Start | MakeRoom:
        self.n_decisions += 1
        await asyncio.sleep(0)  # looking at the hardware takes a while
        assert all(resident.engine.is_alive or resident.unloading for resident in residents)
        if self.refusals:
            raise self.refusals.pop(0)
        n_over = len(residents) + 1 - self.n_places
        if n_over > 0:
            return MakeRoom(tuple(residents[:n_over]))
        return partial(self.load, candidates)

    async def load(self, candidates: Candidates) -> Resident:
        assert sum(engine.is_alive for engine in self.engines.values()) < self.n_places, "no room"
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        chosen = candidates[self.picks if len(candidates) > 1 else 0]
        assert chosen.id not in self.engines or not self.engines[chosen.id].is_alive, "loaded twice"
        self.loaded.append(chosen.id)
        self.engines[chosen.id] = engine = FakeEngine()
        return Resident(chosen, cast(EngineClient, engine), template=None, device="CPU", name=chosen.id)  # type: ignore[arg-type]

    def alive(self) -> set[str]:
        return {name for name, engine in self.engines.items() if engine.is_alive}


def model(name: str) -> Candidates:
    path = Path(f"/models/{name}.gguf")
    return (LocalModel(id=name, ref=name, path=path, parts=(path,), quant="Q4_0", bytes=1, kind="model"),)


@pytest.fixture
def machine() -> Machine:
    return Machine()


async def use(
    residency: Residency, name: str, done: asyncio.Event | None = None, *, keep_alive_s: float | None = None
) -> None:
    async with residency.lease(model(name), keep_alive_s=keep_alive_s) as resident:
        assert resident.model.id == name
        assert resident.engine.is_alive
        if done:
            await done.wait()
            assert resident.engine.is_alive


async def use_any(residency: Residency, candidates: Candidates) -> str:
    async with residency.lease(candidates) as resident:
        return resident.model.id


def n_leases(residency: Residency) -> int:
    return sum(resident.n_leases for resident in residency.residents)


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


# One place ------------------------------------------------------------------------------------------


async def test_requests_for_one_model_share_a_load(machine: Machine) -> None:
    residency = Residency(machine.decide)
    await asyncio.gather(*(use(residency, "a") for _ in range(20)))
    await use(residency, "a")
    assert machine.loaded == ["a"]
    assert n_leases(residency) == 0


async def test_swap_waits_for_running_requests(machine: Machine) -> None:
    residency, done = Residency(machine.decide), asyncio.Event()
    running = [asyncio.create_task(use(residency, "a", done)) for _ in range(3)]
    await asyncio.sleep(0.01)
    other = asyncio.create_task(use(residency, "b"))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(use(residency, "a"))
    await asyncio.sleep(0.01)
    assert machine.loaded == ["a"]
    done.set()
    await asyncio.gather(*running, other, late)
    assert machine.loaded == ["a", "b", "a"]


async def test_a_stream_of_requests_starves_nobody(machine: Machine) -> None:
    """There is always a request for a running, and b gets its turn all the same."""
    residency, is_over = Residency(machine.decide), asyncio.Event()

    async def client(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while not is_over.is_set():
            async with residency.lease(model("a")):
                await asyncio.sleep(0.02)

    clients = [asyncio.create_task(client(i * 0.005)) for i in range(4)]
    await until(lambda: machine.loaded)
    await asyncio.wait_for(use(residency, "b"), 5)
    await asyncio.wait_for(use(residency, "c"), 5)
    is_over.set()
    await asyncio.gather(*clients)


async def test_failed_load_is_told_to_all_and_tried_again(machine: Machine) -> None:
    residency = Residency(machine.decide)
    for faults in (machine.errors, machine.refusals):
        faults.append(EngineError("no"))
        results = await asyncio.gather(*(use(residency, "a") for _ in range(3)), return_exceptions=True)
        assert [str(result) for result in results] == ["no"] * 3
    await use(residency, "a")
    assert machine.loaded == ["a"]


async def test_load_that_ran_out_of_memory_is_decided_anew(machine: Machine) -> None:
    residency = Residency(machine.decide)
    machine.errors = [EngineError("memory", is_out_of_memory=True)]
    await use(residency, "a")
    assert (machine.loaded, machine.n_decisions) == (["a"], 2)
    machine.errors = [EngineError("memory", is_out_of_memory=True) for _ in range(3)]
    with pytest.raises(EngineError, match="memory"):
        await use(residency, "b")
    assert len(machine.errors) == 1


async def test_dead_engine_is_replaced(machine: Machine) -> None:
    deaths: list[str] = []
    residency = Residency(machine.decide, on_death=lambda resident: deaths.append(resident.name))
    await use(residency, "a")
    first = machine.engines["a"]
    first.is_alive = False
    assert (residency.residents, len(residency.fallen), deaths) == ([], 1, [])
    await use(residency, "a")
    assert machine.loaded == ["a", "a"]
    assert (first.n_closed, deaths, residency.fallen) == (1, ["a"], [])


async def test_model_in_use_that_dies_makes_room(machine: Machine) -> None:
    residency, done = Residency(machine.decide), asyncio.Event()

    async def caught_in_it() -> None:
        async with residency.lease(model("a")):
            await done.wait()

    running = asyncio.create_task(caught_in_it())
    await until(lambda: machine.loaded)
    waiting = asyncio.create_task(use(residency, "b"))
    await asyncio.sleep(0.01)
    machine.engines["a"].is_alive = False
    done.set()
    await asyncio.wait_for(waiting, 5)
    await running
    assert machine.loaded == ["a", "b"]
    assert n_leases(residency) == 0


async def test_client_that_goes_away_does_not_stop_the_load(machine: Machine) -> None:
    residency = Residency(machine.decide)
    machine.gate.clear()
    first, second = (asyncio.create_task(use(residency, "a")) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    machine.gate.set()
    await asyncio.wait_for(second, 5)
    assert n_leases(residency) == 0
    await asyncio.wait_for(use(residency, "b"), 5)


async def test_nobody_makes_room_for_a_client_that_has_left(machine: Machine) -> None:
    residency, done = Residency(machine.decide), asyncio.Event()
    running = asyncio.create_task(use(residency, "a", done))
    await until(lambda: machine.loaded)
    impatient = asyncio.create_task(use(residency, "b"))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(use(residency, "a"))  # behind b
    await asyncio.sleep(0.01)
    assert not late.done()
    impatient.cancel()
    await asyncio.wait_for(late, 5)  # b is not waited for any more
    patient = asyncio.create_task(use(residency, "b"))
    await asyncio.sleep(0.01)
    done.set()
    await asyncio.gather(running, patient)
    assert machine.loaded == ["a", "b"]


async def test_lease_of_a_client_that_left_at_the_last_moment_is_given_back(machine: Machine) -> None:
    residency = Residency(machine.decide)
    machine.gate.clear()
    only = asyncio.create_task(use(residency, "a"))
    await asyncio.sleep(0.01)
    machine.gate.set()
    for _ in range(50):
        await asyncio.sleep(0)
        if residency.residents:
            only.cancel()
            break
    await asyncio.gather(only, return_exceptions=True)
    await asyncio.wait_for(use(residency, "b"), 5)
    assert machine.loaded == ["a", "b"]


async def test_close(machine: Machine) -> None:
    machine.n_places = 2
    residency = Residency(machine.decide, keep_alive_s=60)
    await use(residency, "a")
    await use(residency, "b")
    await residency.close()
    assert residency.residents == []
    assert [engine.n_closed for engine in machine.engines.values()] == [1, 1]


async def test_end_of_the_program_is_told_to_those_who_wait_for_a_model(machine: Machine) -> None:
    residency = Residency(machine.decide)
    machine.gate.clear()
    waiting = [asyncio.create_task(use(residency, name)) for name in ("a", "a", "b")]
    await asyncio.sleep(0.01)
    await residency.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert ["is ending" in str(result) for result in results] == [True] * 3
    assert {type(result) for result in results} == {EngineError}


async def test_load_of_other_files_is_not_joined(machine: Machine) -> None:
    """A request for one quant is not served by what a plan chose for a request that left it open."""
    residency = Residency(machine.decide)
    machine.gate.clear()
    both = asyncio.create_task(use_any(residency, (*model("a"), *model("b"))))
    await asyncio.sleep(0.01)
    one = asyncio.create_task(use_any(residency, model("a")))
    await asyncio.sleep(0.01)
    machine.picks = -1
    machine.gate.set()
    assert await both == "b"
    assert await one == "a"


async def test_swap_that_is_cancelled_leaves_no_engine_behind(machine: Machine) -> None:
    residency = Residency(machine.decide)
    await use(residency, "a")
    engine = machine.engines["a"]
    engine.gate.clear()
    swapping = asyncio.create_task(use(residency, "b"))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(residency.close())
    await asyncio.sleep(0.01)
    engine.gate.set()
    await asyncio.gather(closing, swapping, return_exceptions=True)
    assert engine.n_closed == 1
    assert not engine.is_alive


async def test_memory_that_comes_back_late_is_waited_for(machine: Machine) -> None:
    """A driver's figures may lag behind the end of a process: no one else goes for that, and no request
    fails."""
    residency = Residency(machine.decide)
    await use(residency, "a")
    real, n_lags = machine.decide, 1

    async def decide(candidates: Candidates, residents: Sequence[Resident]) -> Start | MakeRoom:
        nonlocal n_lags
        if not residents and n_lags:
            n_lags -= 1
            raise DoesNotFitError("not yet", needed_bytes=2, available_bytes=1)
        return await real(candidates, residents)

    residency._decide = decide
    await use(residency, "b")
    assert n_lags == 0
    machine.refusals.append(DoesNotFitError("never", needed_bytes=2, available_bytes=1))
    with pytest.raises(DoesNotFitError, match="never"):
        await use(residency, "c")
    assert machine.alive() == {"b"}  # it goes for nobody who would not fit alone


# Several places -------------------------------------------------------------------------------------


async def test_models_lie_side_by_side_and_the_least_recently_used_goes(machine: Machine) -> None:
    machine.n_places = 2
    residency = Residency(machine.decide)
    for name in "abab":
        await use(residency, name)
    assert machine.loaded == ["a", "b"]
    await use(residency, "a")
    await use(residency, "c")
    assert machine.alive() == {"a", "c"}
    assert [resident.name for resident in residency.residents] == ["c", "a"]


async def test_last_use_is_the_end_of_a_request(machine: Machine) -> None:
    machine.n_places = 2
    residency, done = Residency(machine.decide), asyncio.Event()
    long = asyncio.create_task(use(residency, "a", done))
    await until(lambda: machine.loaded)
    await use(residency, "b")
    done.set()
    await long
    await use(residency, "c")
    assert machine.alive() == {"a", "c"}


async def test_model_in_use_is_never_evicted_while_another_is_idle(machine: Machine) -> None:
    machine.n_places = 2
    residency, done = Residency(machine.decide), asyncio.Event()
    running = asyncio.create_task(use(residency, "a", done))
    await until(lambda: machine.loaded)
    await use(residency, "b")
    for name in "cdb":
        await asyncio.wait_for(use(residency, name), 5)
    assert machine.loaded == ["a", "b", "c", "d", "b"]
    assert machine.engines["a"].n_closed == 0
    done.set()
    await running


async def test_loaded_models_answer_while_another_is_loaded_beside_them(machine: Machine) -> None:
    machine.n_places = 2
    residency = Residency(machine.decide)
    await use(residency, "a")
    machine.gate.clear()
    loading = asyncio.create_task(use(residency, "b"))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(use(residency, "a"), 5)
    assert not loading.done()
    machine.gate.set()
    await loading


async def test_who_queued_for_one_that_stays_gets_it_without_a_turn(machine: Machine) -> None:
    """c wants the room of a or b. Requests for a wait behind it, until it has got b's."""
    machine.n_places = 2
    residency = Residency(machine.decide)
    done = {name: asyncio.Event() for name in "ab"}
    running = [asyncio.create_task(use(residency, name, done[name])) for name in "ab"]
    await until(lambda: len(machine.loaded) == 2)
    machine.gate.clear()
    third = asyncio.create_task(use(residency, "c"))
    await asyncio.sleep(0.01)
    queued = asyncio.create_task(use(residency, "a"))
    await asyncio.sleep(0.01)
    assert not queued.done()
    done["b"].set()
    await asyncio.wait_for(queued, 5)
    assert not third.done()  # it is still being loaded
    machine.gate.set()
    done["a"].set()
    await asyncio.gather(third, *running)
    assert machine.alive() == {"a", "c"}


@pytest.mark.parametrize("n_places", [1, 2, 3])
async def test_mixed_load_loses_nothing(machine: Machine, n_places: int) -> None:
    """Of many clients of four models, some leave early and some loads fail: each request gets a model, its
    error, or was given up by its client."""
    machine.n_places = n_places
    residency = Residency(machine.decide, keep_alive_s=0.003)
    dice = random.Random(n_places)
    n_served = 0

    async def client(name: str, start_s: float, work_s: float, keep_alive_s: float | None) -> None:
        nonlocal n_served
        await asyncio.sleep(start_s)
        async with residency.lease(model(name), keep_alive_s=keep_alive_s) as resident:
            assert (resident.name, resident.engine.is_alive) == (name, True)
            await asyncio.sleep(work_s)
            assert resident.engine.is_alive
            n_served += 1

    clients = [
        asyncio.create_task(
            client(
                dice.choice("aaabcd"), dice.random() * 0.3, dice.random() * 0.01, dice.choice([None, 0, -1])
            )
        )
        for _ in range(300)
    ]
    leaving = dice.sample(clients, 60)
    for i, leaver in enumerate(leaving):
        asyncio.get_running_loop().call_later(i * 0.005, leaver.cancel)
    machine.errors = [EngineError("no")] * 3
    results = await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), 20)
    assert all(isinstance(x, EngineError | asyncio.CancelledError | None) for x in results)
    assert results.count(None) == n_served > 150
    assert not residency._loads
    assert n_leases(residency) == 0
    await residency.close()
    assert machine.alive() == set()


# Coming and going -----------------------------------------------------------------------------------


async def test_idle_model_is_unloaded_after_its_time(machine: Machine) -> None:
    machine.n_places = 2
    residency = Residency(machine.decide, keep_alive_s=0.05)
    await use(residency, "a")
    await use(residency, "b", keep_alive_s=-1)
    [b, a] = residency.residents
    assert b.expires_in_s is None
    assert a.expires_in_s is not None
    assert await asyncio.to_thread(lambda: a.expires_in_s) is not None  # the page asks in a thread of its own
    assert 0 < a.expires_in_s <= 0.05
    await until(lambda: machine.alive() == {"b"})
    await use(residency, "a")
    assert machine.loaded == ["a", "b", "a"]


async def test_time_begins_with_the_end_of_the_last_request(machine: Machine) -> None:
    residency, done = Residency(machine.decide, keep_alive_s=0.03), asyncio.Event()
    running = asyncio.create_task(use(residency, "a", done))
    await until(lambda: machine.loaded)
    await asyncio.sleep(0.08)
    assert residency.residents[0].expires_in_s is None
    done.set()
    await running
    await use(residency, "a")
    assert machine.loaded == ["a"]
    await until(lambda: not machine.alive())


async def test_request_says_how_long_a_model_stays(machine: Machine) -> None:
    residency = Residency(machine.decide, keep_alive_s=60)
    await use(residency, "a", keep_alive_s=0)
    await until(lambda: not machine.alive(), 1)
    await use(residency, "a", keep_alive_s=-1)
    await use(residency, "a")  # says nothing: as before
    assert residency.residents[0].keep_alive_s == -1
    await use(residency, "a", keep_alive_s=30)
    assert residency.residents[0].keep_alive_s == 30
    await residency.close()


async def test_request_that_comes_while_its_model_goes_loads_it_anew(machine: Machine) -> None:
    residency = Residency(machine.decide)
    await use(residency, "a", keep_alive_s=0)
    machine.engines["a"].gate.clear()
    await until(lambda: not residency.residents)  # it is about to go
    again = asyncio.create_task(use(residency, "a"))
    await asyncio.sleep(0.01)
    assert machine.loaded == ["a"]
    machine.engines["a"].gate.set()
    await asyncio.wait_for(again, 5)
    assert machine.loaded == ["a", "a"]


async def test_unload(machine: Machine) -> None:
    machine.n_places = 2
    residency, done = Residency(machine.decide), asyncio.Event()
    await residency.unload(model("a"))
    running = asyncio.create_task(use(residency, "a", done))
    await until(lambda: machine.loaded)
    await use(residency, "b")
    unloading = asyncio.create_task(residency.unload(model("a")))
    await asyncio.sleep(0.01)
    later = asyncio.create_task(use(residency, "a"))
    await asyncio.sleep(0.01)
    assert machine.alive() == {"a", "b"}
    done.set()
    await asyncio.gather(running, unloading, later)
    assert machine.loaded == ["a", "b", "a"]
    await residency.unload(model("b"))
    assert machine.alive() == {"a"}
