"""Finds or gets a browser of the Chromium family for the tests of the page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from command import CommandError, Context, run, say
from packages import Packages

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
    "microsoft-edge-stable",
    "msedge",
)
MAC_APPS = ("Chromium", "Google Chrome", "Microsoft Edge")
WINDOWS_PATHS = (r"Google\Chrome\Application\chrome.exe", r"Microsoft\Edge\Application\msedge.exe")
WINDOWS_FOLDERS = ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA")


def get(packages: Packages) -> str:
    """A browser's path: one that is installed, else Debian's package, else Playwright's own; "" when none
    can be had."""
    return (
        find_installed()
        or _find_downloaded(packages)
        or _install_package(packages.context)
        or _download(packages)
    )


def find_installed() -> str:
    """The first browser here that runs, "" when none does."""
    for path in places():
        if runs(path):
            return path
    return ""


def places() -> list[str]:
    """Where a browser may be on this system; what is listed exists."""
    found = [path for name in NAMES if (path := shutil.which(name))]
    if sys.platform == "darwin":
        found += [f"/Applications/{app}.app/Contents/MacOS/{app}" for app in MAC_APPS]
    if sys.platform == "win32":
        folders = [os.environ[name] for name in WINDOWS_FOLDERS if name in os.environ]
        found += [str(Path(folder, path)) for folder in folders for path in WINDOWS_PATHS]
    return [path for path in found if Path(path).exists()]


def runs(path: str) -> bool:
    """Whether it is a browser and not a stand-in that asks to install one, as Ubuntu's package is. On
    Windows every --version opens a window, and there are no stand-ins."""
    if sys.platform == "win32":
        return True
    try:
        done = subprocess.run([path, "--version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def apt_prefix(
    *,
    has: Callable[[str], object] = shutil.which,
    is_root: bool | None = None,
    may_sudo: Callable[[], bool] | None = None,
) -> list[str] | None:
    """How apt-get is called where it may install without asking; None where it may not or is not there."""
    if not has("apt-get"):
        return None
    if os.name == "posix" and os.geteuid() == 0 if is_root is None else is_root:
        return ["apt-get"]
    if has("sudo") and (may_sudo or _may_sudo)():
        return ["sudo", "-n", "apt-get"]
    return None


def _may_sudo() -> bool:
    return (
        subprocess.run(["sudo", "-n", "true"], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
    )


def _install_package(context: Context) -> str:
    apt = apt_prefix()
    if apt is None:
        return ""
    say("    No browser is here; installing the package chromium.")
    return _try(
        [[*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", "chromium"]],
        context,
        find_installed,
    )


def _find_downloaded(packages: Packages) -> str:
    """Playwright's browser, where an earlier run downloaded it."""
    code = (
        "from playwright.sync_api import sync_playwright as start\n"
        "with start() as playwright: print(playwright.chromium.executable_path)"
    )
    try:
        path = packages.run("-c", code)[-1]
    except CommandError:
        return ""
    return path if Path(path).exists() and runs(path) else ""


def _download(packages: Packages) -> str:
    say("    No browser is here; downloading Playwright's.")
    command = [str(packages.python), "-m", "playwright", "install", "chromium"]
    return _try([command], packages.context, lambda: _find_downloaded(packages))


def _try(commands: Sequence[Sequence[str]], context: Context, find: Callable[[], str]) -> str:
    """Run the commands, then look; a failure is told and leaves the browser unfound."""
    try:
        for command in commands:
            run(command, context, env={"DEBIAN_FRONTEND": "noninteractive"})
        return find()
    except CommandError as error:
        say(f"    That failed: {error.message}")
        return ""
