"""`nemolocal ui`: the app, that is the port with the page, and a browser that shows it."""

from __future__ import annotations

import contextlib
import threading
import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer

from nemolocal.cli import options, output
from nemolocal.cli.hardware import tell_warnings
from nemolocal.cli.serve import check_beside, tell_failures
from nemolocal.config import Config

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from nemolocal.api.listen import Listener

_TEXT_BROWSERS = {"www-browser", "links", "elinks", "lynx", "w3m"}  # they would draw into this terminal


@options.takes_settings(
    "model",
    *options.LISTENING,
    *options.LOADING,
    *options.PLANNING,
    *options.STAYING,
    *options.SAMPLING,
    *options.NETWORK,
    *options.MACHINE,
)
def ui(
    config: Config,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Open no browser; print the address only.", metavar="")
    ] = False,
) -> None:
    """Open the app in the browser. The port for other programs is at the same address."""
    from nemolocal.api.serve import serve
    from nemolocal.cli.pull import ensure_local
    from nemolocal.service import Service

    check_beside(config)
    tell_warnings(config)
    tell_failures()
    service = Service(config)
    # A model from the settings is loaded by the first request; one from the command line now.
    refs = [config.settings.model] if config.sources["model"] == "flag" else []
    for ref in refs:
        ensure_local(service, ref)

    def page() -> ASGIApp:
        from nemolocal.ui import app  # takes seconds: the port calls this beside its own work

        return app.page(service)

    def announce(listener: Listener) -> None:
        if listener.warning:
            output.note(f"warning: {listener.warning}")
        print(f"NemoLocal is at {listener.url} (Ctrl-C stops it)", flush=True)
        if not no_browser:
            threading.Thread(target=open_browser, args=[listener.url], daemon=True).start()

    serve(service, refs, page=page, announce=announce)


def open_browser(url: str) -> None:
    """Show the address in the person's browser; where there is none, the printed address has to do."""
    with contextlib.suppress(webbrowser.Error, OSError):
        browser = webbrowser.get()
        if getattr(browser, "name", "") not in _TEXT_BROWSERS:
            browser.open(url)
