"""The arithmetic of memory, by hand for a small model and against llama.cpp itself for wide ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nemolocal.models import catalog, gguf, memory
from nemolocal.models.memory import MIB, Load
from nemolocal.models.shape import Dimensions, ModelShape, estimate
from tests import synthetic

# KV: grouped heads, lengths of their own, lists -----------------------------------------------------


def starter_like(tmp_path: Path, **overrides: object) -> ModelShape:
    """The header of the starter model's shape: 30 layers, 576 wide, 9 heads, 3 KV heads."""
    dimensions = Dimensions(
        architecture="llama",
        layers=30,
        n_ctx_train=8192,
        n_embd=576,
        n_vocab=49152,
        n_head=9,
        n_head_kv=3,
        n_ff=1536,
        is_tied=True,
    )
    path = synthetic.write(
        tmp_path / "m.gguf",
        dimensions,
        weights="none",
        has_vocab=False,
        overrides={f"llama.attention.{key}": value for key, value in overrides.items()},
    )
    return gguf.read(path).shape


@pytest.mark.parametrize(
    ("overrides", "load", "n_bytes"),
    [
        ({}, Load(8192, 1), 188_743_680),
        ({}, Load(2048, 1), 47_185_920),
        ({}, Load(8192, 1, "q8_0"), 100_270_080),
        ({"head_count_kv": 9}, Load(8192, 1), 566_231_040),
        ({"key_length": 128, "value_length": 128}, Load(8192, 1), 377_487_360),
        ({"head_count_kv": [3] * 15 + [1] * 15}, Load(8192, 1), 125_829_120),
    ],
)
def test_the_cache_follows_the_key_and_value_heads(
    tmp_path: Path, overrides: dict[str, object], load: Load, n_bytes: int
) -> None:
    shape = starter_like(tmp_path, **overrides)
    assert sum(memory.kv_bytes(layer, load) for layer in shape.layers) == n_bytes


def test_without_a_number_of_kv_heads_each_head_has_its_own(tmp_path: Path) -> None:
    """As llama.cpp takes it: the key is left out of the header altogether."""
    path = synthetic.write_tiny(tmp_path / "m.gguf", overrides={"llama.attention.head_count_kv": 2})
    content = path.read_bytes()
    path.write_bytes(content.replace(b"head_count_kv", b"head_count_xx"))
    shape = gguf.read(path).shape
    assert [layer.n_embd_k_gqa for layer in shape.layers] == [4 * 16] * 4


def test_slots_share_the_cache_but_each_has_its_own_state(tmp_path: Path) -> None:
    shape = gguf.read(synthetic.write_tiny(tmp_path / "m.gguf", "nemotron_h")).shape
    one, eight = Load(1024, 1), Load(1024, 8)
    assert sum(memory.kv_bytes(x, one) for x in shape.layers) == sum(
        memory.kv_bytes(x, eight) for x in shape.layers
    )
    assert sum(memory.state_bytes(x, eight) for x in shape.layers) == 8 * shape.state_bytes


def test_a_context_is_rounded_up_as_llama_cpp_rounds_it() -> None:
    assert [memory.pad_ctx(n) for n in (1, 256, 257, 8192)] == [256, 256, 512, 8192]


def test_a_quantized_cache_costs_a_gpu_a_copy_of_one_block(tmp_path: Path) -> None:
    shape = gguf.read(synthetic.write_tiny(tmp_path / "m.gguf")).shape
    load = Load(131_072, 1, "q8_0")
    on_gpu = memory.compute_bytes(shape, load, is_gpu=True)
    in_f16 = memory.compute_bytes(shape, replace(load, kv_type="f16"), is_gpu=True)
    copy_bytes = 131_072 * (32 + 32) * 2
    assert 0.9 * copy_bytes < on_gpu - in_f16 <= copy_bytes
    assert memory.compute_bytes(shape, load, is_gpu=False) <= in_f16


# Estimates from a catalogue's row -------------------------------------------------------------------


@pytest.mark.parametrize("model", sorted(set(synthetic.TINY) - {"gemma3"}))
def test_an_estimate_before_the_download_agrees_with_the_file(tmp_path: Path, model: str) -> None:
    """States, caches and activations exactly; weights nearly, as norms and biases are not counted."""
    real = gguf.read(synthetic.write_tiny(tmp_path / "m.gguf", model)).shape
    total = sum((real.repeating_bytes, real.input_bytes, real.output_bytes, real.extra_bytes))
    total -= real.input_bytes if real.is_tied else 0
    guess = estimate(synthetic.TINY[model], file_bytes=total)
    for layer, guessed in zip(real.layers, guess.layers, strict=True):
        assert guessed.kind == layer.kind
        assert guessed.weights_bytes == pytest.approx(layer.weights_bytes, rel=0.05)
        assert (guessed.n_embd_k_gqa, guessed.n_embd_v_gqa) == (layer.n_embd_k_gqa, layer.n_embd_v_gqa)
        assert guessed.state_bytes == layer.state_bytes
        assert guessed.expert_bytes == pytest.approx(layer.expert_bytes, rel=0.05)
    assert (guess.n_layer, guess.n_layer_all, guess.is_tied) == (real.n_layer, real.n_layer_all, real.is_tied)
    assert guess.n_activations_max == real.n_activations_max
    assert guess.n_activations_recurrent == real.n_activations_recurrent
    assert guess.n_params == pytest.approx(real.n_params, rel=0.03)
    assert guess.active_bytes == pytest.approx(real.active_bytes, rel=0.05)


