"""Changing what is on this machine: adding a file where it lies, removing models, checking their bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemolocal.config import Config, expand
from nemolocal.errors import ModelFileError, ModelNotFoundError, NemoLocalError, UsageError
from nemolocal.models import catalog, disk, receipt, reference, store, transfer
from nemolocal.models.catalog import Catalog
from nemolocal.models.disk import Progress
from nemolocal.models.reference import HubRef, NamedRef, PathRef
from nemolocal.models.store import LocalModel


def import_path(path: str | Path, config: Config, known: Catalog | None = None) -> LocalModel:
    """Add a model where it lies: nothing is copied or moved. Of a split model any part will do.

    Raises ModelFileError when the file cannot be used. A model that is known already is returned as it is.
    """
    known = known or catalog.load()
    found = store.resolve(PathRef(expand(path)), config, known)
    if found.pointer or found.path.is_relative_to(config.models_dir):
        return found
    if not found.is_usable:
        raise ModelFileError(f"{found.path.name} cannot be run by itself.", kind="unsupported")
    taken = {model.id.casefold() for model in store.list_models(config, known)}
    taken |= {model.id for model in known.models}
    base = reference.id_of(found.path.name) or "model"
    names = [base, *(f"{base}-{i}" for i in range(2, len(taken) + 3))]
    name = next(name for name in names if name.casefold() not in taken)
    try:
        receipt.write_pointer(config.models_dir, name, found.path)
    except OSError as error:
        raise disk.disk_error(error, config.models_dir) from None
    return store.resolve(NamedRef(name), config, known)


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed. An imported model's own file stays where it is (`is_forgotten`)."""

    ref: str
    files: tuple[Path, ...]
    bytes: int
    is_forgotten: bool = False


def remove(ref: str, config: Config, known: Catalog | None = None) -> Removed:
    """Remove one local model, or what has arrived of a download that was begun. Never touches anything
    outside the models folder.

    Raises ModelNotFoundError where there is nothing to remove, UsageError where the reference means
    several models or a file outside, BeingFetchedError while its file is fetched.
    """
    known = known or catalog.load()
    model = _one_to_remove(ref, config, known)
    if model is None:
        return remove_begun(ref, config, known)
    if model.pointer:
        _unlink(model.pointer)
        return Removed(model.ref, (model.pointer,), 0, is_forgotten=True)
    _refuse_outside(model.path, config)
    with transfer.locked_at_once(model.path, config.models_dir):
        files = [*model.parts, receipt.receipt_path(model.path)]
        files += [partial for part in model.parts for partial in disk.partials_of(part)]
        return _remove_files(model.ref, files, config)


def _one_to_remove(ref: str, config: Config, known: Catalog) -> LocalModel | None:
    parsed = reference.parse(ref)
    models = store.list_models(config, known)
    if isinstance(parsed, PathRef):
        path = parsed.path if parsed.path.exists() else config.models_dir / parsed.path
        for model in models:
            if path.absolute() in {part.absolute() for part in model.parts}:
                return model
        if path.exists():
            _refuse_outside(path, config)
        raise ModelNotFoundError(f"There is no {path}.", hint="`nemolocal models list` shows what is here.")
    found = [model for model in models if model.ref.casefold() == ref.strip().casefold()]
    found = found or [model for model in models if store.matches(model, parsed)]
    if len(found) > 1:
        refs = " or ".join(model.ref for model in found)
        raise UsageError(f"'{ref}' means {len(found)} models.", hint=f"Name one: {refs}.")
    return found[0] if found else None


def remove_begun(ref: str, config: Config, known: Catalog | None = None) -> Removed:
    """Remove what has arrived of a download that was begun, and no model that is whole.

    Raises ModelNotFoundError where nothing has arrived, UsageError where the reference means several, and
    BeingFetchedError while one goes on.
    """
    known = known or catalog.load()
    parsed = reference.parse(ref)
    root = config.models_dir
    found: list[Path] = []
    if isinstance(parsed, NamedRef) and known.get(parsed.name):
        model, row = known.find(parsed)
        for file in (row,) if row else model.files:
            for repo in dict.fromkeys((file.repo, *model.other_repos)):
                found += store.partials(root, repo, quant=file.quant)
    elif isinstance(parsed, HubRef):
        found = store.partials(root, parsed.repo, quant=parsed.quant, file=parsed.file)
    if not found:
        raise ModelNotFoundError(
            f"'{ref}' is not on this machine.", hint="`nemolocal models list` shows what is."
        )
    for path in found:
        _refuse_outside(path, config)
    targets = sorted({_target_of(path) for path in found})
    if not (isinstance(parsed, PathRef) or parsed.quant) and len(targets) > 1:
        names = [target.relative_to(root).as_posix().split("/", 2)[2] for target in targets]
        named = " or ".join(f"{ref}:{_choice(name)}" for name in names)
        raise UsageError(
            f"'{ref}' means {len(targets)} downloads that were begun.", hint=f"Name one: {named}."
        )
    with ExitStack() as held:
        for target in targets:
            held.enter_context(transfer.locked_at_once(target, config.models_dir))
        return _remove_files(ref, found, config)


