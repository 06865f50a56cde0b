"""The lock that keeps two set-ups in the same folder apart."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from command import say

POLL_S = 0.2


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[tuple[int, ...]]:
    """Wait until no other set-up holds this lock file, then hold it. Yields the open file that
    the lock hangs on; on POSIX a command that inherits it holds the lock for as long as it lives."""
    with path.open("a+b") as file:
        has_said = False
        while not _try_lock(file.fileno()):
            if not has_said:
                say("Another set-up is at work in this folder; waiting for it to end.")
                has_said = True
            time.sleep(POLL_S)
        try:
            yield () if os.name == "nt" else (file.fileno(),)
        finally:
            _unlock(file.fileno())


if sys.platform == "win32":
    import msvcrt

    def _try_lock(fd: int) -> bool:
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: better unguarded than not at all
            return True
        return True

    def _unlock(fd: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
