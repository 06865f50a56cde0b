"""What the hub has said, kept in the cache folder: what repositories hold, and the headers of model files.

A header belongs to one file at one commit and never changes, so it is asked for once and known without a
network afterwards. What a repository held is only used while the hub cannot be asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nemolocal
from nemolocal.config import Config
from nemolocal.models import receipt
from nemolocal.models.headers import Summary
from nemolocal.models.repos import HubRepo, RemoteFile, RemoteModel
from nemolocal.models.shape import LayerKind, LayerShape, ModelShape

N_MOST = 300
"""So many are kept, of some 30 kB each; those that were used least lately go first."""


def keep_repo(repo: HubRepo, config: Config) -> None:
    """Note what a repository holds now."""
    _write(_path(config, repo.id), {"day": time.strftime("%Y-%m-%d"), "repo": asdict(repo)})


def repo(name: str, config: Config) -> tuple[HubRepo, str] | None:
    """What a repository held when it was last asked about, and the day."""
    values = _read(_path(config, name))
    try:
        kept = dict(values["repo"])
        models = tuple(
            RemoteModel(
                model["quant"],
                model["kind"],
                tuple(RemoteFile(**file) for file in model["files"]),
                tuple(model["missing"]),
            )
            for model in kept.pop("models")
        )
        refused, pieces = tuple(kept.pop("refused")), tuple(kept.pop("pieces"))
        return HubRepo(models=models, refused=refused, pieces=pieces, **kept), str(values["day"])
    except (KeyError, TypeError, ValueError):
        return None


def keep_header(key: str, summary: Summary, shape: ModelShape, config: Config) -> None:
    """Note what a header says. `key` names the file and its version."""
    values = asdict(shape)
    for layer in values["layers"]:
        layer["kind"] = layer["kind"].value
    _write(_path(config, key), {"summary": asdict(summary), "shape": values})


def header(key: str, config: Config) -> tuple[Summary, ModelShape] | None:
    """What the header says that was kept under `key`."""
    values = _read(_path(config, key))
    try:
        kept = dict(values["shape"])
        layers = tuple(LayerShape(**{**x, "kind": LayerKind(x["kind"])}) for x in kept.pop("layers"))
        return Summary(**values["summary"]), ModelShape(layers=layers, **kept)
    except (KeyError, TypeError, ValueError):
        return None


def _path(config: Config, key: str) -> Path:
    digest = hashlib.sha256(key.casefold().encode()).hexdigest()[:32]
    return config.paths.cache / "hub" / f"{digest}.json"


def _read(path: Path) -> dict[str, Any]:
    """Empty where nothing is kept, or something of another version, which may have meant other things."""
    values = receipt.read_json(path)
    if values.get("version") != nemolocal.__version__:
        return {}
    with contextlib.suppress(OSError):
        path.touch()
    return values


def _write(path: Path, values: dict[str, Any]) -> None:
    """A cache that cannot be written is no error: the hub is asked again then."""
    with contextlib.suppress(OSError):
        receipt.write_json(path, {"version": nemolocal.__version__, **values})
        others = sorted(path.parent.glob("*.json"), key=lambda kept: kept.stat().st_mtime)
        for old in others[: max(0, len(others) - N_MOST)]:
            old.unlink(missing_ok=True)
