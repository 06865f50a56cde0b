"""`nemolocal models pull`, and the offer to fetch a model that a command needs and that is not here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemolocal import units
from nemolocal.cli import options, output
from nemolocal.config import Config
from nemolocal.errors import DoesNotFitError, ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from nemolocal.models.store import LocalModel
    from nemolocal.service import Service
    from nemolocal.types import TextModel

Advance = Callable[[int, int], None]
"""Gets (bytes done, bytes in all)."""


@options.takes_settings("offline", "models_dir", "hardware", "log_level")
def pull(
    config: Config,
    ref: Annotated[
        str,
        typer.Argument(metavar="REF", help="ID[:QUANT] of the catalogue, or hf:OWNER/REPO[:QUANT or FILE]."),
    ],
    is_accepted: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the model's licence; do not ask.", metavar="")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Download a model: without a quantization, the file that fits this machine best.

    What was begun before is taken up where it stopped. Where a licence has to be accepted, you are asked;
    without a terminal it is named, and to use the model is to accept it.
    """
    chosen = fitting(ref, config)
    terms = "" if is_accepted else _terms(chosen, config)
    is_asked = _can_ask() and not as_json
    if terms and is_asked:
        _ask_for_licence(chosen, terms)
    model = fetch(chosen, config)
    if terms and not is_asked:  # not before, since what goes wrong is told in one line
        output.note(f"To use {model.ref} is to accept its licence: {terms}.")
    if as_json:
        output.print_json(local_json(model))
    else:
        print(f"{model.ref} is ready: {model.path}")


def fitting(ref: str, config: Config) -> str:
    """The reference with the quantization that a plan chooses for this machine, where it names a model of
    the catalogue or a repository without one. A model that does not fit, or not as the settings wish, is
    said, and left to the person."""
    from nemolocal.hardware import survey
    from nemolocal.models import catalog, planning, reference

    parsed = reference.parse(ref)
    if isinstance(parsed, reference.PathRef) or parsed.quant:
        return ref
    if parsed.file if isinstance(parsed, reference.HubRef) else not catalog.load().get(parsed.name):
        return ref
    try:
        plan = planning.plan(ref, config, survey(config))
    except (DoesNotFitError, UsageError) as error:
        output.note(f"warning: {error}")
        return ref
    if isinstance(parsed, reference.NamedRef):
        return f"{parsed.name}:{plan.candidate.quant}"
    return ref if plan.candidate.is_local else plan.candidate.file


def _ask_for_licence(ref: str, terms: str) -> None:
    """Raises UsageError where the person says no."""
    if not typer.confirm(f"The licence of {ref}: {terms}. Do you accept it?", default=False, err=True):
        raise UsageError(
            f"{ref} was not downloaded, since its licence was not accepted.",
            hint="`nemolocal models show REF` names the licence of another model.",
        )


def _terms(ref: str, config: Config) -> str:
    """The licence that has to be accepted and where it can be read, "" where none has to be, or where the
    model is here."""
    from nemolocal.models import catalog, hub, reference, store

    parsed = reference.parse(ref)
    listed = catalog.load().of_ref(parsed)
    if listed is None or not listed.must_accept or store.find(parsed, config):
        return ""
    return f"{listed.licence} ({hub.endpoint(config)}/{listed.repo})"


def fetch(ref: str, config: Config) -> LocalModel:
    """Download with a progress bar on stderr."""
    from nemolocal.models import download

    try:
        with bar(f"Fetching {ref}") as (advance, note):
            return download.pull(ref, config, progress=advance, note=note)
    except KeyboardInterrupt:
        output.note(f"Stopped. `nemolocal models pull {ref}` goes on from here.")
        raise


def ensure_local(service: Service, ref: str | None) -> TextModel:
    """The model that is asked for; one that is not here but can be had is offered to whoever sits there.

    Raises ModelNotFoundError, which names the command that fetches it, where nobody can be asked or the
    answer is no.
    """
    try:
        return service.admit(ref)
    except ModelNotFoundError as error:
        wanted = _to_offer(service.config, ref)
        if not wanted and ref is None:
            error.hint = "Name one as REF, or set one as `model`; `nemolocal models list` shows them all."
        if not wanted or not _can_ask():
            raise
        wanted = fitting(wanted, service.config)
        if not _confirm(error, wanted, service.config):
            raise
    fetch(wanted, service.config)
    return service.admit(ref)


def _to_offer(config: Config, ref: str | None) -> str:
    """What could be fetched: the model that was named or is set; the starter where none was and none is
    here; "" where fetching is no way out."""
    from nemolocal.models import catalog, reference, store

    if config.settings.offline:
        return ""
    ref = ref or config.settings.model
    if not ref:
        here = store.list_models(config)
        return "" if any(model.is_usable and model.can_chat for model in here) else catalog.STARTER
    parsed = reference.parse(ref)
    if isinstance(parsed, reference.NamedRef):
        return ref if catalog.load().get(parsed.name) else ""
    return ref if isinstance(parsed, reference.HubRef) else ""


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _confirm(error: ModelNotFoundError, ref: str, config: Config) -> bool:
    from nemolocal.models import download

    choice = download.usual_choice(download.choices(ref, config), ref)
    terms = _terms(ref, config)
    accepting = f" That accepts its licence: {terms}." if terms else ""
    question = f"{error.message} Fetch {choice.ref} ({units.size(choice.bytes)}) now?{accepting}"
    return typer.confirm(question, default=True, err=True)


@contextmanager
def bar(title: str, *, has_lines: bool = True) -> Iterator[tuple[Advance, Callable[[str], None]]]:
    """A progress bar on stderr, and a way to print a line above it.

    Without a terminal there is a line for each tenth in its place, or nothing.
    """
    if not sys.stderr.isatty():
        yield _Lines(title).advance if has_lines else lambda done, total: None, output.note
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.console(sys.stderr), transient=True) as progress:
        tasks: list[Any] = []

        def advance(done: int, total: int) -> None:
            if not tasks:  # what an earlier run fetched must not count as this one's speed
                tasks.append(progress.add_task(title, total=total, completed=done))
            progress.update(tasks[0], completed=done, total=total)

        yield advance, lambda line: progress.console.print(line)


class _Lines:
    """Progress for a log file: one line for each tenth."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._n_tenths = -1

    def advance(self, done: int, total: int) -> None:
        n_tenths = 10 * done // max(1, total)
        if n_tenths > self._n_tenths:
            self._n_tenths = n_tenths
            output.note(f"{self._title}: {units.size(done)} of {units.size(total)}")


def local_json(model: LocalModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "ref": model.ref,
        "name": model.name,
        "quant": model.quant,
        "bytes": model.bytes,
        "path": str(model.path),
        "architecture": model.architecture,
        "parameters": model.n_params,
        "context": model.n_ctx_train,
        "problem": model.problem or None,
    }
