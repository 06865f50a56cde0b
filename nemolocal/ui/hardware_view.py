"""How the Hardware tab looks. Pure HTML from values; must not know gradio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from nemolocal.hardware import Gpu, Hardware, Holder, Sample, latest
from nemolocal.ui.drawing import GAP_S, Part, device, plot, text
from nemolocal.units import gib, size

OVER_S: Final = 300.0
"""The last five minutes are drawn."""
OURS: Final = "NemoLocal"
STATES: Final = {
    "unused": "not used",
    "lost": "lost",
    "mig": "divided",
    "error": "not read",
}


def machine(
    found: Hardware,
    samples: Sequence[Sample],
    *,
    now_s: float,
    is_described: bool = False,
    ours: Mapping[str, int] | None = None,
) -> str:
    """The GPUs with who holds their memory, then CPU and RAM, as they are now, with the last minutes. What
    `samples` saw counts while it is fresh; `is_described` says that a profile speaks, not this machine.
    `ours` is what loaded models hold, in bytes by a GPU's UUID or "" for the RAM, where no driver tells."""
    held = ours or {}
    fresh = [sample for sample in samples if now_s - sample.at_s <= GAP_S]
    warnings = "".join(f'<p class="warning">{text(each)}</p>' for each in found.warnings)
    reason = "" if found.reason in found.warnings else f'<p class="quiet">{text(found.reason)}</p>'
    if is_described:
        reason += '<p class="quiet">Its figures are not live.</p>'
    gpus = latest(found.gpus, fresh)
    cards = "".join(_gpu(gpu, samples, now_s, held.get(gpu.uuid, 0)) for gpu in gpus)
    cards += _host(found, samples, now_s, held.get("", 0))
    return f'<div class="machine">{warnings}{reason}<div class="cards">{cards}</div></div>'


def _gpu(gpu: Gpu, samples: Sequence[Sample], now_s: float, our_bytes: int) -> str:
    head = f"<h3>{text(f'GPU {gpu.index}: {gpu.name}')}{_state(gpu)}</h3>"
    problem = f'<p class="problem">{text(gpu.problem)}</p>' if gpu.problem else ""
    if not gpu.is_read:
        return f'<section class="card lost">{head}{problem}</section>'
    facts = [
        f"compute capability {gpu.compute_capability}" if gpu.compute_capability else "",
        f"driver {gpu.driver}" if gpu.driver else "",
        f"{gpu.n_links} NVLinks" if gpu.n_links else "",
        "a MIG slice" if gpu.is_slice else "",
        "uses the RAM" if gpu.shares_ram else "",
    ]
    readings = [
        ("Load", f"{gpu.load:.0%}" if gpu.load is not None else ""),
        ("Temperature", f"{gpu.temperature_c} °C" if gpu.temperature_c is not None else ""),
        ("Power", f"{gpu.power_w:.0f} W" if gpu.power_w is not None else ""),
    ]
    told = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in readings if value)
    return (
        f'<section class="card">{head}{problem}<div class="bars">{_owners(gpu, our_bytes)}</div>'
        f'<dl class="readings">{told}</dl>{_holders(gpu.holders)}{_gpu_plots(gpu, samples, now_s)}'
        f'<p class="quiet">{text(" · ".join(fact for fact in facts if fact))}</p></section>'
    )


def _state(gpu: Gpu) -> str:
    if gpu.state == "ok":
        return ""
    return f'<span class="gpu-state">{text(STATES.get(gpu.state, gpu.state))}</span>'


def _owners(gpu: Gpu, our_bytes: int) -> str:
    """The GPU's memory by who holds it, as the driver tells, else by what our models take."""
    ours = sum(h.used_bytes for h in gpu.holders if h.name == OURS) or our_bytes
    return _memory("Memory", ours, free_bytes=gpu.free_bytes, total_bytes=gpu.total_bytes)


def _memory(name: str, our_bytes: int, *, free_bytes: int, total_bytes: int) -> str:
    """A bar in the colours and words of plans. What the driver, the screen and the system take counts as
    other programs' there, too."""
    ours = min(our_bytes, total_bytes - free_bytes)
    parts = [
        Part(OURS, ours, "weights"),
        Part("other programs", total_bytes - free_bytes - ours, "others"),
        Part("free", free_bytes, "free"),
    ]
    return device(name, [part for part in parts if part.n_bytes], total_bytes)


def _holders(holders: Sequence[Holder]) -> str:
    if not holders:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{text(each.name)}</th><td class="number">{each.pid}</td>'
        f'<td class="number">{gib(each.used_bytes) if each.used_bytes else "not told"}</td></tr>'
        for each in holders
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("Program", "Process", "Memory"))
    return (
        f'<table class="files"><caption>In its memory</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _gpu_plots(gpu: Gpu, samples: Sequence[Sample], now_s: float) -> str:
    seen = [
        (sample.at_s, each)
        for sample in samples
        for each in sample.gpus
        if each.uuid == gpu.uuid and each.is_read
    ]
    held = [(at_s, 1 - each.free_bytes / max(each.total_bytes, 1)) for at_s, each in seen]
    loads = [(at_s, each.load) for at_s, each in seen if each.load is not None]
    return _plots({"Memory": held, "Load": loads}, now_s)


def _host(found: Hardware, samples: Sequence[Sample], now_s: float, our_bytes: int) -> str:
    cpu, total, free = found.cpu, found.ram.total_bytes, found.ram.available_bytes
    if samples and now_s - samples[-1].at_s <= GAP_S:
        total = samples[-1].ram_total_bytes
        free = total - samples[-1].ram_used_bytes
    facts = [f"{cpu.physical_cores} cores", *cpu.features]
    if cpu.n_numa_nodes > 1:
        facts.insert(1, f"{cpu.n_numa_nodes} NUMA nodes")
    if found.disk_free_bytes:
        facts.append(f"{size(found.disk_free_bytes)} free on the disk of the models")
    ram = [(sample.at_s, sample.ram_used_bytes / max(sample.ram_total_bytes, 1)) for sample in samples]
    loads = [(sample.at_s, sample.cpu_load) for sample in samples]
    return (
        f'<section class="card"><h3>{text(cpu.name)}</h3>'
        f'<div class="bars">{_memory("RAM", our_bytes, free_bytes=free, total_bytes=total)}</div>'
        f"{_plots({'RAM': ram, 'Load': loads}, now_s)}"
        f'<p class="quiet">{text(" · ".join(facts))}</p></section>'
    )


def _plots(series: dict[str, list[tuple[float, float]]], now_s: float) -> str:
    drawn = "".join(
        plot(points, name=name, now_s=now_s, over_s=OVER_S) for name, points in series.items() if points
    )
    return f'<div class="plots">{drawn}</div>' if drawn else ""
