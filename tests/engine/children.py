"""Processes that stand in for an engine's child: entries like worker.main, found by name when spawned."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from nemolocal.engine import child, worker
from nemolocal.engine.llama import backend
from nemolocal.engine.messages import (
    Accepted,
    Beat,
    Chunk,
    Failed,
    Finished,
    LoadFailed,
    LoadProgress,
    LoadSpec,
    ModelInfo,
    Ready,
    Shortage,
    Submit,
)
from nemolocal.types import Timings, Usage

INFO = ModelInfo("fake", "llama", 64, 64, 1, 1, 10, "", "", False, (), "", "", "")
FOREVER_S = 600.0


def loads_forever(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    connection.send([LoadProgress(0.5)])
    time.sleep(FOREVER_S)


def dies_in_load(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    connection.send([LoadProgress(0.5)])
    os._exit(3)


def dies_at_the_first_request(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    connection.send([Ready(INFO)])
    connection.recv()
    os._exit(3)


def hangs_after_its_pipe(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    """As when a driver does not come back while the model is freed."""
    connection.send([Ready(INFO)])
    connection.recv()
    connection.close()
    time.sleep(FOREVER_S)


def hangs_in_load(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    for i in range(8):
        connection.send([LoadProgress(i / 10)])
        time.sleep(0.1)
    time.sleep(FOREVER_S)


def hangs_at_the_first_request(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    connection.send([Ready(INFO)])
    connection.recv()
    time.sleep(FOREVER_S)


def reads_for_long(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    """A prompt that takes many steps, of which each shows a sign of life; then it is idle for as long."""
    connection.send([Ready(INFO)])
    while isinstance(command := connection.recv(), Submit):
        connection.send([Accepted(command.id, 1)])
        for _ in range(7):
            time.sleep(0.2)
            connection.send([Beat()])
        connection.send([Chunk(command.id, "yes", 1)])
        connection.send([Finished(command.id, "stop", Usage(1, 1), Timings(0.0, 0.0, 0.0))])


def runs_out_of_memory_in_load(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    child.redirect_stderr(log_path)
    os.write(2, b"cudaMalloc failed: out of memory\n")
    connection.send([LoadFailed("llama.cpp could not make a context.", "Use a smaller --ctx.")])


def lacks_memory_for_its_cache(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    connection.send([LoadFailed("No context.", "Use less.", Shortage("GPU-1", 800, 700, 1024))])


def runs_out_of_memory_at_the_first_request(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    child.redirect_stderr(log_path)
    connection.send([Ready(INFO)])
    command = connection.recv()
    os.write(2, b"ggml_gallocr: failed to allocate CUDA0 buffer of size 1\n")
    connection.send([Failed(command.id, "llama_decode failed.")])


def aborts_in_native_code(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    """As when llama.cpp finds its own state impossible."""
    vars(backend)["LlamaBackend"] = _abort
    worker.main(connection, spec, log_path)


def _abort(*_: Any) -> None:
    import llama_cpp

    llama_cpp.llama_cpp._lib.ggml_abort(b"file.cpp", 1, b"GGML_ASSERT(%s) failed", b"sense")
