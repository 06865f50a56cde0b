"""Who may talk to the port: names of the server, origins, content types, keys, headers for the browser."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from nemolocal.api import app, security
from nemolocal.errors import ConfigError
from tests.api.serving import CHAT, COMPLETIONS, assert_error, client, connected, running, until, user
from tests.fakes import FakeService

pytestmark = pytest.mark.anyio

EVIL = "https://evil.example"


class StandInPage:
    """The page, as far as the guard is concerned: an app that records what gets through to it."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await PlainTextResponse("page")(scope, receive, send)


def guarded(
    *, key: str = "", host: str = "127.0.0.1", allow: tuple[str, ...] = ()
) -> tuple[Any, StandInPage]:
    page = StandInPage()
    guard = security.Guard(
        page,
        allowed=security.allowed(host, allow),
        api_key=key,
        is_api=lambda path: path.startswith("/v1"),
    )
    return guard, page


async def ask(
    guard: Any,
    path: str = "/",
    *,
    headers: list[tuple[str, str]] | None = None,
    method: str = "GET",
    kind: str = "http",
    server: tuple[str, int] = ("127.0.0.1", 6366),
) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer; the Host header is in `headers` alone."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "server": server,
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers or []],
    }
    await guard(scope, receive, send)
    if sent[0]["type"] == "websocket.close":
        return sent[0]["code"], {}
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


HOME = ("Host", "127.0.0.1:6366")


# Host -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:6366",
        "127.0.0.1",
        "localhost:6366",
        "LOCALHOST",
        "[::1]:6366",
        "[::1]",
        "localhost:80",
        "127.0.0.2",
    ],
)
async def test_loopback_names_are_let_through(host: str) -> None:
    guard, _ = guarded()
    assert (await ask(guard, headers=[("Host", host)]))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:6366",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example@127.0.0.1",
        "127.0.0.1@evil.example",
        "127.0.0.1:6366:1",
        "192.168.1.5",
        "0.0.0.0",
        "[::2]",
        "localhost, evil.example",
        "127.0.0.1/",
        "",
    ],
)
async def test_foreign_names_are_refused(host: str) -> None:
    guard, page = guarded()
    for path in ("/", "/v1/models", "/gradio_api/queue/join"):
        status, headers = await ask(guard, path, headers=[("Host", host)], server=("192.168.1.5", 6366))
        assert status == 403
        assert "access-control-allow-origin" not in headers
    assert page.paths == []


@pytest.mark.parametrize("hosts", [[], [HOME, HOME], [HOME, ("Host", "evil.example")]])
async def test_there_is_exactly_one_host(hosts: list[tuple[str, str]]) -> None:
    guard, page = guarded()
    assert (await ask(guard, headers=hosts))[0] == 400
    assert page.paths == []


async def test_the_configured_and_allowed_names_are_let_through() -> None:
    guard, _ = guarded(host="nemo.lan", allow=("box.lan", "https://app.example", "[fd00::5]"))
    for host in ("nemo.lan:6366", "box.lan", "app.example", "[fd00::5]:6366", "127.0.0.1"):
        assert (await ask(guard, headers=[("Host", host)]))[0] == 200
    assert (await ask(guard, headers=[("Host", "other.lan")]))[0] == 403


async def test_on_all_addresses_the_one_that_was_connected_to_is_a_name() -> None:
    guard, _ = guarded(host="0.0.0.0")
    for host, status in (
        ("192.168.1.5:6366", 200),
        ("192.168.1.6:6366", 403),
        ("evil.example", 403),
        ("0.0.0.0", 403),
    ):
        assert (await ask(guard, headers=[("Host", host)], server=("192.168.1.5", 6366)))[0] == status


# Origin -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin",
    [
        "http://127.0.0.1:6366",
        "http://localhost:6366",
        "http://[::1]:6366",
        "HTTP://LOCALHOST:6366",
    ],
)
async def test_the_servers_own_pages_may_call_it(origin: str) -> None:
    guard, _ = guarded()
    assert (await ask(guard, headers=[HOME, ("Origin", origin)]))[0] == 200


