"""What loads and answers teach: measured, kept, told, and used by the next plan. On a card that is only
described, with engines that only pretend, but take what they are told to."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemolocal import config, database, load_settings
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import Held, LoadSpec, Occupancy
from nemolocal.errors import EngineError, OutOfMemoryError, UsageError
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
from tests.profiles import GIB, machine

pytestmark = pytest.mark.anyio

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


@pytest.fixture(autouse=True)
def heard(home: Path, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Two models are here, and the log is heard."""
    folder = config.load().models_dir
    folder.mkdir(parents=True)
    shutil.copy(synthetic.write_tiny(folder / "one.gguf"), folder / "two.gguf")
    logger = logging.getLogger("nemolocal")
    before = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel("INFO")
    yield caplog
    logger.propagate, logger.level = before


async def ask(made: Service, ref: str) -> None:
    items = [item async for item in made.find_model(ref).chat(HI, GenerationParams())]
    assert isinstance(items[-1], Finish)


async def load_and_close(pc: Pc, ref: str = "one", **flags: Any) -> None:
    made = pc.service(**flags)
    await ask(made, ref)
    await made.close()


def rows(query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(config.load().paths.data / database.FILE)) as connection:
        return connection.execute(query).fetchall()


# Loads ---------------------------------------------------------------------------------------------


async def test_what_a_load_took_is_kept_beside_its_plan_told_and_corrects_the_next(
    heard: pytest.LogCaptureFixture,
) -> None:
    pc = Pc()
    first = pc.plan(ctx=4096)
    await load_and_close(pc, ctx=4096)
    kept = {kind: (planned, used) for kind, planned, used in rows(
        f"SELECT kind, planned_bytes, used_bytes FROM load_bytes WHERE device = '{UUID}'"
    )}  # fmt: skip
    share = first.placement.shares[0]
    assert kept["weights"] == (share.weights_bytes, 1 * MIB)
    assert kept["kv"] == (share.kv_bytes, 1 * MIB)
    assert kept["compute"] == (share.compute_bytes, 40 * MIB)
    assert kept["overhead"] == (share.overhead_bytes, 800 * MIB)
    [(load_json, driver, library)] = rows("SELECT load_json, driver, library FROM loads")
    assert json.loads(load_json)["n_ctx"] == 4096
    assert (driver, library) == (DRIVER, measured.library_version())
    [line] = [r.getMessage() for r in heard.records if "other than planned" in r.getMessage()]
    assert f"one took other than planned: {CARD} 842 for" in line
    assert "overhead 800 for 530" in line
    assert "buffers 40 for" in line
    again = pc.plan(ctx=4096).placement.shares[0]
    assert again.overhead_bytes == 800 * MIB
    ratio = min(40 * MIB / share.compute_bytes, measured.RATIO_MOST)
    assert again.compute_bytes == pytest.approx(ratio * share.compute_bytes, rel=0.01)


async def test_a_corrected_plan_that_comes_true_is_not_told_of(heard: pytest.LogCaptureFixture) -> None:
    pc = Pc()
    share = pc.plan(ctx=4096).placement.shares[0]
    buffers = round(1.5 * share.compute_bytes)
    pc.held = (Held(UUID, share.weights_bytes, share.kv_bytes, compute_bytes=buffers),)
    pc.taken_bytes = pc.held[0].total_bytes + 700 * MIB
    for _ in range(3):
        await load_and_close(pc, ctx=4096)
    assert sum("other than planned" in record.getMessage() for record in heard.records) == 1
    ratios = [ratio for (ratio,) in rows("SELECT compute_ratio FROM loads")]
    assert ratios == pytest.approx([1.5] * 3, rel=0.001)  # of the arithmetic, not of what corrected it


async def test_where_the_driver_names_nobody_what_is_less_free_counts() -> None:
    pc = Pc(names_holders=False)
    await load_and_close(pc)
    assert pc.learned.overhead_bytes == {UUID: 800 * MIB}


@pytest.mark.parametrize("grab_bytes", [10 * GIB, -830 * MIB])
async def test_what_others_took_or_gave_back_meanwhile_is_not_taken_for_the_models(grab_bytes: int) -> None:
    pc = Pc(names_holders=False, others_bytes=GIB, grab_bytes=grab_bytes)
    made = pc.service()
    await ask(made, "one")
    planned = made._residency.residents[0].plan
    assert planned is not None
    assert made.loaded()[0].gpu_bytes == planned.placement.gpu_bytes
    await made.close()
    assert pc.learned.overhead_bytes == {}
    assert pc.learned.compute_ratios != {}


