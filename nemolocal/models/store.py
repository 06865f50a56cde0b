"""The models folder: what is on this machine, and which file a reference means. Never asks the network.

A downloaded model lies at OWNER/REPO/FILE with a receipt (FILE.json) beside it; files that a person puts
anywhere below the folder are found too; an imported model stays where it is and has a note in `imported`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from nemolocal.config import Config
from nemolocal.errors import ModelFileError, ModelNotFoundError
from nemolocal.models import catalog, disk, gguf, headers, receipt, reference
from nemolocal.models.catalog import Catalog
from nemolocal.models.reference import FileKind, HubRef, NamedRef, PathRef, Reference
from nemolocal.models.shape import Pooling

CACHE_FILE = "headers.json"
N_NAMED = 4  # models that an error names, at most

Purpose = Literal["chat", "embed", "rank"]
"""What a model does with a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine.

    `ref` is the reference that means this file alone; `id` the catalogue's, `hf:OWNER/REPO`, or the path
    below the models folder without its suffix and without what references use for something else. `path`
    is what the engine is given (part 1 of a split model), `parts` are all files that are there, `bytes` their
    size. `problem` is one line where the file cannot be
    used. `pointer` is the note of an imported model, None for others. `changed` is in seconds since 1970.
    """

    id: str
    ref: str
    path: Path
    parts: tuple[Path, ...]
    quant: str
    bytes: int
    kind: FileKind
    name: str = ""
    architecture: str = ""
    n_params: int = 0
    n_ctx_train: int = 0
    can_chat: bool = False
    pooling: Pooling = ""
    problem: str = ""
    fault: str = ""
    repo: str = ""
    catalog_id: str = ""
    pointer: Path | None = None
    changed: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether it can be loaded, to answer, to embed or to rank."""
        return self.kind == "model" and (self.can_chat or bool(self.pooling)) and not self.problem

    @property
    def purpose(self) -> Purpose:
        return "rank" if self.pooling == "rank" else "embed" if self.pooling else "chat"

    @property
    def info(self) -> gguf.GgufInfo:
        """The whole header, read once for each version of the file. Raises ModelFileError."""
        return _read_info(self.path, self.bytes, self.changed)


@lru_cache(maxsize=8)
def _read_info(path: Path, n_bytes: int, changed: int) -> gguf.GgufInfo:
    return gguf.read(path)


# Listing ------------------------------------------------------------------------------------------


def list_models(config: Config, known: Catalog | None = None) -> tuple[LocalModel, ...]:
    """Every model on this machine, sorted by id and size: those that cannot be used are marked so, and
    projectors, drafts and quantization statistics by their `kind`. Reads headers only."""
    known = known or catalog.load()
    root = config.models_dir
    found = [*_in_folder(root, known), *_imported(root)]
    summaries = headers.summarise([model.parts for model in found], config.paths.cache / CACHE_FILE)
    models = [_with_summary(model, summary) for model, summary in zip(found, summaries, strict=True)]
    return tuple(sorted(_with_refs(models, root), key=lambda m: (m.id, m.bytes, m.ref)))


def _in_folder(root: Path, known: Catalog) -> Iterator[LocalModel]:
    names = sorted(_walk(root))
    groups = reference.group_files(names)
    for group in groups:
        yield _local(root, group.names, group.kind, known)
    grouped = {name for group in groups for name in group.names}
    for name in names:
        if name not in grouped:  # a piece that was cut by bytes; its header says so
            yield _local(root, (name,), "model", known)


def _walk(root: Path) -> Iterator[str]:
    """Paths of model files below `root`, with forward slashes. Links to folders are followed once."""
    seen = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and (
                name.lower().endswith(reference.SUFFIX) or gguf.is_raw_part(name)
            ):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _local(root: Path, names: tuple[str, ...], kind: FileKind, known: Catalog) -> LocalModel:
    first = names[0]
    owner, _, rest = first.partition("/")
    repo = f"{owner}/{rest.partition('/')[0]}"
    repo = repo if "/" in rest and reference.is_repo(repo) else ""
    listed = known.of_repo(repo) if repo else None
    return _model(
        tuple(root / name for name in names),
        id=listed.id if listed else f"hf:{repo}" if repo else reference.id_of(first),
        kind=kind,
        quant=reference.quant_of(first),
        repo=repo,
        catalog_id=listed.id if listed else "",
    )


