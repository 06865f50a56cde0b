"""What both the models and the hardware are drawn with, as HTML: bars, figures, buttons. Pure; every text
from elsewhere is escaped here, and nowhere is any taken for HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from nemolocal.models.plans import Bar

KINDS = {
    "weights": "weights",
    "KV cache": "kv",
    "state": "state",
    "buffers": "buffers",
    "overhead": "overhead",
    "margin": "margin",
    "other programs": "others",
    "free": "free",
}
"""The parts of a bar, in their order, and the class that colours each."""


def text(value: object) -> str:
    """One line of text, safe inside an element or an attribute."""
    return escape(" ".join(str(value).split()), quote=True)


def size(n_bytes: float) -> str:
    """A file's size in decimal units, as file managers give it."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"


def gib(n_bytes: float) -> str:
    """Memory, in the unit that GPUs are sold in."""
    return f"{n_bytes / (1 << 30):.1f} GiB"


def span_of_time(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def button(label: str, act: str, ref: str, *, kind: str = "") -> str:
    """A button that the page hands back as (act, ref)."""
    return (
        f'<button type="button" class="act {text(kind)}" data-act="{text(act)}" data-ref="{text(ref)}">'
        f"{text(label)}</button>"
    )


def progress(share: float, label: str) -> str:
    percent = round(100 * min(max(share, 0.0), 1.0), 1)
    return (
        f'<span class="progress" role="progressbar" aria-label="{text(label)}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{percent:g}"><i style="width:{percent:g}%"></i></span>'
    )


def bars(drawn: Iterable[Bar]) -> str:
    """A bar for each device, and a legend of the parts that occur."""
    rows, seen = [], set()
    for bar in drawn:
        parts = []
        for what, n_bytes in bar.parts:
            seen.add(what)
            percent = 100 * n_bytes / max(bar.total_bytes, 1)
            parts.append(
                f'<i class="{KINDS[what]}" style="width:{percent:.2f}%" title="{what} {gib(n_bytes)}"></i>'
            )
        spoken = ", ".join(f"{what} {gib(n_bytes)}" for what, n_bytes in bar.parts)
        rows.append(
            f'<div class="device"><span class="device-name">{text(bar.name)}</span>'
            f'<span class="device-size">{gib(bar.total_bytes)}</span>'
            f'<span class="memory" role="img" aria-label="{text(spoken)}">{"".join(parts)}</span></div>'
        )
    legend = "".join(f'<span><i class="{KINDS[what]}"></i>{what}</span>' for what in KINDS if what in seen)
    return f'<div class="bars">{"".join(rows)}<div class="legend">{legend}</div></div>'


def line(points: Iterable[float], *, name: str) -> str:
    """A small plot of values from 0 to 1, the newest at the right."""
    values = [min(max(value, 0.0), 1.0) for value in points]
    n = max(len(values) - 1, 1)
    path = " ".join(f"{300 * i / n:.1f},{58 - 56 * value:.1f}" for i, value in enumerate(values))
    now = f"{values[-1]:.0%} now" if values else "nothing yet"
    return (
        f'<svg class="plot" viewBox="0 0 300 60" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(name)}: {now}"><polyline points="{path}"/></svg>'
    )
