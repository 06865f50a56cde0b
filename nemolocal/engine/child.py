"""The frame of an engine's process, the same for every kind of model: deaf to Ctrl-C, stderr kept for the
parent, the model loaded, the parent told, and the model freed in the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from nemolocal.engine.messages import LoadFailed, LoadProgress, ModelInfo, Ready, Shortage
from nemolocal.errors import EngineError, OutOfMemoryError

PROGRESS_EVERY_S = 0.1


class Loaded(Protocol):
    """A loaded model."""

    def info(self) -> ModelInfo: ...

    def close(self) -> None: ...


Model = TypeVar("Model", bound=Loaded)


def serve(
    connection: Connection,
    log_path: str,
    *,
    load: Callable[[Callable[[float], None]], Model],
    run: Callable[[Model], None],
) -> None:
    """Load a model, say so, and serve it until `run` returns: when the parent asks for it, or is gone.

    `load` gets a function that takes the loaded share, 0 to 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which tells us
    redirect_stderr(log_path)
    # On an abort llama.cpp would run a debugger, which writes on the user's stdout and takes seconds.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        model = load(_report_progress(connection))
        connection.send([Ready(model.info())])
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is gone; there is nobody to tell
    except OutOfMemoryError as error:
        shortage = Shortage(error.device, error.wanted_bytes, error.free_bytes, error.held_bytes)
        connection.send([LoadFailed(error.message, error.hint, shortage)])
        return
    except EngineError as error:
        connection.send([LoadFailed(error.message, error.hint)])
        return
    except Exception as error:  # whatever a broken library or driver throws is an answer too
        connection.send([LoadFailed(f"The engine did not start: {type(error).__name__}: {error}.")])
        return
    try:
        run(model)
    except (BrokenPipeError, EOFError, ConnectionResetError) as error:
        print(f"The other end of the pipe is gone: {type(error).__name__}.", file=sys.stderr)
    finally:
        model.close()


def _report_progress(connection: Connection) -> Callable[[float], None]:
    last = 0.0

    def report(fraction: float) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY_S:
            last = time.monotonic()
            connection.send([LoadProgress(fraction)])

    return report


def redirect_stderr(path: str) -> None:
    """Native code that aborts writes its last words to stderr; keep them where the parent can quote them.
    Where that cannot be written, they go to the parent's stderr."""
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError:
        return
    os.dup2(target, 2)
    os.close(target)
