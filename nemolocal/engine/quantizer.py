"""The parent's side of quantizing: a process for one file, which may abort without taking anything along."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from nemolocal.engine.llama import quantize
from nemolocal.engine.messages import QuantizeSpec, TensorDone
from nemolocal.errors import EngineDiedError, EngineError


def run(spec: QuantizeSpec) -> Iterator[TensorDone]:
    """Each tensor as it is done. Raises EngineError with the library's own word when it refuses, and
    EngineDiedError when its process ends. Closing the iterator ends the work."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=quantize.main, args=(theirs, spec), name="nemolocal-quantizer", daemon=True
    )
    process.start()
    theirs.close()
    with ours, _ended(process):
        while True:
            try:
                said = ours.recv()
            except (EOFError, OSError):
                process.join()
                raise EngineDiedError(
                    f"The quantizer's process ended (exit code {process.exitcode})."
                ) from None
            if isinstance(said, TensorDone):
                yield said
            elif said:
                raise EngineError(f"llama.cpp could not quantize {spec.source}: {said}")
            else:
                return


@contextmanager
def _ended(process: BaseProcess) -> Iterator[None]:
    try:
        yield
    finally:
        if process.is_alive():
            process.terminate()
        process.join()
