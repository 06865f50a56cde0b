"""From the error tree to HTTP: one table, one shape, and the border where nothing may escape.

Every error body is `{"error": {"message", "type", "param", "code"}}` and nothing else. Knows no route.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemolocal.errors import (
    BusyError,
    ConfigError,
    ContextLengthError,
    DoesNotFitError,
    EngineDiedError,
    EngineError,
    EngineGaveUpError,
    HubError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    NemoLocalError,
    TemplateError,
    UsageError,
)

log = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class RefusedError(InvalidRequestError):
    """A request that the port turns away before any route sees it, with a status and a code of its own."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class NotServedError(InvalidRequestError):
    """The field is understood and would change the answer, but this version does not serve it."""


class ShuttingDownError(NemoLocalError):
    """The server was told to stop while this request ran."""

    def __init__(self) -> None:
        super().__init__("NemoLocal is shutting down.", hint="Send the request again once it is back.")


class ClientGoneError(Exception):
    """The client has closed the connection: there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How one class of error looks from outside."""

    status: int
    type: str
    code: str | None = None
    param: str | None = None


FAULTS: Mapping[type[NemoLocalError], Fault] = {
    InvalidRequestError: Fault(400, INVALID_REQUEST),
    NotServedError: Fault(400, INVALID_REQUEST, "unsupported_parameter"),
    ContextLengthError: Fault(400, INVALID_REQUEST, "context_length_exceeded"),
    TemplateError: Fault(400, INVALID_REQUEST, "template_error", "messages"),
    ConfigError: Fault(500, SERVER_ERROR),
    UsageError: Fault(400, INVALID_REQUEST, param="model"),  # its reference is all that a request can misuse
    ModelNotFoundError: Fault(404, INVALID_REQUEST, "model_not_found", "model"),
    BusyError: Fault(429, "rate_limit_error", "queue_full"),
    HubError: Fault(502, SERVER_ERROR, "hub_error"),
    ModelFileError: Fault(500, SERVER_ERROR, "model_file_error"),
    DoesNotFitError: Fault(503, SERVER_ERROR, "does_not_fit"),
    EngineDiedError: Fault(503, SERVER_ERROR, "engine_died"),
    EngineGaveUpError: Fault(503, SERVER_ERROR, "engine_gave_up"),
    EngineError: Fault(500, SERVER_ERROR, "engine_error"),
    ShuttingDownError: Fault(503, SERVER_ERROR, "shutting_down"),
    NemoLocalError: Fault(500, SERVER_ERROR),
}

INTERNAL = Fault(500, SERVER_ERROR, "internal_error")
INTERNAL_MESSAGE = "Something went wrong inside NemoLocal. Its log file says more."


def fault_of(error: Exception) -> Fault:
    """The nearest entry of the table; what is not in our tree is an internal error."""
    if isinstance(error, RefusedError):
        return Fault(error.status, INVALID_REQUEST, error.code)
    for kind in type(error).__mro__:
        if issubclass(kind, NemoLocalError) and kind in FAULTS:
            return FAULTS[kind]
    return INTERNAL


def error_body(error: Exception) -> dict[str, dict[str, str | None]]:
    """The body for any exception. An exception from outside our tree shows nothing of itself."""
    fault = fault_of(error)
    is_ours = isinstance(error, NemoLocalError)
    param = getattr(error, "param", None) or fault.param
    return {
        "error": {
            "message": _clean(str(error)) if is_ours else INTERNAL_MESSAGE,
            "type": fault.type,
            "param": _clean(param) if param else None,
            "code": fault.code,
        }
    }


def error_response(error: Exception) -> JSONResponse:
    headers: dict[str, str] = {}
    if isinstance(error, RefusedError):
        headers |= error.headers
    if isinstance(error, BusyError | EngineGaveUpError):
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    return JSONResponse(error_body(error), fault_of(error).status, headers=headers)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's hook for the errors of our own tree."""
    fault = fault_of(error)
    if fault.status >= 500:
        log.warning("%s %s: %s", request.method, request.url.path, error)
    return error_response(error)


async def answer_no_route(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's hook for 404 and 405, which come from the router and not from us."""
    status = getattr(error, "status_code", 404)
    path = request.url.path[:200]
    if status == 405:
        allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
        refused = RefusedError(
            f"{path} does not take {request.method}.",
            status=405,
            code="method_not_allowed",
            hint=f"It takes {allowed}." if allowed else "",
            headers={"Allow": allowed} if allowed else None,
        )
    else:
        refused = RefusedError(
            f"There is no route {request.method} {path}.",
            status=404,
            code="unknown_route",
            hint="The API starts at /v1.",
        )
    return error_response(refused)


class ErrorBorder:
    """The last frame of the API: nothing passes it but an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except (ClientGoneError, ClientDisconnect):
            return
        except Exception as error:  # the API's border
            log.exception("%s %s failed", scope.get("method"), scope.get("path"))
            if not has_begun:
                await error_response(error)(scope, receive, send)


def _clean(text: str) -> str:
    """One line that can be encoded, whatever the client put into a name that we repeat."""
    return " ".join(text.encode("utf-8", "replace").decode("utf-8").split())[:1000]
