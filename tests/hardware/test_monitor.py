"""Samples of the last minutes, over a fake driver."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import pytest

from nemolocal import hardware
from nemolocal.hardware import monitor as watching
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


def seen(*gpus: hardware.Gpu) -> tuple[hardware.Sample, ...]:
    return (hardware.Sample(0, (), 0, 0, 1), hardware.Sample(2, gpus, 0, 0, 1))


def test_gpus_are_shown_as_the_newest_sample_has_them() -> None:
    old = hardware.Gpu(0, "GPU-a", "RTX 4090", "8.9", 24 * GIB, 20 * GIB)
    hidden = hardware.Gpu(1, "GPU-b", "RTX 3090", "8.6", 24 * GIB, 20 * GIB)
    new = replace(old, free_bytes=3 * GIB, load=0.9)
    assert hardware.latest([old], ()) == (old,)
    assert hardware.latest([old], seen(hidden, new)) == (new,)
    assert hardware.latest([old], seen()) == (old,)
    assert hardware.latest([replace(old, uuid="GPU-profile-0")], seen(new))[0].free_bytes == 20 * GIB
    lost = hardware.Gpu(0, "", "GPU 0", "", 0, 0, state="lost", problem="gone")
    assert hardware.latest([old, hidden], seen(lost)) == (lost, hidden)
    part = replace(old, uuid="MIG-a", is_slice=True)
    assert hardware.latest([part], seen(lost)) == (part,)


def test_what_the_engine_cannot_use_stays_so() -> None:
    unused = hardware.Gpu(
        0, "GPU-a", "RTX 4090", "8.9", 24 * GIB, 20 * GIB, state="unused", problem="no CUDA"
    )
    ok = replace(unused, state="ok", problem="", free_bytes=GIB)
    assert hardware.latest([unused], seen(ok)) == (replace(unused, free_bytes=GIB),)
    lost = replace(unused, state="lost", problem="gone", total_bytes=0, free_bytes=0)
    assert hardware.latest([unused], seen(lost)) == (lost,)


def test_old_samples_are_not_the_last_minutes(nvml: Install) -> None:
    nvml(init=12)
    monitor = hardware.Monitor(every_s=0.05)
    until(lambda: len(monitor.samples()) > 1)
    monitor.close()
    stale = replace(monitor._samples[0], at_s=time.time() - 3600)
    monitor._samples.appendleft(stale)
    assert stale not in monitor.samples()
    assert len(monitor.samples()) > 1
    monitor.close()


@pytest.mark.parametrize(("every_s", "age_s", "is_shown"), [(2, 9, True), (2, 11, False), (4, 19, True)])
def test_what_the_driver_said_long_ago_is_not_shown_as_what_is(
    nvml: Install, monkeypatch: pytest.MonkeyPatch, every_s: float, age_s: float, is_shown: bool
) -> None:
    monkeypatch.setattr(watching._Probe, "_start", lambda self: None)
    probe = watching._Probe(every_s)
    probe._answer, probe._answered_s = {"gpus": []}, time.monotonic() - age_s
    assert (probe.newest() is not None) == is_shown


def probes() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "probe.py" in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_a_probe_that_dies_is_started_once_more(nvml: Install) -> None:
    nvml(gpus=[gpu()])
    monitor = hardware.Monitor(every_s=0.05)
    until(lambda: bool(monitor.samples()) and bool(monitor.samples()[-1].gpus))
    (first,) = probes()
    first.kill()
    until(lambda: bool(probes()) and probes() != [first])
    (second,) = probes()
    second.kill()
    n = len(monitor.samples())
    until(lambda: len(monitor.samples()) > n + 3)
    assert probes() == []  # and the rest is still watched
    monitor.close()
    assert psutil.STATUS_ZOMBIE not in {each.status() for each in psutil.Process().children()}


def test_the_probe_ends_with_a_parent_that_is_killed(nvml: Install) -> None:
    nvml(gpus=[gpu()])
    code = """
import time
from nemolocal.hardware import Monitor
monitor = Monitor(every_s=0.05)
while not monitor.samples():
    time.sleep(0.02)
print(flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        parent.stdout.readline()
        (probe,) = psutil.Process(parent.pid).children()
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        probe.wait(10)