@pytest.mark.parametrize(
    "origin",
    [
        EVIL,
        "null",
        "http://127.0.0.1:3000",
        "http://127.0.0.1",
        "http://127.0.0.1:6366.evil.example",
        "http://evil.example:6366",
        "file://",
        "chrome-extension://abc",
        "",
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_foreign_pages_may_not(origin: str, kind: str) -> None:
    guard, page = guarded()
    for path, method in (("/", "GET"), ("/gradio_api/queue/join", "POST"), (CHAT, "POST"), (CHAT, "OPTIONS")):
        status, headers = await ask(guard, path, method=method, kind=kind, headers=[HOME, ("Origin", origin)])
        assert status == (1008 if kind == "websocket" else 403)
        assert "access-control-allow-origin" not in headers
    assert page.paths == []


async def test_a_websocket_of_the_own_page_gets_through() -> None:
    reached: list[str] = []

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["type"])
        await send({"type": "websocket.close", "code": 1000, "reason": ""})

    guard = security.Guard(
        page, allowed=security.allowed("127.0.0.1", ()), api_key="", is_api=lambda path: False
    )
    await ask(guard, kind="websocket", headers=[HOME, ("Origin", "http://127.0.0.1:6366")])
    assert reached == ["websocket"]


async def test_behind_a_proxy_the_page_keeps_its_origin() -> None:
    guard, _ = guarded(allow=("nemo.example",))
    headers = [("Host", "nemo.example"), ("Origin", "https://nemo.example")]
    assert (await ask(guard, headers=headers))[0] == 200


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json"]
)
async def test_a_cross_site_post_starts_nothing(content_type: str) -> None:
    service = FakeService()
    async with client(service) as caller:
        for path in (CHAT, COMPLETIONS):
            response = await caller.post(
                path,
                content='{"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}',
                headers={"Origin": EVIL, "Content-Type": content_type},
            )
            assert_error(response, 403, code="origin_not_allowed")
            assert "access-control-allow-origin" not in response.headers
    assert service.model.calls == []


async def test_an_allowed_origin_may_ask_beforehand_and_then_call() -> None:
    service = FakeService(allow_origin=("https://app.example", "app://obsidian.md", "box.lan"), api_key="k")
    async with client(service) as caller:
        for origin in ("https://app.example", "app://obsidian.md", "http://box.lan:8080", "https://box.lan"):
            asked = await caller.options(
                CHAT,
                headers={
                    "Origin": origin,
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "authorization, content-type",
                    "Access-Control-Request-Private-Network": "true",
                },
            )
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == origin
            assert "authorization" in asked.headers["access-control-allow-headers"]
            assert asked.headers["access-control-allow-private-network"] == "true"
            for messages, status in ((user("Hi"), 200), ([], 400)):
                response = await caller.post(
                    CHAT, json={"messages": messages}, headers={"Origin": origin, "Authorization": "Bearer k"}
                )
                assert response.status_code == status
                assert response.headers["access-control-allow-origin"] == origin
        for origin in ("http://app.example", "https://app.example.evil.example", "https://app.example:444"):
            assert_error(
                await caller.get("/v1/models", headers={"Origin": origin}), 403, code="origin_not_allowed"
            )


@pytest.mark.parametrize(
    "entry",
    [
        "*",
        "https://*.example",
        "https://app.example/path",
        "a b",
        "https://",
        "http:/x",
        "https://[::1",
        "[x",
    ],
)
def test_an_entry_that_is_neither_origin_nor_name(entry: str) -> None:
    with pytest.raises(ConfigError, match="neither an origin nor a host name"):
        app.create(FakeService(allow_origin=(entry,)))


# Keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Authorization", "Bearer s3cret", 200),
        ("Authorization", "bearer s3cret", 200),
        ("x-api-key", "s3cret", 200),
        ("Authorization", "Bearer wrong", 401),
        ("Authorization", "Bearer s3cre", 401),
        ("Authorization", "Bearer s3cret2", 401),
        ("Authorization", "Bearer", 401),
        ("Authorization", "s3cret", 401),
        ("Authorization", "Basic " + base64.b64encode(b"me:s3cret").decode(), 401),
        ("x-api-key", "", 401),
        ("x-api-key", "\xe9", 401),
        ("X-Other", "s3cret", 401),
    ],
)
async def test_the_api_takes_the_key_in_two_headers(header: str, value: str, status: int) -> None:
    guard, _ = guarded(key="s3cret")
    answer, headers = await ask(guard, "/v1/models", headers=[HOME, (header, value)])
    assert answer == status
    if status == 401:
        assert headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Basic " + base64.b64encode(b"anyone:s3cret").decode(), 200),
        ("Basic " + base64.b64encode(b":s3cret").decode(), 200),
        ("Bearer s3cret", 200),
        ("Basic " + base64.b64encode(b"s3cret:").decode(), 401),
        ("Basic " + base64.b64encode(b"s3cret").decode(), 401),
        ("Basic " + base64.b64encode(b"x:\xff").decode(), 401),
        ("Basic %%%", 401),
        (None, 401),
    ],
)
async def test_a_browser_can_log_in_to_the_page(value: str | None, status: int) -> None:
    guard, page = guarded(key="s3cret")
    for path in ("/", "/gradio_api/queue/join", "/config"):
        answer, headers = await ask(
            guard, path, headers=[HOME, *([("Authorization", value)] if value else [])]
        )
        assert answer == status
        if status == 401:
            assert headers["www-authenticate"].startswith("Basic realm=")
    assert len(page.paths) == (3 if status == 200 else 0)


async def test_a_key_that_is_not_ascii() -> None:
    guard, _ = guarded(key="schlüssel")
    basic = base64.b64encode("x:schlüssel".encode()).decode()
    assert (await ask(guard, headers=[HOME, ("Authorization", f"Basic {basic}")]))[0] == 200


async def test_everything_but_health_asks_for_the_key() -> None:
    async with client(FakeService(api_key="s3cret")) as caller:
        assert (await caller.get("/health")).status_code == 200
        for path in ("/v1/models", "/v1/nope", "/", "/health/x", "/metrics"):
            assert_error(await caller.get(path), 401, code="invalid_api_key")
        assert_error(await caller.post(CHAT, json={"messages": user("Hi")}), 401, code="invalid_api_key")
        response = await caller.get("/v1/models", headers={"Authorization": "Bearer s3cret"})
        assert response.status_code == 200


async def test_no_key_is_asked_for_when_there_is_none() -> None:
    async with client(FakeService()) as caller:
        response = await caller.get("/v1/models", headers={"Authorization": "Bearer whatever"})
    assert response.status_code == 200


# Headers for the browser, and raw requests ------------------------------------------------------


async def test_a_browser_may_load_nothing_from_elsewhere() -> None:
    guard, _ = guarded(key="k")
    for extra in ([], [("x-api-key", "k")]):
        _, headers = await ask(guard, headers=[HOME, *extra])
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["object-src"] == "'none'"
        assert not any("http" in sources or "*" in sources for sources in policy.values())
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


async def test_raw_requests_on_a_real_socket() -> None:
    service = FakeService()

    async def status(live: Any, request: str) -> bytes:
        async with connected(live) as (reader, writer):
            writer.write(request.replace("\n", "\r\n").encode())
            return (await reader.readline()).split()[1]

    async with running(service) as live:
        end = "\nConnection: close\n\n"
        assert await status(live, f"GET /health HTTP/1.1\nHost: localhost:{live.number}{end}") == b"200"
        assert await status(live, f"GET /health HTTP/1.1\nHost: evil.example{end}") == b"403"
        assert await status(live, "GET /health HTTP/1.1\nHost: localhost\nHost: localhost" + end) == b"400"
        assert await status(live, "GET /health HTTP/1.1" + end) == b"400"
        assert await status(live, "GET /health HTTP/1.0\n\n") == b"400"
        assert await status(live, "GET http://evil.example/health HTTP/1.1\nHost: localhost" + end) == b"404"
        upgrade = "\nUpgrade: websocket\nConnection: Upgrade\nSec-WebSocket-Key: x\nSec-WebSocket-Version: 13"
        join = f"GET /v1/models HTTP/1.1\nHost: localhost{upgrade}\nOrigin: {EVIL}\n\n"
        assert await status(live, join) == b"403"
        async with httpx.AsyncClient(base_url=live.url) as caller:
            response = await caller.get("/health")
        assert "server" not in response.headers
    await until(lambda: service.n_closed == 1)
