"""A plan says what gave way and what that costs, and a refusal what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nemolocal.errors import DoesNotFitError
from nemolocal.hardware import Hardware, Holder
from nemolocal.models.memory import MIB
from nemolocal.models.sizing import GIB, Candidate, Wish, plan
from tests.models.plan_cases import LADDER, RTX_3060, RTX_4090, check, even, gpu, machine, of_catalog


def refused(files: Sequence[Candidate], hardware: Hardware, wish: Wish | None = None) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        plan("demo", files, hardware, wish)
    return caught.value.hint


@pytest.mark.parametrize(
    ("wish", "offered", "kept"),
    [
        (Wish(quant="Q8_0"), "Q4_K_M would fit.", Wish(quant="Q4_K_M")),
        (Wish(n_ctx=65_536, n_gpu_layers=33), "--ctx 32768 would fit.", Wish(n_ctx=32_768, n_gpu_layers=33)),
        (Wish(n_gpu_layers=33, gpus=("0",), n_ctx=8192, quant="Q6_K"), "--gpu-layers", Wish(n_ctx=8192)),
        (Wish(margin_bytes=6 * GIB, n_gpu_layers=33, quant="Q3_K_M"), "--gpu-layers", Wish(quant="Q3_K_M")),
    ],
)
def test_what_is_offered_does_fit(wish: Wish, offered: str, kept: Wish) -> None:
    hardware = machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 7.6), ram_gib=7)
    if wish.quant == "Q8_0":
        hardware = machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 5), ram_gib=3)
    assert offered in refused(LADDER, hardware, wish)
    check(plan("demo", LADDER, hardware, kept), hardware)


def test_of_a_context_that_is_far_too_long_the_longest_that_fits_is_offered() -> None:
    n_trained = LADDER[0].shape.n_ctx_train
    large = machine(gpu(0, "NVIDIA H200", 140, 139), ram_gib=500)
    wish = Wish(n_ctx=999_999_999)
    assert refused(LADDER, large, wish) == f"--ctx {n_trained} would fit, all that it was trained for."
    hint = refused(LADDER, machine(RTX_3060, ram_gib=4), wish)
    offered = int(hint.split()[1])
    assert n_trained > offered > 2048
    check(
        plan("demo", LADDER, machine(RTX_3060, ram_gib=4), Wish(n_ctx=offered)), machine(RTX_3060, ram_gib=4)
    )
    with pytest.raises(DoesNotFitError):
        plan("demo", LADDER, machine(RTX_3060, ram_gib=4), Wish(n_ctx=2 * offered))


def test_a_smaller_margin_is_offered_where_nothing_else_helps() -> None:
    hardware = machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 5), ram_gib=1)
    assert "--margin-mib 256" in refused(LADDER, hardware)
    assert plan("demo", LADDER, hardware, Wish(margin_bytes=256 * MIB)).placement.gpus
    assert "smaller model" in refused(LADDER, machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 2), ram_gib=2))


def test_a_program_that_must_end_is_named_by_what_it_holds_on_all_cards() -> None:
    holders = (Holder(7, "desktop", 600 * MIB), Holder(4711, "blender", 4 * GIB))
    busy = [gpu(i, "NVIDIA GeForce RTX 4060", 8, 3, holders=holders) for i in range(2)]
    hint = refused([even("Q4_K_M", 9)], machine(*busy, ram_gib=2))
    assert hint == "It would fit if blender (process 4711) ended, which holds 8.0 GiB of GPU memory."
    told = plan("demo", LADDER, machine(*busy)).reasons[-1]
    assert told.startswith("blender (process 4711) holds 8.0 GiB of GPU memory; without it, ")


def test_a_program_that_changes_nothing_is_not_told_of() -> None:
    full = gpu(0, "NVIDIA GeForce RTX 4090", 24, 23.4, holders=(Holder(7, "desktop", 600 * MIB),))
    assert not any("desktop" in reason for reason in plan("demo", [LADDER[3]], machine(full)).reasons)


def test_what_lies_in_ram_is_told_by_what_it_costs() -> None:
    made = plan("demo", [even("Q4_K_M", 30)], machine(RTX_4090, ram_gib=40))
    assert not made.placement.is_whole
    assert "% of the speed of such a card that held all of it" in made.reasons[1]
    percent = int(made.reasons[1].split("at ")[1].split("%")[0])
    assert 5 < percent < 60


def test_a_longer_context_and_faster_prompts_may_cost_a_little_where_a_part_is_in_ram() -> None:
    files, hardware = of_catalog("nemotron-3-nano-30b-a3b"), machine(RTX_3060)
    made = plan("m", files, hardware)
    least = plan("m", files, hardware, Wish(n_ctx=8192, n_slots=1, n_ubatch=512))
    check(made, hardware)
    assert made.placement.host_experts
    assert made.load.n_ctx >= 65_536
    assert made.load.n_ubatch > 512
    assert made.tokens_per_s is not None
    assert least.tokens_per_s is not None
    assert least.tokens_per_s / 1.16 < made.tokens_per_s <= least.tokens_per_s
    assert made.prompt_tokens_per_s is not None
    assert least.prompt_tokens_per_s is not None
    assert made.prompt_tokens_per_s > 1.5 * least.prompt_tokens_per_s
    dear = plan("demo", [even("Q4_K_M", 30)], machine(RTX_4090, ram_gib=60))
    assert dear.load.n_ctx < 131_072  # of a model whose cache is large, a long context is not cheap


def test_slots_cost_no_layers_where_each_has_a_large_state() -> None:
    """Of a hybrid with 139 MiB for each slot, eight slots would send more than a gigabyte to the RAM."""
    made = plan("m", of_catalog("nemotron-nano-9b-v2"), machine(gpu(0, "GPU", 6, 4.5)))
    assert made.placement.host.n_layers
    assert made.load.n_slots == 1


def test_a_gpu_that_cannot_be_used_is_named() -> None:
    lost = replace(gpu(1, "NVIDIA RTX A6000", 48, 0), state="lost", problem="It has fallen off the bus.")
    told = plan("demo", LADDER, machine(RTX_4090, lost)).reasons
    assert "GPU 1 (NVIDIA RTX A6000) is not used: It has fallen off the bus." in told


def test_layers_that_were_asked_for_are_counted_as_they_were_asked_for() -> None:
    n_layer = LADDER[0].shape.n_layer
    told = plan("demo", LADDER, machine(RTX_4090), Wish(n_gpu_layers=10)).reasons
    assert any(reason.startswith(f"9 of {n_layer} layers and the output layer lie on") for reason in told)