async def test_the_most_of_the_newest_loads_counts() -> None:
    pc = Pc()
    for overhead in (900, 800, 700, 600, 650, 640):
        pc.taken_bytes = pc.held[0].total_bytes + overhead * MIB
        await load_and_close(pc)
    assert pc.learned.overhead_bytes == {UUID: 800 * MIB}  # the first is too old
    for _ in range(measured.N_KEPT):
        await load_and_close(pc)
    assert rows("SELECT count(*) FROM loads") == [(measured.N_KEPT,)]
    assert rows("SELECT count(DISTINCT load_id) FROM load_bytes") == [(measured.N_KEPT,)]


async def test_corrections_are_bounded(heard: pytest.LogCaptureFixture) -> None:
    pc = Pc(held=(Held(UUID, compute_bytes=12 * GIB),), taken_bytes=13 * GIB)
    await load_and_close(pc)
    assert list(pc.learned.compute_ratios.values()) == [measured.RATIO_MOST]
    pc.held = (Held(UUID, compute_bytes=1),)
    pc.taken_bytes = 600 * MIB
    for _ in range(measured.N_COUNTED):
        await load_and_close(pc)
    assert list(pc.learned.compute_ratios.values()) == [measured.RATIO_LEAST]


async def test_a_quantized_cache_that_is_not_filled_is_no_reason_to_plan_less(tmp_path: Path) -> None:
    folder = config.load().models_dir
    synthetic.write(folder / "one.gguf", replace(synthetic.TINY["llama"], n_embd=128, n_head=4, n_head_kv=4))
    pc = Pc(held=(Held(UUID, compute_bytes=1),))
    await load_and_close(pc, kv="q8_0")
    assert list(pc.learned.compute_ratios.values()) == [1.0]


async def test_another_library_driver_or_file_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pc = Pc()
    await load_and_close(pc)
    known = pc.learned
    path = config.load().models_dir / "one.gguf"
    key = (str(path), f"{UUID} none {pc.specs[0].n_gpu_layers} -0")
    assert (list(known.overhead_bytes), list(known.compute_ratios)) == ([UUID], [str(path)])
    assert dict(known.tokens_per_s) == {key: 50.0}
    pc.hardware = card(24, driver="590.1")
    assert pc.learned == Learned()
    pc.hardware = card(24)
    with monkeypatch.context() as patch:
        patch.setattr(measured, "library_version", lambda: "99")
        assert pc.learned == Learned()
    os.utime(path, (1, 1))
    changed = measured.learned(config.load(), pc.hardware)
    assert changed == Learned(overhead_bytes=known.overhead_bytes)
    path.unlink()
    assert measured.learned(config.load(), pc.hardware) == changed


async def test_a_profile_neither_teaches_nor_learns(tmp_path: Path) -> None:
    await load_and_close(Pc())
    profile = tmp_path / "pc.toml"
    profile.write_text(
        f"[ram]\ntotal_bytes = {32 * GIB}\navailable_bytes = {17 * GIB}\n"
        '[cpu]\nname = "x"\nphysical_cores = 2\n'
    )
    settings = config.load({"hardware": str(profile)})
    assert measured.learned(settings, card(24)) == Learned()
    pc = Pc()
    made = Service(settings, start_engine=pc.start)
    await ask(made, "two")
    await made.close()
    assert rows("SELECT count(*) FROM loads") == [(1,)]


async def test_a_database_that_cannot_be_used_stops_no_load(heard: pytest.LogCaptureFixture) -> None:
    path = config.load().paths.data / database.FILE
    path.write_bytes(b"nonsense" * 100)
    await load_and_close(Pc())
    assert "what one took is not kept" in heard.text
    assert "what earlier loads took is left out" in heard.text


# Room ----------------------------------------------------------------------------------------------


async def test_what_a_loaded_model_really_holds_counts_as_room() -> None:
    """By its plan it would give back too little for the other to lie on the card."""
    pc = Pc(card(2.3), taken_bytes=1242 * MIB)
    made = pc.service(margin_mib=256, ctx=512)
    await ask(made, "one")
    assert made.loaded()[0].gpu_bytes == 1242 * MIB
    await ask(made, "two")
    assert [engine.is_alive for engine in pc.engines] == [False, True]
    assert pc.specs[1].n_gpu_layers > 0
    await made.close()


async def test_each_load_looks_at_the_memory_anew() -> None:
    """A card that was lost and is back, with less free than before."""
    pc = Pc()
    whole = pc.hardware
    lost = replace(whole.gpus[0], state="lost", problem="Lost.", total_bytes=0, free_bytes=0)
    pc.hardware = replace(whole, mode="cpu", gpus=(lost,))
    made = pc.service(ctx=512)
    await ask(made, "one")
    assert pc.specs[-1].n_gpu_layers == 0
    pc.hardware = whole
    await ask(made, "two")
    assert pc.specs[-1].n_gpu_layers > 0
    plan = made._residency.residents[0].plan
    assert plan is not None
    assert plan.placement.gpus[0].free_bytes == whole.gpus[0].free_bytes
    pc.others_bytes = 20 * GIB
    await made.unload("two")
    await ask(made, "two")
    plan = made._residency.residents[0].plan
    assert plan is not None
    assert plan.placement.gpus[0].free_bytes == whole.gpus[0].free_bytes - 20 * GIB
    await made.close()


