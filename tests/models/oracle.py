"""Asks llama.cpp itself what a model would take, without loading a weight: run as a script in a process of
its own, since what it logs is process-wide and a header that it dislikes may abort it.

Reads a JSON list of {"path", "n_ctx", "n_slots", "kv_type", "n_ubatch", "kv_layout"} from stdin, with
"pooling" (llama.cpp's number of it) for models that embed or rank; writes a list of {"weights", "kv",
"state", "compute"} in bytes, as rounded by the log's two decimals of a MiB.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from typing import Any

import llama_cpp

MIB = 1 << 20
N_DRAFTED = 16  # rows of logits for tokens that are guessed ahead
KV_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
FLASH_ATTENTION_ON = 1

_lines: list[str] = []


@llama_cpp.llama_log_callback
def _log(_level: int, text: bytes, _user: ctypes.c_void_p) -> None:
    _lines.append(text.decode(errors="replace"))


_loaded: dict[str, Any] = {}  # the model of the last path: jobs of one file come one after another


def load(path: str) -> Any:
    if path not in _loaded:
        for model in _loaded.values():
            llama_cpp.llama_model_free(model)
        _loaded.clear()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers, params.no_alloc, params.load_mode = 0, True, 0
        _loaded[path] = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not _loaded[path]:
            raise SystemExit("".join(_lines))
    return _loaded[path]


def measure(job: dict[str, Any]) -> dict[str, int]:
    _lines.clear()
    model = load(job["path"])
    wish = llama_cpp.llama_context_default_params()
    wish.n_ctx, wish.n_ubatch = job["n_ctx"], job["n_ubatch"]
    wish.n_batch = max(2048, job["n_ubatch"])
    wish.n_seq_max = job["n_slots"]
    wish.n_outputs_max = job["n_slots"] + N_DRAFTED
    wish.n_outputs_max_per_seq = 1 + N_DRAFTED
    if "pooling" in job:
        wish.embeddings, wish.pooling_type = True, job["pooling"]
        wish.n_batch = wish.n_outputs_max = job["n_ubatch"]
    is_shared = job.get("kv_layout", "shared") == "shared"
    wish.kv_unified, wish.swa_full = is_shared, False
    if not is_shared:
        wish.n_ctx *= job["n_slots"]
    wish.flash_attn_type = FLASH_ATTENTION_ON
    wish.type_k = wish.type_v = KV_TYPES[job["kv_type"]]
    context = llama_cpp.llama_init_from_model(model, wish)
    if not context:
        raise SystemExit("".join(_lines))
    found = {
        "weights": llama_cpp.llama_model_size(model),
        "kv": _sum("llama_kv_cache: size ="),
        "state": _sum("llama_memory_recurrent: size ="),
        "compute": _sum("CPU compute buffer size ="),
    }
    llama_cpp.llama_free(context)
    return found


def _sum(label: str) -> int:
    found = re.findall(re.escape(label) + r"\s+([\d.]+) MiB", "".join(_lines))
    return round(sum(map(float, found)) * MIB)


if __name__ == "__main__":
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    print(json.dumps([measure(job) for job in json.load(sys.stdin)]))