def _target_of(partial: Path) -> Path:
    """The file that a download gives its name last: NAME.gguf of NAME.gguf.KEY.partial, part 1 where it is
    split."""
    name = partial.name.removesuffix(disk.PARTIAL_SUFFIX).rpartition(".")[0]
    return partial.with_name(reference.part_names(name)[0])


def _choice(name: str) -> str:
    """What names one file of a repository: its quantization, as a rule."""
    return (reference.quant_of(name) if reference.kind_of(name) == "model" else "") or name


def _remove_files(ref: str, files: list[Path], config: Config) -> Removed:
    n_bytes = 0
    removed = []
    for path in files:
        if path.is_symlink() or path.exists():
            n_bytes += path.lstat().st_size
            _unlink(path)
            removed.append(path)
    _prune({path.parent for path in files}, config.models_dir)
    return Removed(ref, tuple(removed), n_bytes)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise NemoLocalError(
            f"Cannot remove {path}: {error.strerror}.", hint="Unload the model, or check the folder's rights."
        ) from None


def _prune(folders: set[Path], root: Path) -> None:
    """Remove folders that are empty now, up to the models folder."""
    for folder in folders:
        while folder != root and folder.is_relative_to(root):
            try:
                folder.rmdir()
            except OSError:  # not empty
                break
            folder = folder.parent


def _refuse_outside(path: Path, config: Config) -> None:
    """Links inside the folder may lead out of it."""
    if not path.parent.resolve().is_relative_to(config.models_dir.resolve()):
        raise UsageError(
            f"{path} lies outside the models folder, where nothing is removed.", hint="Remove it yourself."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The check of one file. "unknown" means that nobody published a hash to compare with; `expected` and
    `found` are sha256 in hexadecimal digits."""

    ref: str
    path: Path
    state: Literal["ok", "damaged", "unknown"]
    expected: str
    found: str


def verify(
    ref: str | None,
    config: Config,
    *,
    progress: Progress = lambda done_bytes, total_bytes: None,
    known: Catalog | None = None,
) -> tuple[Verified, ...]:
    """Read local models (None: all) and compare their sha256 with what was published.

    Raises ModelNotFoundError, UsageError or ModelFileError as `store.resolve` does.
    """
    known = known or catalog.load()
    models = _to_verify(ref, config, known)
    parts = [(model, i, part) for model in models for i, part in enumerate(model.parts)]
    total = sum(model.bytes for model in models)
    done = 0

    def report_from(start: int) -> Callable[[int], None]:
        return lambda n_bytes: progress(start + n_bytes, total)

    checked = []
    for model, i, part in parts:
        expected = _expected(model, i, known)
        try:
            found = disk.hash_file(part, report_from(done))
            done += part.stat().st_size
        except OSError as error:
            raise ModelFileError(f"{part.name}: Cannot be read ({error.strerror}).", kind="missing") from None
        state: Literal["ok", "damaged", "unknown"] = "unknown" if not expected else "ok"
        if expected and found != expected:
            state = "damaged"
        checked.append(Verified(ref=model.ref, path=part, state=state, expected=expected, found=found))
    return tuple(checked)


def _to_verify(ref: str | None, config: Config, known: Catalog) -> list[LocalModel]:
    """Damaged files cannot be resolved, and are the very ones to check."""
    models = store.list_models(config, known)
    if ref is None:
        return [model for model in models if model.fault != "missing"]
    parsed = reference.parse(ref)
    if not isinstance(parsed, PathRef):
        found = [m for m in models if m.ref.casefold() == ref.strip().casefold() or store.matches(m, parsed)]
        if found:
            return found
    return [store.resolve(parsed, config, known)]


def _expected(model: LocalModel, i: int, known: Catalog) -> str:
    """The published hash of part `i`: from the receipt, else from the catalogue."""
    given = receipt.read(model.path)
    if given:
        named = {file.name: file.sha256 for file in given.files}
        return named.get(model.parts[i].name, "")
    listed = known.get(model.catalog_id) if model.catalog_id else None
    for row in listed.files if listed else ():
        for name, sha256 in zip(row.names, row.sha256, strict=False):
            if row.repo == model.repo and model.parts[i].as_posix().endswith(f"/{row.repo}/{name}"):
                return sha256
    return ""
