"""What loads and answers teach: measured, kept, told, and used by the next plan."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemolocal import config, database, load_settings
from nemolocal.engine.messages import Held
from nemolocal.errors import UsageError
from nemolocal.models import measured, planning
from nemolocal.models.learned import Learned
from nemolocal.service import Service
from nemolocal.types import Usage
from tests import synthetic
from tests.cards import CARD, DRIVER, MIB, UUID, Pc, ask, card, load_and_close, put_two_models
from tests.profiles import GIB, machine

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def heard(home: Path, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Two models are here, and the log is heard."""
    put_two_models()
    logger = logging.getLogger("nemolocal")
    before = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel("INFO")
    yield caplog
    logger.propagate, logger.level = before


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
    for _ in range(20):
        await load_and_close(pc)
    assert rows("SELECT count(*) FROM loads") == [(20,)]
    assert rows("SELECT count(DISTINCT load_id) FROM load_bytes") == [(20,)]


async def test_what_another_program_took_in_the_same_moment_spoils_no_plan() -> None:
    """Unless it is measured again: then it is the model's own."""
    pc = Pc(names_holders=False)
    await load_and_close(pc)
    pc.taken_bytes = pc.held[0].total_bytes + 3 * GIB
    made = pc.service()
    await ask(made, "one")
    planned = made._residency.residents[0].plan
    assert planned is not None
    assert made.loaded()[0].gpu_bytes == planned.placement.gpu_bytes
    await made.close()
    assert pc.learned.overhead_bytes == {UUID: 800 * MIB}
    await load_and_close(pc)
    assert pc.learned.overhead_bytes == {UUID: 3 * GIB}


async def test_a_first_load_with_far_too_much_is_not_believed() -> None:
    pc = Pc(names_holders=False)
    pc.taken_bytes = pc.held[0].total_bytes + 3 * GIB
    await load_and_close(pc)
    assert pc.learned.overhead_bytes == {}


@pytest.mark.parametrize(("overhead_mib", "is_used"), [(63, False), (64, True), (4096, True), (4097, False)])
async def test_an_overhead_that_cannot_be_is_not_kept(overhead_mib: int, is_used: bool) -> None:
    pc = Pc(names_holders=False)
    pc.taken_bytes = pc.held[0].total_bytes + overhead_mib * MIB
    await load_and_close(pc)
    kept = rows(f"SELECT used_bytes FROM load_bytes WHERE device = '{UUID}' AND kind = 'overhead'")
    assert kept == [(overhead_mib * MIB if is_used else None,)]


async def test_corrections_are_bounded(heard: pytest.LogCaptureFixture) -> None:
    pc = Pc(held=(Held(UUID, compute_bytes=12 * GIB),), taken_bytes=13 * GIB)
    await load_and_close(pc)
    assert list(pc.learned.compute_ratios.values()) == [2.0]
    pc.held = (Held(UUID, compute_bytes=1),)
    pc.taken_bytes = 600 * MIB
    for _ in range(5):
        await load_and_close(pc)
    assert list(pc.learned.compute_ratios.values()) == [0.8]


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
    assert list(known.overhead_bytes) == [UUID]
    assert [file for file, _ in known.compute_ratios] == [str(path)]
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


@pytest.mark.model
async def test_a_real_engine_teaches_what_its_library_has_allocated() -> None:
    made = Service(config.load({"ctx": 2048, "threads": 1}), detect=machine)
    await made.load("one")
    plan = made._residency.residents[0].plan
    await made.close()
    assert plan is not None
    kept = {kind: (planned, used) for kind, planned, used in rows(
        "SELECT kind, planned_bytes, used_bytes FROM load_bytes WHERE device = ''"
    )}  # fmt: skip
    assert kept["kv"][0] == plan.placement.host.kv_bytes
    assert kept["kv"][1] == pytest.approx(kept["kv"][0], abs=0.01 * MIB)
    [(ratio,)] = rows("SELECT compute_ratio FROM loads")
    assert 0 < ratio <= 1.0
