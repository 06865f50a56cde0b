"""Sockets: which addresses, and one clear line for each that cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from nemolocal.api import listen as listening
from nemolocal.api.listen import Listener, listen
from nemolocal.errors import PortError, UsageError


@contextlib.contextmanager
def open_at(host: str, port: int = 0, *, has_key: bool = False) -> Iterator[Listener]:
    listener = listen(host, port, has_key=has_key)
    try:
        yield listener
    finally:
        listener.close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def hosts(listener: Listener) -> list[str]:
    return [sock.getsockname()[0] for sock in listener.sockets]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_both_loopbacks_on_one_port(host: str) -> None:
    with open_at(host) as listener:
        assert hosts(listener) == (["127.0.0.1", "::1"] if has_ipv6() else ["127.0.0.1"])
        assert {sock.getsockname()[1] for sock in listener.sockets} == {listener.port}
        assert listener.url == f"http://{host}:{listener.port}"
        assert listener.warning == ""
        for address in hosts(listener):
            socket.create_connection((address, listener.port), 1).close()


@pytest.mark.anyio
async def test_small_pieces_are_sent_without_delay() -> None:
    """Else each answer on a kept connection waits for the client to acknowledge its head."""
    has_no_delay: list[int] = []

    async def on_client(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = writer.get_extra_info("socket")
        has_no_delay.append(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with open_at("127.0.0.1") as listener:
        async with await asyncio.start_server(on_client, sock=listener.sockets[0]):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
    assert [bool(value) for value in has_no_delay] == [True]


@pytest.mark.skipif(not has_ipv6(), reason="this system has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_is_shown_in_brackets(host: str) -> None:
    with open_at(host) as listener:
        assert hosts(listener) == ["::1"]
        assert listener.url == f"http://[::1]:{listener.port}"


@pytest.mark.parametrize("code", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_without_ipv6_the_default_still_listens(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = listening._bind

    def without_ipv6(address: Any, port: int) -> socket.socket:
        if address.family == socket.AF_INET6:
            raise OSError(code, os.strerror(code))
        return bind(address, port)

    monkeypatch.setattr(listening, "_bind", without_ipv6)
    with open_at("127.0.0.1") as listener:
        assert hosts(listener) == ["127.0.0.1"]
    with pytest.raises(PortError, match="not an address of this machine"):
        listen("::1", 0, has_key=False)


def test_a_port_in_use_names_its_holder_and_the_next_free_one() -> None:
    with open_at("127.0.0.1") as holder, pytest.raises(PortError) as caught:
        listen("127.0.0.1", holder.port, has_key=False)
    assert f"Port {holder.port} is in use by " in caught.value.message
    assert f"(process {os.getpid()})" in caught.value.message
    free = int(caught.value.hint.split("--port ")[1].rstrip("."))
    assert free > holder.port
    with open_at("127.0.0.1", free) as listener:
        assert listener.port == free


@pytest.mark.skipif(not has_ipv6(), reason="this system has no IPv6")
def test_a_stranger_on_the_other_loopback_is_in_the_way() -> None:
    with open_at("::1") as stranger, pytest.raises(PortError, match="in use"):
        listen("127.0.0.1", stranger.port, has_key=False)


def test_the_holder_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: str) -> Any:
        raise listening.psutil.AccessDenied

    monkeypatch.setattr(listening.psutil, "net_connections", denied)
    with open_at("127.0.0.1") as holder, pytest.raises(PortError, match="in use by another process"):
        listen("127.0.0.1", holder.port, has_key=False)


def test_a_port_that_was_just_left_can_be_taken_again() -> None:
    with open_at("127.0.0.1") as listener:
        number = listener.port
        caller = socket.create_connection(("127.0.0.1", number), 1)
        listener.sockets[0].setblocking(True)
        listener.sockets[0].accept()[0].close()  # closed from this side first, so it lingers
        caller.close()
    with open_at("127.0.0.1", number) as again:
        assert again.port == number


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "may not listen on port 80"),
        (errno.EPERM, "may not listen on port 80"),
        (errno.EADDRNOTAVAIL, "not an address of this machine"),
        (errno.ENOBUFS, "Cannot listen on 127.0.0.1, port 80"),
    ],
)
def test_what_the_system_refuses_is_told(code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: Any, port: int) -> socket.socket:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(listening, "_bind", refuse)
    with pytest.raises(PortError, match=words) as caught:
        listen("127.0.0.1", 80, has_key=False)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_port_that_cannot_be(port: int) -> None:
    with pytest.raises(UsageError, match=f"no port {port}"):
        listen("127.0.0.1", port, has_key=False)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "", "bad host", "127.0.0.1:80", "x" * 300])
def test_a_host_without_an_address(host: str) -> None:
    with pytest.raises(PortError, match="No address is known"):
        listen(host, 0, has_key=True)


def test_beyond_loopback_a_key_is_needed() -> None:
    with pytest.raises(UsageError, match="an API key is needed") as caught:
        listen("0.0.0.0", 0, has_key=False)
    assert "--api-key" in caught.value.hint


def test_beyond_loopback_with_a_key_there_is_a_warning() -> None:
    with open_at("0.0.0.0", has_key=True) as listener:
        assert hosts(listener) == ["0.0.0.0"]
        assert listener.url == f"http://127.0.0.1:{listener.port}"
        assert "Other machines can reach this server" in listener.warning
