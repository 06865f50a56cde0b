"""With every matrix cut over the cards, the plan counts what llama.cpp puts on each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemolocal.errors import UsageError
from nemolocal.hardware import Cpu, Gpu, Hardware, Ram
from nemolocal.models import catalog, memory, tensor_split
from nemolocal.models.memory import Load
from nemolocal.models.placement import Job
from nemolocal.models.shape import ModelShape
from nemolocal.models.sizing import GIB, Candidate, Wish, plan

LOAD = Load(8192, 1)


def shape_of(model_id: str, quant: str = "Q4_K_M") -> ModelShape:
    model = catalog.load().get(model_id)
    assert model is not None
    return model.shape(model.file(quant))


def card(index: int, gib: float = 80, name: str = "NVIDIA H100") -> Gpu:
    return Gpu(index, f"GPU-{index}", name, "9.0", round(gib * GIB), round(gib * GIB))


@pytest.mark.parametrize(
    ("model_id", "n_together", "most"),
    [
        ("llama-3.1-nemotron-70b", 1, 8),  # 8 heads of the cache, 8 of the queries to each
        ("llama-3.1-nemotron-nano-4b", 1, 8),  # 4 to each: rows of 512 are whole blocks of 256
        ("nemotron-mini-4b", 2, 4),  # 3 to each: only two together are whole blocks
        ("openreasoning-nemotron-7b", 2, 2),  # 4 heads of the cache, 7 to each
    ],
)
def test_heads_that_share_a_block_stay_together(model_id: str, n_together: int, most: int) -> None:
    shape = shape_of(model_id)
    assert tensor_split.n_heads_together(shape, shape.layers[0]) == n_together
    assert [n for n in range(1, 17) if tensor_split.is_even(shape, n)][-1] == most
    assert [n for n in range(1, 17) if tensor_split.is_possible(shape, n)][-1] == most


def test_cards_of_one_kind_hold_the_same() -> None:
    shape = shape_of("llama-3.1-nemotron-70b")
    place = tensor_split.across(Job(shape, LOAD), [card(1), card(0)])
    assert place is not None
    assert [gpu.uuid for gpu in place.gpus] == ["GPU-0", "GPU-1"]
    assert place.tensor_split == (0.5, 0.5)
    one, other = place.shares
    assert one == other
    assert one.kv_bytes == sum(memory.kv_bytes(layer, LOAD) for layer in shape.layers) / 2
    norms = 80 * 2 * 4 * 8192  # two to a block, whole on each card
    cut = shape.repeating_bytes + shape.output_bytes - norms
    assert one.weights_bytes == pytest.approx(norms + cut / 2, abs=1)
    assert place.host.weights_bytes == shape.input_bytes


def test_unlike_cards_hold_whole_heads_by_their_room() -> None:
    """Of 8 heads, 70 % are 5.6: cut before the sixth where the larger card comes first, and after the second
    of the smaller card where that does, which they do by turns; so the larger has 5 and 6, 5.5 on average."""
    shape = shape_of("llama-3.1-nemotron-70b")
    job = Job(shape, LOAD)
    fixed = job.overhead_bytes(card(0)) + job.compute_bytes()
    cards = [
        replace(card(i), free_bytes=fixed + round(share * 60 * GIB)) for i, share in enumerate((0.7, 0.3))
    ]
    cards[1] = replace(cards[1], name="NVIDIA A100")
    place = tensor_split.across(job, cards)
    assert place is not None
    assert place.tensor_split == (0.7, 0.3)
    kv_bytes = sum(memory.kv_bytes(layer, LOAD) for layer in shape.layers)
    assert [share.kv_bytes / kv_bytes for share in place.shares] == [5.5 / 8, 2.5 / 8]
    assert sum(s.weights_bytes for s in place.shares) >= shape.repeating_bytes + shape.output_bytes
    for gpu, share in zip(place.gpus, place.shares, strict=True):
        assert share.total_bytes <= gpu.free_bytes


def test_experts_are_cut_and_what_every_token_passes_is_counted_whole() -> None:
    dense = shape_of("llama-3.1-nemotron-70b")
    layers = tuple(replace(x, expert_bytes=x.weights_bytes * 3 // 4) for x in dense.layers)
    place = tensor_split.across(Job(replace(dense, layers=layers), LOAD), [card(0), card(1)])
    assert place is not None
    experts = sum(x.expert_bytes for x in layers)
    rest = dense.repeating_bytes - experts
    assert place.shares[0].weights_bytes == pytest.approx(rest + (experts + dense.output_bytes) / 2, abs=1)


def test_a_cut_that_leaves_a_card_without_heads_is_refused() -> None:
    shape = shape_of("openreasoning-nemotron-7b")
    files = [Candidate("Q4_K_M", "m.gguf", 4_700_000_000, shape)]
    cards = tuple(card(i) for i in range(3))
    hardware = Hardware("gpu", "", cards, Cpu("a CPU", 8), Ram(64 * GIB, 64 * GIB))
    with pytest.raises(UsageError, match="over 3 GPUs"):
        plan("m", files, hardware, Wish(split="tensor"))
    made = plan("m", files, hardware, Wish(split="tensor", gpus=("0", "2")))
    assert made.visible_devices == ("GPU-0", "GPU-2")
