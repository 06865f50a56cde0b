"""`nemolocal serve`: the port without the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nemolocal.cli import options, output
from nemolocal.cli.hardware import tell_warnings
from nemolocal.config import Config

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

    tell_warnings(config)
    service = Service(config)
    for ref in model or ():
        ensure_local(service, ref)
    listen(service, model or (), announce=_announce)


def _announce(listener: Listener) -> None:
    if listener.warning:
        output.note(f"warning: {listener.warning}")
    print(f"NemoLocal serves {listener.url}/v1 (Ctrl-C stops it)", flush=True)
