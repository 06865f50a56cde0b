"""The catalogue: which models a person can name, and the files that each of them comes as.

Read from `models.toml`. Knows what was published, not what is on this machine or on the hub today.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nemolocal import config
from nemolocal.errors import ConfigError, ModelNotFoundError
from nemolocal.models import shape
from nemolocal.models.reference import HubRef, NamedRef, Reference, is_plain_path, is_repo, part_names

STARTER = "starter"

Tag = Literal["chat", "reasoning", "code", "vision", "embedding", "rerank"]

_ID = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
_LANGUAGE = re.compile(r"[a-z]{2}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What the model's makers advise; None where they say nothing. Temperature 0 means greedy."""

    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A model file that comes inside a Python package: the package, its version, the path of the file in
    the wheel and the size of the wheel in bytes."""

    package: str
    version: str
    member: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFile:
    """One file that a model comes as, or the parts of a split one.

    `names` are paths in `repo`, part 1 first; empty when only the quantization is known to be there,
    whose files are then looked up. `bytes` is the size of all parts together; where `is_approximate` it
    was computed from the model's shape and may be off by 2 %. `sha256` has one entry for each name, or none.
    """

    quant: str
    repo: str
    bytes: int
    is_approximate: bool
    names: tuple[str, ...] = ()
    sha256: tuple[str, ...] = ()
    wheel: Wheel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogModel:
    """One model. `n_ctx` is how many tokens its maker names, `n_ctx_trained` what its files are made for.
    `other_repos` hold the same weights as GGUF too and are tried in their order, `template` and `notes` are
    for people. `family` is shared by models of unlike size that do the same. `must_accept` says that the
    licence's terms have to be agreed to. `no_reasoning` is the advice where thinking is switched off.
    `dimensions` is None where they are not known."""

    id: str
    name: str
    maker: str
    family: str
    tags: tuple[str, ...]
    languages: tuple[str, ...]
    licence: str
    repo: str
    released: str
    n_params: int
    n_active_params: int
    n_ctx: int
    dimensions: shape.Dimensions | None
    files: tuple[CatalogFile, ...]
    must_accept: bool = False
    sampling: Sampling = Sampling()
    no_reasoning: Sampling = Sampling()
    other_repos: tuple[str, ...] = ()
    template: str = ""
    notes: str = ""

    @property
    def n_ctx_trained(self) -> int:
        return self.dimensions.n_ctx_train if self.dimensions else self.n_ctx

    def file(self, quant: str) -> CatalogFile:
        """The row of a quantization, in any case. Raises ModelNotFoundError."""
        for row in self.files:
            if row.quant.casefold() == quant.casefold():
                return row
        known = ", ".join(row.quant for row in self.files)
        other = "" if self.files[0].wheel else f" hf:{self.repo}:QUANT takes any other of its repository."
        raise ModelNotFoundError(
            f"The catalogue has no {quant} of '{self.id}'.", hint=f"It has {known}.{other}"
        )

    def shape(self, row: CatalogFile) -> shape.ModelShape:
        """The model's shape as the plan needs it before the file is here."""
        if self.dimensions:
            return shape.estimate(self.dimensions, file_bytes=row.bytes)
        return shape.assume(
            file_bytes=row.bytes,
            n_params=self.n_params,
            n_active_params=self.n_active_params,
            n_ctx_train=self.n_ctx,
            pooling="last" if "embedding" in self.tags else "rank" if "rerank" in self.tags else "",
        )


@dataclass(frozen=True, slots=True)
class Catalog:
    models: tuple[CatalogModel, ...]

    def get(self, name: str) -> CatalogModel | None:
        """The model of this id, in any case."""
        return next((m for m in self.models if m.id == name.casefold()), None)

    def find(self, ref: NamedRef) -> tuple[CatalogModel, CatalogFile | None]:
        """The model and, where the reference names a quantization, its row. Raises ModelNotFoundError."""
        model = self.get(ref.name)
        if model is None:
            raise ModelNotFoundError(f"No model is called '{ref.name}'.", hint=self.hint_for(ref.name))
        return model, model.file(ref.quant) if ref.quant else None

    def of_ref(self, ref: Reference) -> CatalogModel | None:
        """The model that a reference means by its id or by a repository that holds it."""
        if isinstance(ref, HubRef):
            return self.of_repo(ref.repo)
        return self.get(ref.name) if isinstance(ref, NamedRef) else None

    def smaller_ones(self, model: CatalogModel) -> tuple[CatalogModel, ...]:
        """Smaller models of the same family, the largest first."""
        same = [m for m in self.models if m.family == model.family and m.n_params < model.n_params]
        return tuple(sorted(same, key=lambda m: (-m.n_params, m.id)))

    def of_repo(self, repo: str) -> CatalogModel | None:
        """The model that this repository holds, in any case."""
        wanted = repo.casefold()
        for model in self.models:
            repos = {model.repo, *model.other_repos, *(row.repo for row in model.files)}
            if wanted in {r.casefold() for r in repos}:
                return model
        return None

    def hint_for(self, name: str, others: tuple[str, ...] = ()) -> str:
        """How to go on when no model is called `name`; `others` are further names that would have done."""
        if is_repo(name):
            return f"A repository of the hub is written hf:{name}."
        known = {i.casefold(): i for i in (*(m.id for m in self.models), *others)}
        close = difflib.get_close_matches(name.casefold(), known, n=3, cutoff=0.6)
        close += [i for i in known if name.casefold() in i and i not in close][: 3 - len(close)]
        if close:
            *first, last = (known[i] for i in close)
            return f"Did you mean {', '.join(first)}{' or ' if first else ''}{last}?"
        return "`nemolocal models list` shows the names; hf:OWNER/REPO takes any other repository."


