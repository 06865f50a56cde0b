"""The sockets that the port listens on, bound before anything slow begins: a port in use is told at once.

The default 127.0.0.1 listens on ::1 as well where the system has IPv6, since `localhost` means either and
many clients try ::1 first. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from nemolocal.errors import PortError, UsageError

N_PORTS_TRIED = 100
BACKLOG = 2048
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}


@dataclass(frozen=True, slots=True)
class Listener:
    """Bound and listening sockets, all on one port. `url` is what a browser on this machine opens;
    `warning` is one line or empty."""

    sockets: tuple[socket.socket, ...]
    port: int
    url: str
    warning: str = ""

    def close(self) -> None:
        for each in self.sockets:
            each.close()


@dataclass(frozen=True, slots=True)
class _Address:
    family: socket.AddressFamily
    host: str
    is_required: bool = True

    @property
    def is_loopback(self) -> bool:
        return self.host == "::1" or self.host.startswith("127.")

    @property
    def is_wildcard(self) -> bool:
        return self.host in ("0.0.0.0", "::")


def listen(host: str, port: int, *, has_key: bool) -> Listener:
    """Listen on `host`: a name or an address, IPv6 with or without brackets. Port 0 takes any free one.

    Raises UsageError for a port that cannot be and for an address beyond loopback without a key, PortError
    when the address cannot be listened on. Never takes another port than the one asked for.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"There is no port {port}.", hint="Ports go from 1 to 65535: --port 6366.")
    name = host.strip().removeprefix("[").removesuffix("]")
    addresses = _addresses(name, port)
    is_open = not all(address.is_loopback for address in addresses)
    if is_open and not has_key:
        raise UsageError(
            f"Listening on {host} lets other machines in, so an API key is needed.",
            hint="Give --api-key KEY, or listen on 127.0.0.1.",
        )
    warning = f"Other machines can reach this server: it listens on {host}, unencrypted." if is_open else ""
    sockets = _bind_all(addresses, host, port)
    number: int = sockets[0].getsockname()[1]
    shown = addresses[0]
    where = name if not shown.is_wildcard else "::1" if shown.family == socket.AF_INET6 else "127.0.0.1"
    netloc = f"[{where}]" if ":" in where else where
    return Listener(sockets, number, f"http://{netloc}:{number}", warning)


def _addresses(name: str, port: int) -> list[_Address]:
    """What a host stands for; for 127.0.0.1 and localhost both loopbacks, IPv4 first."""
    if name in ("127.0.0.1", "localhost"):
        return [
            _Address(socket.AF_INET, "127.0.0.1"),
            _Address(socket.AF_INET6, "::1", is_required=False),
        ]
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        found = []
    addresses = [
        _Address(family, str(where[0]))
        for family, _, _, _, where in found
        if family in (socket.AF_INET, socket.AF_INET6)
    ]
    if not name or not addresses:
        raise PortError(
            f"No address is known for the host '{name}'.", hint="Use 127.0.0.1, or one of this machine's own."
        )
    return list(dict.fromkeys(addresses))


def _bind_all(addresses: Iterable[_Address], host: str, port: int) -> tuple[socket.socket, ...]:
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            # Port 0: the first socket chooses, the others follow.
            number = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bind(address, number))
            except OSError as error:
                if address.is_required or error.errno not in _ABSENT:
                    raise _explain(error, host, number, list(addresses)) from None
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return tuple(sockets)


def _bind(address: _Address, port: int) -> socket.socket:
    # The protocol is named since asyncio sends small pieces without delay on such sockets only: else each
    # answer on a kept connection waits 40 ms for the client to acknowledge its head.
    sock = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform == "win32":
            # Without it another process could take the same port from us.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            # A port whose last connections are only being wound up is free.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address.host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _explain(error: OSError, host: str, port: int, addresses: list[_Address]) -> PortError:
    """One line for a bind that failed: what holds the port, and what to do."""
    if error.errno == errno.EADDRINUSE:
        free = _next_free(addresses, port)
        return PortError(
            f"Port {port} is in use by {_holder(port)}.",
            hint=f"Stop it, or choose another port: --port {free}." if free else "Stop it, or give --port.",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PortError(
            f"This user may not listen on port {port}.", hint="Choose one above 1024: --port 6366."
        )
    if error.errno in _ABSENT:
        return PortError(
            f"{host} is not an address of this machine.", hint="Use 127.0.0.1, or one of its own."
        )
    return PortError(
        f"Cannot listen on {host}, port {port}: {error.strerror}.", hint="Choose another --port."
    )


def _holder(port: int) -> str:
    """The process that listens on a port, as far as the system tells."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_it = getattr(connection.laddr, "port", None) == port
            if is_it and connection.status == psutil.CONN_LISTEN and connection.pid:
                process = psutil.Process(connection.pid)
                is_ours = any("nemolocal" in part for part in process.cmdline()[:3])
                name = "another NemoLocal" if is_ours else process.name()
                return f"{name} (process {connection.pid})"
    return "another process"


def _next_free(addresses: list[_Address], port: int) -> int | None:
    for candidate in range(port + 1, min(port + N_PORTS_TRIED, 65536)):
        with contextlib.suppress(PortError):
            sockets = []
            try:
                for address in addresses:
                    sockets.append(_bind(address, candidate))
                return candidate
            except OSError as error:
                if sockets and error.errno in _ABSENT:
                    return candidate
            finally:
                for each in sockets:
                    each.close()
    return None