def _imported(root: Path) -> Iterator[LocalModel]:
    for pointer, path in receipt.read_pointers(root).items():
        parts = tuple(path.with_name(name) for name in reference.part_names(path.name))
        present = tuple(part for part in parts if part.is_file()) or (path,)
        yield _model(
            present,
            id=pointer.stem,
            kind=reference.kind_of(path.name),
            quant=reference.quant_of(path.as_posix()),
            pointer=pointer,
        )


def _model(
    parts: tuple[Path, ...],
    *,
    id: str,
    kind: FileKind,
    quant: str,
    repo: str = "",
    catalog_id: str = "",
    pointer: Path | None = None,
) -> LocalModel:
    """What is known without opening the files; their header and the reference are filled in later."""
    n_bytes, changed = 0, 0.0
    for part in parts:
        try:
            status = part.stat()
        except OSError:  # a link to nowhere, or gone since: its header tells
            continue
        n_bytes += status.st_size
        changed = max(changed, status.st_mtime)
    return LocalModel(
        id=id,
        ref="",
        path=parts[0],
        parts=parts,
        quant=quant,
        bytes=n_bytes,
        kind=kind,
        repo=repo,
        catalog_id=catalog_id,
        pointer=pointer,
        changed=int(changed),
    )


def _with_summary(model: LocalModel, summary: headers.Summary) -> LocalModel:
    problem = "" if model.kind == "imatrix" else summary.problem  # no model, so no broken one either
    kind = model.kind
    if summary.fault == "projector" and kind == "model":
        kind = "projector"
    elif kind in ("adapter", "other") and not problem:  # the name misled: it is a whole model
        kind = "model"
    return replace(
        model,
        kind=kind,
        # A name says more than the header, which knows no UD-Q4_K_XL; where it says nothing, the header does.
        quant=model.quant or summary.quant,
        name=summary.name or Path(reference.stem_of(model.path.name)).name,
        architecture=summary.architecture,
        n_params=summary.n_params,
        n_ctx_train=summary.n_ctx_train,
        can_chat=summary.can_chat,
        pooling=summary.pooling,
        problem=problem,
        fault=summary.fault,
    )


def _with_refs(models: list[LocalModel], root: Path) -> Iterator[LocalModel]:
    """Give each model the shortest reference that means no other."""
    counts: Counter[str] = Counter()
    choices = [_ref_choices(model, root) for model in models]
    for refs in choices:
        counts.update({ref.casefold() for ref in refs})
    for model, refs in zip(models, choices, strict=True):
        unique = [ref for ref in refs if counts[ref.casefold()] == 1]
        yield replace(model, ref=(unique or [str(model.path)])[0])


def _ref_choices(model: LocalModel, root: Path) -> list[str]:
    if not model.repo:
        return [model.id]
    by_file = f"hf:{model.repo}:{model.path.relative_to(root / model.repo).as_posix()}"
    if not model.quant or model.kind != "model":
        return [by_file]
    return [f"{model.id}:{model.quant}", f"hf:{model.repo}:{model.quant}", by_file]


# Finding ------------------------------------------------------------------------------------------


def find(ref: Reference, config: Config, known: Catalog | None = None) -> tuple[LocalModel, ...]:
    """The models on this machine that a name or repository means and that can be loaded, largest first:
    several where no quantization is named, so that a plan may choose. Empty where there is none."""
    if isinstance(ref, PathRef):
        return (resolve(ref, config, known),)
    found = [model for model in list_models(config, known) if matches(model, ref) and model.is_usable]
    return tuple(sorted(found, key=lambda model: -model.bytes))


def matches(model: LocalModel, ref: NamedRef | HubRef) -> bool:
    """Whether a reference may mean this model; a file is only meant by its own name when it is no model
    (a projector, say)."""
    if isinstance(ref, HubRef):
        if model.repo.casefold() != ref.repo.casefold():
            return False
        if ref.file:
            end = f"/{ref.repo}/{ref.file}".casefold()
            return any(part.as_posix().casefold().endswith(end) for part in model.parts)
    else:
        name = ref.name.casefold()
        names = {model.id.casefold(), model.catalog_id}
        if not model.repo:
            names.add(model.id.rpartition("/")[2].casefold())
        if name not in names:
            return False
    if ref.quant:
        return model.quant.casefold() == ref.quant.casefold() and model.kind == "model"
    return model.kind == "model" or not model.repo