@cache
def load(path: Path | None = None) -> Catalog:
    """Read the catalogue (default: the one that ships with the package).

    Raises ConfigError, naming the model, for unknown or missing keys and for values that cannot be meant.
    """
    source = path or config.resource("models.toml")
    try:
        tables = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"Cannot read {source}: {error}.", hint="Install NemoLocal anew.") from None
    models = []
    for model_id, table in tables.items():
        try:
            models.append(_model(model_id, table))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{source.name}: [{model_id}]: {error}.", hint="Mend that table.") from None
    return Catalog(tuple(models))


def _model(model_id: str, table: Any) -> CatalogModel:
    """Raises TypeError or ValueError, saying what is wrong."""
    if not _ID.fullmatch(model_id):
        raise ValueError("an id has small letters, digits, dots and dashes")
    if not isinstance(table, dict):
        raise TypeError("must be a table")
    values = dict(table)
    repo, dimensions = values.get("repo"), _table(values, "dimensions")
    if not isinstance(repo, str) or not is_repo(repo):
        raise ValueError(f"'repo' {repo!r} is not OWNER/REPO")
    rows = values.pop("files", None)
    if not isinstance(rows, list) or not rows:
        raise ValueError("'files' must list at least one file")
    model: CatalogModel = _build(
        CatalogModel,
        values,
        id=model_id,
        files=tuple(_file(row, repo=repo) for row in rows),
        dimensions=_build(shape.Dimensions, dimensions) if dimensions else None,
        sampling=_build(Sampling, _table(values, "sampling")),
        no_reasoning=_build(Sampling, _table(values, "no_reasoning")),
    )
    unknown = set(model.tags) - set(get_args(Tag))
    if unknown or not model.tags:
        raise ValueError(f"'tags' {sorted(unknown)} are not known, or there is none")
    if not model.languages or not all(_LANGUAGE.fullmatch(code) for code in model.languages):
        raise ValueError("'languages' are codes of two letters, at least one")
    if not (model.name and model.maker and model.family and model.licence):
        raise ValueError("'name', 'maker', 'family' and 'licence' must say something")
    quants = [row.quant for row in model.files]
    if len(set(quants)) != len(quants):
        raise ValueError("a quantization is listed twice")
    model.shape(model.files[0])  # raises ValueError where the dimensions contradict one another
    return model


def _file(row: Any, *, repo: str) -> CatalogFile:
    if not isinstance(row, dict):
        raise TypeError("each of 'files' must be a table")
    values = dict(row)
    name = values.pop("name", "")
    if name and not (isinstance(name, str) and is_plain_path(name)):
        raise ValueError(f"'name' cannot be {name!r}")
    if ("bytes" in values) == ("bytes_about" in values):
        raise ValueError("a file has either 'bytes' or 'bytes_about'")
    is_approximate = "bytes_about" in values
    if is_approximate:
        values["bytes"] = values.pop("bytes_about")
    if isinstance(values.get("sha256"), str):
        values["sha256"] = [values["sha256"]]
    wheel = values.pop("wheel", None)
    values.setdefault("repo", repo)
    file: CatalogFile = _build(
        CatalogFile,
        values,
        names=tuple(part_names(name)) if name else (),
        is_approximate=is_approximate,
        wheel=None if wheel is None else _build(Wheel, wheel),
    )
    if file.quant != file.quant.upper() or file.bytes <= 0 or not is_repo(file.repo):
        raise ValueError(f"the file {file.quant!r} has a wrong quant, size or repo")
    if file.sha256 and len(file.sha256) != len(file.names):
        raise ValueError(f"the file {file.quant!r} needs one sha256 for each part")
    if not all(_SHA256.fullmatch(digest) for digest in file.sha256):
        raise ValueError(f"the file {file.quant!r} has a sha256 that is none")
    return file


def _table(values: dict[str, Any], name: str) -> Mapping[str, Any]:
    found = values.pop(name, {})
    if not isinstance(found, dict):
        raise TypeError(f"'{name}' must be a table")
    return found


def _build(kind: type[Any], values: Mapping[str, Any], **given: Any) -> Any:
    """Make a dataclass from a TOML table, strictly: every key known, every value of its field's type.
    `given` are fields that are made already and that the table may not set."""
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known or key in given:
            raise ValueError(f"unknown key '{key}'")
    made = {key: _value(key, value, hints[key]) for key, value in values.items()}
    for name, field in known.items():
        if name not in made and name not in given and field.default is MISSING:
            raise ValueError(f"'{name}' is missing")
    return kind(**made, **given)


def _value(key: str, value: Any, hint: Any) -> Any:
    kinds = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if type(value) is kind or (get_origin(kind) is Literal and value in get_args(kind)):
            return value
        if kind is float and type(value) is int:
            return float(value)
        is_list = get_origin(kind) is tuple and isinstance(value, list)
        if is_list and all(type(item) is get_args(kind)[0] for item in value):
            return tuple(value)
    raise TypeError(f"'{key}' cannot be {value!r}")
