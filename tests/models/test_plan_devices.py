"""Each device is given what it can hold: the fastest card alone, or layers by their bytes, or part in RAM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemolocal.errors import DoesNotFitError, UsageError
from nemolocal.hardware import Gpu, Holder
from nemolocal.models.learned import Learned, placed
from nemolocal.models.memory import MIB
from nemolocal.models.sizing import GIB, Plan, Wish, plan
from tests.models.plan_cases import (
    BUSY_4090,
    LADDER,
    OLD_3090,
    RTX_3060,
    RTX_4090,
    SECOND_4090,
    check,
    even,
    gpu,
    machine,
    of_catalog,
)

# Devices --------------------------------------------------------------------------------------------------


def test_one_card_that_holds_it_all_is_used_alone_and_it_is_the_faster() -> None:
    cards = (gpu(0, "NVIDIA GeForce RTX 3060", 24, 23), gpu(1, "NVIDIA GeForce RTX 4090", 24, 22))
    made = plan("demo", LADDER, machine(*cards))
    assert made.visible_devices == (cards[1].uuid,)
    assert made.placement.tensor_split == ()
    assert made.split_mode == "none"


def test_a_card_in_use_is_planned_by_what_is_free() -> None:
    free = plan("demo", LADDER, machine(gpu(0, "RTX 3060", 12, 11.5)))
    in_use = plan("demo", LADDER, machine(gpu(0, "RTX 3060", 12, 6.5)))
    assert free.candidate.quant == "Q6_K"
    assert in_use.candidate.quant in ("Q4_K_M", "Q3_K_M")
    check(in_use, machine(gpu(0, "RTX 3060", 12, 6.5)))


def test_two_unlike_cards_each_get_what_they_can_hold() -> None:
    """The engine's process sees just these cards in the plan's order, so no numbering can swap them."""
    files = [even("Q4_K_M", 20, n_layer=40)]
    for cards in ((OLD_3090, BUSY_4090), (BUSY_4090, OLD_3090)):
        made = plan("demo", files, machine(*cards), Wish(n_ctx=16384))
        check(made, machine(*cards))
        assert made.placement.is_whole
        by_name = dict(zip(made.placement.gpus, made.placement.shares, strict=True))
        assert made.visible_devices == (OLD_3090.uuid, BUSY_4090.uuid)
        assert by_name[BUSY_4090].total_bytes < 4 * GIB
        assert by_name[OLD_3090].total_bytes < 23 * GIB
        assert made.placement.tensor_split[0] > made.placement.tensor_split[1] > 0


def test_uneven_layers_are_split_by_bytes() -> None:
    made = plan("m", of_catalog("llama-3.3-nemotron-super-49b"), machine(RTX_4090, SECOND_4090, ram_gib=64))
    check(made, machine(RTX_4090, SECOND_4090, ram_gib=64))
    first, second = made.placement.shares
    assert made.placement.is_whole
    assert second.n_layers > first.n_layers + 10  # the later layers of this model are the narrow ones
    assert abs(first.total_bytes - second.total_bytes) < 1.5 * GIB


def test_a_giant_layer_is_put_where_it_fits() -> None:
    plain = even("Q4_K_M", 8, n_layer=8, n_row=256)
    giant = replace(plain.shape.layers[0], weights_bytes=12 * GIB)
    layers = (*plain.shape.layers[:3], giant, *plain.shape.layers[4:])
    files = [replace(plain, shape=replace(plain.shape, layers=layers))]
    cards = (gpu(0, "RTX 3060", 12, 11.5), gpu(1, "RTX 4080", 16, 15.8))
    made = plan("demo", files, machine(*cards), Wish(n_ctx=8192))
    check(made, machine(*cards))
    assert made.placement.gpus[0] == cards[1]


@pytest.mark.parametrize("selection", [("1",), ("GPU-bbbb",), (SECOND_4090.uuid,)])
def test_gpus_are_chosen_by_index_or_uuid(selection: tuple[str, ...]) -> None:
    made = plan("demo", LADDER, machine(RTX_4090, SECOND_4090), Wish(gpus=selection))
    assert made.visible_devices == (SECOND_4090.uuid,)


def test_an_unknown_or_broken_gpu_is_refused() -> None:
    lost = gpu(1, "RTX 4090", 24, 0, state="lost", problem="it has fallen off the bus")
    with pytest.raises(UsageError, match="GPU-aaaa"):
        plan("demo", LADDER, machine(RTX_4090), Wish(gpus=("7",)))
    with pytest.raises(UsageError, match="fallen off the bus"):
        plan("demo", LADDER, machine(RTX_4090, lost), Wish(gpus=("1",)))
    assert plan("demo", LADDER, machine(RTX_4090, lost)).visible_devices == (RTX_4090.uuid,)


def test_a_number_of_gpu_layers_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan("demo", [even("Q8_0", 30)], machine(RTX_4090, ram_gib=64), Wish(n_gpu_layers=30))
    assert "--gpu-layers" in caught.value.hint
    assert caught.value.needed_bytes > caught.value.available_bytes


def test_no_gpu_layers_means_the_cpu() -> None:
    made = plan("demo", LADDER, machine(RTX_4090), Wish(n_gpu_layers=0))
    assert made.visible_devices == ()
    assert made.placement.n_gpu_layers == 0
    assert "asked for" in made.reasons[0]


def test_a_gpu_too_full_for_anything_leaves_the_cpu_and_says_so() -> None:
    made = plan("demo", LADDER, machine(gpu(0, "RTX 4090", 24, 1.2)))
    assert made.visible_devices == ()
    assert "1.2 GiB are free" in made.reasons[0]


def test_a_gpu_without_memory_of_its_own_is_not_counted_twice() -> None:
    shared = gpu(0, "NVIDIA GB10", 20, 18, shares_ram=True)
    made = plan("demo", LADDER, machine(shared, ram_gib=18))
    assert made.placement.ram_bytes <= 18 * GIB
    with pytest.raises(DoesNotFitError):
        plan("demo", [even("Q4_K_M", 25)], machine(shared, ram_gib=18))


def test_a_tensor_split_takes_all_cards_or_says_why_not() -> None:
    files = [even("Q4_K_M", 30, n_layer=40)]
    hardware = machine(RTX_4090, SECOND_4090)
    made = plan("demo", files, hardware, Wish(split="tensor"))
    check(made, hardware)
    assert made.split_mode == "tensor"
    assert made.placement.tensor_split == (0.5, 0.5)
    assert len(made.visible_devices) == 2
    with pytest.raises(UsageError, match="two GPUs"):
        plan("demo", files, machine(RTX_4090), Wish(split="tensor"))
    with pytest.raises(UsageError, match="nemotron_h"):
        plan("m", of_catalog("nemotron-3-nano-4b"), hardware, Wish(split="tensor"))
    with pytest.raises(UsageError, match="f16"):
        plan("demo", files, hardware, Wish(split="tensor", kv_type="q8_0"))


@pytest.mark.parametrize("n_slots", [-1, 33])
def test_too_many_slots_are_refused(n_slots: int) -> None:
    with pytest.raises(UsageError, match="slots"):
        plan("demo", LADDER, machine(RTX_4090), Wish(n_slots=n_slots))


def test_a_cache_type_that_the_heads_cannot_have_is_refused() -> None:
    odd = even("Q4_K_M", 4, head_length=80)
    with pytest.raises(UsageError, match="80"):
        plan("demo", [odd], machine(RTX_4090), Wish(kv_type="q8_0"))
    assert plan("demo", [odd], machine(gpu(0, "GPU", 8, 7.1))).load.kv_type == "f16"


# More than one card ---------------------------------------------------------------------------------------


def test_a_second_card_is_not_taken_for_more_context_than_is_of_use() -> None:
    """One card holds 65,536 tokens and both would hold 131,072."""
    alone, both = machine(RTX_4090), machine(RTX_4090, SECOND_4090)
    made = plan("demo", LADDER, both)
    assert made.load.n_ctx == plan("demo", LADDER, alone).load.n_ctx == 65_536
    assert made.visible_devices == (RTX_4090.uuid,)
    asked_for = plan("demo", LADDER, both, Wish(n_ctx=131_072))
    assert len(asked_for.placement.gpus) == 2
    small = machine(RTX_3060, replace(RTX_3060, index=1, uuid="GPU-second"))
    more = plan("demo", LADDER, small)
    assert (more.load.n_ctx, len(more.placement.gpus)) == (65_536, 2)
    assert plan("demo", LADDER, machine(RTX_3060)).load.n_ctx < 65_536


def test_a_faster_card_is_filled_before_a_slower_one() -> None:
    files = [even("Q4_K_M", 26, n_layer=52, n_row=128)]
    slow = gpu(1, "NVIDIA GeForce RTX 3060", 12, 11.5)
    made = plan("demo", files, machine(RTX_4090, slow, ram_gib=64), Wish(n_ctx=8192))
    check(made, machine(RTX_4090, slow, ram_gib=64))
    shares = dict(zip(made.placement.gpus, made.placement.shares, strict=True))
    assert made.placement.is_whole
    left = RTX_4090.free_bytes - GIB - shares[RTX_4090].total_bytes
    assert left < shares[slow].total_bytes / shares[slow].n_layers  # not one layer more
    assert shares[slow].total_bytes < 0.8 * slow.free_bytes


@pytest.mark.parametrize("free", [(23.4, 22.0), (22.0, 23.4), (22.6, 22.5)])
def test_the_order_of_the_cards_is_that_of_their_uuids_whatever_is_free(free: tuple[float, float]) -> None:
    cards = [gpu(i, "NVIDIA GeForce RTX 4090", 24, gib) for i, gib in enumerate(free)]
    made = plan("demo", [even("Q4_K_M", 30, n_layer=40)], machine(*cards[::-1], ram_gib=64))
    assert made.visible_devices == (cards[0].uuid, cards[1].uuid)


def mig(index: int, gib: float, **rest: object) -> Gpu:
    part = gpu(index, f"NVIDIA H100 80GB HBM3 MIG {gib:.0f}gb", gib, gib - 0.5, is_slice=True, **rest)
    return replace(part, uuid=f"MIG-{index}")


def test_a_slice_excludes_no_card_that_does_better_and_is_taken_where_it_does() -> None:
    """One that MIG has cut is used alone, so the choice is between it and all of the cards."""
    small, large = mig(2, 10), mig(3, 40)
    cards = machine(RTX_4090, SECOND_4090, small, ram_gib=64)
    both = [even("Q4_K_M", 30, n_layer=40)]
    made = plan("demo", both, cards)
    check(made, cards)
    assert made.visible_devices == (RTX_4090.uuid, SECOND_4090.uuid)
    assert any("cannot be used beside whole cards" in reason for reason in made.reasons)
    better = machine(RTX_3060, small, large, ram_gib=64)
    made = plan("demo", both, better)
    check(made, better)
    assert made.visible_devices == (large.uuid,)
    assert any("is used alone" in reason for reason in made.reasons)
    assert plan("demo", both, machine(RTX_3060, ram_gib=64)).placement.is_whole is False
    assert plan("demo", both, better, Wish(gpus=("0",))).visible_devices == (RTX_3060.uuid,)
    assert plan("demo", both, cards, Wish(split="tensor")).split_mode == "tensor"
    for named in (("0", small.uuid), (small.uuid, large.uuid)):
        with pytest.raises(UsageError, match="no other GPU beside"):
            plan("demo", both, better, Wish(gpus=named))


def test_what_fits_nowhere_is_refused_by_the_group_with_most_room() -> None:
    with pytest.raises(DoesNotFitError, match=r"and 2[0-9]\.[0-9] GiB can be used"):
        plan("demo", [even("Q4_K_M", 80)], machine(RTX_4090, mig(1, 10), ram_gib=1))
    hint = "It would fit without --gpu."
    with pytest.raises(DoesNotFitError) as caught:
        plan("demo", [even("Q4_K_M", 20)], machine(RTX_3060, mig(1, 40), ram_gib=1), Wish(gpus=("0",)))
    assert caught.value.hint == hint


# Experts in RAM, matrices cut over cards, what was learned ------------------------------------------------


def linked(index: int, name: str = "NVIDIA H200", gib: float = 140, **rest: object) -> Gpu:
    return gpu(index, name, gib, gib - 1, **{"n_links": 18, **rest})


def test_experts_go_to_the_ram_before_layers_do() -> None:
    made = plan("m", of_catalog("nemotron-3-nano-30b-a3b"), machine(RTX_3060))
    check_experts(made)
    assert made.placement.n_gpu_layers == 53
    assert made.placement.host.n_layers == 0
    assert not made.placement.is_whole
    assert "stay in RAM" in made.reasons[0]
    fewer = plan("m", of_catalog("nemotron-3-nano-30b-a3b"), machine(gpu(0, "RTX 4070 Ti SUPER", 16, 15.5)))
    check_experts(fewer)
    assert len(fewer.placement.host_experts) < len(made.placement.host_experts)


def check_experts(made: Plan) -> None:
    place, shape = made.placement, made.candidate.shape
    sparse = [il for il, layer in enumerate(shape.layers) if layer.expert_bytes]
    assert place.host_experts
    assert list(place.host_experts) == sparse[: len(place.host_experts)]
    in_ram = sum(shape.layers[il].expert_bytes for il in place.host_experts)
    assert place.host.weights_bytes == shape.input_bytes + in_ram
    (share,) = place.shares
    assert share.weights_bytes == shape.repeating_bytes + shape.output_bytes - in_ram


def test_a_card_too_small_for_all_layers_keeps_the_last_ones_without_their_experts() -> None:
    made = plan("m", of_catalog("nemotron-3-super-120b-a12b"), machine(gpu(0, "A card", 8, 7), ram_gib=120))
    place = made.placement
    assert 0 < place.host.n_layers < 88
    first = place.host.n_layers
    layers = made.candidate.shape.layers
    assert place.host_experts == tuple(il for il in range(first, 88) if layers[il].expert_bytes)


def test_matrices_are_cut_over_linked_cards_where_that_is_faster() -> None:
    files, small = of_catalog("llama-3.1-nemotron-70b"), of_catalog("llama-3.1-nemotron-nano-8b")
    two = machine(linked(0), linked(1))
    made = plan("m", files, two)
    check(made, two)
    assert made.split_mode == "tensor"
    assert "faster than one after another" in made.reasons[0]
    alone = plan("m", files, two, Wish(split="layer"))
    assert alone.split_mode == "none"
    assert made.tokens_per_s is not None
    assert alone.tokens_per_s is not None
    assert made.tokens_per_s > 1.2 * alone.tokens_per_s
    for hardware, model in [
        (two, small),  # coming together costs more than is won
        (machine(linked(0, n_links=0), linked(1, n_links=0)), files),
        (machine(linked(0), linked(1, "NVIDIA H100")), files),
        (two, of_catalog("llama-3.3-nemotron-super-49b")),  # layers without attention
        (two, of_catalog("nemotron-3-super-120b-a12b")),
    ]:
        assert plan("m", model, hardware).split_mode != "tensor"
    three = plan("m", files, machine(linked(0), linked(1), linked(2)))
    assert len(three.placement.gpus) == 2  # heads of the cache are not cut in three


def test_what_loads_have_shown_replaces_the_arithmetic() -> None:
    usual = plan("demo", LADDER, machine(RTX_4090))
    file = usual.candidate.file
    known = Learned(
        {RTX_4090.uuid: 900 * MIB}, {(file, usual.load): 1.5}, {placed(file, usual.placement): 77.0}
    )
    made = plan("demo", LADDER, machine(RTX_4090), learned=known)
    (before,), (after,) = usual.placement.shares, made.placement.shares
    assert after.overhead_bytes == 900 * MIB
    assert made.load == usual.load
    assert after.compute_bytes == round(1.5 * before.compute_bytes)
    assert made.to_dict()["measured"] == {"tokens_per_s": 77.0}
    other = plan("demo", LADDER, machine(RTX_4090), Wish(n_slots=1), learned=known).placement.shares[0]
    usual_other = plan("demo", LADDER, machine(RTX_4090), Wish(n_slots=1)).placement.shares[0]
    assert other.compute_bytes == round(1.5 * usual_other.compute_bytes)  # a warning for other loads, too
    less = Learned(compute_ratios={(file, usual.load): 0.85})
    (share,) = plan("demo", LADDER, machine(RTX_4090), learned=less).placement.shares
    assert share.compute_bytes == round(0.85 * before.compute_bytes)
    (share,) = plan("demo", LADDER, machine(RTX_4090), Wish(n_slots=1), learned=less).placement.shares
    assert share.compute_bytes == usual_other.compute_bytes
    elsewhere = plan("demo", LADDER, machine(RTX_4090), Wish(n_gpu_layers=20), learned=known)
    assert elsewhere.measured_tokens_per_s is None
    full = Learned({RTX_3060.uuid: 11 * GIB})
    assert not plan("demo", LADDER, machine(RTX_3060), learned=full).placement.gpus


def test_who_holds_the_memory_is_named() -> None:
    holder = Holder(4711, "blender", 5 * GIB)
    busy = gpu(0, "NVIDIA GeForce RTX 4060", 8, 2.5, holders=(holder,))
    made = plan("demo", LADDER, machine(busy))
    assert any("blender (process 4711) holds 5.0 GiB" in reason for reason in made.reasons)
    with pytest.raises(DoesNotFitError, match="blender"):
        plan("demo", LADDER, machine(busy, ram_gib=2))


@pytest.mark.parametrize(("aim", "quant"), [("speed", "Q4_K_M"), ("balanced", "Q6_K"), ("quality", "Q8_0")])
def test_each_aim_goes_up_to_its_class(aim: str, quant: str) -> None:
    made = plan("demo", LADDER, machine(RTX_4090), Wish(aim=aim))  # type: ignore[arg-type]
    assert made.candidate.quant == quant


def test_bars_fill_each_device() -> None:
    hardware = machine(RTX_4090, replace(RTX_3060, index=1, uuid="GPU-other"))
    made = plan("demo", LADDER, hardware)
    used, idle, ram = made.bars(hardware)
    assert (used.total_bytes, idle.total_bytes) == (24 * GIB, 12 * GIB)
    assert ram.total_bytes == hardware.ram.total_bytes
    assert [what for what, _ in used.parts] == [
        "weights", "KV cache", "buffers", "overhead", "margin", "other programs", "free",
    ]  # fmt: skip
    assert [what for what, _ in idle.parts] == ["other programs", "free"]
    assert dict(used.parts)["margin"] == GIB
