"""The last minutes of this machine: a sample every two seconds, for as long as somebody looks.

One probe lives as long as the samples are wanted; where there is no NVIDIA driver it is asked once and left.
"""

from __future__ import annotations

import json
import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import psutil

from nemolocal.hardware import absence, host
from nemolocal.hardware import gpus as driver
from nemolocal.hardware.parts import Gpu

EVERY_S: Final = 2.0
N_KEPT: Final = 150  # five minutes
UNWATCHED_S: Final = 30.0
"""So long after the last look nothing more is asked."""
STALE_S: Final = 10.0
"""An answer of the driver's older than this is no longer shown as what is."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look: `at_s` is the clock's, `cpu_load` from 0 to 1 over all cores."""

    at_s: float
    gpus: tuple[Gpu, ...]
    cpu_load: float
    ram_used_bytes: int
    ram_total_bytes: int


def latest(gpus: Sequence[Gpu], samples: Sequence[Sample]) -> tuple[Gpu, ...]:
    """These GPUs as the newest sample has seen them, each as it was where that sample lacks it: those that a
    profile describes, or that a driver is silent about. What the engine cannot use stays so."""
    seen = samples[-1].gpus if samples else ()
    return tuple(next((_merged(gpu, new) for new in seen if _is_same(gpu, new)), gpu) for gpu in gpus)


def _is_same(gpu: Gpu, new: Gpu) -> bool:
    """One that is lost may have no UUID any more."""
    is_slot = (gpu.index, gpu.is_slice) == (new.index, new.is_slice)
    return gpu.uuid == new.uuid or (is_slot and not (gpu.uuid and new.uuid))


def _merged(gpu: Gpu, new: Gpu) -> Gpu:
    is_unused = gpu.state == "unused" and new.state == "ok"
    return replace(new, state=gpu.state, problem=gpu.problem) if is_unused else new


class Monitor:
    """Samples in a thread of its own. `samples` starts it, and it ends by itself when nobody looks."""

    def __init__(self, *, every_s: float = EVERY_S, unwatched_s: float = UNWATCHED_S) -> None:
        self._every_s = every_s
        self._unwatched_s = unwatched_s
        self._samples: deque[Sample] = deque(maxlen=N_KEPT)
        self._looked_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def samples(self) -> tuple[Sample, ...]:
        """What was seen in the last five minutes, the newest last; empty at the first look."""
        oldest_s = time.time() - N_KEPT * EVERY_S
        with self._lock:
            self._looked_s = time.monotonic()
            if self._thread is None or not self._thread.is_alive():
                self._stop.clear()
                self._thread = threading.Thread(target=self._watch, name="hardware monitor", daemon=True)
                self._thread.start()
            return tuple(sample for sample in self._samples if sample.at_s >= oldest_s)

    def close(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        probe = _Probe(self._every_s)
        psutil.cpu_percent()  # the first call only starts the measure
        try:
            while not self._stop.wait(self._every_s):
                with self._lock:
                    if time.monotonic() - self._looked_s > self._unwatched_s:
                        self._thread = None
                        return
                sample = self._look(probe)
                with self._lock:
                    self._samples.append(sample)
        finally:
            probe.close()

    def _look(self, probe: _Probe) -> Sample:
        ram = host.read_ram()
        answer = probe.newest()
        gpus = driver.read_answer(answer, ram).gpus if answer else ()
        used = ram.total_bytes - ram.available_bytes
        return Sample(time.time(), gpus, psutil.cpu_percent() / 100, used, ram.total_bytes)


class _Probe:
    """The driver's newest answer. A probe that dies is started again once; one without a driver is not."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._n_left = 2
        self._answer: dict[str, object] | None = None
        self._answered_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def newest(self) -> dict[str, object] | None:
        """None where there is no driver, or where it has been silent for too long."""
        if self._process and self._process.poll() is not None:
            self._start()
        is_stale = time.monotonic() - self._answered_s > max(STALE_S, 5 * self._every_s)
        return None if is_stale else self._answer

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()

    def _start(self) -> None:
        self._process = None
        if not self._n_left:
            return
        self._n_left -= 1
        try:
            self._process = driver.start_probe(
                "--every",
                str(self._every_s),
                library_folder=driver.wsl_library(),
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            _log.debug("no probe: %s", error)
            return
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                try:
                    answer = json.loads(line)
                except ValueError:
                    continue  # a library prints what it likes
                self._answer, self._answered_s = answer, time.monotonic()
                if "error" in answer and answer["error"]["code"] in ("no_module", absence.LIBRARY_NOT_FOUND):
                    self._n_left = 0
                    process.kill()
                    break
        process.wait()
        if process.stdin:
            process.stdin.close()
