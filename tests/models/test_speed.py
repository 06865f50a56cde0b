"""Forecasts come near what was measured, and fall with whatever slows a model down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemolocal.hardware import Gpu
from nemolocal.models import catalog, forecast, placement, speed, tensor_split
from nemolocal.models.memory import Load
from nemolocal.models.placement import Job, Placement
from nemolocal.models.shape import ModelShape
from nemolocal.models.sizing import GIB


def shape_of(model_id: str, quant: str = "Q4_K_M") -> ModelShape:
    model = catalog.load().get(model_id)
    assert model is not None
    return model.shape(model.file(quant))


def card(index: int = 0, name: str = "NVIDIA H200", gib: int = 139) -> Gpu:
    return Gpu(index, f"GPU-{index}", name, "9.0", gib * GIB, gib * GIB)


def on(shape: ModelShape, load: Load, *cards: Gpu) -> Placement:
    found = placement.on_gpus(Job(shape, load), cards)
    assert found is not None
    return found


NANO_8B, LLAMA_70B = shape_of("llama-3.1-nemotron-nano-8b"), shape_of("llama-3.1-nemotron-70b")
SHORT = Load(128, 1)  # nothing much in the cache, as it was measured


@pytest.mark.parametrize(
    ("shape", "is_cut", "measured"),
    [(NANO_8B, False, 276), (LLAMA_70B, False, 44.6), (LLAMA_70B, True, 64.7)],
)
def test_answers_come_as_fast_as_was_measured_on_h200s(
    shape: ModelShape, is_cut: bool, measured: float
) -> None:
    cut = tensor_split.across(Job(shape, SHORT), [card(), card(1)])
    place = cut if is_cut else on(shape, SHORT, card())
    assert place is not None
    seconds = speed.token_s(shape, SHORT, place)
    assert seconds is not None
    assert 1 / seconds == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("kv_type", "n_ctx", "share"), [("f16", 4096, 0.94), ("q8_0", 4096, 0.86)])
def test_what_lies_in_the_cache_costs_time_and_more_so_quantized(
    kv_type: str, n_ctx: int, share: float
) -> None:
    """242 tokens a second at a depth of 8,192 in f16 and 197 in q8_0, of 273 at none; half that at 4,096."""
    load = Load(n_ctx, 1, kv_type)  # type: ignore[arg-type]
    empty = speed.token_s(NANO_8B, SHORT, on(NANO_8B, SHORT, card()))
    filled = speed.token_s(NANO_8B, load, on(NANO_8B, load, card()))
    assert empty is not None
    assert filled is not None
    assert empty / filled == pytest.approx(share, abs=0.04)


def test_prompts_are_read_as_fast_as_was_measured_on_h200s() -> None:
    load = Load(8192, 1)
    one = speed.prompt_token_s(NANO_8B, load, on(NANO_8B, load, card()), n_cores=8)
    assert one is not None
    assert 1 / one == pytest.approx(9459, rel=0.1)
    two = on(LLAMA_70B, load, card(gib=30), card(1, gib=30))
    assert two.split_mode == "layer"
    flowing = speed.prompt_token_s(LLAMA_70B, load, two, n_cores=8)
    assert flowing is not None
    assert 1 / flowing == pytest.approx(2065, rel=0.15)


def test_experts_are_read_slower_than_their_active_parameters_would_be() -> None:
    """Each gets but a few tokens of a batch, and more of a larger one."""
    shape, card_4090 = shape_of("nemotron-3-nano-30b-a3b"), card(name="NVIDIA GeForce RTX 4090", gib=40)
    seconds = []
    for n_ubatch in (512, 2048):
        load = Load(8192, 1, n_ubatch=n_ubatch)
        each = speed.prompt_token_s(shape, load, on(shape, load, card_4090), n_cores=8)
        assert each is not None
        seconds.append(each)
    n_active = 3.58e9
    assert seconds[0] > seconds[1] > 1.5 * 2 * n_active / 155e12


def test_what_lies_in_ram_is_copied_for_a_prompt_and_read_by_the_cpu_for_an_answer() -> None:
    shape, load = shape_of("nemotron-3-nano-30b-a3b", "IQ4_NL"), Load(8192, 1)
    whole = on(shape, load, card(name="NVIDIA GeForce RTX 4090"))
    part = placement.most_on_gpus(Job(shape, load), [card(name="NVIDIA GeForce RTX 4090", gib=11)])
    assert part.host_experts
    for forecast_s in (
        speed.token_s(shape, load, part),
        speed.prompt_token_s(shape, load, part, n_cores=8),
    ):
        assert forecast_s is not None
    whole_s, part_s = speed.token_s(shape, load, whole), speed.token_s(shape, load, part)
    assert whole_s is not None
    assert part_s is not None
    assert part_s > 1.5 * whole_s
    small = speed.prompt_token_s(shape, load, part, n_cores=8)
    large = speed.prompt_token_s(shape, replace(load, n_ubatch=2048), part, n_cores=8)
    assert small is not None
    assert large is not None
    assert small > 2 * large  # the copies are shared by four times as many tokens


def test_without_a_gpu_the_cores_count() -> None:
    load = Load(8192, 1)
    place = placement.in_ram(Job(NANO_8B, load))
    few, many = (speed.prompt_token_s(NANO_8B, load, place, n_cores=n) for n in (4, 16))
    assert few is not None
    assert many is not None
    assert few == pytest.approx(4 * many)
    assert 10 < 1 / few < 60


def test_an_unknown_card_has_no_forecast() -> None:
    load = Load(8192, 1)
    place = on(NANO_8B, load, card(name="A card of tomorrow"))
    assert speed.token_s(NANO_8B, load, place) is None
    assert speed.prompt_token_s(NANO_8B, load, place, n_cores=8) is None
    nameless = replace(NANO_8B, n_params=0)
    assert speed.prompt_token_s(nameless, load, on(nameless, load, card()), n_cores=8) is None


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 672),
        ("NVIDIA A10", 600),
        ("NVIDIA A100-SXM4-40GB", 1555),  # no A10
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 1792),
        ("NVIDIA RTX A1000", None),  # no A100
        ("NVIDIA A100-PCIE-80GB", 1935),
        ("NVIDIA A100-PCIE-40GB", 1555),
        ("Tesla V100-SXM2-16GB", 900),
        ("Tesla V100S-PCIE-32GB", 1134),
        ("Quadro RTX 6000", 672),
        ("NVIDIA RTX 6000 Ada Generation", 960),
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA H20", 4000),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 576),  # the desktop's name, another chip
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 512),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", None),  # sold with two kinds of memory
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),  # a slice
    ],
)
def test_cards_are_known_by_whole_words_of_their_names(name: str, gb_per_s: int | None) -> None:
    expected = gb_per_s and gb_per_s * forecast.GB
    assert forecast.bandwidth(name) == expected
    assert (forecast.compute_s(name, 1e12) is None) == (gb_per_s is None)


def test_no_laptop_takes_the_figure_of_a_desktop_card() -> None:
    for name in forecast.CARDS:
        if "Laptop" not in name:
            for suffix in ("Laptop GPU", "Mobile"):
                own = forecast.CARDS.get(f"{name} {suffix}")
                assert forecast.bandwidth(f"NVIDIA {name} {suffix}") == (own and own[0] * forecast.GB)
