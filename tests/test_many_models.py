"""Several models in one service: over real model files, on machines that are only described and with engines
that only pretend, but take memory while they live."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemolocal import config
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec, Occupancy
from nemolocal.errors import EngineDiedError, EngineError, EngineGaveUpError, ModelNotFoundError
from nemolocal.hardware import Hardware
from nemolocal.models import room
from nemolocal.models.room import Footprint
from nemolocal.service import Service
from nemolocal.types import (
    Delta,
    Finish,
    GenerationParams,
    Message,
    Prompt,
    Started,
    StreamItem,
    Timings,
    Usage,
)
from tests import synthetic
from tests.profiles import GIB, machine

pytestmark = pytest.mark.anyio

HI = [Message("user", "Hi")]
TAKES_BYTES = 8 * GIB
OUT_OF_MEMORY = EngineError("cudaMalloc failed", is_out_of_memory=True)


class FakeEngine:
    """Answers "yes" until it is told to die."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.is_alive = True
        self.pid: int | None = None
        self.death: EngineDiedError | None = None
        self.occupancy = Occupancy()
        self.gate = asyncio.Event()
        self.gate.set()
        self.info = SimpleNamespace(
            chat_template=synthetic.CHATML, bos="", eos="", control_tokens=(), n_ctx=spec.n_ctx, held=()
        )

    async def generate(self, prompt: Prompt, params: GenerationParams) -> AsyncGenerator[StreamItem, None]:
        yield Started(3)
        await self.gate.wait()
        if self.death:
            self.is_alive = False
            raise self.death
        yield Delta("yes")
        yield Finish("stop", Usage(3, 1), Timings(0.0, 0.0, 0.0))

    async def close(self) -> None:
        self.is_alive = False


@dataclass
class Machine:
    """Each engine takes 8 GiB of its RAM, whatever a plan says of so small a model."""

    hardware: Hardware = field(default_factory=lambda: machine(ram_gib=17))
    engines: list[FakeEngine] = field(default_factory=list)
    log_paths: list[Path] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)  # of the next loads
    dies: bool = False  # so does every engine at its first request

    def detect(self) -> Hardware:
        n_alive = sum(engine.is_alive for engine in self.engines)
        return room.without(self.hardware, [Footprint(ram_bytes=TAKES_BYTES)] * n_alive)

    async def start(
        self, spec: LoadSpec, log_path: Path, on_progress: Callable[[float], None]
    ) -> EngineClient:
        if self.errors:
            raise self.errors.pop(0)
        engine = FakeEngine(spec)
        if self.dies:
            engine.death = EngineDiedError("The engine's process ended (exit code 3).", hint="Again.")
        self.engines.append(engine)
        self.log_paths.append(log_path)
        return cast(EngineClient, engine)

    def service(self, **flags: Any) -> Service:
        return Service(config.load(flags), detect=self.detect, start_engine=self.start)

    @property
    def loaded(self) -> list[str]:
        return [Path(engine.spec.path).stem for engine in self.engines]