# Too little memory ---------------------------------------------------------------------------------


def out_of_memory(pc: Pc, *, held_mib: int = 0, free_mib: int | None = 0, wanted_mib: int = 1) -> None:
    pc.errors.append(
        OutOfMemoryError(
            "llama.cpp could not make a context.",
            device=UUID,
            wanted_bytes=wanted_mib * MIB,
            free_bytes=None if free_mib is None else free_mib * MIB,
            held_bytes=held_mib * MIB,
        )
    )


async def test_too_little_memory_is_planned_again_with_what_the_engine_really_held() -> None:
    """CUDA took 1,800 MiB where 530 were planned."""
    pc = Pc(card(2.3))
    free_mib = pc.hardware.gpus[0].free_bytes // MIB
    out_of_memory(pc, free_mib=free_mib - 1800)
    made = pc.service(margin_mib=256, ctx=512)
    await ask(made, "one")
    assert [spec.n_gpu_layers > 0 for spec in pc.specs] == [True, False]
    assert made.status().note == f"1.2 GiB more are kept free on {CARD}, since memory ran out before."
    assert made.totals()["one"].n_failed_loads == 1
    await made.close()


async def test_memory_that_others_took_meanwhile_is_not_kept_free_twice() -> None:
    pc = Pc(card(2.3))
    free_mib = pc.hardware.gpus[0].free_bytes // MIB
    out_of_memory(pc, free_mib=free_mib - 530 - 1200)
    made = pc.service(margin_mib=256, ctx=512)
    detect, n_looks = pc.detect, itertools.count()

    def others_come() -> Hardware:
        pc.others_bytes = 1200 * MIB if next(n_looks) else 0
        return detect()

    made._loader._detect = others_come
    await ask(made, "one")
    assert pc.specs[1].n_gpu_layers == 0
    assert made.status().note == ""
    await made.close()


async def test_more_asked_for_than_was_planned_is_planned_for() -> None:
    pc = Pc(card(2.3))
    out_of_memory(pc, free_mib=None, wanted_mib=1300)
    made = pc.service(margin_mib=256, ctx=512)
    await ask(made, "one")
    assert [spec.n_gpu_layers > 0 for spec in pc.specs] == [True, False]
    await made.close()


async def test_a_failure_that_the_figures_do_not_explain_makes_the_plan_smaller_by_a_guess() -> None:
    pc = Pc(card(24))
    for _ in range(2):
        out_of_memory(pc, free_mib=None)
    made = pc.service(ctx=512)
    with pytest.raises(OutOfMemoryError):
        await ask(made, "one")
    assert made._loader.failures.missing_bytes(Path(pc.specs[0].path)) == {UUID: 2 * GIB}
    await made.close()


async def test_more_than_an_engine_can_hold_was_others_who_came_and_went() -> None:
    pc = Pc(card(24))
    out_of_memory(pc, free_mib=512)
    made = pc.service(ctx=512)
    await ask(made, "one")
    assert made.status().note == f"1.0 GiB more are kept free on {CARD}, since memory ran out before."
    assert pc.specs[1].n_gpu_layers > 0
    await made.close()


async def test_a_second_failure_is_told_in_one_line_with_all_figures(
    heard: pytest.LogCaptureFixture,
) -> None:
    pc = Pc(card(24))
    for _ in range(9):
        out_of_memory(pc, held_mib=256, free_mib=512, wanted_mib=768)
    made = pc.service(ctx=512, slots=1)
    with pytest.raises(OutOfMemoryError) as caught:
        await ask(made, "one")
    assert len(pc.specs) == 2
    text = str(caught.value)
    assert "\n" not in text
    assert f"one ran out of memory while loading: {CARD} was asked for 0.75 GiB more" in text
    assert "with 0.50 GiB free, beside 0.25 GiB that the model had" in text
    assert "planned again with what the first try showed, and failed again" in text
    assert made.status().state == "failed"
    assert text in made.status().problem
    await made.close()


async def test_too_little_ram_is_told_too() -> None:
    pc = Pc(machine(ram_gib=16))
    error = OutOfMemoryError("No context.", device="", wanted_bytes=GIB, free_bytes=None, held_bytes=0)
    pc.errors = [error, error]
    made = pc.service(ctx=512)
    with pytest.raises(EngineError, match=r"the RAM was asked for 1\.00 GiB more, beside 0\.00 GiB"):
        await ask(made, "one")
    await made.close()


