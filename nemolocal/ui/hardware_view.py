"""How the Hardware tab looks. Pure HTML from values; must not know gradio."""

from __future__ import annotations

from collections.abc import Sequence

from nemolocal.hardware import Gpu, Hardware, Sample, latest
from nemolocal.ui.drawing import gib, line, progress, text


def machine(found: Hardware, samples: Sequence[Sample]) -> str:
    """The GPUs with who holds their memory, then CPU and RAM, as they are now, with the last minutes."""
    warnings = "".join(f'<p class="warning" role="alert">{text(each)}</p>' for each in found.warnings)
    cards = "".join(_gpu(gpu, samples) for gpu in latest(found.gpus, samples))
    reason = "" if found.reason in found.warnings else f'<p class="quiet">{text(found.reason)}</p>'
    return f'{warnings}{reason}<div class="cards">{cards}{_host(found, samples)}</div>'


def _gpu(gpu: Gpu, samples: Sequence[Sample]) -> str:
    name = f"GPU {gpu.index}: {gpu.name}"
    if not gpu.is_read:
        return (
            f'<section class="card lost"><h3>{text(name)}</h3>'
            f'<p class="problem">{text(gpu.state)}: {text(gpu.problem)}</p></section>'
        )
    used = gpu.total_bytes - gpu.free_bytes
    seen = [each for sample in samples for each in sample.gpus if each.uuid == gpu.uuid and each.is_read]
    facts = [
        f"{gpu.load:.0%} busy" if gpu.load is not None else "",
        f"{gpu.temperature_c} °C" if gpu.temperature_c is not None else "",
        f"{gpu.power_w:.0f} W" if gpu.power_w is not None else "",
        f"compute capability {gpu.compute_capability}" if gpu.compute_capability else "",
        f"driver {gpu.driver}" if gpu.driver else "",
        f"{gpu.n_links} NVLinks" if gpu.n_links else "",
        "uses the RAM" if gpu.shares_ram else "",
    ]
    memory = [1 - each.free_bytes / max(each.total_bytes, 1) for each in seen]
    loads = [each.load for each in seen if each.load is not None]
    holders = "".join(
        f"<tr><td>{text(h.name)}</td><td class='number'>{h.pid}</td>"
        f"<td class='number'>{gib(h.used_bytes) if h.used_bytes else '–'}</td></tr>"
        for h in gpu.holders
    )
    table = f'<table class="files"><caption>In its memory</caption>{holders}</table>' if holders else ""
    return (
        f'<section class="card"><h3>{text(name)}</h3>'
        f"<p>{gib(used)} of {gib(gpu.total_bytes)} used "
        f"{progress(used / max(gpu.total_bytes, 1), 'memory used')}</p>"
        f'<p class="quiet">{text(" · ".join(fact for fact in facts if fact))}</p>'
        f"{_plot('memory', memory)}{_plot('load', loads)}{table}</section>"
    )


def _host(found: Hardware, samples: Sequence[Sample]) -> str:
    cpu, newest = found.cpu, samples[-1] if samples else None
    total = newest.ram_total_bytes if newest else found.ram.total_bytes
    used = newest.ram_used_bytes if newest else total - found.ram.available_bytes
    facts = [f"{cpu.physical_cores} cores", *cpu.features]
    if cpu.n_numa_nodes > 1:
        facts.insert(1, f"{cpu.n_numa_nodes} NUMA nodes")
    ram = [sample.ram_used_bytes / max(sample.ram_total_bytes, 1) for sample in samples]
    return (
        f'<section class="card"><h3>{text(cpu.name)}</h3>'
        f"<p>{gib(used)} of {gib(total)} RAM used {progress(used / max(total, 1), 'RAM used')}</p>"
        f'<p class="quiet">{text(" · ".join(facts))}</p>'
        f"{_plot('RAM', ram)}{_plot('CPU', [sample.cpu_load for sample in samples])}</section>"
    )


def _plot(name: str, values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    return f"<figure><figcaption>{text(name)} {values[-1]:.0%}</figcaption>{line(values, name=name)}</figure>"
