"""The parent's side of quantizing: a process for one file, which may abort without taking anything along."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from nemolocal.engine.llama import quantize
from nemolocal.engine.messages import QuantizeSpec, TensorDone
from nemolocal.errors import EngineDiedError, EngineError

SIGKILL = 9
N_CHARACTERS = 200  # of the last words of a process that died


class NeedsImportanceError(EngineError):
    """The quantization cannot be had without an importance matrix."""


def run(spec: QuantizeSpec, log_path: Path) -> Generator[TensorDone, None, None]:
    """Each tensor as it is done. Closing the iterator ends the work.

    Raises EngineError with the library's own word when it refuses, NeedsImportanceError, and EngineDiedError
    when its process ends.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with suppress(OSError):  # its last words then go to our stderr
        log_path.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(
        target=quantize.main, args=(theirs, spec, str(log_path)), name="nemolocal-quantizer", daemon=True
    )
    process.start()
    theirs.close()
    with ours, _ended(process):
        while True:
            try:
                said = ours.recv()
            except (EOFError, OSError):
                process.join()
                raise _death(process.exitcode, log_path) from None
            if isinstance(said, TensorDone):
                yield said
            elif said == quantize.NEEDS_IMPORTANCE:
                raise NeedsImportanceError("This quantization needs an importance matrix.")
            elif said:
                raise EngineError(f"llama.cpp could not quantize {Path(spec.source).name}: {said}")
            else:
                return


def _death(code: int | None, log_path: Path) -> EngineDiedError:
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    if code == -SIGKILL:
        how += ", which a system out of memory sends"
    words = ""
    with suppress(OSError):
        lines = log_path.read_text(encoding="utf-8", errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "")[:N_CHARACTERS]
    return EngineDiedError(f"The quantizer's process ended ({how}){': ' + words if words else ''}.")


@contextmanager
def _ended(process: BaseProcess) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.join()
