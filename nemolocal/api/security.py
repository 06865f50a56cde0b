"""Who may talk to the port: the outermost layer, before the API and the page alike, websockets included.

A web page on another site must not reach the models through the user's browser. Two checks stop it: the
`Host` must be a name of this server (a name re-pointed by DNS still sends the attacker's), and an `Origin`
must be this server's own or allowed. Beyond loopback a key is asked for as well.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemolocal.api.errors import RefusedError, error_response
from nemolocal.errors import ConfigError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::"})
OPEN_PATHS = frozenset({"/health"})  # asked by scripts that wait for the server; tells nothing

# Gradio writes inline scripts and styles into its page; nothing may come from or go to anywhere else.
PAGE_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "media-src 'self' data: blob:",
        "connect-src 'self'",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_HOST_NAME = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")


@dataclass(frozen=True, slots=True)
class Allowed:
    """The names that this server goes by, and the foreign origins that may call it."""

    hosts: frozenset[str]
    origins: frozenset[str]
    origin_hosts: frozenset[str]
    is_wildcard: bool

    def origin_pattern(self) -> str:
        """A regular expression for the allowed foreign origins; matches nothing when there are none."""
        patterns = [re.escape(origin) for origin in sorted(self.origins)]
        patterns += [rf"https?://{re.escape(_bracketed(host))}(:\d+)?" for host in sorted(self.origin_hosts)]
        return "|".join(patterns) or r"(?!)"


def allowed(host: str, allow_origin: Iterable[str]) -> Allowed:
    """What the settings `host` and `allow_origin` allow. An entry is an origin (`https://app.example`,
    `app://obsidian.md`) or a host name. Raises ConfigError for anything else."""
    host = _plain(host)
    hosts = set(LOOPBACK_NAMES) | ({host} - WILDCARDS)
    origins: set[str] = set()
    origin_hosts: set[str] = set()
    for entry in allow_origin:
        scheme, mark, rest = entry.lower().rstrip("/").partition("://")
        try:
            name = _plain(urlsplit(f"//{rest if mark else scheme}").hostname or "")
        except ValueError:  # a bracket without its other half
            name = ""
        is_origin = bool(mark) and "/" not in rest
        is_name = not mark and name == _plain(scheme)
        if not (is_origin or is_name) or not _HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"allow_origin: '{entry}' is neither an origin nor a host name.",
                hint="Give entries like https://app.example or mybox.lan.",
            )
        hosts.add(name)
        if is_origin:
            origins.add(f"{scheme}://{rest}")
        else:
            origin_hosts.add(name)
    return Allowed(frozenset(hosts), frozenset(origins), frozenset(origin_hosts), host in WILDCARDS)


class Guard:
    """Lets a request through to `app`, or answers it with a refusal."""

    def __init__(
        self, app: ASGIApp, *, allowed: Allowed, api_key: str, is_api: Callable[[str], bool]
    ) -> None:
        self._app = app
        self._allowed = allowed
        self._origins = re.compile(allowed.origin_pattern())
        self._key = _digest(api_key) if api_key else None
        self._is_api = is_api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        is_api = self._is_api(scope["path"])
        try:
            self._check(scope, is_api)
        except RefusedError as refusal:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            else:
                await error_response(refusal)(scope, receive, _sealed(send, is_api))
            return
        await self._app(scope, receive, _sealed(send, is_api))

    def _check(self, scope: Scope, is_api: bool) -> None:
        headers = Headers(scope=scope)
        host = self._check_host(headers, scope)
        self._check_origin(headers, host)
        method = scope.get("method", "GET")
        if is_api and method == "OPTIONS" and "access-control-request-method" in headers:
            return  # browsers send neither key nor body when they ask beforehand
        if self._key and scope["path"] not in OPEN_PATHS:
            self._check_key(headers, is_api)
        if is_api and method in {"POST", "PUT", "PATCH"}:
            _check_content_type(headers)

    def _check_host(self, headers: Headers, scope: Scope) -> tuple[str, str]:
        values = headers.getlist("host")
        if len(values) != 1:
            raise RefusedError(
                "A request must have exactly one Host header.", status=400, code="invalid_host"
            )
        match = _HOST.fullmatch(values[0].strip())
        name = _plain(match[1]) if match else ""
        if match and (name in self._allowed.hosts or _is_loopback(name) or self._is_own_address(name, scope)):
            return name, match[2] or ""
        raise RefusedError(
            "This Host is not one of this server's names.",
            status=403,
            code="host_not_allowed",
            hint="Allow a name with --allow-origin NAME.",
        )

    def _is_own_address(self, name: str, scope: Scope) -> bool:
        """When listening on all addresses: the very address that the client connected to. A literal
        address cannot be re-pointed by DNS."""
        address, _ = scope.get("server") or ("", None)
        return self._allowed.is_wildcard and name == _plain(address)

    def _check_origin(self, headers: Headers, host: tuple[str, str]) -> None:
        for origin in headers.getlist("origin"):
            if not (_is_same_origin(origin, host) or self._origins.fullmatch(origin.lower())):
                raise RefusedError(
                    "Web pages of another origin may not call this server.",
                    status=403,
                    code="origin_not_allowed",
                    hint="Allow an origin with --allow-origin ORIGIN.",
                )

    def _check_key(self, headers: Headers, is_api: bool) -> None:
        given = _key_in(headers, takes_basic=not is_api)
        if given is not None and hmac.compare_digest(_digest(given), self._key or b""):
            return
        scheme = "Bearer" if is_api else 'Basic realm="NemoLocal: any name, the API key as password"'
        raise RefusedError(
            "A key is needed here." if given is None else "The key is wrong.",
            status=401,
            code="invalid_api_key",
            hint="Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            headers={"WWW-Authenticate": scheme},
        )


def _check_content_type(headers: Headers) -> None:
    """Forms and plain text are what a browser sends across sites without asking, so they start nothing."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(
            "The body must be sent as JSON.",
            status=415,
            code="unsupported_media_type",
            hint="Set Content-Type: application/json.",
        )


def _key_in(headers: Headers, *, takes_basic: bool) -> str | None:
    if "x-api-key" in headers:
        return headers["x-api-key"].strip()
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if takes_basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return None


def _digest(key: str) -> bytes:
    # Digests are of one length, so that not even the key's length shows in the time of the comparison.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_same_origin(origin: str, host: tuple[str, str]) -> bool:
    scheme, mark, rest = origin.lower().partition("://")
    match = _HOST.fullmatch(rest)
    if not mark or not match or scheme not in {"http", "https"}:
        return False
    default = "443" if scheme == "https" else "80"
    name = _plain(match[1])
    if (match[2] or default) != (host[1] or default):
        return False
    # localhost, 127.0.0.1 and ::1 on one port are all this server.
    return name == host[0] or (name in LOOPBACK_NAMES and host[0] in LOOPBACK_NAMES)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _plain(host: str) -> str:
    return host.strip().strip("[]").lower()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _sealed(send: Send, is_api: bool) -> Send:
    """Adds the headers that keep a browser from guessing, leaking or loading anything."""

    async def sealed_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["X-Content-Type-Options"] = "nosniff"
            headers["Referrer-Policy"] = "no-referrer"
            if not is_api:
                headers["Content-Security-Policy"] = PAGE_POLICY
        await send(message)

    return sealed_send
