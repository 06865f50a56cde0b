"""One command of the set-up: all that it prints goes to the log, and a line that moves shows how far it is.

Knows nothing of environments, packages or engines.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from faults import Kind, SetupError, find_fault

N_KEPT_LINES = 2000  # enough of the end of a log to find the cause of a failure in
TERMINAL_EVERY_S = 0.5
LOG_EVERY_S = 30.0
STOP_WITHIN_S = 5.0


class CommandError(SetupError):
    """A command ended badly. `lines` are the last ones that it printed, `kind` what they tell of."""

    def __init__(self, message: str, *, lines: Sequence[str] = (), hint: str = "", kind: Kind = "") -> None:
        super().__init__(message, hint=hint)
        self.lines = lines
        self.kind = kind


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
            raise CommandError(f"Cannot start {words[0]}: {error.strerror}.") from None
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
        fault = find_fault(list(lines), program)
        raise CommandError(fault.message, hint=fault.hint, kind=fault.kind, lines=list(lines))
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