@pytest.fixture(autouse=True)
def _files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three models that are here and whose plans take 8 GiB."""
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    first = synthetic.write_tiny(folder / "one.gguf")
    for name in ("two.gguf", "three.gguf"):
        shutil.copy(first, folder / name)
    real = room.footprint
    monkeypatch.setattr(room, "footprint", lambda plan: _grown(real(plan)))


def _grown(footprint: Footprint) -> Footprint:
    return Footprint(footprint.gpu_bytes, TAKES_BYTES)


async def ask(made: Service, ref: str | None, *, keep_alive_s: float | None = None) -> str:
    model = made.find_model(ref, keep_alive_s=keep_alive_s)
    items = [item async for item in model.chat(HI, GenerationParams())]
    assert isinstance(items[-1], Finish)
    return "".join(item.text for item in items if isinstance(item, Delta))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_models_lie_side_by_side_while_they_fit() -> None:
    pc = Machine()
    made = pc.service()
    for ref in ("one", "two", "one", "two"):
        assert await ask(made, ref) == "yes"
    assert pc.loaded == ["one", "two"]
    assert [(card.id, card.is_loaded) for card in made.list_models()] == [
        ("one", True), ("two", True), ("three", False)
    ]  # fmt: skip
    status = made.status()
    assert (status.state, status.model, status.loaded) == ("ready", "two", ("two", "one"))
    assert [path.name for path in pc.log_paths] == ["engine.log", "engine-2.log"]
    await made.close()
    assert not any(engine.is_alive for engine in pc.engines)


async def test_what_is_loaded() -> None:
    pc = Machine()
    made = pc.service(ctx=512, slots=3, keep_alive_s=60)
    await ask(made, "one", keep_alive_s=-1)
    stream = made.find_model("two").chat(HI, GenerationParams())
    await anext(stream)
    pc.engines[1].occupancy = Occupancy(n_running=1, n_waiting=7, n_cells=512, n_taken_cells=40)
    two, one = made.loaded()
    assert (two.n_waiting, two.n_cells, two.n_taken_cells) == (1, 512, 40)  # no more than ask
    assert (two.id, two.n_active, two.expires_in_s, two.n_ctx, two.n_slots) == ("two", 1, None, 512, 3)
    assert (two.device, two.gpu_bytes, two.ram_bytes, two.note) == ("CPU", 0, TAKES_BYTES, "")
    assert (one.id, one.n_active, one.expires_in_s) == ("one", 0, None)
    async for _ in stream:
        pass
    expires_in_s = made.loaded()[0].expires_in_s
    assert expires_in_s is not None
    assert 59 < expires_in_s <= 60
    await made.close()


async def test_the_least_recently_used_makes_room() -> None:
    pc = Machine(machine(ram_gib=17))
    made = pc.service()
    for ref in ("one", "two", "one"):
        await ask(made, ref)
    pc.hardware = machine(ram_gib=16)  # something else has started
    await ask(made, "three")
    assert [engine.is_alive for engine in pc.engines] == [True, False, True]
    assert pc.log_paths[2].name == "engine-2.log"
    await made.close()


async def test_limit_to_the_number_of_models() -> None:
    pc = Machine(machine(ram_gib=64))
    made = pc.service(max_models=2)
    for ref in ("one", "two", "three"):
        await ask(made, ref)
    assert [engine.is_alive for engine in pc.engines] == [False, True, True]
    await made.close()


async def test_profile_tells_of_the_machine_with_nothing_loaded(tmp_path: Path) -> None:
    profile = tmp_path / "pc.toml"
    ram = f"[ram]\ntotal_bytes = {32 * GIB}\navailable_bytes = {17 * GIB}\n"
    profile.write_text(ram + '[cpu]\nname = "x"\nphysical_cores = 2\n')
    pc = Machine()
    made = Service(config.load({"hardware": str(profile)}), start_engine=pc.start)
    for ref in ("one", "two", "three"):
        await ask(made, ref)
    assert [engine.is_alive for engine in pc.engines] == [True, True, True]
    await ask(made, "one")
    profile.write_text(profile.read_text().replace(str(17 * GIB), str(16 * GIB)))
    await made.unload("one")
    await ask(made, "one")
    assert [engine.is_alive for engine in pc.engines] == [False, False, True, True]
    await made.close()


async def test_busy_model_is_waited_for_and_no_request_is_lost() -> None:
    pc = Machine(machine(ram_gib=8.4))
    made = pc.service()
    await made.load("one")
    pc.engines[0].gate.clear()
    running = [asyncio.create_task(ask(made, "one")) for _ in range(3)]
    await asyncio.sleep(0.02)
    others = [asyncio.create_task(ask(made, "two"))]
    await until(lambda: made._residency._residents[0].is_leaving)
    others += [asyncio.create_task(ask(made, ref)) for ref in ("three", "one", "two")]
    await asyncio.sleep(0.05)
    assert pc.loaded == ["one"]
    assert made.status().state == "ready"
    pc.engines[0].gate.set()
    assert await asyncio.wait_for(asyncio.gather(*running, *others), 10) == ["yes"] * 7
    assert pc.loaded == ["one", "two", "three", "one"]
    await made.close()


async def test_idle_model_goes_and_comes_back_when_nobody_is_named() -> None:
    pc = Machine()
    made = pc.service(keep_alive_s=0.03)
    await ask(made, "two")
    await until(lambda: not pc.engines[0].is_alive)
    assert (made.status().state, made.loaded()) == ("idle", [])
    assert await ask(made, None) == "yes"
    assert pc.loaded == ["two", "two"]
    await ask(made, None, keep_alive_s=0)
    await until(lambda: not pc.engines[1].is_alive)
    await made.close()


async def test_model_that_is_meant_where_none_is_named() -> None:
    pc = Machine()
    made = pc.service(model="one")
    await ask(made, "two")
    await ask(made, None)
    assert pc.loaded == ["two"]  # as before: the loaded one
    await ask(made, "one")
    await ask(made, "two")
    await ask(made, None)
    assert made.status().model == "one"  # with several loaded, the configured one
    await made.close()


async def test_unload() -> None:
    pc = Machine()
    made = pc.service()
    await ask(made, "one")
    await made.unload("one")
    assert not pc.engines[0].is_alive
    assert made.status().state == "idle"
    await made.unload("one")
    with pytest.raises(ModelNotFoundError):
        await made.unload("nope")


async def test_three_deaths_in_a_row_stop_the_trying_and_say_why() -> None:
    pc = Machine(dies=True)
    made = pc.service()
    for _ in range(3):
        with pytest.raises(EngineDiedError, match="exit code 3"):
            await ask(made, "one")
    with pytest.raises(EngineGaveUpError, match=r"3 times in a row.*exit code 3"):
        await ask(made, "one")
    assert pc.loaded == ["one"] * 3
    status = made.status()
    assert status.state == "failed"
    assert "3 times in a row" in status.problem
    assert made.totals()["one"].n_failures == 3
    pc.dies = False
    assert await ask(made, "two") == "yes"  # the others are not to blame
    with pytest.raises(EngineGaveUpError):
        await ask(made, "one")
    assert pc.engines[-1].is_alive  # and do not make room for it
    await made.load("one")  # asked for by name
    assert await ask(made, "one") == "yes"
    assert made.status().state == "ready"
    await made.close()


async def test_answer_between_deaths_begins_a_new_row() -> None:
    pc = Machine()
    made = pc.service()
    for _ in range(4):
        await ask(made, "one")
        pc.engines[-1].death = EngineDiedError("It died.")
        with pytest.raises(EngineDiedError):
            await ask(made, "one")
    assert await ask(made, "one") == "yes"
    await made.close()


async def test_loads_that_fail_count_too() -> None:
    pc = Machine(errors=[EngineError("The file is odd.") for _ in range(4)])
    made = pc.service()
    for _ in range(3):
        with pytest.raises(EngineError, match="odd"):
            await ask(made, "one")
    with pytest.raises(EngineGaveUpError, match="odd"):
        await ask(made, "one")
    assert len(pc.errors) == 1
    assert made.totals()["one"].n_failed_loads == 3
    await made.close()


async def test_death_while_idle_is_shown_and_counts() -> None:
    pc = Machine()
    made = pc.service()
    await ask(made, "one")
    pc.engines[0].is_alive = False
    pc.engines[0].death = EngineDiedError("Shot.")
    assert (made.status().state, made.status().problem) == ("idle", "Shot.")
    assert made.list_models()[0].is_loaded is False
    assert await ask(made, "one") == "yes"
    assert made.status().problem == ""
    await made.close()


async def test_after_want_of_memory_the_plan_is_smaller_and_the_status_says_so() -> None:
    pc = Machine(machine(("NVIDIA GeForce RTX 4090", 2.3), ram_gib=32), errors=[OUT_OF_MEMORY])
    made = pc.service()
    assert await ask(made, "one") == "yes"  # the same request: nothing was lost
    assert made.status().note == "1 GiB more are kept free on each device, since memory ran out before."
    assert made.status().device == "CPU"
    assert made.totals()["one"].n_failed_loads == 1
    await ask(made, "two")
    assert made.status().note == ""
    assert "4090" in made.status().device
    await made.close()


async def test_want_of_memory_that_no_plan_cures() -> None:
    pc = Machine(machine(("NVIDIA GeForce RTX 4090", 24), ram_gib=32), errors=[OUT_OF_MEMORY] * 9)
    made = pc.service()
    with pytest.raises(EngineError, match="cudaMalloc"):
        await ask(made, "one")
    assert len(pc.errors) == 7
    for _ in range(2):
        with pytest.raises(EngineGaveUpError, match="cudaMalloc"):
            await ask(made, "one")
    assert len(pc.errors) == 6
    await made.close()
