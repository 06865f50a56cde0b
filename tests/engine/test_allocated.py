"""What was allocated, as llama.cpp's log tells: read line by line, and asked of the real library."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as library
import psutil
import pytest

from nemolocal import config, load_spec
from nemolocal.engine.llama import ggml
from nemolocal.engine.llama.allocated import MIB, Allocated
from nemolocal.engine.llama.backend import LlamaBackend
from nemolocal.engine.llama.drafting import open_drafter
from nemolocal.engine.llama.library import Log
from nemolocal.engine.messages import Held, LoadSpec, ModelInfo, Shortage
from nemolocal.errors import EngineError, OutOfMemoryError
from nemolocal.models import planning
from nemolocal.models.sizing import Plan
from tests import synthetic
from tests.engine.kinds import KINDS
from tests.profiles import machine

ROUNDING_BYTES = 0.005 * MIB + 1  # of the log, for each buffer
ONE, TWO = "GPU-one", "GPU-two"


def heard(*lines: str, gpus: tuple[str, ...] = (ONE, TWO)) -> dict[str, Held]:
    allocated = Allocated(gpus)
    number = allocated.begin()
    for line in lines:
        allocated.hear(line)
    return {held.device: held for held in allocated.held(number)}


def test_sizes_by_device_and_kind() -> None:
    held = heard(
        "load_tensors:   CPU_Mapped model buffer size =   281.81 MiB",
        "load_tensors:        CUDA0 model buffer size =  2048.00 MiB",
        "load_tensors:        CUDA1 model buffer size =  1024.50 MiB",
        "llama_context:  CUDA_Host  output buffer size =     2.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =    64.00 MiB",
        "llama_kv_cache:      CUDA1 KV buffer size =    32.00 MiB",
        "llama_memory_recurrent:      CUDA1 RS buffer size =    10.00 MiB",
        "sched_reserve:      CUDA0 compute buffer size =   300.00 MiB",
        "sched_reserve:  CUDA_Host compute buffer size =    20.00 MiB",
        "llama_model_loader: - kv   5:     llama.vocab_size u32     = 384",
        "print_info: file size   = 0.75 MiB (32.00 BPW)",
    )
    assert held == {
        "": Held("", 295_499_203, compute_bytes=20 * MIB, output_bytes=2 * MIB, is_mapped=True),
        ONE: Held(ONE, 2048 * MIB, 64 * MIB, compute_bytes=300 * MIB),
        TWO: Held(TWO, 2049 * MIB // 2, 32 * MIB, 10 * MIB),
    }


def test_caches_add_up_and_what_computing_takes_is_replaced() -> None:
    """Sliding windows have a cache of their own; a context may plan its computing several times."""
    held = heard(
        "llama_kv_cache:      CUDA0 KV buffer size =    64.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =    16.00 MiB",
        "sched_reserve:      CUDA0 compute buffer size =   300.00 MiB",
        "sched_reserve:      CUDA0 compute buffer size =   200.00 MiB",
        "~llama_context:      CUDA0 compute buffer size is 200.0000 MiB, matches expectation of 200.0000 MiB",
    )
    assert held == {ONE: Held(ONE, kv_bytes=80 * MIB, compute_bytes=200 * MIB)}


def test_a_buffer_cut_over_cards_lies_on_each() -> None:
    held = heard("load_tensors: Meta(CUDA0,CUDA1) model buffer size =  512.00 MiB")
    assert held == {ONE: Held(ONE, 512 * MIB), TWO: Held(TWO, 512 * MIB)}


def test_what_is_loaded_beside_a_model_is_told_from_it() -> None:
    allocated = Allocated((ONE,))
    numbers = []
    for n_mib in (100, 10):
        numbers.append(allocated.begin())
        allocated.hear(f"load_tensors:        CUDA0 model buffer size =  {n_mib}.00 MiB")
        allocated.hear(f"sched_reserve:        CUDA0 compute buffer size =  {n_mib}.00 MiB")
    allocated.hear("llama_adapter_lora_init_impl:      CUDA0 LoRA buffer size =     5.00 MiB")
    assert allocated.held(numbers[0]) == (
        Held(ONE, 100 * MIB, compute_bytes=100 * MIB, beside_bytes=25 * MIB),
    )
    assert allocated.held(numbers[1]) == (Held(ONE, 10 * MIB, compute_bytes=10 * MIB, beside_bytes=5 * MIB),)


def test_an_allocation_that_failed_is_told_with_what_was_free_then() -> None:
    free = {"CUDA1": 700 * MIB}
    allocated = Allocated((ONE, TWO), free.get)
    allocated.begin()
    allocated.hear("load_tensors:        CUDA1 model buffer size =  1024.00 MiB")
    assert allocated.shortage is None
    allocated.hear("allocating 800.00 MiB on device 1: cudaMalloc failed: out of memory")
    allocated.hear("alloc_tensor_range: failed to allocate CUDA1 buffer of size 838860800")
    assert allocated.shortage == Shortage(TWO, 800 * MIB, 700 * MIB, 1024 * MIB)
    allocated.hear("ggml_gallocr_reserve_n_impl: failed to allocate CPU buffer of size 4096")
    assert allocated.shortage == Shortage("", 4096, None, 0)
    allocated.begin()
    assert allocated.shortage is None


# With the real library -----------------------------------------------------------------------------


def planned(path: Path, **flags: str | int) -> tuple[Plan, LoadSpec]:
    settings, hardware = config.load({"threads": 1, **flags}), machine(ram_gib=8)
    plan = planning.plan(str(path), settings, hardware)
    return plan, load_spec.build(plan, hardware, settings)


def info_of(spec: LoadSpec) -> ModelInfo:
    backend = LlamaBackend(spec, lambda share: None)
    try:
        return backend.info()
    finally:
        backend.close()


@pytest.mark.model
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["shared", "split"])
def test_what_is_held_is_what_was_planned(tmp_path: Path, kind: str, layout: str) -> None:
    path = synthetic.write(tmp_path / f"{kind}.gguf", replace(synthetic.TINY[kind], n_ctx_train=4096))
    plan, spec = planned(path, ctx=4096, slots=3, kv_layout=layout)
    [held] = info_of(spec).held
    host = plan.placement.host
    assert held.device == ""
    assert held.weights_bytes == pytest.approx(host.weights_bytes, rel=0.02, abs=ROUNDING_BYTES)
    n_caches = 2 if kind == "gemma3" else 1
    assert held.kv_bytes == pytest.approx(host.kv_bytes, abs=n_caches * ROUNDING_BYTES)
    assert held.state_bytes == pytest.approx(host.state_bytes, abs=ROUNDING_BYTES)
    assert 0 < held.compute_bytes <= 1.1 * host.compute_bytes
    assert held.beside_bytes == 0
    assert bool(held.state_bytes) is kind.startswith("nemotron_h")


@pytest.mark.model
def test_a_draft_model_and_adapters_are_counted_beside(tmp_path: Path) -> None:
    dimensions = synthetic.TINY["llama"]
    path = synthetic.write(tmp_path / "large.gguf", dimensions)
    small = synthetic.write(tmp_path / "small.gguf", dimensions)
    lora = synthetic.write_lora(tmp_path / "lora.gguf", dimensions, seed=1)
    spec = LoadSpec(str(path), 256, 1, n_threads=1, draft=str(small), adapters=((str(lora), 1.0),))
    alone = info_of(replace(spec, draft="off", adapters=())).held[0]
    backend = LlamaBackend(spec, lambda share: None)
    drafter = open_drafter(spec, backend)
    try:
        [held] = backend.info().held
    finally:
        if drafter:
            drafter.close()
        backend.close()
    assert (held.weights_bytes, held.kv_bytes) == (alone.weights_bytes, alone.kv_bytes)
    assert held.beside_bytes > alone.weights_bytes + alone.kv_bytes


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="a process can be kept short of memory on Linux")
def test_a_context_that_finds_no_memory_says_how_much_it_wanted(tmp_path: Path) -> None:
    import resource

    path = synthetic.write_tiny(tmp_path / "model.gguf")
    spec = LoadSpec(str(path), n_ctx=1 << 20, n_slots=1, n_threads=1)
    wanted = (1 << 20) * 512  # cells and bytes of each
    log = Log(library)
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + wanted // 2
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        with pytest.raises(EngineError, match="buffer for kv cache") as caught:
            LlamaBackend(spec, lambda share: None, log=log)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        log.close()
    error = caught.value
    assert isinstance(error, OutOfMemoryError)
    assert (error.device, error.wanted_bytes, error.free_bytes) == ("", wanted, None)
    assert error.held_bytes == pytest.approx(path.stat().st_size, rel=0.1)


@pytest.mark.model
def test_functions_of_ggml_are_found() -> None:
    cpu = ggml.function(library, "ggml_backend_cpu_buffer_type", ctypes.c_void_p)
    assert cpu() == cpu() != 0
    with pytest.raises((AttributeError, OSError)):
        ggml.function(library, "ggml_there_is_no_such_function", None)
    assert ggml.free_bytes(library, "CUDA99") is None
    assert ggml.free_bytes(library, "CPU") is None