@pytest.mark.parametrize("layers", ["", "MX", "M*"])
def test_a_row_that_makes_no_sense_is_refused(layers: str) -> None:
    dimensions = replace(synthetic.TINY["nemotron_h"], layers=layers, n_ff=(1, 2, 3))
    with pytest.raises(ValueError, match=r"letters|numbers"):
        estimate(dimensions, file_bytes=1000)


# Against llama.cpp ----------------------------------------------------------------------------------


def _wide(architecture: str, layers: int | str, **rest: object) -> Dimensions:
    fields = {"n_ctx_train": 131072, "head_dim": 128, **rest}
    return Dimensions(architecture=architecture, layers=layers, **fields)  # type: ignore[arg-type]


WIDE = {
    "nemotron 3 nano 30b": _wide(
        "nemotron_h_moe", "MEM*E", n_embd=2688, n_vocab=131072, n_head=32, n_head_kv=2, n_expert=16,
        n_expert_used=6, n_ff_expert=1856, n_ff_shared=3712, ssm_d_inner=4096, ssm_d_state=128, ssm_n_head=64,
    ),
    "nemotron 3 super": _wide(
        "nemotron_h_moe", "ME*", n_embd=4096, n_vocab=131072, n_head=32, n_head_kv=2, n_expert=32,
        n_expert_used=22, n_ff_expert=2688, n_ff_shared=5376, n_latent=1024, ssm_d_inner=8192,
        ssm_d_state=128, ssm_n_head=128, n_extra_layers=1,
    ),
    "nemotron 3 nano 4b": _wide(
        "nemotron_h", "M-M*-", n_embd=3136, n_vocab=131072, n_head=40, n_head_kv=8, n_ff=12544,
        ssm_d_inner=7680, ssm_d_state=128, ssm_n_head=96,
    ),
    "super 49b": _wide(
        "deci", 4, n_embd=8192, n_vocab=128256, n_head=64, n_head_kv=(8, 0, 8, 0),
        n_ff=(28672, 14336, 28672, 2816),
    ),
    "llama 8b": _wide("llama", 2, n_embd=4096, n_vocab=128256, n_head=32, n_head_kv=8, n_ff=14336),
    "nemotron mini 4b": _wide("nemotron", 2, n_embd=3072, n_vocab=256000, n_head=24, n_head_kv=8, n_ff=9216),
    "qwen2 1.5b": _wide(
        "qwen2", 2, n_embd=1536, n_vocab=151936, n_head=12, n_head_kv=2, n_ff=8960, is_tied=True
    ),
    "qwen3 moe": _wide(
        "qwen3moe", 2, n_embd=2048, n_vocab=151936, n_head=32, n_head_kv=4, n_ff=6144, n_expert=16,
        n_expert_used=8, n_ff_expert=768,
    ),
    "gemma3 4b": _wide(
        "gemma3", 8, n_embd=2560, n_vocab=262144, n_head=8, n_head_kv=4, n_ff=10240, head_dim=256,
        is_tied=True,
    ),
}  # fmt: skip
"""The widths of real models with a few of their blocks and experts: buffers depend on widths alone."""

ON_A_GPU = {
    "nemotron 3 nano 30b": (111.26, 111.26, 167.26, 135.34),
    "nemotron 3 super": (199.51, 199.51, 255.51, 223.59),
    "nemotron 3 nano 4b": (113.68, 154.23, 194.34, 207.34),
    "super 49b": (224.01, 224.01, 280.01, 248.09),
    "llama 8b": (116.01, 116.01, 172.01, 192.09),
    "nemotron mini 4b": (44.01, 44.01, 100.01, 184.09),
    "qwen2 1.5b": (69.51, 69.51, 125.51, 93.59),
    "qwen3 moe": (92.01, 92.01, 148.01, 156.09),
    "gemma3 4b": (82.77, 84.52, 139.52, 181.05),
}
"""MiB of compute buffer that llama-cpp-python 0.3.36 logged for these widths on an NVIDIA H200, all layers
on the GPU, for each of ON_A_GPU_LOADS."""

ON_A_GPU_LOADS = [Load(8192, 1), Load(8192, 8), Load(65536, 4), Load(32768, 8, "q8_0")]


@pytest.mark.parametrize("name", WIDE)
def test_buffers_on_a_gpu_are_never_underestimated(tmp_path: Path, name: str) -> None:
    """Held against what was measured once, since tests have no GPU."""
    path = tmp_path / "m.gguf"
    synthetic.write(path, WIDE[name], weights="none", type_name="Q4_0", has_vocab=False)
    shape = gguf.read(path).shape
    for load, mib in zip(ON_A_GPU_LOADS, ON_A_GPU[name], strict=True):
        assert 0.999 < memory.compute_bytes(shape, load, is_gpu=True) / (mib * MIB) < 1.5, load


