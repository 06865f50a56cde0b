"""`nemolocal hardware`: what this machine is made of."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemolocal import units
from nemolocal.cli import options, output
from nemolocal.config import Config
from nemolocal.errors import NemoLocalError

if TYPE_CHECKING:
    from nemolocal.hardware import Gpu, Hardware

N_HOLDERS_MOST = 6
N_COLUMNS_TITLE = 8


@options.takes_settings("hardware", "models_dir", "log_level")
def hardware(config: Config, as_json: options.AsJson = False) -> None:
    """Show the GPUs, the CPU and the memory that models can use."""
    from nemolocal.hardware import survey

    found = survey(config)
    if as_json:
        output.print_json(found)
    else:
        _show(found)


def tell_warnings(config: Config) -> None:
    """Say in the terminal what keeps a GPU from being used; looked up beside the start, which goes on."""

    def tell() -> None:
        from nemolocal.hardware import survey

        with contextlib.suppress(NemoLocalError):  # met again by whatever needs the hardware
            for warning in survey(config).warnings:
                output.note(f"warning: {warning}")

    threading.Thread(target=tell, daemon=True).start()


def _show(found: Hardware) -> None:
    _tell("Mode", f"{found.mode.upper()}: {found.reason}")
    for gpu in found.gpus:
        name = "Slice" if gpu.is_slice else f"GPU {gpu.index}"
        for at, text in enumerate(_about(gpu, told=found.reason)):
            _tell("" if at else name, text)
    for driver in dict.fromkeys(_driver(gpu) for gpu in found.gpus if gpu.driver):
        _tell("Driver", driver)
    if found.engine:
        _tell("Engine", found.engine)
    cpu, ram = found.cpu, found.ram
    cores = f"{cpu.physical_cores} core{'s' if cpu.physical_cores > 1 else ''}"
    nodes = [f"{cpu.n_numa_nodes} NUMA nodes"] if cpu.n_numa_nodes > 1 else []
    _tell("CPU", ", ".join([cpu.name, cores, *nodes, *cpu.features]))
    _tell("RAM", f"{units.gib(ram.available_bytes)} of {units.gib(ram.total_bytes)} available")
    _tell("Disk", f"{units.size(found.disk_free_bytes)} free for models")


def _tell(title: str, text: str) -> None:
    """A line under a title; on a terminal it breaks between words."""
    indent = " " * N_COLUMNS_TITLE
    lines = [text]
    if sys.stdout.isatty():
        width = max(output.console().width - N_COLUMNS_TITLE, 20)
        lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    print(f"{title:{N_COLUMNS_TITLE}}" + f"\n{indent}".join(lines))


def _about(gpu: Gpu, *, told: str) -> Iterator[str]:
    """A GPU in a few lines: its memory, what it is and does, its name for other programs, who uses it, and
    what is wrong with it where that is not `told` already."""
    memory = f"{units.gib(gpu.free_bytes)} of {units.gib(gpu.total_bytes)} free"
    shared = ", which are the RAM's" if gpu.shares_ram else ""
    state = "" if gpu.state == "ok" else f" ({gpu.state})"
    yield f"{gpu.name}{state}: {memory}{shared}" if gpu.is_read else f"{gpu.name}: {gpu.state}"
    facts = [
        f"compute capability {gpu.compute_capability}" if gpu.compute_capability else "",
        f"{gpu.n_links} NVLinks" if gpu.n_links else "",
        f"{gpu.load:.0%} busy" if gpu.load is not None else "",
        f"{gpu.temperature_c} °C" if gpu.temperature_c is not None else "",
        f"{gpu.power_w:.0f} W" if gpu.power_w is not None else "",
    ]
    yield ", ".join(filter(None, [*facts, gpu.uuid]))
    if gpu.problem not in told:
        yield gpu.problem
    if gpu.holders:
        yield f"in its memory: {_holders(gpu)}"


def _driver(gpu: Gpu) -> str:
    return f"{gpu.driver}, for CUDA up to {gpu.driver_cuda}" if gpu.driver_cuda else gpu.driver


def _holders(gpu: Gpu) -> str:
    """The programs, the largest first; on Windows, which counts no bytes, every window is one."""
    shown = gpu.holders[:N_HOLDERS_MOST]
    sizes = [f" {units.gib(holder.used_bytes)}" if holder.used_bytes else "" for holder in shown]
    named = [f"{h.name}{size} (process {h.pid})" for h, size in zip(shown, sizes, strict=True)]
    n_more = len(gpu.holders) - len(shown)
    return ", ".join(named) + (f" and {n_more} more" if n_more else "")
