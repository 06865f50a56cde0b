"""What installer/test.py runs, and where it gets a browser."""

from __future__ import annotations

import os
from pathlib import Path

import browser
import checks
import pytest
from environment import Place

PLACE = Place(Path("/clone"))


def test_every_check_runs_and_arguments_go_to_pytest() -> None:
    planned = checks.plan(PLACE, ["-k", "engine"], has_browser=True)
    assert [check.name for check in planned] == [
        "ruff format",
        "ruff check",
        "mypy",
        "lint-imports",
        "pytest",
    ]
    assert planned[0].command[1:] == ("-m", "ruff", "format", "--check", ".")
    assert planned[-1].command[1:] == ("-m", "pytest", "-m", "not gpu", "-k", "engine")
    assert all(str(PLACE.scripts) in check.command[0] for check in planned)


def test_without_a_browser_only_its_tests_are_left_out() -> None:
    command = checks.plan(PLACE, [], has_browser=False)[-1].command
    assert command[-2:] == ("-m", "not gpu and not browser")


def test_a_check_that_was_killed_is_told_from_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks.subprocess, "call", lambda command, **_: -9 if "pytest" in command else 0)
    assert checks.run_all(PLACE, [], browser="/usr/bin/chromium", is_ci=False) == 1
    assert "== pytest: ended by signal 9 in " in capsys.readouterr().out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The checks are played: `fails` names those that end badly, `ran` those that were run."""
    state: dict[str, object] = {"ran": [], "fails": set(), "env": {}}

    def call(command: tuple[str, ...], *, cwd: Path, env: dict[str, str]) -> int:
        name = next(
            check.name for check in checks.plan(PLACE, [], has_browser=True) if check.command == command
        )
        state["ran"].append(name)  # type: ignore[attr-defined]
        state["env"] = env
        return int(name in state["fails"])  # type: ignore[operator]

    monkeypatch.setattr(checks.subprocess, "call", call)
    return state


def test_all_run_though_the_first_failed(
    calls: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    calls["fails"] = {"ruff format", "mypy"}
    assert checks.run_all(PLACE, [], browser="/usr/bin/chromium", is_ci=False) == 1
    assert calls["ran"] == ["ruff format", "ruff check", "mypy", "lint-imports", "pytest"]
    assert capsys.readouterr().out.splitlines()[-1] == "Failed: ruff format, mypy."


def test_passing_checks_end_with_zero_and_the_browser_is_handed_on(
    calls: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert checks.run_all(PLACE, [], browser="/opt/a browser/chrome", is_ci=True) == 0
    env = calls["env"]
    assert isinstance(env, dict)
    assert env["NEMOLOCAL_TEST_BROWSER"] == "/opt/a browser/chrome"
    assert env["PATH"].split(os.pathsep)[0] == str(PLACE.scripts)
    assert capsys.readouterr().out.splitlines()[-1] == "All checks passed."


@pytest.mark.parametrize(("is_ci", "code"), [(True, 1), (False, 0)])
def test_missing_browser_is_said_and_fails_on_ci_only(
    is_ci: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks.subprocess, "call", lambda *words, **options: 0)
    assert checks.run_all(PLACE, [], browser="", is_ci=is_ci) == code
    assert "the tests of the page did not run" in capsys.readouterr().out


def test_debians_package_only_where_it_may_be_installed_unasked() -> None:
    def has_all(name: str) -> bool:
        return True

    assert browser.apt_prefix(has=lambda name: False, is_root=True) is None
    assert browser.apt_prefix(has=has_all, is_root=True) == ["apt-get"]
    assert browser.apt_prefix(has=has_all, is_root=False, may_sudo=lambda: True) == ["sudo", "-n", "apt-get"]
    assert browser.apt_prefix(has=has_all, is_root=False, may_sudo=lambda: False) is None
    assert browser.apt_prefix(has=lambda name: name == "apt-get", is_root=False) is None


@pytest.mark.skipif(os.name == "nt", reason="scripts with a #! line")
def test_stand_in_for_a_browser_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the distribution's `chromium-browser` only tells how to install one."""
    for name, code in (("chromium-browser", 1), ("google-chrome", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert browser.find_installed() == str(tmp_path / "google-chrome")
    (tmp_path / "google-chrome").unlink()
    assert browser.find_installed() == ""


def test_browser_comes_from_the_first_source_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def source(name: str, path: str):
        def get(*anything: object) -> str:
            asked.append(name)
            return path

        return get

    class Packages:
        context = None

    monkeypatch.setattr(browser, "find_installed", source("installed", ""))
    monkeypatch.setattr(browser, "_find_downloaded", source("downloaded", ""))
    monkeypatch.setattr(browser, "_install_package", source("package", "/usr/bin/chromium"))
    monkeypatch.setattr(browser, "_download", source("download", "/never"))
    assert browser.get(Packages()) == "/usr/bin/chromium"  # type: ignore[arg-type]
    assert asked == ["installed", "downloaded", "package"]
