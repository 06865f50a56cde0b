"""`nemolocal hardware`: what this machine is made of."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from nemolocal.cli import options, output
from nemolocal.config import Config
from nemolocal.errors import NemoLocalError

if TYPE_CHECKING:
    from nemolocal.hardware import Gpu, Hardware, Holder


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
    for warning in found.warnings:
        output.note(f"warning: {warning}")
    print(f"Mode  {found.mode.upper()}: {found.reason}")
    if found.gpus:
        rows = output.table(
            "GPU", "Name", "Free", "Total", "Compute", "Driver", "UUID", "State", right=["Free", "Total"]
        )
        for gpu in found.gpus:
            rows.add_row(*_cells(gpu))
        output.console().print(rows)
    for gpu in found.gpus:
        if gpu.holders:
            print(f"GPU {gpu.index} is used by {', '.join(map(_holder, gpu.holders))}")
    cpu, ram = found.cpu, found.ram
    cores = f"{cpu.physical_cores} core{'s' if cpu.physical_cores > 1 else ''}"
    nodes = [f"{cpu.n_numa_nodes} NUMA nodes"] if cpu.n_numa_nodes > 1 else []
    print(f"CPU   {', '.join([cpu.name, cores, *nodes, *cpu.features])}")
    print(f"RAM   {output.gib(ram.available_bytes)} of {output.gib(ram.total_bytes)} available")
    print(f"Disk  {output.size(found.disk_free_bytes)} free for models")


def _holder(holder: Holder) -> str:
    size = f" ({output.gib(holder.used_bytes)})" if holder.used_bytes else ""
    return f"{holder.name}, process {holder.pid}{size}"


def _cells(gpu: Gpu) -> list[str]:
    is_known = gpu.state == "ok"
    return [
        f"{gpu.index} (slice)" if gpu.is_slice else str(gpu.index),
        gpu.name,
        output.gib(gpu.free_bytes) if is_known else "–",
        output.gib(gpu.total_bytes) if is_known else "–",
        gpu.compute_capability,
        gpu.driver,
        gpu.uuid,
        gpu.state if not gpu.shares_ram else "ok, uses RAM",
    ]
