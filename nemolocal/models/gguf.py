"""A model file on disk: is it a whole GGUF that the pinned llama.cpp can load, and what is in it?

`read` answers before llama.cpp ever opens the file, since llama.cpp gives one and the same error for every
kind of broken file and aborts on some. Every fault is a ModelFileError of its own kind, one line, with the
file's name. Split models are checked and described as a whole. Knows nothing of catalogues, downloads and
memory plans.
"""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nemolocal.errors import ModelFileError
from nemolocal.models import architectures, gguf_shape
from nemolocal.models.gguf_header import Header, NeedMoreBytesError, TensorInfo, corrupt, parse
from nemolocal.models.shape import ModelShape

_SNIFF_BYTES = 4096

FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}
"""general.file_type -> the usual label of the quantization (enum llama_ftype in include/llama.h)."""


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """A usable model. `path` is what the engine is given: the first part of a split model, whose files are
    all in `parts`. `size_bytes` is the size of all parts, `quant` a label such as "Q4_K_M"."""

    path: Path
    parts: tuple[Path, ...]
    size_bytes: int
    version: int
    architecture: str
    name: str
    quant: str
    tokenizer: str
    chat_template: str
    tensors: tuple[TensorInfo, ...]
    shape: ModelShape

    @property
    def n_ctx_train(self) -> int:
        return self.shape.n_ctx_train

    @property
    def n_params(self) -> int:
        return self.shape.n_params

    @property
    def can_chat(self) -> bool:
        """False for models that embed or rank, draft heads and speech models, which write no text."""
        return self.architecture not in architectures.WITHOUT_TEXT and not self.shape.pooling


@dataclass(frozen=True, slots=True)
class SplitName:
    """The name of one part of a split model, as llama.cpp writes it: PREFIX-00001-of-00003.gguf."""

    prefix: str
    number: int
    n_parts: int

    def part(self, number: int) -> str:
        """The file name of another part, counted from 1."""
        return f"{self.prefix}-{number:05d}-of-{self.n_parts:05d}.gguf"


_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_RAW_PART = re.compile(r"\.gguf[-.](?:part|split)[-\w]*$", re.IGNORECASE)


def parse_split_name(file_name: str) -> SplitName | None:
    """The parts of a split model's file name; None for the name of a single file."""
    found = _SPLIT.fullmatch(file_name)
    if not found or not 1 <= int(found[2]) <= int(found[3]):
        return None
    return SplitName(found[1], int(found[2]), int(found[3]))


def is_raw_part(file_name: str) -> bool:
    """Whether the file is a piece cut by bytes (model.gguf.part1of2), which must be joined before use."""
    return _RAW_PART.search(file_name) is not None


def read(path: str | Path) -> GgufInfo:
    """Check a model file and describe it. Any part of a split model stands for the whole.

    Reads the header only, never the weights. Raises ModelFileError with one of its kinds.
    """
    path = Path(path)
    try:
        return _read_model(path)
    except ModelFileError as error:
        name = path.name or str(path)
        raise ModelFileError(f"{name}: {error.message}", kind=error.kind, hint=error.hint) from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelFileError(f"{path.name}: The file cannot be read ({reason}).", kind="missing") from None


def read_header(path: Path) -> Header:
    """The header of one file, whose bytes are all there: of a split model the keys are in part 1.

    Raises ModelFileError, and OSError when it cannot be read.
    """
    return _read_file(path)[0]


def read_streams(parts: Sequence[tuple[str, BinaryIO, int]]) -> GgufInfo:
    """Describe a model from the beginnings of its files, part 1 first, each with its name and whole size.

    Raises NeedMoreBytesError when a stream ends inside its header: fetch more and call again. Raises
    ModelFileError as `read` does.
    """
    headers = [_read_head(stream, size_bytes) for _, stream, size_bytes in parts]
    first = headers[0]
    _refuse_architecture(first)
    n_parts = first.keys.get("split.count", 0) or 1
    if n_parts != len(parts):
        raise ModelFileError(
            f"This is {len(parts)} of {n_parts} parts of a split model.", kind="missing_part"
        )
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    paths = tuple(Path(name) for name, _, _ in parts)
    return _describe(paths, sum(size for _, _, size in parts), first, tensors)


