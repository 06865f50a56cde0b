"""Of what can be loaded the best that fits is chosen, and wishes are kept or refused."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal.errors import DoesNotFitError, ModelNotFoundError
from nemolocal.hardware import Hardware
from nemolocal.models import catalog, choice, forecast, gguf, placement
from nemolocal.models.memory import MIB, Load
from nemolocal.models.sizing import GIB, N_SLOTS_MOST, Candidate, Plan, Wish, plan
from tests import synthetic
from tests.models.plan_cases import (
    CARD_7_3,
    LADDER,
    RTX_3060,
    RTX_4090,
    asked,
    check,
    even,
    gpu,
    machine,
    of_catalog,
)

# The quantization -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_ctx", "quant"), [(8192, "Q5_K_M"), (16384, "Q4_K_M")])
def test_the_cache_is_counted_before_the_file_is_chosen(n_ctx: int, quant: str) -> None:
    wish = asked(n_ctx)
    made = plan("demo", LADDER, CARD_7_3, wish)
    check(made, CARD_7_3, wish.margin_bytes)
    assert made.candidate.quant == quant
    assert made.placement.is_whole
    assert made.load.n_ctx == n_ctx


def test_what_fits_only_in_part_is_said_in_words() -> None:
    wish = asked(32768)
    made = plan("demo", LADDER, CARD_7_3, wish)
    check(made, CARD_7_3, wish.margin_bytes)
    assert not made.placement.is_whole
    assert made.load.n_ctx == 32768
    assert made.candidate.quant not in ("Q8_0", "Q6_K")
    assert "the rest runs on the CPU" in made.reasons[0]


def test_in_part_the_words_fit_the_quantization_and_the_context() -> None:
    card = gpu(0, "NVIDIA GeForce RTX 4060", 8, 7.3)
    ladder = [even("Q4_K_M", 30), even("Q2_K", 12)]
    good = plan("demo", ladder, machine(card, ram_gib=40))
    assert good.candidate.quant == "Q4_K_M"
    poor = plan("demo", ladder, machine(card, ram_gib=16))
    assert poor.candidate.quant == "Q2_K"
    assert any("the answers suffer" in reason for reason in poor.reasons)
    assert not any("without harm" in reason for reason in poor.reasons)
    wished = plan("demo", ladder, machine(card, ram_gib=16), Wish(n_gpu_layers=3))
    assert any("so many layers on the GPUs" in reason for reason in wished.reasons)
    for made in (good, poor):
        assert not made.placement.is_whole
        assert made.load.n_ctx >= 8192
        longer = plan("demo", ladder, machine(card, ram_gib=60), Wish(n_ctx=131_072))
        assert longer.placement.n_gpu_layers < made.placement.n_gpu_layers
        assert any("--ctx takes more" in reason for reason in made.reasons)
        assert plan("demo", ladder, machine(card, ram_gib=60), Wish(n_ctx=16384)).load.n_ctx == 16384


def test_what_fits_nowhere_is_refused_with_both_sizes() -> None:
    hardware = machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 3), ram_gib=2)
    with pytest.raises(DoesNotFitError) as caught:
        plan("demo", LADDER, hardware, asked(8192))
    error = caught.value
    assert error.needed_bytes > error.available_bytes > 2 * GIB
    assert f"{error.needed_bytes / GIB:.1f} GiB" in str(error)
    assert f"{error.available_bytes / GIB:.1f} GiB" in str(error)
    assert "\n" not in str(error)
    assert error.hint


def test_the_offered_change_does_fit() -> None:
    hardware = machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 4), ram_gib=3)
    wish = Wish(n_ctx=65_536, margin_bytes=0)
    with pytest.raises(DoesNotFitError) as caught:
        plan("demo", LADDER, hardware, wish)
    offered = int(caught.value.hint.split("--ctx ")[1].split()[0])
    made = plan("demo", LADDER, hardware, replace(wish, n_ctx=offered))
    check(made, hardware, 0)
    with pytest.raises(DoesNotFitError):
        plan("demo", LADDER, hardware, replace(wish, n_ctx=2 * offered))


@pytest.mark.parametrize("n_ctx", [0, 8192, 16384, 32768])
def test_the_order_of_the_files_has_no_say(n_ctx: int) -> None:
    wish = Wish(n_ctx=n_ctx)
    plans = {str(plan("demo", order, CARD_7_3, wish).to_dict()) for order in itertools.permutations(LADDER)}
    assert len(plans) == 1


def test_more_than_six_bits_are_not_worth_their_room() -> None:
    made = plan("demo", LADDER, machine(RTX_4090))
    assert made.candidate.quant == "Q6_K"


def test_where_eight_bits_cost_no_more_they_are_taken() -> None:
    """Widths that are no multiple of 256 make Q6_K as large as Q8_0, and Q3_K larger than IQ4_XS."""
    files = [even("Q8_0", 8.0), even("Q6_K", 7.98), even("Q3_K_M", 4.7), even("IQ4_XS", 4.3)]
    assert plan("demo", files, machine(RTX_4090)).candidate.quant == "Q8_0"
    assert plan("demo", files, machine(gpu(0, "RTX 3060", 8, 8))).candidate.quant == "IQ4_XS"


def test_a_file_that_is_here_goes_before_a_better_one_elsewhere() -> None:
    files = [replace(c, is_local=c.quant == "Q4_K_M") for c in LADDER]
    made = plan("demo", files, machine(RTX_4090))
    assert made.candidate.quant == "Q4_K_M"
    assert any("here already" in reason for reason in made.reasons)


def test_a_file_that_is_here_but_too_large_is_passed_over() -> None:
    files = [replace(c, is_local=c.quant == "Q8_0") for c in LADDER]
    assert plan("demo", files, CARD_7_3).candidate.quant != "Q8_0"


def test_a_named_quantization_is_kept_or_refused() -> None:
    assert plan("demo", LADDER, machine(RTX_4090), Wish(quant="q8_0")).candidate.quant == "Q8_0"
    made = plan("demo", LADDER, CARD_7_3, Wish(quant="Q8_0"))
    assert made.candidate.quant == "Q8_0"
    assert not made.placement.is_whole
    with pytest.raises(ModelNotFoundError, match="Q4_K_M"):
        plan("demo", LADDER, CARD_7_3, Wish(quant="Q9"))


# Context, cache and slots ---------------------------------------------------------------------------------


def test_the_context_is_as_long_as_fits_whole() -> None:
    one = [even("Q4_K_M", 4.58)]
    contexts = {free: plan("demo", one, machine(gpu(0, "GPU", 24, free))).load.n_ctx for free in (9, 11, 15)}
    assert contexts == {9: 16384, 11: 32768, 15: 65536}


def test_the_context_never_passes_what_the_model_was_trained_for() -> None:
    for n_train in (4096, 40_960, 32_768):
        one = [even("Q4_K_M", 4.58, n_ctx_train=n_train)]
        assert plan("demo", one, machine(gpu(0, "GPU", 80, 80))).load.n_ctx == n_train


def test_a_quantized_cache_comes_before_a_short_context() -> None:
    one = [even("Q4_K_M", 4.58)]
    made = plan("demo", one, machine(gpu(0, "GPU", 8, 7.9)))
    assert (made.load.n_ctx, made.load.kv_type) == (16384, "q8_0")
    assert any("q8_0" in reason for reason in made.reasons)
    kept = plan("demo", one, machine(gpu(0, "GPU", 8, 7.9)), Wish(kv_type="f16"))
    assert (kept.load.n_ctx, kept.load.kv_type) == (8192, "f16")


def test_a_quantized_cache_that_saves_nothing_is_not_used() -> None:
    """One attention block: its f16 copy for flash attention costs twice what the smaller type saves."""
    plain = even("Q4_K_M", 4.58)
    layers = (replace(plain.shape.layers[0], n_embd_k_gqa=16_384, n_embd_v_gqa=16_384),)
    bare = replace(plain.shape.layers[0], n_embd_k_gqa=0, n_embd_v_gqa=0)
    shape = replace(plain.shape, layers=layers + (bare,) * 31)
    made = plan("demo", [replace(plain, shape=shape)], machine(gpu(0, "GPU", 8, 6.8)))
    assert made.load.kv_type == "f16"
    assert made.placement.is_whole


def test_slots_share_the_cache_of_a_plain_model() -> None:
    assert plan("demo", LADDER, machine(RTX_4090)).load.n_slots == N_SLOTS_MOST


def test_slots_of_a_hybrid_are_as_many_as_leave_room_for_their_states() -> None:
    files = of_catalog("nemotron-nano-9b-v2")
    small, large = plan("m", files, machine(RTX_3060)), plan("m", files, machine(RTX_4090))
    for made, card in ((small, RTX_3060), (large, RTX_4090)):
        check(made, machine(card))
        assert made.placement.shares[0].state_bytes == made.candidate.shape.state_bytes * made.load.n_slots
    assert small.load.n_slots < large.load.n_slots == N_SLOTS_MOST
    assert any("a state of 0." in reason and "at a time" in reason for reason in small.reasons)


def test_what_was_asked_for_is_kept() -> None:
    wish = Wish(n_ctx=5000, n_slots=3, kv_type="q4_0", n_gpu_layers=10)
    made = plan("demo", LADDER, machine(RTX_4090), wish)
    check(made, machine(RTX_4090))
    assert (made.load.n_ctx, made.load.n_slots, made.load.kv_type) == (5000, 3, "q4_0")
    assert made.placement.n_gpu_layers == 10
    assert made.placement.shares[0].n_layers == 9  # and the output layer


def test_a_context_beyond_the_training_is_kept_with_a_warning() -> None:
    one = [even("Q4_K_M", 4.58, n_ctx_train=4096)]
    made = plan("demo", one, machine(RTX_4090), Wish(n_ctx=16384))
    assert made.load.n_ctx == 16384
    assert any("trained for 4,096" in reason for reason in made.reasons)


# The CPU --------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_ram_must_hold_it_all() -> None:
    hardware = machine(ram_gib=14)
    made = plan("m", of_catalog("llama-3.1-nemotron-nano-8b"), hardware)
    check(made, hardware)
    assert (made.candidate.quant, made.load.n_ctx, made.load.n_slots) == ("Q4_K_M", 8192, 8)
    assert made.placement.n_gpu_layers == 0
    assert "No NVIDIA driver was found." in made.reasons[0]
    with pytest.raises(DoesNotFitError):
        plan("m", of_catalog("llama-3.1-nemotron-70b"), hardware)


def test_the_starter_on_a_cpu_gets_its_whole_context() -> None:
    made = plan("starter", of_catalog("starter"), machine(ram_gib=2))
    assert (made.load.n_ctx, made.load.n_slots) == (8192, 8)
    check(made, machine(ram_gib=2))


# All of it, on many machines ------------------------------------------------------------------------------


def plan_if_it_fits(model: str, files: Sequence[Candidate], hardware: Hardware) -> Plan | None:
    try:
        return plan(model, files, hardware)
    except DoesNotFitError:
        return None


def test_every_model_of_the_catalogue_on_many_machines_keeps_its_promises() -> None:
    rng = random.Random(0)
    names = ["NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090", "NVIDIA H200", "an unknown card"]
    for model in catalog.load().models:
        files = of_catalog(model.id)
        for _ in range(4):
            cards = [
                gpu(i, rng.choice(names), total, rng.uniform(0.3, 1) * total)
                for i in range(rng.randrange(4))
                for total in (rng.choice([8, 12, 24, 48, 80]),)
            ]
            hardware = machine(*cards, ram_gib=rng.choice([8, 16, 64, 256]))
            made = plan_if_it_fits(model.id, files, hardware)
            if made is None:
                smallest = min(c.size_bytes for c in files)
                assert smallest > 0.5 * (hardware.ram.available_bytes + sum(c.free_bytes for c in cards))
                continue
            check(made, hardware)
            shuffled = rng.sample(files, len(files))
            swapped = replace(hardware, gpus=hardware.gpus[::-1])
            assert plan(model.id, shuffled, swapped).to_dict() == made.to_dict()


def llama_cpp_devices(n_layer_all: int, n_gpu_layers: int, split: Sequence[float]) -> list[int]:
    """llama.cpp's own rule in its own float32 (src/llama-model.cpp, load_tensors): the device of each layer,
    -1 for the CPU, the output layer last."""

    def f32(value: float) -> float:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])

    start = max(n_layer_all + 1 - n_gpu_layers, 0)
    n_active = min(n_gpu_layers, n_layer_all + 1)
    ends, total = [], 0.0
    for value in split:
        total = f32(total + f32(value))
        ends.append(total)
    ends = [f32(end / total) for end in ends]
    return [
        -1 if il < start else next(d for d, end in enumerate(ends) if end > f32((il - start) / n_active))
        for il in range(n_layer_all + 1)
    ]


def test_llama_cpp_makes_of_the_split_just_the_runs_that_were_planned() -> None:
    cards = [gpu(i, "RTX", 24, free) for i, free in enumerate((23, 9, 5.5))]
    for n_layer in (31, 40, 52, 80, 162):
        shape = replace(even("Q4_K_M", 28, n_layer=n_layer, n_row=64).shape, n_extra_layers=n_layer % 2)
        load = Load(8192, 1)
        for n_gpu_layers in (-1, n_layer - 3, n_layer // 2):
            place = placement.on_gpus(
                placement.Job(shape, load, kept_bytes=256 * MIB), cards, n_gpu_layers=n_gpu_layers
            )
            assert place is not None
            split = place.tensor_split or (1.0,)
            devices = llama_cpp_devices(shape.n_layer_all, place.n_gpu_layers, split)
            blocks = devices[: shape.n_layer]
            assert blocks.count(-1) == place.host.n_layers
            assert [blocks.count(d) for d in range(len(place.gpus))] == [s.n_layers for s in place.shares]


# What is shown --------------------------------------------------------------------------------------------


def test_the_figures_of_each_device_add_up() -> None:
    shown = plan("demo", LADDER, machine(RTX_3060)).to_dict()
    assert list(shown) == [
        "model", "file", "quant", "fits", "context", "slots", "kv_type", "kv_layout", "split_mode",
        "n_ubatch", "devices", "host", "host_experts", "margin_bytes", "reasons", "forecast", "measured",
    ]  # fmt: skip
    parts = ["weights_bytes", "kv_bytes", "state_bytes", "compute_bytes", "overhead_bytes"]
    (device,) = shown["devices"]
    assert set(device) == {"id", "name", "n_layers", *parts, "total_bytes", "free_bytes"}
    assert set(shown["host"]) == {"n_layers", *parts, "total_bytes"}
    for figures in (device, shown["host"]):
        assert sum(figures[part] for part in parts) == figures["total_bytes"]
    assert device["kv_bytes"] == shown["context"] // 8192 * GIB
    assert set(shown["forecast"]) == {"prompt_tokens_per_s", "tokens_per_s"}


def test_a_forecast_needs_a_known_card() -> None:
    known = plan("demo", LADDER, machine(RTX_4090)).tokens_per_s
    assert known is not None
    assert 60 < known < 160  # 1,008 GB/s over 6.1 GiB is 153
    assert plan("demo", LADDER, machine(gpu(0, "A card of tomorrow", 24, 23))).tokens_per_s is None
    on_cpu = plan("demo", LADDER, machine()).tokens_per_s
    assert on_cpu is not None
    assert 5 < on_cpu < 15  # Q4_K_M's 4.6 GiB from two channels of RAM
    assert forecast.bandwidth("NVIDIA GeForce RTX 4090 with Max-Q Design") is None
    assert forecast.bandwidth("NVIDIA GeForce RTX 4070 Ti SUPER") == 672 * forecast.GB
    assert forecast.bandwidth("NVIDIA A10") == 600 * forecast.GB
    assert forecast.bandwidth("NVIDIA A100-SXM4-40GB") == 1555 * forecast.GB  # no A10
    assert forecast.bandwidth("NVIDIA A100 80GB PCIe") == 1935 * forecast.GB
    assert forecast.bandwidth("NVIDIA RTX A1000") is None  # no A100


def test_of_a_mixture_of_experts_only_the_chosen_are_read() -> None:
    dense = plan("d", of_catalog("openreasoning-nemotron-32b"), machine(RTX_4090), Wish(n_ctx=8192))
    sparse = plan("s", of_catalog("nemotron-3-nano-30b-a3b"), machine(RTX_4090), Wish(n_ctx=8192))
    assert dense.tokens_per_s is not None
    assert sparse.tokens_per_s is not None
    assert sparse.tokens_per_s > 3 * dense.tokens_per_s


def test_a_plan_can_be_made_from_a_file(tmp_path: Path) -> None:
    info = gguf.read(synthetic.write_tiny(tmp_path / "m.gguf", "nemotron_h_moe-mtp"))
    made = plan(
        "tiny", [Candidate(info.quant, str(info.path), info.size_bytes, info.shape)], machine(RTX_3060)
    )
    check(made, machine(RTX_3060))
    assert made.placement.n_gpu_layers == 7  # five blocks, the one for prediction, the output layer
    assert made.load.n_ctx == 1024


def test_where_nothing_fits_whole_what_is_here_is_planned() -> None:
    """It is what will be loaded; a file that would fit whole is worth its download all the same."""
    only = [replace(c, is_local=c.quant == "Q8_0") for c in LADDER]
    assert plan("demo", only, machine(ram_gib=64)).candidate.quant == "Q8_0"
    small = machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 3), ram_gib=64)
    assert plan("demo", LADDER, small).candidate.quant != "Q8_0"
    assert plan("demo", only, small).candidate.quant == "Q8_0"
    assert not plan("demo", only, machine(gpu(0, "NVIDIA GeForce RTX 4060", 8, 7.6))).candidate.is_local
    told = plan("demo", only, machine(ram_gib=64)).reasons
    assert any("Q4_K_M" in reason and "download" in reason for reason in told), told


@pytest.mark.parametrize(
    ("label", "above", "below"),
    [
        ("Q6_K_L", "Q6_K", "Q8_0"),
        ("UD-Q6_K_XL", "Q6_K", "Q8_0"),
        ("UD-Q8_K_XL", "Q8_0", "BF16"),
        ("Q5_K_L", "Q5_K_M", "Q6_K"),
        ("UD-Q5_K_XL", "Q5_K_M", "Q6_K"),
        ("Q4_K_L", "Q4_K_M", "Q5_K_S"),
        ("UD-Q4_K_XL", "Q4_K_M", "Q5_K_S"),
        ("Q4_1", "Q4_0", "Q4_K_M"),
        ("Q5_0", "Q4_K_M", "Q5_K_M"),
        ("Q3_K_XL", "Q3_K_M", "IQ4_XS"),
        ("UD-Q3_K_XL", "Q3_K_M", "IQ4_XS"),
        ("Q2_K_L", "Q2_K", "IQ3_XXS"),
        ("UD-Q2_K_XL", "Q2_K", "IQ3_XXS"),
        ("IQ4_NL", "IQ4_XS", "Q4_K_S"),
        ("MXFP4", "IQ4_XS", "Q4_0"),
        ("mxfp4_moe", "IQ4_XS", "Q4_0"),
        ("Q5_K", "Q5_K_S", "Q5_K_L"),
    ],
)
def test_common_labels_have_their_place_whatever_the_file_weighs(label: str, above: str, below: str) -> None:
    rank, more, less = (even(quant, 99).rank for quant in (label, above, below))
    assert more < rank < less
    assert even("bf16", 99).rank == even("F16", 1).rank
    if label == "Q6_K_L":
        assert rank <= choice.AIMS["balanced"]
