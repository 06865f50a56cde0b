"""`nemolocal hardware`: what this machine is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemolocal.cli import options, output
from nemolocal.config import Config

if TYPE_CHECKING:
    from nemolocal.hardware import Gpu, Hardware


@options.takes_settings("hardware", "models_dir", "log_level")
def hardware(config: Config, as_json: options.AsJson = False) -> None:
    """Show the GPUs, the CPU and the memory that models can use."""
    from nemolocal.hardware import survey

    found = survey(config)
    if as_json:
        output.print_json(found)
    else:
        _show(found)


def _show(found: Hardware) -> None:
    print(f"Mode  {found.mode.upper()}: {found.reason}")
    if found.gpus:
        rows = output.table(
            "GPU", "Name", "Free", "Total", "Compute", "Driver", "UUID", "State", right=["Free", "Total"]
        )
        for gpu in found.gpus:
            rows.add_row(*_cells(gpu))
        output.console().print(rows)
    cpu, ram = found.cpu, found.ram
    cores = f"{cpu.physical_cores} core{'s' if cpu.physical_cores > 1 else ''}"
    print(f"CPU   {', '.join([cpu.name, cores, *cpu.features])}")
    print(f"RAM   {output.gib(ram.available_bytes)} of {output.gib(ram.total_bytes)} available")
    print(f"Disk  {output.size(found.disk_free_bytes)} free for models")


def _cells(gpu: Gpu) -> list[str]:
    is_known = gpu.state == "ok"
    return [
        str(gpu.index),
        gpu.name,
        output.gib(gpu.free_bytes) if is_known else "–",
        output.gib(gpu.total_bytes) if is_known else "–",
        gpu.compute_capability,
        gpu.driver,
        gpu.uuid,
        gpu.state if not gpu.shares_ram else "ok, uses RAM",
    ]
