"""Quantizing a model file with the library's own quantizer, in a process of its own: what each tensor becomes
is read from its log.

The lines are those of llama.cpp as vendored in llama-cpp-python 0.3.36 (src/llama-quant.cpp).
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from nemolocal.engine import child
from nemolocal.engine.llama import library as llama_library
from nemolocal.engine.messages import QuantizeSpec, TensorDone

_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+(\S+)\s+-\s+\[([\d, ]+)\],\s+type =\s+(\w+),")
_BECOMES = re.compile(r"converting to (\w+)|-> +[\d.]+ MiB \((\w+)\)")  # the second in a dry run
_ODD = re.compile(r"warning: (\S+)\s+- ncols\s+\d+ not divisible by\s+\d+ \(required for type\s+(\w+)\)")
_NEEDS_IMPORTANCE = re.compile("require.* an (imatrix|importance matrix)|Missing importance matrix")
_BEFORE_REASON = re.compile(r"^\w+: failed to quantize: ")

NEEDS_IMPORTANCE = "needs importance"
"""The answer where the quantization asks for an importance matrix, which a dry run only warns of."""


def main(connection: Connection, spec: QuantizeSpec, log_path: str) -> None:
    """Sends a TensorDone for each tensor, and last a text: "" when all went well, else why not. What native
    code writes to stderr goes to the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    child.redirect_stderr(log_path)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the CPU does it; no GPU's memory is to be taken for it
    threading.Thread(target=_end_with_parent, args=[connection], daemon=True).start()
    try:
        connection.send(_quantize(spec, connection.send))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone; there is nobody to tell
    except Exception as error:  # whatever a broken library throws is an answer too
        connection.send(f"{type(error).__name__}: {error}")


def _end_with_parent(connection: Connection) -> None:
    """The library does not come back before it is through, which may take an hour. The parent sends
    nothing, so that all there is to hear is its end."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)


def _quantize(spec: QuantizeSpec, send: Callable[[TensorDone], None]) -> str:
    library = llama_library.functions()
    reader = _Reader(send)
    callback = library.llama_log_callback(reader.listen)
    library.llama_log_set(callback, None)
    library.llama_backend_init()
    params = library.llama_model_quantize_default_params()
    params.nthread, params.ftype = spec.n_threads, spec.file_type
    params.dry_run, params.allow_requantize = spec.is_dry, spec.may_requantize
    if spec.buffer_bytes:
        params.max_buf_size = spec.buffer_bytes
    importance = _importance(library, spec.importance)
    if importance:
        params.imatrix = importance
    folder, name = os.path.split(spec.target)
    if not spec.is_dry:  # on Windows the library cannot write to folders of every name
        os.chdir(folder)
    source, target = os.fsencode(spec.source), os.fsencode(name)
    result = library.llama_model_quantize(source, target, ctypes.byref(params))
    reader.flush()
    if reader.needs_importance:
        return NEEDS_IMPORTANCE
    return "" if result == 0 else reader.trouble or f"it gave up (code {result})"


def _importance(library: Any, importance: Mapping[str, bytes]) -> Any:
    """The matrix as the library takes it: an array that ends with an entry without a name. None for an empty
    one."""
    if not importance:
        return None
    entries = (library.llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        n = len(values) // ctypes.sizeof(ctypes.c_float)
        entry.name, entry.size = name.encode(), n
        entry.data = (ctypes.c_float * n).from_buffer_copy(values)
    return entries


class _Reader:
    """Puts the pieces of the log together: a tensor's line comes in two or three, and before the first of
    them come the tensors whose rows do not fit the wanted type."""

    def __init__(self, send: Callable[[TensorDone], None]) -> None:
        self._send = send
        self._open: TensorDone | None = None
        self._odd: dict[str, str] = {}
        self.trouble = ""
        self.needs_importance = False

    def listen(self, level: int, text: bytes, _: Any) -> None:
        line = text.decode("utf-8", "replace")
        if level == llama_library.LEVEL_ERROR and line.strip():
            self.trouble = _BEFORE_REASON.sub("", line.strip().splitlines()[0])
        if _NEEDS_IMPORTANCE.search(line):
            self.needs_importance = True
        if odd := _ODD.search(line):
            self._odd[odd[1]] = odd[2]
        if found := _TENSOR.search(line):
            self.flush()
            n, n_all, name, dims, kind = found.groups()
            sizes = tuple(int(size) for size in dims.split(","))
            self._open = TensorDone(int(n), int(n_all), name, sizes, kind, kind, self._odd.get(name, ""))
        if self._open and (becomes := _BECOMES.search(line)):
            self._open = replace(self._open, after=becomes[becomes.lastindex or 1])
        if self._open and "size =" in line:
            self.flush()

    def flush(self) -> None:
        done, self._open = self._open, None
        if done:
            self._send(done)
