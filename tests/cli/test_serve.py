"""`nemolocal ui` and `nemolocal serve`: what they hand to the port, and the browser that they open."""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemolocal.api.listen import Listener
from nemolocal.cli import ui
from nemolocal.errors import PortError
from nemolocal.service import Service
from tests import synthetic
from tests.cli.conftest import Cli, is_one_error
from tests.fakes import FakeService

Opened = queue.Queue[str]


@dataclass
class FakePort:
    """Stands in for the port: announces itself and ends at once."""

    warning: str = ""
    error: Exception | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def serve(
        self,
        service: Service,
        refs: Sequence[str] = (),
        *,
        page: Callable[[], Any] | None = None,
        announce: Callable[[Listener], None],
    ) -> None:
        self.calls.append({"service": service, "refs": list(refs), "page": page})
        if self.error:
            raise self.error
        announce(Listener((), port=6366, url="http://127.0.0.1:6366", warning=self.warning))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, service: FakeService) -> FakePort:
    fake = FakePort()
    monkeypatch.setattr("nemolocal.api.serve.serve", fake.serve)
    return fake


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The addresses that a browser was asked to show."""
    urls: Opened = queue.Queue()
    monkeypatch.setattr(ui, "open_browser", urls.put)
    return urls


def test_serve_is_headless(cli: Cli, port: FakePort, service: FakeService, opened: Opened) -> None:
    result = cli("serve", "--model", "fake", "--model", "fake")
    assert (result.code, result.err) == (0, "")
    assert "http://127.0.0.1:6366/v1" in result.out
    assert port.calls == [{"service": service, "refs": ["fake", "fake"], "page": None}]
    assert opened.empty()


@pytest.mark.parametrize("arguments", [[], ["ui"], ["--host", "127.0.0.1"]])
def test_the_app_opens_a_browser(cli: Cli, port: FakePort, opened: Opened, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert (result.code, result.err) == (0, "")
    assert "http://127.0.0.1:6366" in result.out
    assert opened.get(timeout=5) == "http://127.0.0.1:6366"
    (call,) = port.calls
    assert call["refs"] == []
    assert call["page"] is not None


def test_no_browser(cli: Cli, port: FakePort, opened: Opened) -> None:
    assert cli("ui", "--no-browser").code == 0
    assert opened.empty()


def test_only_a_model_from_the_command_line_is_loaded_at_start(
    cli: Cli, port: FakePort, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMOLOCAL_MODEL", "fake")
    cli("ui")
    cli("ui", "--model", "fake")
    assert [call["refs"] for call in port.calls] == [[], ["fake"]]


def test_warning_of_an_open_address(cli: Cli, port: FakePort) -> None:
    port.warning = "Other machines can reach this server."
    assert cli("serve").err == "warning: Other machines can reach this server.\n"


def test_port_in_use(cli: Cli, port: FakePort) -> None:
    port.error = PortError("Port 6366 is in use by python (process 7).", hint="Choose another: --port 6367.")
    result = cli("serve")
    assert is_one_error(result, 1)
    assert "--port 6367" in result.err


def test_unknown_model_is_told_before_the_port_opens(cli: Cli, port: FakePort) -> None:
    assert is_one_error(cli("serve", "--model", "nope"), 1)
    assert is_one_error(cli("ui", "--model", "nope"), 1)
    assert port.calls == []


def test_browsers_that_draw_into_the_terminal_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    for name in ("firefox", "w3m", "lynx"):
        browser = SimpleNamespace(name=name, open=lambda url, name=name: shown.append(f"{name} {url}"))
        monkeypatch.setattr(webbrowser, "get", lambda browser=browser: browser)
        ui.open_browser("http://127.0.0.1:1")
    assert shown == ["firefox http://127.0.0.1:1"]


def test_no_browser_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", none)
    ui.open_browser("http://127.0.0.1:1")


def test_models_may_be_named_without_a_flag(cli: Cli, port: FakePort) -> None:
    assert cli("serve", "fake", "--model", "fake").code == 0
    assert port.calls[0]["refs"] == ["fake", "fake"]
    assert is_one_error(cli("serve", "nope"), 1)


@pytest.mark.parametrize("command", ["serve", "ui"])
def test_a_draft_model_or_adapter_that_is_not_here_is_told_at_start(
    cli: Cli, port: FakePort, opened: Opened, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for flags, code in ((("--draft", "nope"), 1), (("--lora", "nope.gguf"), 2)):
        refused = cli(command, *flags)
        assert is_one_error(refused, code), refused
        assert flags[0] in refused.err
        assert flags[1] in refused.err
    assert port.calls == []
    monkeypatch.setenv("NEMOLOCAL_DRAFT", "nope")  # what is set for good does not keep the app from starting
    warned = cli(command)
    assert warned.code == 0
    assert warned.err.startswith("warning: --draft: ")
    assert len(warned.err.splitlines()) == len(port.calls) == 1


def test_what_fails_while_it_serves_is_told_in_the_terminal(
    cli: Cli, port: FakePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        logging.getLogger("nemolocal.loading").error("loading %s failed: %s", "big", "It does not fit.")
        logging.getLogger("nemolocal.loading").warning("of no matter")

    monkeypatch.setattr("nemolocal.api.serve.serve", fail)
    assert cli("serve", "--model", "fake").err == "error: loading big failed: It does not fit.\n"


@pytest.mark.model
def test_a_model_that_does_not_fit_is_told_in_the_terminal(tmp_path: Path) -> None:
    """By the whole program: the port opens, the load fails, and the person sees why."""
    model = synthetic.write_tiny(tmp_path / "tiny.gguf")
    (tmp_path / "small.toml").write_text("[ram]\ntotal_bytes = 800000000\navailable_bytes = 530000000\n")
    arguments = ("serve", model, "--port", "0", "--hardware", tmp_path / "small.toml", "--ctx", "900000")
    server = subprocess.Popen(
        [sys.executable, "-m", "nemolocal.cli.app", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr
        line = server.stderr.readline()
        assert line.startswith("error: loading tiny failed: "), line
        assert "does not fit" in line
    finally:
        server.terminate()
        server.communicate(timeout=30)
