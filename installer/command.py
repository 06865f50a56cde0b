"""One command of the set-up: all that it prints goes to the log, a line that moves shows how far it is, and
its failure becomes one line.

Knows nothing of environments, packages or engines.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

N_KEPT_LINES = 2000  # enough of the end of a log to find the cause of a failure in
TERMINAL_EVERY_S = 0.5
LOG_EVERY_S = 30.0
STOP_WITHIN_S = 5.0


class SetupError(Exception):
    """The set-up cannot go on: `message` says what is missing, `hint` how to mend it; both one line."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class CommandError(SetupError):
    """A command ended badly. `lines` are the last ones that it printed."""

    def __init__(self, message: str, *, lines: Sequence[str], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.lines = lines


class Stopped(BaseException):
    """The system asked the set-up to end (SIGTERM, SIGHUP)."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def say(text: str) -> None:
    """Tell the user. Goes to stderr: stdout belongs to the command that is started in the end."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Context:
    """What all commands of one set-up share. `kept_fds` are open files that a command inherits, so that
    the lock of the set-up holds for as long as any of its commands lives."""

    log: Path
    cwd: Path
    env: Mapping[str, str]
    kept_fds: tuple[int, ...] = ()


def run(
    command: Sequence[str | Path], context: Context, *, env: Mapping[str, str] | None = None
) -> Sequence[str]:
    """Run a command to its end and return the last lines that it printed.

    `env` is laid over the context's. Raises CommandError when it cannot be started or ends with anything
    but 0. When this process is told to stop, the command and all that it started are ended first.
    """
    words = [str(word) for word in command]
    lines: collections.deque[str] = collections.deque(maxlen=N_KEPT_LINES)
    with context.log.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(words)}\n")
        log.flush()
        try:
            process = subprocess.Popen(
                words,
                cwd=context.cwd,
                env={**context.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                pass_fds=context.kept_fds if os.name == "posix" else (),
                start_new_session=os.name == "posix",
            )
        except OSError as error:
            raise CommandError(f"Cannot start {words[0]}: {error.strerror}.", lines=()) from None
        assert process.stdout is not None
        reader = Reader(process.stdout, log, lines)
        try:
            _watch(process, reader)
        except BaseException:
            _end(process)
            raise
        finally:
            reader.join(timeout=STOP_WITHIN_S)  # a child left behind may hold the pipe open for ever
            if not reader.is_alive():
                process.stdout.close()
        if reader.problem:
            raise reader.problem
    if process.returncode:
        program = words[2] if words[1:2] == ["-m"] else Path(words[0]).stem
        message, hint = explain(list(lines), program)
        raise CommandError(message, hint=hint, lines=list(lines))
    return list(lines)


class Reader(threading.Thread):
    """Copies what a command prints to the log as it comes. `progress` is the last line that says how far
    it is; `problem` is set when the log cannot be written."""

    def __init__(self, source: IO[str], log: IO[str], lines: collections.deque[str]) -> None:
        super().__init__(daemon=True)
        self.source, self.log, self.lines = source, log, lines
        self.progress = ""
        self.problem: OSError | None = None
        self.start()

    def run(self) -> None:
        for line in self.source:
            text = line.rstrip()
            self.lines.append(text)
            self.progress = find_progress(text) or self.progress
            try:
                self.log.write(f"{text}\n")
                self.log.flush()
            except (OSError, ValueError) as error:  # ValueError: closed, the command outlived its reader
                self.problem = self.problem or (error if isinstance(error, OSError) else None)


def _watch(process: subprocess.Popen[str], reader: Reader) -> None:
    """Wait for the end, showing how far it is: a line that rewrites itself, or one now and then in a log."""
    started = time.monotonic()
    is_terminal = sys.stderr.isatty()
    every_s = TERMINAL_EVERY_S if is_terminal else LOG_EVERY_S
    n_shown = 0
    try:
        while process.poll() is None:
            reader.join(timeout=every_s)  # ends with the output, and sooner than a wait for the process
            if not reader.is_alive():
                process.wait()
                break
            text = f"    {_clock(time.monotonic() - started)}  {reader.progress}".rstrip()
            if not is_terminal:
                say(text)
                continue
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text.ljust(n_shown)}", end="", file=sys.stderr, flush=True)
            n_shown = len(text)
    finally:
        if n_shown:
            print(f"\r{' ' * n_shown}\r", end="", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command with all that it started: as Ctrl-C would, so that pip clears its temporary files away,
    then less politely."""
    if os.name != "posix":  # the console's Ctrl-C reached it already
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_WITHIN_S)
        process.kill()
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_WITHIN_S)
            break
    with contextlib.suppress(OSError):  # what is left of the group, a compiler say
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """While this lasts, being told to end raises Stopped, so that commands do not outlive the set-up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


_STEPS = re.compile(r"^\s*\[(\d+)/(\d+)\]")  # ninja
_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")  # make
_SOURCE = re.compile(r"^\s*([\w.-]+\.(?:c|cc|cpp|cu))\s*$")  # Visual Studio
_PIP = re.compile(
    r"^\s*((?:Collecting|Downloading|Using cached|Installing|Building|Preparing|Getting) .*?)"
    r"(?: from .*| \(from .*|: .*)?$"
)


def find_progress(line: str) -> str:
    """What a line of pip's or a compiler's output says about how far it is; "" for most lines."""
    if found := _STEPS.match(line):
        return f"compiling, {found[1]} of {found[2]}"
    if found := _PERCENT.match(line):
        return f"compiling, {found[1]} %"
    if found := _SOURCE.match(line):
        return f"compiling {found[1]}"
    if found := _PIP.match(line):
        words = found[1].split(" ", 1)
        return f"{words[0].lower()} {words[1].split('/')[-1]}"[:70]
    return ""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _compiler_is_missing(text: str) -> bool:
    return bool(re.search(r"CMAKE_CX*_COMPILER.*(not set|could be found|not found)|No CMAKE_C", text))


_FAULTS: tuple[tuple[Callable[[str], object], str, str], ...] = (
    (
        re.compile(r"No space left on device|\[Errno 28\]|not enough space on the disk|WinError 112").search,
        "The disk is full.",
        "Free about 4 GB where NemoLocal and the temporary folder lie, and run the same command again.",
    ),
    (
        _compiler_is_missing,
        "The engine has to be compiled, and no working C and C++ compiler was found.",
        "Install one and run the same command again.",
    ),
    (
        re.compile(
            r"[Kk]illed signal terminated program|internal compiler error: Killed|out of memory"
        ).search,
        "The memory ran out while compiling.",
        "Close other programs, set CMAKE_BUILD_PARALLEL_LEVEL=1 and run the same command again.",
    ),
    (
        re.compile(
            r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Max retries exceeded"
            r"|Temporary failure in name resolution|ProxyError|Connection refused|Network is unreachable"
        ).search,
        "The package index cannot be reached.",
        "Check the connection (HTTPS_PROXY, where there is a proxy) and run the same command again.",
    ),
    (
        re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLError").search,
        "The package index's certificate is not trusted.",
        "Name your network's certificate file in PIP_CERT and run the same command again.",
    ),
    (
        re.compile(r"Permission denied|\[Errno 13\]|WinError 5\b|Read-only file system|\[Errno 30\]").search,
        "A file cannot be written: permission denied.",
        "Close a running NemoLocal, make the folder yours, and run the same command again.",
    ),
    (
        re.compile(r"No matching distribution found for").search,
        "A package that NemoLocal needs is not offered for this Python and system.",
        "The log names it.",
    ),
)


def is_unreachable(lines: Sequence[str]) -> bool:
    """Whether a failed command failed for want of a connection."""
    return explain(lines, "pip")[0].startswith("The package index")


def explain(lines: Sequence[str], program: str) -> tuple[str, str]:
    """What went wrong and how to mend it, one line each, from what a failed command printed last."""
    text = "\n".join(lines)
    for matches, message, hint in _FAULTS:
        if matches(text):
            return message, hint
    said = [line for line in lines if line.strip()]
    errors = [line for line in said if re.match(r"\s*(ERROR|error|Error)\b", line)]
    last = (errors or said or ["without a word"])[-1].strip()
    return f"{program} failed: {last[:300]}", ""


def explain_os_error(error: OSError) -> SetupError:
    """The same for a file that the set-up itself could not read or write."""
    where = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SetupError(_FAULTS[0][1], hint=_FAULTS[0][2])
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SetupError(
            f"Cannot write{where}: permission denied.",
            hint="Close a running NemoLocal, or clone into a folder of your own.",
        )
    return SetupError(f"Cannot use{where}: {error.strerror or error}.", hint="Mend or remove it.")
