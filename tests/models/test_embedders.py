"""Models that embed or rank are told from those that chat, and planned for the inputs that they read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal.config import load
from nemolocal.models import gguf, memory, sizing, store
from nemolocal.models.memory import MIB, Load, load_of
from nemolocal.models.shape import ModelShape, Pooling
from nemolocal.models.sizing import Candidate, Wish
from tests import synthetic, synthetic_embedders
from tests.profiles import machine

WIDE = {
    "bert": {"n_embd": 384, "n_head": 12, "n_head_kv": 12, "n_ff": 1536, "n_vocab": 30_000, "n_ctx": 512},
    "llama-embed": {"n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 4096, "n_vocab": 60_000},
    "qwen3-embed": {"n_embd": 512, "n_head": 8, "n_head_kv": 4, "n_ff": 1536, "n_vocab": 60_000},
}
POOLINGS = {"mean": 1, "cls": 2, "last": 3, "rank": 4}


def wide(tmp_path: Path, kind: str, **sizes: object) -> Path:
    """A header of real widths over a hole."""
    wished = {"n_ctx": 4096, **WIDE[kind], **sizes}
    return synthetic_embedders.write(tmp_path / f"{kind}.gguf", kind, weights="none", **wished)  # type: ignore[arg-type]


def planned(path: Path, wish: Wish | None = None, *, ram_gib: float = 32, gpu_gib: float = 0) -> sizing.Plan:
    info = gguf.read(path)
    gpus = [("NVIDIA GeForce RTX 4090", gpu_gib)] if gpu_gib else []
    candidate = Candidate(info.quant, str(path), info.size_bytes, info.shape)
    return sizing.plan("m", [candidate], machine(*gpus, ram_gib=ram_gib), wish)


# What kind of model it is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pooling", "reads_whole"),
    [
        ("bert", "cls", True),
        ("bert-rank", "rank", True),
        ("llama-embed", "mean", True),
        ("qwen3-embed", "last", False),
        ("qwen3-rank", "rank", False),
    ],
)
def test_the_file_says_how_it_pools(tmp_path: Path, kind: str, pooling: Pooling, reads_whole: bool) -> None:
    info = gguf.read(synthetic_embedders.write(tmp_path / "m.gguf", kind))
    assert (info.shape.pooling, info.shape.reads_whole) == (pooling, reads_whole)
    assert not info.can_chat


def test_a_chat_model_pools_nothing_even_where_it_says_so(tmp_path: Path) -> None:
    for keys in ({}, {"llama.pooling_type": 0}):
        info = gguf.read(synthetic.write_tiny(tmp_path / "m.gguf", keys=keys))
        assert info.can_chat
        assert (info.shape.pooling, info.shape.reads_whole) == ("", False)


def test_an_encoder_that_says_nothing_takes_the_mean(tmp_path: Path) -> None:
    silent = replace(synthetic.TINY["llama"], architecture="llama-embed")
    path = synthetic.write(tmp_path / "m.gguf", silent)
    shape = gguf.read(path).shape
    assert (shape.pooling, shape.reads_whole) == ("mean", True)


def test_the_mean_over_a_causal_model_is_taken_in_one_batch(tmp_path: Path) -> None:
    path = synthetic.write_tiny(tmp_path / "m.gguf", "qwen3", keys={"qwen3.pooling_type": 1})
    assert gguf.read(path).shape.reads_whole


def test_an_encoder_without_an_output_matrix_has_its_weights_once(tmp_path: Path) -> None:
    info = gguf.read(synthetic_embedders.write(tmp_path / "m.gguf", "bert"))
    shape = info.shape
    total = shape.input_bytes + shape.output_bytes + shape.repeating_bytes
    assert total == sum(tensor.n_bytes for tensor in info.tensors)


def test_the_store_lists_what_embeds_as_usable_and_as_no_chat_model(home: Path) -> None:
    config = load({})
    config.models_dir.mkdir(parents=True)
    synthetic_embedders.write(config.models_dir / "embedder.gguf", "bert")
    synthetic_embedders.write(config.models_dir / "ranker.gguf", "bert-rank")
    synthetic.write_tiny(config.models_dir / "writer.gguf")
    found = {model.id: model for model in store.list_models(config)}
    assert all(model.is_usable for model in found.values())
    assert {id: model.pooling for id, model in found.items()} == {
        "embedder": "cls",
        "ranker": "rank",
        "writer": "",
    }
    assert [id for id, model in found.items() if model.can_chat] == ["writer"]


# What it takes --------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_buffers_hold_what_llama_cpp_reserves(tmp_path: Path) -> None:
    paths = {kind: wide(tmp_path, kind) for kind in WIDE}
    shapes = {kind: gguf.read(path).shape for kind, path in paths.items()}
    jobs = []
    for kind, shape in shapes.items():
        for n_ctx in (256, shape.n_ctx_train):
            load = load_of(shape, n_ctx=n_ctx, n_slots=32, kv_type="f16")
            jobs.append(
                {
                    "kind": kind,
                    "path": str(paths[kind]),
                    "n_ctx": n_ctx,
                    "n_slots": 32,
                    "kv_type": "f16",
                    "n_ubatch": min(load.n_ubatch, n_ctx),
                    "pooling": POOLINGS[shape.pooling],
                }
            )
    script = Path(__file__).with_name("oracle.py")
    answer = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(jobs), capture_output=True, text=True, check=True
    )
    for job, real in zip(jobs, json.loads(answer.stdout), strict=True):
        shape = shapes[job["kind"]]
        load = load_of(shape, n_ctx=job["n_ctx"], n_slots=32, kv_type="f16")
        planned_bytes = memory.compute_bytes(shape, load, is_gpu=False)
        assert real["compute"] <= planned_bytes <= 3 * real["compute"] + 8 * MIB, job
        kv_bytes = sum(memory.kv_bytes(layer, load) for layer in shape.layers)
        assert kv_bytes == pytest.approx(real["kv"], abs=0.02 * MIB), job


def test_a_row_of_logits_is_counted_for_each_token_of_a_batch(tmp_path: Path) -> None:
    shape = gguf.read(wide(tmp_path, "llama-embed")).shape
    load = load_of(shape, n_ctx=2048, n_slots=8, kv_type="f16")
    assert load == Load(2048, 8, "f16", 2048)
    assert memory.host_bytes(shape, load, is_computing=True) >= 4 * 60_000 * 2048


def test_short_heads_keep_their_scores_on_a_gpu(tmp_path: Path) -> None:
    shape = gguf.read(wide(tmp_path, "bert")).shape
    load = load_of(shape, n_ctx=512, n_slots=8, kv_type="f16")
    gap = memory.compute_bytes(shape, load, is_gpu=True) - memory.compute_bytes(shape, load, is_gpu=False)
    assert gap == 4 * 12 * 512 * 512


# The plan -------------------------------------------------------------------------------------------


def test_an_encoder_is_planned_for_whole_inputs_and_no_cache(tmp_path: Path) -> None:
    plan = planned(wide(tmp_path, "bert"))
    assert (plan.load.n_ctx, plan.load.n_ubatch, plan.load.n_slots) == (512, 512, 32)
    assert plan.placement.host.kv_bytes == 0
    assert "Inputs of up to 512 tokens." in plan.reasons
    assert "Up to 32 inputs at a time." in plan.reasons


def test_an_embedder_takes_a_gpu_where_there_is_one(tmp_path: Path) -> None:
    plan = planned(wide(tmp_path, "llama-embed"), gpu_gib=24)
    assert plan.placement.is_whole
    assert (plan.load.n_ctx, plan.load.n_slots) == (4096, 32)


def test_inputs_that_may_be_read_in_parts_are_read_in_small_batches(tmp_path: Path) -> None:
    plan = planned(wide(tmp_path, "qwen3-embed", n_ctx=32_768))
    assert (plan.load.n_ctx, plan.load.n_ubatch) == (8192, 512)
    assert "Inputs of up to 8,192 tokens; --ctx takes more, up to 32,768." in plan.reasons


def test_a_large_vocabulary_makes_the_inputs_shorter_unless_they_are_wished(tmp_path: Path) -> None:
    path = wide(tmp_path, "llama-embed", n_vocab=200_000, n_ctx=8192)
    assert planned(path).load.n_ctx == 2048
    assert planned(path, Wish(n_ctx=8192)).load.n_ctx == 8192


def test_little_memory_makes_the_inputs_shorter(tmp_path: Path) -> None:
    plan = planned(wide(tmp_path, "llama-embed", n_ctx=8192), ram_gib=2.2)
    assert plan.load.n_ctx < 4096


def test_a_context_longer_than_the_model_reads_is_no_wish_for_it(tmp_path: Path) -> None:
    """A server's --ctx is for all its models, and those that embed mostly read less."""
    plan = planned(wide(tmp_path, "bert"), Wish(n_ctx=8192))
    assert plan.load == planned(wide(tmp_path, "bert")).load
    told = "Inputs of up to 512 tokens; the 8,192 asked for are more than the 512 that the model reads."
    assert told in plan.reasons
    assert planned(wide(tmp_path, "bert"), Wish(n_ctx=300, n_slots=4)).load == Load(300, 4, "f16", 300)


def test_loads_of_chat_models_are_as_before(tmp_path: Path) -> None:
    shape: ModelShape = gguf.read(synthetic.write_tiny(tmp_path / "m.gguf")).shape
    assert load_of(shape, n_ctx=1024, n_slots=4, kv_type="q8_0") == Load(1024, 4, "q8_0")
