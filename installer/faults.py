"""What went wrong, in one line with the way to mend it: from what a command printed, or from a file error."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["", "disk", "compiler", "memory", "network", "certificate", "permission", "package"]

N_LAST_LINES = 200  # a fault stands near the end; what is further up was overcome


class SetupError(Exception):
    """The set-up cannot go on: `message` says what is missing, `hint` how to mend it; both one line."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


@dataclass(frozen=True)
class Fault:
    """A kind of failure and the words by which it shows in a command's output."""

    kind: Kind
    message: str
    hint: str = ""
    words: str = r"(?!)"


DISK = Fault(
    "disk",
    "The disk is full.",
    "Free about 4 GB where NemoLocal and the temporary folder lie, and run the same command again.",
    r"No space left on device|\[Errno 28\]|not enough space on the disk|WinError 112|Disk quota exceeded",
)
COMPILER = Fault(
    "compiler",
    "The engine has to be compiled, and no working C and C++ compiler was found.",
    "Install one and run the same command again.",
    r"CMAKE_CX*_COMPILER.*(not set|could be found|not found)|No CMAKE_C",
)
MEMORY = Fault(
    "memory",
    "The memory ran out while compiling.",
    "Close other programs, set CMAKE_BUILD_PARALLEL_LEVEL=1 and run the same command again.",
    r"[Kk]illed signal terminated program|internal compiler error: Killed|out of memory",
)
CERTIFICATE = Fault(
    "certificate",
    "The package index's certificate is not trusted.",
    "Name your network's certificate file in PIP_CERT and run the same command again.",
    r"CERTIFICATE_VERIFY_FAILED|SSLError",
)
NETWORK = Fault(
    "network",
    "The package index cannot be reached.",
    "Check the connection (HTTPS_PROXY, where there is a proxy) and run the same command again.",
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Max retries exceeded|ProxyError"
    r"|Temporary failure in name resolution|Connection refused|Network is unreachable",
)
PERMISSION = Fault(
    "permission",
    "A file cannot be written: permission denied.",
    "Close a running NemoLocal, make the folder yours, and run the same command again.",
    r"Permission denied|\[Errno 13\]|WinError 5\b|Read-only file system|\[Errno 30\]",
)
PACKAGE = Fault(
    "package",
    "A package that NemoLocal needs is not offered for this Python and system.",
    "The log names it.",
    r"No matching distribution found for",
)
CAUSES = (DISK, COMPILER, MEMORY, CERTIFICATE, NETWORK, PERMISSION)


def find_fault(lines: Sequence[str], program: str) -> Fault:
    """What made a command fail, from the last lines that it printed. Where they tell nothing that is known,
    the fault is the last error among them."""
    last = [line.strip() for line in lines[-N_LAST_LINES:] if line.strip()]
    for line in reversed(last):
        for fault in CAUSES:
            if re.search(fault.words, line):
                return fault
    # pip says this too when it found nothing for want of a connection, so it comes after the causes
    if any(re.search(PACKAGE.words, line) for line in last):
        return PACKAGE
    errors = [line for line in last if re.match(r"(ERROR|error|Error)\b", line)]
    said = (errors or last or ["without a word"])[-1]
    return Fault("", f"{program} failed: {said[:300]}")


def explain(error: OSError) -> SetupError:
    """The same for a file that the set-up itself could not read or write."""
    where = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SetupError(DISK.message, hint=DISK.hint)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SetupError(
            f"Cannot write{where}: permission denied.",
            hint="Close a running NemoLocal, or clone into a folder of your own.",
        )
    return SetupError(f"Cannot use{where}: {error.strerror or error}.", hint="Mend or remove it.")