def resolve(ref: str | Reference, config: Config, known: Catalog | None = None) -> LocalModel:
    """The one local model that a reference means; the largest where several do.

    Raises UsageError for what is no reference, ModelFileError when the file is there but cannot be used,
    and ModelNotFoundError, saying how to get it, when it is not there.
    """
    known = known or catalog.load()
    ref = reference.parse(ref) if isinstance(ref, str) else ref
    if isinstance(ref, PathRef):
        return _resolve_path(ref.path, config, known)
    models = list_models(config, known)
    found = [model for model in models if matches(model, ref)]
    usable = sorted((model for model in found if model.is_usable), key=lambda model: -model.bytes)
    if usable:
        return usable[0]
    if found:
        raise _unusable(found[0])
    raise _not_here(ref, models, known)


def _resolve_path(path: Path, config: Config, known: Catalog) -> LocalModel:
    """A path counts from the current folder, then from the models folder."""
    if not path.exists() and (config.models_dir / path).exists():
        path = config.models_dir / path
    info = gguf.read(path)
    real = info.path.resolve()
    for model in list_models(config, known):
        if model.path.resolve() == real:
            return model
    # Not resolve(): behind a link the file may have another name, and no parts beside it.
    parts = tuple(Path(os.path.normpath(part.absolute())) for part in info.parts)
    model = _model(
        parts,
        id=reference.stem_of(path.name),
        kind=reference.kind_of(path.name),
        quant=reference.quant_of(parts[0].as_posix()),
    )
    return replace(_with_summary(model, headers.of(info)), ref=str(parts[0]))


def _unusable(model: LocalModel) -> ModelFileError:
    if model.problem:
        return ModelFileError(model.problem, kind=model.fault)
    return ModelFileError(
        f"{model.path.name} is of the kind {model.architecture or model.kind}, which cannot run by itself.",
        kind="unsupported",
        hint="Choose a model that chats, embeds or ranks.",
    )


def _not_here(ref: NamedRef | HubRef, models: Iterable[LocalModel], known: Catalog) -> ModelNotFoundError:
    if isinstance(ref, NamedRef):
        listed = known.get(ref.name)
        if listed is None:
            ids = tuple({model.id for model in models if model.is_usable})
            return ModelNotFoundError(f"No model is called '{ref.name}'.", hint=known.hint_for(ref.name, ids))
        if ref.quant:
            try:
                listed.file(ref.quant)
            except ModelNotFoundError as error:
                return error
    return ModelNotFoundError(
        f"'{ref}' is not on this machine.", hint=f"Get it with `nemolocal models pull {ref}`."
    )


def nothing_named(purpose: Purpose, here: Sequence[str]) -> ModelNotFoundError:
    """The error where no model of a purpose was named and more or less than one is `here`, by their ids."""
    kind = {"chat": "model", "embed": "model that embeds", "rank": "model that ranks"}[purpose]
    if here:
        others = f" and {len(here) - N_NAMED} more" if len(here) > N_NAMED else ""
        return ModelNotFoundError(
            f"No {kind} was named, and several are here: {', '.join(here[:N_NAMED])}{others}.",
            hint="Name one; `nemolocal models list` shows them all.",
        )
    hint = "Run `nemolocal models pull starter`."
    if purpose != "chat":
        hint = "Get one as .gguf: `nemolocal models pull hf:OWNER/REPO`, or `nemolocal models import PATH`."
    return ModelNotFoundError(f"There is no {kind} on this machine.", hint=hint)


def target_path(root: Path, repo: str, name: str) -> Path:
    """Where a repository's file is kept. Both must have passed `is_repo` and `is_plain_path`."""
    assert reference.is_repo(repo), repo
    assert reference.is_plain_path(name), name
    return root.joinpath(*repo.split("/"), *name.split("/"))


def partials(root: Path, repo: str, *, quant: str = "", file: str = "") -> list[Path]:
    """What has arrived of a repository's files that are not whole yet: of all of them, of the models of one
    quantization, or of one file with all its parts."""
    folder = root.joinpath(*repo.split("/"))
    wanted = {name.casefold() for name in reference.part_names(file)} if file else set()
    found = []
    for path in sorted(folder.rglob(f"*{disk.PARTIAL_SUFFIX}")):
        # NAME.gguf.KEY.partial
        name = path.relative_to(folder).as_posix().removesuffix(disk.PARTIAL_SUFFIX).rpartition(".")[0]
        if wanted and name.casefold() not in wanted:
            continue
        if quant and (
            reference.quant_of(name).casefold() != quant.casefold() or reference.kind_of(name) != "model"
        ):
            continue
        found.append(path)
    return found
