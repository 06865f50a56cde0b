"""The catalogue and the models folder side by side: what a person can choose from, and what is here of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nemolocal.config import Config
from nemolocal.models import catalog
from nemolocal.models.catalog import Catalog, CatalogFile, CatalogModel
from nemolocal.models.store import LocalModel, list_models, partials


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """A file of the catalogue, of this machine, or of both. `bytes` is the real size where it is here, the
    catalogue's otherwise, `done_bytes` what has arrived of a download that was begun."""

    quant: str
    ref: str
    bytes: int
    state: Literal["remote", "partial", "local"]
    done_bytes: int = 0
    row: CatalogFile | None = None
    local: LocalModel | None = None

    @property
    def problem(self) -> str:
        """One line where the local file cannot be used."""
        return self.local.problem if self.local else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """One line of `models list`. `listed` is None for a model that the catalogue does not know."""

    id: str
    name: str
    files: tuple[ListedFile, ...]
    listed: CatalogModel | None = None


def build(config: Config, known: Catalog | None = None) -> tuple[ListedModel, ...]:
    """The catalogue with what is here of it, then the other local models by id. Projectors, drafts and
    statistics are left out."""
    known = known or catalog.load()
    local = [model for model in list_models(config, known) if model.kind == "model"]
    models = [
        ListedModel(
            id=listed.id,
            name=listed.name,
            listed=listed,
            files=_listed_files(listed, [m for m in local if m.catalog_id == listed.id], config.models_dir),
        )
        for listed in known.models
    ]
    others: dict[str, list[LocalModel]] = {}
    for model in local:
        if not model.catalog_id:
            others.setdefault(model.id, []).append(model)
    for model_id, found in others.items():
        files = tuple(_local_file(model) for model in found)
        models.append(ListedModel(id=model_id, name=found[0].name, files=files))
    return tuple(models)


def _listed_files(listed: CatalogModel, local: list[LocalModel], root: Path) -> tuple[ListedFile, ...]:
    """The rows in the catalogue's order, then what else is here of this model."""
    rows = []
    rest = list(local)
    for row in listed.files:
        here = next(
            (m for m in rest if m.quant == row.quant and m.repo.casefold() == row.repo.casefold()), None
        )
        if here:
            rest.remove(here)
            rows.append(replace(_local_file(here), row=row))
            continue
        done = _arrived_bytes(partials(root, row.repo, quant=row.quant))
        rows.append(
            ListedFile(
                quant=row.quant,
                ref=f"{listed.id}:{row.quant}",
                bytes=row.bytes,
                state="partial" if done else "remote",
                done_bytes=done,
                row=row,
            )
        )
    return (*rows, *(_local_file(model) for model in rest))


def _arrived_bytes(paths: Iterable[Path]) -> int:
    n_bytes = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # whole by now, and under its own name
            n_bytes += path.stat().st_size
    return n_bytes


def _local_file(model: LocalModel) -> ListedFile:
    return ListedFile(
        quant=model.quant,
        ref=model.ref,
        bytes=model.bytes,
        state="local",
        done_bytes=model.bytes,
        local=model,
    )
