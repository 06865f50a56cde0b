"""Samples of the last minutes, over a fake driver."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import psutil

from nemolocal import hardware
from tests.hardware.conftest import GIB, Install, gpu


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_monitor_samples_while_somebody_looks(nvml: Install) -> None:
    file = nvml(gpus=[gpu(load=50, memory=[[24 * GIB, 20 * GIB], [24 * GIB, 10 * GIB]])])
    monitor = hardware.Monitor(every_s=0.05, unwatched_s=1)
    assert monitor.samples() == ()
    until(lambda: any(s.gpus and s.gpus[0].free_bytes == 10 * GIB for s in monitor.samples()))
    newest = monitor.samples()[-1]
    assert newest.gpus[0].load == 0.5
    assert 0 <= newest.cpu_load <= 1
    assert 0 < newest.ram_used_bytes <= newest.ram_total_bytes
    thread = monitor._thread
    assert thread
    thread.join(timeout=10)  # nobody looks any more
    assert not thread.is_alive()
    assert not [p for p in psutil.Process().children() if "probe.py" in " ".join(p.cmdline())]
    file.write_text(json.dumps({"gpus": [gpu(memory=[15])]}))
    monitor.samples()  # and it starts again
    until(lambda: monitor.samples()[-1].gpus[0].state == "lost")
    assert monitor.samples()[-1].gpus[0].free_bytes == 0
    monitor.close()


def test_monitor_without_a_driver_watches_the_rest(nvml: Install) -> None:
    nvml(init=12)
    monitor = hardware.Monitor(every_s=0.05)
    until(lambda: len(monitor.samples()) > 3)
    assert monitor.samples()[-1].gpus == ()
    monitor.close()
