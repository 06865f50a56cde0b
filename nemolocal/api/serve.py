"""Listening: sockets first, then the server around the port, until it is told to stop.

Cheap to import, so that a port in use is told before anything slow is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import uvicorn

from nemolocal import log
from nemolocal.api.listen import Listener, listen
from nemolocal.service import Service

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from nemolocal.api.app import Port

GRACE_S = 2  # for answers to take their leave; then they are cut
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none writes into one that closes


def serve(
    service: Service,
    refs: Sequence[str] = (),
    *,
    page: Callable[[], ASGIApp] | None = None,
    announce: Callable[[Listener], None] | None = None,
) -> None:
    """Listen as the service's settings say (host, port, api_key, allow_origin) until Ctrl-C or SIGTERM.

    `refs` are loaded in the background once the server has started. `page` makes the page (see app.create);
    None serves headless. `announce` is called when requests are answered. Raises PortError and UsageError
    before anything is loaded, and what `service.start` raises.
    """
    settings = service.config.settings
    listener = listen(settings.host, settings.port, has_key=bool(settings.api_key))
    # The web framework takes half a second to import; a port in use is told before that.
    from nemolocal.api import app

    try:
        port = app.create(service, refs, page=page)
        server = Server(port, lambda: announce(listener) if announce else None)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(list(listener.sockets))
    except SystemExit:
        if port.failure is None:
            raise
        raise port.failure from None
    finally:
        listener.close()


class Server(uvicorn.Server):
    """uvicorn around a Port: says when it answers, and ends running answers before it closes."""

    def __init__(self, port: Port, announce: Callable[[], None]) -> None:
        _log_to_ours()
        super().__init__(
            uvicorn.Config(
                port,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._port = port
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._port.begin_stop()
        await super().shutdown(sockets)


def _log_to_ours() -> None:
    """uvicorn's own words go to our log file, not to the terminal."""
    theirs = logging.getLogger("uvicorn.error")
    theirs.handlers = list(logging.getLogger(log.ROOT).handlers) or [logging.NullHandler()]
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False
