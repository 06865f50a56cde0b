"""Loads that find too little memory, and what a loaded model counts as when room is made."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal.errors import EngineError, OutOfMemoryError
from nemolocal.hardware import Hardware
from tests.cards import CARD, MIB, UUID, Pc, ask, card, put_two_models
from tests.profiles import GIB, machine

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _files(home: Path) -> None:
    put_two_models()


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


async def test_a_second_failure_is_told_in_one_line_with_all_figures() -> None:
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
