"""Processes that stand in for an engine's child: entries like worker.main, found by name when spawned."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from nemolocal.engine import llama, worker
from nemolocal.engine.messages import LoadProgress, LoadSpec, ModelInfo, Ready

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


def aborts_in_native_code(connection: Connection, spec: LoadSpec, log_path: str) -> None:
    """As when llama.cpp finds its own state impossible."""
    vars(llama)["LlamaBackend"] = _abort
    worker.main(connection, spec, log_path)


def _abort(*_: Any) -> None:
    import llama_cpp

    llama_cpp.llama_cpp._lib.ggml_abort(b"file.cpp", 1, b"GGML_ASSERT(%s) failed", b"sense")
