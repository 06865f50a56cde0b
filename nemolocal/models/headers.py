"""What the headers of many model files say, kept from one run to the next.

Reading the header of a large vocabulary takes a tenth of a second; a folder of thirty models is to be listed
in less than one. A summary is taken again when a file's size or time of change differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import nemolocal
from nemolocal.errors import ModelFileError
from nemolocal.models import gguf, receipt
from nemolocal.models.shape import Pooling


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's header in short. For a file that cannot be used, `problem` is one line, `fault` the kind of
    the ModelFileError, and the rest is empty."""

    name: str = ""
    architecture: str = ""
    quant: str = ""
    n_params: int = 0
    n_ctx_train: int = 0
    can_chat: bool = False
    problem: str = ""
    fault: str = ""
    pooling: Pooling = ""


def summarise(models: Sequence[Sequence[Path]], cache_file: Path) -> list[Summary]:
    """The summaries of models, each given by the paths of its parts, part 1 first.

    `cache_file` is written where something is new; a cache that cannot be read or written is no error.
    """
    cached = receipt.read_json(cache_file)
    known = cached.get("models") if cached.get("version") == nemolocal.__version__ else None
    known = known if isinstance(known, dict) else {}
    fresh: dict[str, object] = {}
    found = []
    for parts in models:
        key, stamp = str(parts[0]), _stamp(parts)
        summary = _recall(known.get(key), stamp) or _read(parts[0])
        fresh[key] = {"stamp": stamp, "summary": asdict(summary)}
        found.append(summary)
    if fresh != known:
        with contextlib.suppress(OSError):  # the next listing is slower then, and that is all
            receipt.write_json(cache_file, {"version": nemolocal.__version__, "models": fresh})
    return found


def _stamp(parts: Sequence[Path]) -> list[list[int]]:
    stamp = []
    for part in parts:
        try:
            status = part.stat()
            stamp.append([status.st_size, status.st_mtime_ns])
        except OSError:
            stamp.append([])
    return stamp


def _recall(entry: object, stamp: list[list[int]]) -> Summary | None:
    if not isinstance(entry, dict) or entry.get("stamp") != stamp or [] in stamp:
        return None
    try:
        return Summary(**entry["summary"])
    except (KeyError, TypeError):
        return None


def _read(path: Path) -> Summary:
    try:
        info = gguf.read(path)
    except ModelFileError as error:
        return Summary(problem=str(error), fault=error.kind)
    return of(info)


def of(info: gguf.GgufInfo) -> Summary:
    """The summary of a header that has been read."""
    return Summary(
        name=info.name,
        architecture=info.architecture,
        quant=info.quant,
        n_params=info.n_params,
        n_ctx_train=info.n_ctx_train,
        can_chat=info.can_chat,
        pooling=info.shape.pooling,
    )