# Speed ---------------------------------------------------------------------------------------------


async def test_a_speed_is_that_of_an_answer_that_had_the_machine_for_itself() -> None:
    pc = Pc()
    made = pc.service(ctx=512)
    await made.load("one")
    pc.engines[0].gate.clear()
    both = [asyncio.create_task(ask(made, "one")) for _ in range(2)]
    await asyncio.sleep(0.02)
    pc.engines[0].gate.set()
    await asyncio.gather(*both)
    pc.engines[0].usage = Usage(3, 20)  # too few tokens
    await ask(made, "one")
    pc.engines[0].usage = Usage(3, 101, drafted_tokens=90, accepted_tokens=80)
    await ask(made, "one")
    await asyncio.to_thread(made._loader.close)
    assert rows("SELECT * FROM speeds") == []
    await made.close()


async def test_a_measured_speed_stands_beside_the_forecast_of_the_same_placement() -> None:
    pc = Pc()
    await load_and_close(pc, ctx=512)
    plan = pc.plan(ctx=512)
    assert plan.measured_tokens_per_s == 50.0
    assert plan.to_dict()["measured"] == {"tokens_per_s": 50.0}
    assert plan.tokens_per_s != 50.0
    assert pc.plan(ctx=512, gpu_layers=0).measured_tokens_per_s is None


async def test_speeds_are_kept_now_and_then_and_their_middle_counts() -> None:
    pc = Pc()
    made = pc.service(ctx=512)
    now = itertools.count(step=61)
    made._loader._learning._now = lambda: float(next(now))
    await made.load("one")
    for n_tokens in (101, 1001, 121, 141, 161, 181, 201):
        pc.engines[0].usage = Usage(3, n_tokens)
        await ask(made, "one")
    await made.close()
    assert rows("SELECT count(*) FROM speeds") == [(measured.N_COUNTED,)]
    assert list(pc.learned.tokens_per_s.values()) == [80.0]


# Load settings that are kept for a model -------------------------------------------------------------


async def test_a_model_is_loaded_with_the_settings_that_are_kept_for_it() -> None:
    pc = Pc()
    load_settings.put("one", {"ctx": 1024, "slots": 2, "gpu_layers": 0}, config.load())
    made = pc.service()
    await ask(made, "one")
    await ask(made, "two")
    one, two = pc.specs
    assert (one.n_ctx, one.n_slots, one.n_gpu_layers) == (1024, 2, 0)
    assert two.n_gpu_layers > 0
    await made.close()
    made = pc.service(ctx=512)
    await ask(made, "one")
    assert (pc.specs[-1].n_ctx, pc.specs[-1].n_slots) == (512, 2)
    await made.close()


async def test_kept_settings_that_cannot_be_met_are_named_as_the_cause() -> None:
    load_settings.put("one", {"gpu": ("GPU-sold",)}, config.load())
    made = Pc().service()
    with pytest.raises(UsageError, match=r"GPU-sold.*load settings that are kept for this model"):
        await ask(made, "one")
    await ask(made, "two")
    await made.close()


async def test_of_several_files_the_one_that_is_chosen_brings_its_settings() -> None:
    folder = config.load().models_dir / "acme" / "nano"
    folder.mkdir(parents=True)
    for quant in ("Q4_K_M", "Q8_0"):
        shutil.copy(config.load().models_dir / "one.gguf", folder / f"nano-{quant}.gguf")
    pc = Pc()
    await load_and_close(pc, "hf:acme/nano")
    chosen = pc.specs[0].path
    quant = "Q8_0" if "Q8_0" in chosen else "Q4_K_M"
    load_settings.put(f"hf:acme/nano:{quant}", {"ctx": 768}, config.load())
    await load_and_close(pc, "hf:acme/nano")
    assert (pc.specs[1].path, pc.specs[1].n_ctx) == (chosen, 768)
    load_settings.forget(f"hf:acme/nano:{quant}", config.load())
    load_settings.put("hf:acme/nano", {"ctx": 640}, config.load())
    for ref in ("hf:acme/nano", f"hf:acme/nano:{quant}"):
        await load_and_close(pc, ref)
        assert (pc.specs[-1].path, pc.specs[-1].n_ctx) == (chosen, 640)


async def test_a_plan_by_name_knows_what_loads_have_shown() -> None:
    pc = Pc()
    await load_and_close(pc)
    plan = planning.plan("one", config.load(), pc.hardware)
    assert plan.placement.shares[0].overhead_bytes == 800 * MIB
    assert planning.plan("one", config.load(), pc.hardware, Learned()) != plan
