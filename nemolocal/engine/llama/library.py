"""The library itself: devices, its log, and the model file as loaded into memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemolocal.engine.llama import ggml, overrides
from nemolocal.engine.llama.allocated import Allocated
from nemolocal.engine.llama.vocab import LlamaVocab
from nemolocal.engine.messages import Held, LoadSpec, ModelInfo
from nemolocal.errors import EngineError, OutOfMemoryError

LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR
# What llama.cpp says after it has told the reason.
CONSEQUENCE = re.compile(r"failed to (load model|initialize batch|decode)\b")
NUMA_DISTRIBUTE = 1  # GGML_NUMA_STRATEGY_DISTRIBUTE
SPLIT_MODES = {"none": 0, "layer": 1, "tensor": 3}
WSL_FOLDER = Path("/usr/lib/wsl/lib")


def load_library(spec: LoadSpec) -> Any:
    """The module of llama.cpp's functions, started. Raises EngineError when it cannot do what is planned."""
    _choose_devices(spec)
    if spec.n_gpu_layers != 0:
        _prefer_windows_driver()
    library = functions()
    library.llama_backend_init()
    if spec.n_numa_nodes > 1:  # before the weights are touched, which decides on whose memory they lie
        library.llama_numa_init(NUMA_DISTRIBUTE)
    if spec.n_gpu_layers != 0 and not library.llama_supports_gpu_offload():
        raise _no_gpu()
    return library


def functions() -> Any:
    """The module of llama.cpp's functions. To be asked for after the devices are chosen: CUDA reads the
    environment once."""
    import llama_cpp

    return llama_cpp.llama_cpp


def load_model(library: Any, spec: LoadSpec, log: Log, on_progress: Callable[[float], None]) -> Any:
    """The weights of a plan's file. `on_progress` gets the loaded share, 0 to 1. Raises EngineError."""
    params = library.llama_model_default_params()
    params.n_gpu_layers = spec.n_gpu_layers
    params.split_mode = SPLIT_MODES[spec.split_mode]
    if spec.tensor_split:
        shares = (ctypes.c_float * library.llama_max_devices())(*spec.tensor_split)
        params.tensor_split = shares

    if spec.host_experts:
        experts = overrides.experts_in_ram(library, spec.host_experts)
        params.tensor_buft_overrides = ctypes.cast(experts, ctypes.c_void_p)

    def keep_going(share: float, _: Any) -> bool:
        on_progress(share)
        return True

    progress = library.llama_progress_callback(keep_going)
    params.progress_callback = progress
    model = library.llama_model_load_from_file(os.fsencode(spec.path), params)
    if not model:
        raise log.failure(f"llama.cpp could not load {spec.path}: {log.last}")
    return model


def open_context(library: Any, model: Any, params: Any, *, n_ctx: int, log: Log) -> Any:
    """A context for a loaded model. Raises EngineError when there is no memory for `n_ctx` tokens."""
    params.swa_full = False
    params.no_perf = True
    context = library.llama_init_from_model(model, params)
    if not context:
        raise log.failure(
            f"llama.cpp could not make a context of {n_ctx} tokens: {log.last}", hint="Try a smaller --ctx."
        )
    return context


def metadata(library: Any, model: Any, key: str) -> str:
    """A value of the file's header as text, "" where it has none."""
    buffer = ctypes.create_string_buffer(256)
    n = library.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if n >= 0 else ""


def describe(
    library: Any,
    model: Any,
    vocab: LlamaVocab,
    *,
    n_ctx: int,
    held: Sequence[Held],
    n_embd: int = 0,
) -> ModelInfo:
    """What llama.cpp says of a loaded model, and what its user says of the context."""
    template = library.llama_model_chat_template(model, None) or b""
    return ModelInfo(
        name=metadata(library, model, "general.name"),
        architecture=metadata(library, model, "general.architecture"),
        n_ctx=n_ctx,
        n_ctx_train=int(library.llama_model_n_ctx_train(model)),
        n_params=int(library.llama_model_n_params(model)),
        size_bytes=int(library.llama_model_size(model)),
        n_vocab=vocab.n_tokens,
        bos=vocab.bos,
        eos=vocab.eos,
        adds_bos=vocab.adds_bos,
        control_tokens=vocab.control_texts,
        chat_template=template.decode("utf-8", "replace"),
        library=f"llama.cpp {library.llama_version().decode()}",
        system_info=library.llama_print_system_info().decode(),
        held=tuple(held),
        n_embd=n_embd,
    )


class Log:
    """Listens to llama.cpp: the last line of trouble, and what was allocated. `gpus` are the UUIDs of those
    that it sees, in its order."""

    def __init__(self, library: Any, gpus: Sequence[str] = ()) -> None:
        self._library = library
        self._trouble: deque[str] = deque(maxlen=1)
        self.allocated = Allocated(gpus, lambda device: ggml.free_bytes(library, device))

        def listen(level: int, text: bytes, _: Any) -> None:
            line = text.decode("utf-8", "replace").strip()
            self.allocated.hear(line)
            if level == LEVEL_ERROR and line and not CONSEQUENCE.search(line):
                self._trouble.append(line.splitlines()[0])

        self._callback = library.llama_log_callback(listen)
        library.llama_log_set(self._callback, None)

    def close(self) -> None:
        """Stop listening; llama.cpp must not call what is gone."""
        self._library.llama_log_set(self._library.llama_log_callback(0), None)

    def failure(self, message: str, *, hint: str = "") -> EngineError:
        """The error for what did not go well: one of memory where an allocation has failed."""
        shortage = self.allocated.shortage
        if shortage is None:
            return EngineError(message, hint=hint)
        return OutOfMemoryError(message, hint=hint, **asdict(shortage))

    @property
    def last(self) -> str:
        return self._trouble[-1] if self._trouble else "no reason given"


def _no_gpu() -> EngineError:
    import llama_cpp

    if any((Path(llama_cpp.__file__).parent / "lib").glob("*ggml-cuda*")):
        return EngineError(
            "The plan uses GPUs, but CUDA cannot be started.",
            hint="Reboot, which helps after a suspend or a new driver, or plan with --gpu-layers 0.",
        )
    return EngineError(
        "The plan uses GPUs, but the installed llama-cpp-python was built without CUDA.",
        hint="See `nemolocal hardware` for the fix, or plan with --gpu-layers 0.",
    )


def _prefer_windows_driver(folder: Path = WSL_FOLDER) -> None:
    """Under WSL a Linux driver's library, installed beside Windows', is found first and cannot work. What a
    process has loaded by its name is found before both."""
    library = folder / "libcuda.so.1"
    if library.exists():
        with contextlib.suppress(OSError):  # told of by what is asked of CUDA next
            ctypes.CDLL(str(library))


def _choose_devices(spec: LoadSpec) -> None:
    """Show CUDA just the planned GPUs, by UUID and in the plan's order, so that numbering cannot differ."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if spec.visible_devices or spec.n_gpu_layers == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices)
