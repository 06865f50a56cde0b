"""Server-sent events: one `data:` line and an empty line for each, comments while nothing is to be said.

Knows the framing, not what is in an event: a dialect hands over a Script.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemolocal.api.choices import Choices
from nemolocal.api.connection import attend, while_connected
from nemolocal.api.errors import ClientGoneError, ShuttingDownError, error_body
from nemolocal.errors import NemoLocalError
from nemolocal.types import Delta, Finish

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0  # clients and proxies give up after 15 s or more of silence
KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

# JSON lets these stand raw, but many clients split lines at them.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class Script(Protocol):
    """What a dialect says at each point of a stream: JSON values, one for each event."""

    def begin(self) -> Iterable[Any]: ...

    def item(self, index: int, item: Delta | Finish) -> Iterable[Any]: ...

    def end(self) -> Iterable[Any]: ...


def event(payload: Any) -> bytes:
    """One event. Line breaks inside strings are escaped by JSON, so the payload is one line."""
    return b"data: " + _encode(payload).translate(_LINE_BREAKS).encode() + b"\n\n"


def events(payloads: Iterable[Any]) -> bytes:
    return b"".join(map(event, payloads))


async def stream(request: Request, choices: Choices, script: Script) -> EventStream:
    """Wait until the engine has accepted the prompts, then answer with a stream: what is wrong with a
    request is a plain error with its status, even where a stream was asked for."""
    await while_connected(request, choices.start())
    return EventStream(choices, script)


class EventStream(Response):
    """Writes started choices as they come. Ends in `[DONE]`, or in an event with an error."""

    media_type = "text/event-stream"

    def __init__(self, choices: Choices, script: Script) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._choices = choices
        self._script = script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stopping = scope["app"].state.stopping
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await attend(self._write(send), receive=receive, stopping=stopping)
        except ClientGoneError:
            return
        except NemoLocalError as error:
            if not isinstance(error, ShuttingDownError):
                log.warning("a stream failed: %s", error)
            await _send(send, event(error_body(error)))
        except Exception as error:  # the API's border: the status has gone out already
            log.exception("a stream failed")
            await _send(send, event(error_body(error)))
        finally:
            await self._choices.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        opening = events(self._script.begin())
        if opening:
            await _send(send, opening)
        n_open = self._choices.n
        while n_open:
            items = await self._choices.take(KEEP_ALIVE_S)
            n_open -= sum(isinstance(item, Finish) for _, item in items)
            # What has piled up while the client was slow goes out in one write, each item as its own event.
            written = b"".join(events(self._script.item(index, item)) for index, item in items)
            await _send(send, written or KEEP_ALIVE)
        await _send(send, events(self._script.end()) + DONE)


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
