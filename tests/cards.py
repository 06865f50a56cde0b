"""A machine with one card that is only described, and engines that only pretend, but take of it what they are
told to."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from nemolocal import config
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import Held, LoadSpec, Occupancy
from nemolocal.hardware import Hardware, Holder
from nemolocal.models import measured, planning
from nemolocal.models.learned import Learned
from nemolocal.models.sizing import Plan
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
from tests.profiles import machine

MIB = 1 << 20
CARD = "NVIDIA GeForce RTX 4090"
UUID = machine((CARD, 1)).gpus[0].uuid
DRIVER = "580.10"
HI = [Message("user", "Hi")]


class FakeEngine:
    """Writes 101 tokens in two seconds, all at once."""

    def __init__(self, spec: LoadSpec, pid: int, held: tuple[Held, ...]) -> None:
        self.spec, self.pid = spec, pid
        self.is_alive = True
        self.death = None
        self.occupancy = Occupancy()
        self.gate = asyncio.Event()
        self.gate.set()
        self.usage = Usage(3, 101)
        self.info = SimpleNamespace(
            chat_template=synthetic.CHATML, bos="", eos="", control_tokens=(), n_ctx=spec.n_ctx, held=held
        )

    async def generate(self, prompt: Prompt, params: GenerationParams) -> AsyncGenerator[StreamItem, None]:
        yield Started(3)
        await self.gate.wait()
        yield Delta("yes")
        yield Finish("stop", self.usage, Timings(0.0, 0.1, 2.0))

    async def close(self) -> None:
        self.is_alive = False


@dataclass
class Pc:
    """Each engine takes `taken_bytes` of the card, of which llama.cpp tells `held`; other programs take
    `others_bytes`, and `grab_bytes` more while something loads. The driver may not name who holds what."""

    hardware: Hardware = field(default_factory=lambda: card(24))
    held: tuple[Held, ...] = (Held(UUID, 1 * MIB, 1 * MIB, compute_bytes=40 * MIB),)
    taken_bytes: int = 842 * MIB
    others_bytes: int = 0
    grab_bytes: int = 0
    names_holders: bool = True
    engines: list[FakeEngine] = field(default_factory=list)
    specs: list[LoadSpec] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)  # of the next loads

    def detect(self) -> Hardware:
        alive = [engine for engine in self.engines if engine.is_alive and engine.spec.n_gpu_layers]
        holders = tuple(Holder(engine.pid, "python", self.taken_bytes) for engine in alive)

        def now(gpu: Any) -> Any:
            used = self.others_bytes + len(alive) * self.taken_bytes
            return replace(
                gpu,
                free_bytes=max(gpu.free_bytes - used, 0),
                holders=holders if self.names_holders else (),
            )

        return replace(self.hardware, gpus=tuple(now(gpu) for gpu in self.hardware.gpus))

    async def start(
        self, spec: LoadSpec, log_path: Path, on_progress: Callable[[float], None]
    ) -> EngineClient:
        self.specs.append(spec)
        if self.errors:
            raise self.errors.pop(0)
        self.others_bytes += self.grab_bytes
        engine = FakeEngine(spec, 100 + len(self.engines), self.held if spec.n_gpu_layers else ())
        self.engines.append(engine)
        return cast(EngineClient, engine)

    def service(self, **flags: Any) -> Service:
        return Service(config.load(flags), detect=self.detect, start_engine=self.start)

    @property
    def learned(self) -> Learned:
        return measured.learned(config.load(), self.detect())

    def plan(self, **flags: Any) -> Plan:
        return planning.plan("one", config.load(flags), self.hardware, self.learned)


def card(gib: float, *, driver: str = DRIVER) -> Hardware:
    found = machine((CARD, gib))
    return replace(found, gpus=tuple(replace(gpu, driver=driver) for gpu in found.gpus))


def put_two_models() -> None:
    """The models "one" and "two", which are the same."""
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    shutil.copy(synthetic.write_tiny(folder / "one.gguf"), folder / "two.gguf")


async def ask(made: Service, ref: str) -> None:
    items = [item async for item in made.find_model(ref).chat(HI, GenerationParams())]
    assert isinstance(items[-1], Finish)


async def load_and_close(pc: Pc, ref: str = "one", **flags: Any) -> None:
    made = pc.service(**flags)
    await ask(made, ref)
    await made.close()
