"""Making a smaller file of a model: what it would be, whether there is room, and the work itself. The file
gets its name only when it is whole."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from nemolocal.config import Config
from nemolocal.engine import quantizer
from nemolocal.engine.messages import QuantizeSpec, TensorDone
from nemolocal.engine.quantizer import NeedsImportanceError
from nemolocal.errors import EngineError, ModelFileError, UsageError
from nemolocal.hardware import host
from nemolocal.models import disk, gguf, recast
from nemolocal.models.gguf import GgufInfo
from nemolocal.models.importance import Importance

log = logging.getLogger(__name__)

LOG_FILE: Final = "quantizer.log"
WHOLE_TYPES: Final = ("F32", "F16", "BF16")
"""What nothing has been taken from yet."""
TYPES: Final = {label: number for number, label in gguf.FILE_TYPES.items() if label != "NVFP4"}
"""The quantizations that llama.cpp makes (llama_ftype_get_default_type), and its number of each."""
_OTHER_NAMES: Final = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}

IMPORTANCE_HINT: Final = "Give one with --imatrix, or take a larger type, such as IQ3_S or Q3_K_M."
_PART: Final = re.compile(r"nemolocal-(\d+)-\d+\.part")
_numbers = itertools.count(1)
_BLOCK: Final = re.compile(r"^blk\.\d+\.")
_NOT_WEIGHED: Final = ("token_embd.weight", "per_layer_token_embd.weight")

BUFFER_LEAST_BYTES: Final = 256 << 20
BUFFER_MOST_BYTES: Final = 8 << 30
"""The library's own choice of what is in memory of one tensor, too much for a small machine."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to make of a model. `quant` is one of TYPES; `importance` may be empty; `n_threads` 0 means the
    physical cores."""

    source: GgufInfo
    quant: str
    importance: Importance = field(default_factory=dict)
    may_requantize: bool = False
    n_threads: int = 0

    def spec(self, target: Path, *, is_dry: bool = False) -> QuantizeSpec:
        available = host.read_ram().available_bytes
        return QuantizeSpec(
            source=str(self.source.path.absolute()),
            target=str(target.absolute()),
            file_type=TYPES[self.quant],
            n_threads=self.n_threads or host.read_cpu().physical_cores,
            is_dry=is_dry,
            may_requantize=self.may_requantize,
            importance=self.importance,
            buffer_bytes=min(max(available // 4, BUFFER_LEAST_BYTES), BUFFER_MOST_BYTES),
        )


@dataclass(frozen=True, slots=True)
class Fallback:
    """`n_tensors` tensors have rows of the length `row`, which are no whole blocks of any of the `wanted`
    types, and become another. `names` are without the number of the block."""

    row: int
    becomes: str
    wanted: tuple[str, ...]
    names: tuple[str, ...]
    n_tensors: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What a job gives: `result` is the model as it would be, its size to the byte. `needs_importance` says
    that it cannot be made without an importance matrix."""

    job: Job
    result: GgufInfo
    changes: tuple[TensorDone, ...]
    needs_importance: bool = False

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(tensor.n_bytes for tensor in self.result.tensors) / max(self.result.n_params, 1)

    @property
    def types(self) -> dict[str, int]:
        """How many tensors are of each type, the most frequent first."""
        return dict(Counter(tensor.type_name for tensor in self.result.tensors).most_common())

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The tensors that cannot have their type, those with rows of one length together."""
        groups: defaultdict[tuple[int, str], list[TensorDone]] = defaultdict(list)
        for done in self.changes:
            if done.wanted:
                groups[done.dims[0], done.after.upper()].append(done)
        return tuple(
            Fallback(
                row,
                becomes,
                wanted=tuple(sorted({done.wanted.upper() for done in group})),
                names=tuple(sorted({_BLOCK.sub("", done.name) for done in group})),
                n_tensors=len(group),
            )
            for (row, becomes), group in sorted(groups.items())
        )

    @property
    def n_lacking(self) -> int:
        """Tensors that change and that the importance matrix says nothing of; 0 where there is no matrix."""
        named = self.job.importance
        return sum(x.before != x.after and x.name not in named for x in self.changes) if named else 0


def quant_named(text: str) -> str:
    """A quantization by the name that people write. Raises UsageError, naming those that there are."""
    label = text.upper()
    label = _OTHER_NAMES.get(label, label)
    if label not in TYPES:
        known = ", ".join(sorted(TYPES))
        raise UsageError(f"'{text}' is no quantization that llama.cpp makes.", hint=f"There are {known}.")
    return label


def preview(job: Job, target: Path, config: Config) -> Preview:
    """What the file would be; writes nothing.

    Raises UsageError for what is quantized already where that is not allowed or would change nothing,
    ModelFileError for an importance matrix of another model, EngineError.
    """
    changes: list[TensorDone] = []
    needs_importance = False
    with closing(quantizer.run(job.spec(target, is_dry=True), config.paths.logs / LOG_FILE)) as tensors:
        try:
            changes.extend(tensors)
        except NeedsImportanceError:  # told when all sizes have been
            needs_importance = True
    _refuse_twice(job, changes)
    _check_importance(job, changes)
    types = {done.name: done.after.upper() for done in changes}
    if all(done.before == done.after for done in changes):
        raise UsageError(
            f"{job.source.path.name} is {job.source.quant} already; nothing of it would change.",
            hint="Name a smaller quantization.",
        )
    if set(types) != {tensor.name for tensor in job.source.tensors}:
        raise EngineError(f"llama.cpp found other tensors in {job.source.path.name} than its header lists.")
    result = recast.recast(job.source, job.quant, types, target)
    return Preview(job, result, tuple(changes), needs_importance)


def quantize(
    made: Preview,
    config: Config,
    *,
    may_replace: bool = False,
    progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> GgufInfo:
    """Write the file of a preview, and return what it holds. `progress` gets the bytes of the source that
    are done, and of all. What it raises, and Ctrl-C, leave nothing behind.

    Raises UsageError for a target that is there or must not be, and for a lacking importance matrix,
    NoSpaceError before anything is written and where the disk fills up, EngineError when the library refuses
    or dies, DownloadError for a disk that cannot be written.
    """
    job, target = made.job, made.result.path
    check_target(job.source, target, may_replace=may_replace)
    if made.needs_importance:
        raise UsageError(f"{job.quant} needs an importance matrix.", hint=IMPORTANCE_HINT)
    disk.check_space(target.parent, made.result.size_bytes, what=target.name)
    sizes = {tensor.name: tensor.n_bytes for tensor in job.source.tensors}
    done_bytes, total_bytes = 0, sum(sizes.values())
    with _part_of(target) as part:
        try:
            with closing(quantizer.run(job.spec(part), config.paths.logs / LOG_FILE)) as tensors:
                for done in tensors:
                    done_bytes += sizes[done.name]
                    progress(done_bytes, total_bytes)
        except NeedsImportanceError:
            raise UsageError(
                f"The importance matrix says nothing of a tensor that {job.quant} needs it for.",
                hint=IMPORTANCE_HINT,
            ) from None
        except EngineError:  # all that the library says of a full disk is "iostream error"
            _check_room_for_rest(part, made.result)
            raise
        written = _whole(part, made.result)
        _keep(part, target, may_replace=may_replace)
    return replace(written, path=target, parts=(target,))


def check_target(source: GgufInfo, target: Path, *, may_replace: bool) -> None:
    """Raises UsageError where a file must not be written."""
    if target.suffix.lower() != ".gguf":
        raise UsageError(f"{target} does not end in .gguf.", hint="Models are found by that.")
    if gguf.parse_split_name(target.name):
        raise UsageError(f"{target.name} is the name of a part of a split model.", hint="Give another -o.")
    if target.is_dir():
        raise UsageError(f"{target} is a folder.", hint="Give -o with the name of a file.")
    if target.resolve() in {path.resolve() for path in source.parts}:
        raise UsageError("A file cannot be quantized onto itself.", hint="Give another -o.")
    if target.exists() and not may_replace:
        raise UsageError(f"{target} is there already.", hint="Give another -o, or --force.")


def _refuse_twice(job: Job, changes: Iterable[TensorDone]) -> None:
    """Raises UsageError where something that is quantized would be quantized again, without leave."""
    twice = Counter(
        done.before.upper()
        for done in changes
        if done.before.upper() not in WHOLE_TYPES and done.before != done.after
    )
    if twice and not job.may_requantize:
        kinds = ", ".join(f"{n} tensors are {kind}" for kind, n in twice.most_common(3))
        raise UsageError(
            f"{job.source.path.name} is quantized already ({job.source.quant}: {kinds}), and would lose "
            "quality twice.",
            hint="Begin with an F16 or BF16 file, or give --allow-requantize.",
        )


def _check_importance(job: Job, changes: Iterable[TensorDone]) -> None:
    """Raises ModelFileError where the library would refuse it after an hour."""
    for done in changes:
        n_columns = done.dims[0] * done.dims[2]
        n_given = len(job.importance.get(done.name, b"")) // 4
        if n_given and n_given != n_columns and done.name not in _NOT_WEIGHED:
            raise ModelFileError(
                f"The importance matrix is of another model: it has {n_given:,} columns for {done.name}, "
                f"which has {n_columns:,} here.",
                kind="unsupported",
            )


@contextmanager
def _part_of(target: Path) -> Iterator[Path]:
    """Where the file is written until it is whole; removed in any case. What a run that was killed has left
    is removed as well."""
    try:
        for left in target.parent.glob("nemolocal-*.part"):
            found = _PART.fullmatch(left.name)
            if found and not psutil.pid_exists(int(found[1])):
                left.unlink(missing_ok=True)
        part = target.with_name(f"nemolocal-{os.getpid()}-{next(_numbers)}.part")
        part.touch()  # the library says of a folder that it cannot write no more than "iostream error"
    except OSError as error:
        raise disk.disk_error(error, target) from None
    try:
        yield part
    finally:
        try:
            part.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s: %s", part, error)


def _check_room_for_rest(part: Path, planned: GgufInfo) -> int:
    """How many bytes are missing of the file. Raises NoSpaceError where the disk has no room for them."""
    missing_bytes = planned.size_bytes - (part.stat().st_size if part.exists() else 0)
    if missing_bytes > 0:
        disk.check_space(part.parent, missing_bytes, what=planned.path.name)
    return missing_bytes


def _whole(part: Path, planned: GgufInfo) -> GgufInfo:
    """What was written. The library does not notice when a disk is full, so that its word is not enough.
    Raises NoSpaceError, EngineError."""
    missing_bytes = _check_room_for_rest(part, planned)
    try:
        written = gguf.read(part)
    except ModelFileError as error:
        raise EngineError(
            f"llama.cpp wrote a damaged file: {error.message}", hint="Check the disk."
        ) from None
    if missing_bytes:
        log.warning("%s was planned with %d bytes more", planned.path, missing_bytes)
    return written


def _keep(part: Path, target: Path, *, may_replace: bool) -> None:
    """Bring the bytes to the disk, and give the file its name. Raises UsageError where somebody else has
    given it to another file meanwhile, which may not be replaced."""
    is_new = False
    try:
        with part.open("r+b") as stream:
            os.fsync(stream.fileno())
        if not may_replace:
            target.touch(exist_ok=False)  # of two that come at once, one is told
            is_new = True
        part.replace(target)
    except FileExistsError:
        raise UsageError(f"{target} has appeared meanwhile.", hint="Give another -o, or --force.") from None
    except OSError as error:
        if is_new:
            with suppress(OSError):
                target.unlink()
        raise disk.disk_error(error, target) from None
