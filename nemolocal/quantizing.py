"""Making a smaller file of a model: what it would take, whether there is room, and the work itself. The file
gets its name only when it is whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from nemolocal.engine import quantizer
from nemolocal.engine.messages import QuantizeSpec, TensorDone
from nemolocal.errors import EngineError, ModelFileError, UsageError
from nemolocal.models import disk, gguf, remote
from nemolocal.models.choice import Candidate
from nemolocal.models.gguf import GgufInfo
from nemolocal.models.gguf_header import TENSOR_TYPES

PART_SUFFIX: Final = ".part"
WHOLE_TYPES: Final = ("F32", "F16", "BF16")
_BYTES_OF: Final = {name.upper(): (n_block, n_bytes) for name, n_block, n_bytes in TENSOR_TYPES.values()}
_FILE_TYPES: Final = {label.upper(): number for number, label in gguf.FILE_TYPES.items()}


@dataclass(slots=True)
class Outcome:
    """What the quantizer did, or in a dry run would do; `after_bytes` counts the tensors alone."""

    quant: str
    before_bytes: int = 0
    after_bytes: int = 0
    n_tensors: int = 0
    types: dict[str, int] = field(default_factory=dict)  # how many tensors are of each type
    odd: list[str] = field(default_factory=list)  # tensors whose rows are no multiple of 256

    def add(self, done: TensorDone) -> None:
        n = math.prod(done.dims)
        self.before_bytes += _bytes(n, done.before)
        self.after_bytes += _bytes(n, done.after)
        self.n_tensors += 1
        self.types[done.after.upper()] = self.types.get(done.after.upper(), 0) + 1
        if done.before != done.after and done.dims[0] % 256 and "_K" in self.quant:
            self.odd.append(done.name)


def file_type(quant: str) -> tuple[str, int]:
    """A quantization's usual name and llama.cpp's number of it. Raises UsageError, naming those there are."""
    label = quant.upper()
    if label not in _FILE_TYPES:
        known = ", ".join(sorted(gguf.FILE_TYPES.values()))
        raise UsageError(f"'{quant}' is no quantization.", hint=f"There are {known}.")
    return gguf.FILE_TYPES[_FILE_TYPES[label]], _FILE_TYPES[label]


def check(info: GgufInfo, *, may_requantize: bool) -> None:
    """Refuse what would only lose. Raises UsageError."""
    if info.quant.upper() not in WHOLE_TYPES and not may_requantize:
        raise UsageError(
            f"{info.path.name} is quantized already ({info.quant}), and would lose twice.",
            hint="Begin with an F16 or BF16 file, or give --allow-requantize.",
        )


def dry_run(info: GgufInfo, quant: str, *, may_requantize: bool = False) -> Outcome:
    """What would become of a model. Writes nothing. Raises UsageError, EngineError."""
    label, number = file_type(quant)
    check(info, may_requantize=may_requantize)
    spec = QuantizeSpec(str(info.path), "", number, is_dry=True, may_requantize=may_requantize)
    outcome = Outcome(label)
    for done in quantizer.run(spec):
        outcome.add(done)
    return outcome


def quantize(
    info: GgufInfo,
    quant: str,
    target: Path,
    *,
    n_threads: int = 0,
    may_requantize: bool = False,
    may_replace: bool = False,
    progress: Callable[[int, int], None] = lambda n_done, n_all: None,
) -> Outcome:
    """Write the smaller file. `progress` gets the bytes of the tensors that are done, and of all. What it
    raises, and Ctrl-C, leave nothing behind.

    Raises UsageError for a wrong wish or a target that is there, NoSpaceError before anything is written,
    EngineError when the library refuses, DownloadError for a disk that cannot be written.
    """
    label, number = file_type(quant)
    if target.exists() and not may_replace:
        raise UsageError(f"{target} is there already.", hint="Give another -o, or --force.")
    if target.resolve() in {path.resolve() for path in info.parts}:
        raise UsageError("A file cannot be quantized onto itself.", hint="Give another -o.")
    planned = dry_run(info, quant, may_requantize=may_requantize)
    disk.check_space(target.parent, planned.after_bytes, what=target.name)
    part = target.with_name(target.name + PART_SUFFIX)
    outcome = Outcome(label)
    spec = QuantizeSpec(str(info.path), str(part), number, n_threads=n_threads, may_requantize=may_requantize)
    try:
        part.touch()  # the library says of a folder that it cannot write no more than "iostream error"
        for done in quantizer.run(spec):
            outcome.add(done)
            progress(outcome.before_bytes, planned.before_bytes)
        part.replace(target)
    except EngineError:  # which is also all that it says of a disk that has filled up meanwhile
        n_left = planned.after_bytes - part.stat().st_size
        disk.check_space(target.parent, n_left, what=target.name)
        raise
    except OSError as error:
        raise disk.disk_error(error, target) from None
    finally:
        part.unlink(missing_ok=True)
    return outcome


def candidate(info: GgufInfo, outcome: Outcome) -> Candidate:
    """The model as a plan would see it once it is quantized, by its parts' share of the size."""
    size = info.size_bytes - outcome.before_bytes + outcome.after_bytes
    shape = remote.scaled(info.shape, from_bytes=outcome.before_bytes, to_bytes=outcome.after_bytes)
    return replace(Candidate(outcome.quant, f"{outcome.quant}.gguf", size, shape), is_local=False)


def _bytes(n_elements: int, type_name: str) -> int:
    known = _BYTES_OF.get(type_name.upper())
    if known is None:
        raise ModelFileError(f"The type {type_name} is not known here.", kind="unsupported")
    n_block, n_bytes = known
    return n_elements // n_block * n_bytes
