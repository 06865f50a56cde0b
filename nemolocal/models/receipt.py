"""Small JSON files in the models folder: where a downloaded model came from, and where an imported one lies.

Each stands beside what it tells of and is written in one stroke. Knows nothing of the catalogue or the hub.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SUFFIX = ".json"
IMPORTED = "imported"


@dataclass(frozen=True, slots=True)
class ReceiptFile:
    """`sha256` is that of the file on this machine, which was compared with the published one if any."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where a model came from: `source` is "hub" or a Python package, `revision` the repository's commit or
    the package's version, `fetched` a time like 2026-12-01T12:00:00Z. `files` in the order of the parts."""

    source: str
    repo: str
    revision: str
    fetched: str
    files: tuple[ReceiptFile, ...]


def receipt_path(model_file: Path) -> Path:
    """The receipt beside a model's file (of a split model part 1)."""
    return model_file.with_name(model_file.name + SUFFIX)


def write(model_file: Path, receipt: Receipt) -> None:
    """Raises OSError."""
    write_json(receipt_path(model_file), asdict(receipt))


def read(model_file: Path) -> Receipt | None:
    """None where there is no receipt, or one that nobody of ours wrote."""
    values = read_json(receipt_path(model_file))
    try:
        files = tuple(ReceiptFile(**file) for file in values["files"])
        return Receipt(**{**values, "files": files})
    except (KeyError, TypeError):
        return None


def write_pointer(root: Path, name: str, model_file: Path) -> Path:
    """Note that a model outside the models folder `root` belongs to it. Raises OSError."""
    path = root / IMPORTED / (name + SUFFIX)
    write_json(path, {"path": str(model_file)})
    return path


def read_pointers(root: Path) -> dict[Path, Path]:
    """The imported models: the file that notes each, and the model's file."""
    found = {}
    folder = root / IMPORTED
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else ():
        target = read_json(path).get("path")
        if isinstance(target, str) and target:
            found[path] = Path(target)
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file as a whole, so that no reader ever sees half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are for their owner's eyes alone, and a models folder may be shared.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file, or none that holds an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
