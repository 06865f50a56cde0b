"""`nemolocal serve`: the port without the page."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from nemolocal import log
from nemolocal.cli import options, output
from nemolocal.cli.hardware import tell_warnings
from nemolocal.config import Config
from nemolocal.errors import NemoLocalError

if TYPE_CHECKING:
    from nemolocal.api.listen import Listener


@options.takes_settings(
    *options.LISTENING,
    *options.LOADING,
    *options.PLANNING,
    *options.STAYING,
    *options.SAMPLING,
    *options.NETWORK,
    *options.MACHINE,
)
def serve(
    config: Config,
    refs: Annotated[list[str] | None, typer.Argument(metavar="REF", help="The same as --model.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="REF",
            help="Load this model at start; more of them are served too, and loaded when asked for.",
        ),
    ] = None,
) -> None:
    """Serve models to other programs on this machine, without the page."""
    from nemolocal.api.serve import serve as listen
    from nemolocal.cli.pull import ensure_local
    from nemolocal.service import Service

    check_beside(config)
    tell_warnings(config)
    tell_failures()
    service = Service(config)
    wanted = [*(refs or ()), *(model or ())]
    for ref in wanted:
        ensure_local(service, ref)
    listen(service, wanted, announce=_announce)


def check_beside(config: Config) -> None:
    """Refuse a draft model or adapters that are not here, now and not with the first request. Where no flag
    names them, say so only: the settings must not keep the app from starting.

    Raises ModelNotFoundError, ModelFileError, UsageError.
    """
    from nemolocal.models import adapters, planning

    with _blamed("draft", config):
        planning.draft_model(config)
    with _blamed("lora", config):
        for text in config.settings.lora:
            adapters.parse(text)


@contextmanager
def _blamed(name: str, config: Config) -> Iterator[None]:
    """Errors name the setting; where no flag gave it they are warnings."""
    flag = f"--{name}"
    try:
        yield
    except NemoLocalError as error:
        if flag not in str(error):
            error.message = f"{flag}: {error.message}"
        if config.sources[name] == "flag":
            raise
        output.note(f"warning: {error}")


def tell_failures() -> None:
    """Say in the terminal too what goes wrong while the server runs: a model that cannot be loaded, above
    all. The log file has it with its details."""
    logging.getLogger(log.ROOT).addHandler(_Telling())


class _Telling(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def filter(self, record: logging.LogRecord) -> bool:
        # The engine's client tells of deaths, which are told again with the model's name.
        return not record.name.startswith("nemolocal.engine.")

    def emit(self, record: logging.LogRecord) -> None:
        output.error(record.getMessage())


def _announce(listener: Listener) -> None:
    if listener.warning:
        output.note(f"warning: {listener.warning}")
    print(f"NemoLocal serves {listener.url}/v1 (Ctrl-C stops it)", flush=True)