LOADS = [
    Load(8192, 1),
    Load(8192, 4, "q8_0"),
    Load(32768, 4, n_ubatch=2048),
    Load(8192, 8, kv_layout="split"),
    Load(65536, 32),
]


def shapes() -> Iterator[tuple[str, Dimensions]]:
    """Real widths with a few blocks, and every model of the catalogue whole; each shape once."""
    yield from WIDE.items()
    known: set[Dimensions] = set()
    for model in catalog.load().models:  # but for those that embed or rank, which test_embedders.py has
        if model.dimensions and not model.dimensions.pooling and model.dimensions not in known:
            known.add(model.dimensions)
            yield model.id, model.dimensions


def _file_bytes(shape: ModelShape) -> int:
    """Of a header whose embeddings are Q4_0: tied ones are in the file once."""
    n_twice = shape.n_vocab * shape.n_embd * 18 // 32 if shape.is_tied else 0
    return shape.repeating_bytes + shape.output_bytes + shape.extra_bytes + shape.input_bytes - n_twice


def test_the_catalogue_tells_of_every_model_what_its_header_will(tmp_path: Path) -> None:
    """Caches, states, windows and activations exactly, weights nearly."""
    for name, dimensions in shapes():
        if name in WIDE:
            continue
        path = synthetic.write(
            tmp_path / "m.gguf", dimensions, weights="none", type_name="Q4_0", has_vocab=False
        )
        real = gguf.read(path).shape
        guess = estimate(dimensions, file_bytes=_file_bytes(real))
        path.unlink()
        for field in ("kind", "n_embd_k_gqa", "n_embd_v_gqa", "state_bytes", "n_swa"):
            told = [getattr(layer, field) for layer in guess.layers]
            assert told == [getattr(layer, field) for layer in real.layers], (name, field)
        assert (guess.n_layer_all, guess.is_tied) == (real.n_layer_all, real.is_tied), name
        assert guess.n_activations_max == real.n_activations_max, name
        assert guess.n_activations_recurrent == real.n_activations_recurrent, name
        assert guess.head_length == real.head_length, name
        assert guess.n_params == pytest.approx(real.n_params, rel=0.002), name
        assert guess.active_bytes == pytest.approx(real.active_bytes, rel=0.05), name


@pytest.mark.model
def test_weights_cache_state_and_buffers_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """On headers of the exact shapes, loaded without their weights. Weights to the byte. The library's log
    rounds the cache and the state to a hundredth of a MiB, far less than a step of either, which is 256
    cells or a block's state: what agrees with it agrees to the byte. The compute buffer is never less than
    what llama.cpp reserves, and at most a tenth more."""
    jobs, expected = [], []
    for index, (name, dimensions) in enumerate(shapes()):
        path = tmp_path / f"{name}.gguf"
        synthetic.write(path, dimensions, weights="none", type_name="Q4_0", has_vocab=False)
        shape = gguf.read(path).shape
        loads = LOADS if name in WIDE else [LOADS[index % 5], LOADS[(index + 2) % 5]]
        for load in loads:
            if shape.state_bytes:  # which llama.cpp does allocate
                load = replace(load, n_slots=min(load.n_slots, 4))
            facts = {key: getattr(load, key) for key in ("n_ctx", "n_slots", "kv_type", "n_ubatch")}
            jobs.append({"path": str(path), "kv_layout": load.kv_layout, **facts})
            expected.append((f"{name}, {load}", shape, load))
    script = Path(__file__).with_name("oracle.py")
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(jobs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (what, shape, load), found in zip(expected, json.loads(done.stdout), strict=True):
        rounding = 0.005 * MIB * (2 if any(layer.n_swa for layer in shape.layers) else 1) + 1
        kv = sum(memory.kv_bytes(layer, load) for layer in shape.layers)
        state = sum(memory.state_bytes(layer, load) for layer in shape.layers)
        assert _file_bytes(shape) == found["weights"], what
        assert kv == pytest.approx(found["kv"], abs=rounding), what
        assert state == pytest.approx(found["state"], abs=rounding), what
        most = 1.1 if what.partition(",")[0] not in WIDE else 1.2  # these have fewer blocks than any model
        assert 1 <= memory.compute_bytes(shape, load, is_gpu=False) / found["compute"] < most, what


def test_several_cards_keep_three_more_copies_of_what_flows_between_them() -> None:
    """GGML_SCHED_MAX_COPIES is 4, and the first is counted with the buffers."""
    model = catalog.load().get("llama-3.1-nemotron-nano-8b")
    assert model is not None
    shape, load = model.shape(model.file("Q4_K_M")), Load(8192, 1)
    each = 2 * 512 * 8192 + 4 * 4096 * 512  # the mask in f16, the embedded batch in f32
    assert memory.pipeline_bytes(shape, load) == 3 * each
