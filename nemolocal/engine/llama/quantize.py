"""Quantizing a model file with the library's own quantizer, in a process of its own: what each tensor becomes
is read from its log."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from nemolocal.engine.llama import library as llama_library
from nemolocal.engine.messages import QuantizeSpec, TensorDone

_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+(\S+)\s+-\s+\[([\d, ]+)\],\s+type =\s+(\w+),")
_BECOMES = re.compile(r"converting to (\w+)|-> +[\d.]+ MiB \((\w+)\)")  # the second in a dry run
_NEEDS_IMATRIX = "require an imatrix"  # what a dry run only warns of


def main(connection: Connection, spec: QuantizeSpec) -> None:
    """Sends a TensorDone for each tensor, and last a text: "" when all went well, else why not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the CPU does it; no GPU's memory is to be taken for it
    try:
        connection.send(_quantize(spec, connection.send))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone; there is nobody to tell
    except Exception as error:  # whatever a broken library throws is an answer too
        connection.send(f"{type(error).__name__}: {error}")


def _quantize(spec: QuantizeSpec, send: Callable[[TensorDone], None]) -> str:
    library = llama_library.functions()
    reader = _Reader(send)
    callback = library.llama_log_callback(reader.listen)
    library.llama_log_set(callback, None)
    library.llama_backend_init()
    params = library.llama_model_quantize_default_params()
    params.nthread, params.ftype = spec.n_threads, spec.file_type
    params.dry_run, params.allow_requantize = spec.is_dry, spec.may_requantize
    source, target = os.fsencode(spec.source), os.fsencode(spec.target)
    result = library.llama_model_quantize(source, target, ctypes.byref(params))
    reader.flush()
    if reader.needs_imatrix:
        return "the smallest quantizations need an importance matrix, which is not made here"
    return "" if result == 0 else reader.trouble or f"llama.cpp gave up (code {result})"


class _Reader:
    """Puts the pieces of the log together: a tensor's line comes in two or three."""

    def __init__(self, send: Callable[[TensorDone], None]) -> None:
        self._send = send
        self._open: TensorDone | None = None
        self.trouble = ""
        self.needs_imatrix = False

    def listen(self, level: int, text: bytes, _: Any) -> None:
        line = text.decode("utf-8", "replace")
        if level == llama_library.LEVEL_ERROR and line.strip():
            self.trouble = line.strip().splitlines()[0]
        if _NEEDS_IMATRIX in line:
            self.needs_imatrix = True
        if found := _TENSOR.search(line):
            self.flush()
            n, n_all, name, dims, kind = found.groups()
            sizes = tuple(int(size) for size in dims.split(","))
            self._open = TensorDone(int(n), int(n_all), name, sizes, kind, kind)
        if self._open and (becomes := _BECOMES.search(line)):
            done = self._open
            self._open = replace(done, after=becomes[becomes.lastindex or 1])
        if self._open and "size =" in line:
            self.flush()

    def flush(self) -> None:
        done, self._open = self._open, None
        if done:
            self._send(done)
