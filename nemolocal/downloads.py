"""Downloads that go on whether anybody looks or not: one thread each, a few at a time, in their order.

What has arrived is kept when one is paused, fails or the program ends; the next start goes on from there.
Knows references, not what they are for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

from nemolocal.config import Config
from nemolocal.errors import (
    BeingFetchedError,
    DownloadStoppedError,
    ModelNotFoundError,
    NemoLocalError,
)
from nemolocal.models import begun, download, upkeep

N_AT_ONCE: Final = 2
SPEED_OVER_S: Final = 5.0
"""The speed is that of so long."""

State = Literal["waiting", "running", "paused", "failed", "done"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Download:
    """How far one is. `total_bytes` is 0 until the hub has said it, `bytes_per_s` 0 while nothing comes.
    `problem` is why it failed, `note` the last thing there was to say, each in one line."""

    ref: str
    state: State = "waiting"
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    problem: str = ""
    note: str = ""

    @property
    def left_s(self) -> float | None:
        """Seconds to go at this speed, None where that cannot be told."""
        if self.state != "running" or self.bytes_per_s <= 0:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s


@dataclass(slots=True)
class _Job:
    seen: Download
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    exact: str = ""  # the reference of its one file, once that is known
    is_found: bool = False  # begun by another run, and not gone on with in this one
    is_going: bool = False  # being cancelled
    is_wanted_again: bool = False  # asked for anew meanwhile
    before: threading.Thread | None = None  # of an earlier try, which may not have ended yet
    marks: deque[tuple[float, int]] = field(default_factory=deque)  # (when, bytes)


class Downloads:
    """All downloads of this program, by the reference that was asked for; two references to the same file are
    one download, as far as that can be told without the hub. Safe to use from any thread."""

    def __init__(
        self,
        config: Config,
        *,
        on_done: Callable[[str], None] = lambda ref: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._on_done = on_done
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.RLock()
        self._is_closed = False

    def all(self) -> tuple[Download, ...]:
        """In the order in which they were asked for."""
        with self._lock:
            return tuple(job.seen for job in self._jobs.values() if not job.is_going)

    def get(self, ref: str) -> Download | None:
        with self._lock:
            job = self._job(ref)
            return job.seen if job and not job.is_going else None

    def _job(self, ref: str) -> _Job | None:
        if ref in self._jobs:
            return self._jobs[ref]
        return next((job for key, job in self._jobs.items() if begun.is_same(key, ref)), None)

    def find_begun(self) -> None:
        """Take up, as paused, what earlier runs or other programs have begun and not ended."""
        found = begun.all_of(self._config)
        with self._lock:
            for ref in [ref for ref, job in self._jobs.items() if job.is_found and not job.thread]:
                if not self._jobs[ref].is_going:
                    del self._jobs[ref]  # it may have been ended, or taken away, elsewhere
            for each in found:
                if not any(each.is_of(ref) for ref in self._jobs):
                    seen = Download(each.ref, "paused", each.done_bytes, each.total_bytes)
                    self._jobs[each.ref] = _Job(seen, exact=each.ref, is_found=True)

    def start(self, ref: str) -> None:
        """Begin, or go on with one that was paused or failed. Nothing happens to one that runs."""
        with self._lock:
            job = self._job(ref)
            if job and job.is_going:
                job.is_wanted_again = True
                return
            if job and job.seen.state in ("waiting", "running"):
                return
            before = job.seen if job and job.seen.state != "done" else Download(job.seen.ref if job else ref)
            seen = replace(before, state="waiting", problem="", note="", bytes_per_s=0.0)
            exact, thread = (job.exact, job.thread) if job else ("", None)
            self._jobs[seen.ref] = _Job(seen, exact=exact, before=thread)
            self._next()

    def pause(self, ref: str) -> None:
        """Stop one and keep what has arrived."""
        with self._lock:
            job = self._job(ref)
            if job is None or job.seen.state not in ("waiting", "running"):
                return
            job.stop.set()
            job.seen = replace(job.seen, state="paused", bytes_per_s=0.0)
            self._next()

    def cancel(self, ref: str) -> None:
        """Stop one and throw away what has arrived of it; one that is done stays, and is only forgotten
        here. Waits for its threads; whoever asks for it anew meanwhile gets it afterwards. Raises
        BeingFetchedError where something else fetches what has arrived."""
        with self._lock:
            job = self._job(ref)
            if job:
                if job.is_going:
                    return
                job.is_going = True
                job.stop.set()
        try:
            for thread in (job.before, job.thread) if job else ():
                if thread:
                    thread.join()
            if job is None:
                self._remove_begun(ref)
            elif job.seen.state != "done" and job.exact:  # else it has begun nothing
                self._remove_begun(job.exact)
        except BeingFetchedError:
            if job is None or job.seen.done_bytes:
                raise
        finally:
            with self._lock:
                if job:
                    self._jobs.pop(job.seen.ref, None)
                    if job.is_wanted_again:
                        self.start(job.seen.ref)
                self._next()

    def _remove_begun(self, ref: str) -> None:
        with suppress(ModelNotFoundError):  # nothing had arrived
            upkeep.remove_begun(ref, self._config)

    def close(self) -> None:
        """Stop all; what has arrived is kept."""
        with self._lock:
            self._is_closed = True
            jobs = list(self._jobs.values())
            for job in jobs:
                job.stop.set()
        for job in jobs:
            if job.thread:
                job.thread.join(timeout=5)

    def _next(self) -> None:
        """Start what waits, as long as there is a place."""
        running = sum(job.seen.state == "running" for job in self._jobs.values())
        for ref, job in self._jobs.items():
            if running >= N_AT_ONCE or self._is_closed:
                return
            if job.seen.state == "waiting" and not job.is_going:
                running += 1
                job.seen = replace(job.seen, state="running")
                job.thread = threading.Thread(
                    target=self._run, args=(ref, job), name=f"download {ref}", daemon=True
                )
                job.thread.start()

    def _run(self, ref: str, job: _Job) -> None:
        progress, note = partial(self._advance, job), partial(self._note, job)
        try:
            if job.before:
                job.before.join()
            job.exact = job.exact or download.exact(ref, self._config, stop=job.stop)
            download.pull(job.exact, self._config, progress=progress, note=note, stop=job.stop)
        except DownloadStoppedError:
            self._settle(job, "paused")
        except NemoLocalError as error:
            self._settle(job, "failed", problem=str(error))
        except Exception as error:
            log.error("the download of %s met an error that is our own", ref, exc_info=error)
            self._settle(job, "failed", problem=f"NemoLocal itself failed ({type(error).__name__}).")
        else:
            self._settle(job, "done")
            self._tell(ref)
        with self._lock:
            self._next()

    def _tell(self, ref: str) -> None:
        """What is made of it elsewhere does not keep those that wait from their turn."""
        try:
            self._on_done(ref)
        except Exception as error:
            log.error("what follows the download of %s met an error that is our own", ref, exc_info=error)

    def _advance(self, job: _Job, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        with self._lock:
            marks = job.marks
            marks.append((now, done_bytes))
            while now - marks[0][0] > SPEED_OVER_S:
                marks.popleft()
            (began, first), speed = marks[0], 0.0
            if now > began:
                speed = (done_bytes - first) / (now - began)
            job.seen = replace(
                job.seen, done_bytes=done_bytes, total_bytes=total_bytes, bytes_per_s=max(speed, 0.0)
            )

    def _note(self, job: _Job, line: str) -> None:
        with self._lock:
            job.seen = replace(job.seen, note=line)

    def _settle(self, job: _Job, state: State, *, problem: str = "") -> None:
        with self._lock:
            job.seen = replace(job.seen, state=state, problem=problem, bytes_per_s=0.0)
