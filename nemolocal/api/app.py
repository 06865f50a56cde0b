"""The port as one ASGI app: guard, then the API or the page, and the service's life with the server's.

Routes live in the dialects' own modules; what draws the page is handed in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from nemolocal.api import errors, metrics, rerank, security
from nemolocal.api.openai import chat, completions, embeddings, models
from nemolocal.api.page import Page
from nemolocal.errors import NemoLocalError
from nemolocal.service import Service

API_ROOTS = ("/v1", "/health", "/metrics")
NO_PAGE = "NemoLocal serves its API at /v1. This is the headless server; `nemolocal ui` has the page.\n"


class Port:
    """The whole of what listens: an ASGI app with a lifespan.

    `failure` says why the service could not start, once the lifespan has failed for that.
    """

    def __init__(self, service: Service, refs: Sequence[str], page: Callable[[], ASGIApp] | None) -> None:
        self.failure: NemoLocalError | None = None
        self._service = service
        self._refs = tuple(refs)
        self._stopping = asyncio.Event()
        self._page = Page(page, self._stopping) if page else None
        self._api = self._build_api()
        settings = service.config.settings
        self._guard = security.Guard(
            self._dispatch, allowed=self._allowed, api_key=settings.api_key, is_api=self._is_api
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    def begin_stop(self) -> None:
        """End running answers: the API's with an error that says why, the page's without a word. To be
        called on the server's loop."""
        self._stopping.set()

    def _build_api(self) -> FastAPI:
        # No generated documentation: its pages would load scripts from the web.
        api = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=self._live)
        api.state.service = self._service
        api.state.stopping = self._stopping
        api.add_exception_handler(NemoLocalError, errors.answer_error)
        api.add_exception_handler(HTTPException, errors.answer_no_route)
        api.add_middleware(errors.ErrorBorder)
        settings = self._service.config.settings
        self._allowed = security.allowed(settings.host, settings.allow_origin)
        api.add_middleware(
            CORSMiddleware,
            allow_origin_regex=self._allowed.origin_pattern(),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
        )
        api.add_api_route("/health", health, methods=["GET", "HEAD"])
        if self._page is None:
            api.add_api_route("/", no_page, methods=["GET", "HEAD"])
        for dialect in (models, chat, completions, embeddings, rerank, metrics):
            api.include_router(dialect.router)
        return api

    @contextlib.asynccontextmanager
    async def _live(self, api: FastAPI) -> AsyncIterator[None]:
        if self._page is not None:
            self._page.start()
        try:
            await self._service.start(self._refs)
            yield
        except NemoLocalError as error:
            self.failure = error
            raise
        finally:
            self.begin_stop()
            if self._page is not None:
                await self._page.close()
            await self._service.close()

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._page is None or scope["type"] == "lifespan" or self._is_api(scope["path"]):
            await self._api(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    def _is_api(self, path: str) -> bool:
        return self._page is None or any(path == root or path.startswith(root + "/") for root in API_ROOTS)


def create(service: Service, refs: Sequence[str] = (), *, page: Callable[[], ASGIApp] | None = None) -> Port:
    """The port over a service.

    `refs` are loaded once the server has started. `page` makes the page as an ASGI app with a lifespan; it
    is called once, in a thread. Without it the port is headless. Raises ConfigError for a wrong
    `allow_origin`.
    """
    return Port(service, refs, page)


async def health(request: Request) -> JSONResponse:
    """200 while a model is loaded, whatever happens to another one; 503 while the only one loads or after its
    load has failed."""
    service: Service = request.app.state.service
    status = service.status()
    if status.loaded:
        return JSONResponse({"status": "ok"})
    if status.state == "loading":
        content = {"status": "loading", "progress": status.progress}
        return JSONResponse(content, 503, headers={"Retry-After": "1"})
    if status.state == "failed":
        return JSONResponse({"status": "failed", "problem": status.problem}, 503)
    return JSONResponse({"status": "ok"})


async def no_page(request: Request) -> PlainTextResponse:
    return PlainTextResponse(NO_PAGE)