def _read_head(stream: BinaryIO, size_bytes: int) -> Header:
    _refuse_other_formats(stream.read(_SNIFF_BYTES))
    stream.seek(0)
    header = parse(stream)
    _check_size(header, size_bytes)
    return header


def _read_model(path: Path) -> GgufInfo:
    if is_raw_part(path.name):
        raise ModelFileError(
            "This is a piece of a file that was cut by bytes.",
            kind="joined_parts",
            hint="Join the files first, in order, into one .gguf.",
        )
    split = parse_split_name(path.name)
    if split is None:
        header, size_bytes = _read_file(path)
        _refuse_architecture(header)
        n_parts = header.keys.get("split.count", 0)
        if isinstance(n_parts, int) and n_parts > 1:
            raise ModelFileError(
                f"This is one of {n_parts} parts of a split model, but its name does not say which.",
                kind="missing_part",
                hint=f"Name the parts NAME-00001-of-{n_parts:05d}.gguf and so on, as they were published.",
            )
        return _describe((path,), size_bytes, header, header.tensors)
    return _read_split(path, split)


def _read_split(path: Path, split: SplitName) -> GgufInfo:
    """All parts of a split model. llama.cpp is given the first and finds the others by their names."""
    parts = tuple(path.with_name(split.part(i)) for i in range(1, split.n_parts + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing and path.is_file():
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(
            f"The model has {split.n_parts} parts, of which {missing[0]}{more} is not there.",
            kind="missing_part",
            hint=f"Put all {split.n_parts} parts into one folder.",
        )
    first, size_bytes = _read_file(parts[0] if path.is_file() else path)
    _refuse_architecture(first)
    tensors = list(first.tensors)
    for number, part in enumerate(parts[1:], 2):
        header, n_bytes = _read_part(part, number, split)
        tensors += header.tensors
        size_bytes += n_bytes
    claimed = first.keys.get("split.tensors.count", len(tensors))
    if claimed != len(tensors) or len({t.name for t in tensors}) != len(tensors):
        raise corrupt(f"the parts hold {len(tensors)} tensors, but should hold {claimed}")
    return _describe(parts, size_bytes, first, tuple(tensors))


def _read_part(part: Path, number: int, split: SplitName) -> tuple[Header, int]:
    try:
        header, n_bytes = _read_file(part)
    except ModelFileError as error:
        raise ModelFileError(
            f"Part {number}, {part.name}: {error.message}", kind=error.kind, hint=error.hint
        ) from None
    index = header.keys.get("split.no", number - 1)
    if index != number - 1 or header.keys.get("split.count", split.n_parts) != split.n_parts:
        raise ModelFileError(
            f"{part.name} belongs to another model or place.",
            kind="missing_part",
            hint="Download that part again under its own name.",
        )
    return header, n_bytes


def _read_file(path: Path) -> tuple[Header, int]:
    """The header of one file, whose bytes are all there, and its size."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelFileError(
            "There is no such file.", kind="missing", hint=f"Looked for {path.absolute()}."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError("This is a folder or device, not a file.", kind="missing")
    if status.st_size == 0:
        raise ModelFileError("The file is empty.", kind="empty", hint="Download it again.")
    with path.open("rb") as stream:
        _refuse_other_formats(stream.read(_SNIFF_BYTES))
        stream.seek(0)
        try:
            header = parse(stream)
        except NeedMoreBytesError as error:
            raise _truncated(status.st_size, f"more than {error.needed_bytes - 1:,}") from None
    _check_size(header, status.st_size)
    return header, status.st_size


def _check_size(header: Header, size_bytes: int) -> None:
    if header.tensors and size_bytes < header.needed_bytes:
        raise _truncated(size_bytes, f"{header.needed_bytes:,}")


def _truncated(found_bytes: int, needed: str) -> ModelFileError:
    return ModelFileError(
        f"The file is cut off: it has {found_bytes:,} bytes and needs {needed}.",
        kind="truncated",
        hint="Download it again.",
    )


_OLD_MAGICS = (b"ggml", b"ggmf", b"ggjt", b"ggla", b"lmgg", b"fmgg", b"tjgg", b"algg")
_PAGE = re.compile(rb"\s*(?:<!doctype\s+html|<html|<head|<\?xml|<!--)", re.IGNORECASE)
_LFS = b"version https://git-lfs.github.com/spec/"


def _refuse_other_formats(head: bytes) -> None:
    """Say what a file is that does not begin as a GGUF does. `head` is its first few thousand bytes."""
    text = head.removeprefix(b"\xef\xbb\xbf")
    if head.startswith(b"GGUF"[: len(head)]):
        return
    if _PAGE.match(text):
        raise ModelFileError(
            "This is a web page, not a model file.",
            kind="web_page",
            hint="Download the file itself; the page may ask you to log in or to accept a licence first.",
        )
    if text.startswith(_LFS):
        found = re.search(rb"^size (\d{1,15})\s*$", text, re.MULTILINE)
        size = f" of {int(found[1]):,} bytes" if found else ""
        raise ModelFileError(
            f"This is a git-lfs pointer to a file{size}, not the file.",
            kind="lfs_pointer",
            hint="Run `git lfs pull` there, or download the file.",
        )
    if head.startswith(_OLD_MAGICS):
        raise ModelFileError(
            "This file has the old ggml format, which llama.cpp no longer reads.",
            kind="old_format",
            hint="Get the model as .gguf.",
        )
    raise ModelFileError(
        f"This is not a GGUF file{_guess(head)}.", kind="not_gguf", hint="Get the model as .gguf."
    )


def _guess(head: bytes) -> str:
    if head.startswith(b"PK\x03\x04"):
        return ", but a ZIP archive (perhaps a PyTorch checkpoint)"
    if head[8:10] == b'{"':
        return ", but a safetensors file"
    words = head[:60].decode("ascii", errors="replace")
    if words.isprintable() and "\ufffd" not in words:
        return f", but a text that begins with '{words.strip()}'"
    return ""


def _refuse_architecture(header: Header) -> None:
    architecture = header.keys.get("general.architecture")
    if not isinstance(architecture, str):
        raise corrupt("it names no architecture")
    kind = header.keys.get("general.type", "model")
    if architecture == "clip" or kind == "mmproj":
        raise ModelFileError(
            "This is a projector for images or sound (mmproj), not a chat model.",
            kind="projector",
            hint="Give the model's own .gguf file.",
        )
    if kind not in ("model", "vocab"):
        raise ModelFileError(
            f"This GGUF file is of the type '{kind!s:.40}', not a model.",
            kind="unsupported",
            hint="Give the model's own .gguf file.",
        )
    if architecture not in architectures.SUPPORTED:
        shown = "".join(c if c.isprintable() else "?" for c in architecture[:40])
        raise ModelFileError(
            f"The model's architecture '{shown}' is not supported.",
            kind="unsupported",
            hint="Choose a language model that llama.cpp can run, or update NemoLocal if the model is new.",
        )


def _describe(
    parts: tuple[Path, ...], size_bytes: int, header: Header, tensors: tuple[TensorInfo, ...]
) -> GgufInfo:
    if not tensors:
        raise corrupt("it lists no weights")
    keys = header.keys
    return GgufInfo(
        path=parts[0],
        parts=parts,
        size_bytes=size_bytes,
        version=header.version,
        architecture=str(keys["general.architecture"]),
        name=_text(keys.get("general.name")),
        quant=_quant(keys.get("general.file_type"), tensors),
        tokenizer=_text(keys.get("tokenizer.ggml.model")),
        chat_template=_text(keys.get("tokenizer.chat_template")),
        tensors=tensors,
        shape=gguf_shape.derive(header, tensors),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _quant(file_type: object, tensors: tuple[TensorInfo, ...]) -> str:
    """The label that the file claims, else the type that most of its bytes have."""
    if isinstance(file_type, int) and file_type in FILE_TYPES:
        return FILE_TYPES[file_type]
    n_bytes = Counter[str]()
    for tensor in tensors:
        n_bytes[tensor.type_name] += tensor.n_bytes
    return n_bytes.most_common(1)[0][0]
