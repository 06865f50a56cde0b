"""What both the models and the hardware are drawn with, as HTML: bars, figures, buttons. Pure; every text
from elsewhere is escaped here, and nowhere is any taken for HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from nemolocal.models.plans import Bar
from nemolocal.units import gib

GAP_S: Final = 10.0
"""Two looks that are further apart than this are not joined by a line, nor is one this old the present."""
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
COLOURS = {"green": "Fits", "amber": "With limits", "red": "Does not fit"}


def text(value: object) -> str:
    """One line of text, safe inside an element or an attribute."""
    return escape(" ".join(str(value).split()), quote=True)


def button(label: str, act: str, ref: str, *, kind: str = "", of: str = "") -> str:
    """A button that the page hands back as (act, ref); `of` says to those who do not see the page what it
    acts on."""
    spoken = f' aria-label="{text(f"{label} {of}")}"' if of else ""
    return (
        f'<button type="button" class="act {text(kind)}" data-act="{text(act)}" data-ref="{text(ref)}"'
        f"{spoken}>{text(label)}</button>"
    )


def dot(grade: str) -> str:
    """How well something runs, as a colour and, for those who do not see it, in words."""
    if grade not in COLOURS:
        return '<span class="dot" aria-hidden="true"></span>'
    return f'<span class="dot {grade}" role="img" aria-label="{COLOURS[grade]}"></span>'


def progress(share: float, label: str) -> str:
    percent = round(100 * min(max(share, 0.0), 1.0), 1)
    return (
        f'<span class="progress" role="progressbar" aria-label="{text(label)}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{percent:g}"><i style="width:{percent:g}%"></i></span>'
    )


def bars(drawn: Iterable[Bar]) -> str:
    """A bar for each device, with what each of its parts is and takes."""
    rows = []
    for bar in drawn:
        layers = f" · {bar.n_layers} layer{'s' if bar.n_layers > 1 else ''}" if bar.n_layers else ""
        parts = [Part(what, n_bytes, KINDS.get(what, "others")) for what, n_bytes in bar.parts]
        rows.append(device(f"{bar.name}{layers}", parts, bar.total_bytes))
    return f'<div class="bars">{"".join(rows)}</div>'


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: what it is, how much, and the class that colours it."""

    what: str
    n_bytes: int
    look: str


def device(name: str, parts: Sequence[Part], total_bytes: int) -> str:
    """One device's memory as a bar, and the same in words below it."""
    drawn = "".join(
        f'<i class="{part.look}" style="width:{100 * part.n_bytes / max(total_bytes, 1):.2f}%"></i>'
        for part in parts
    )
    told = "".join(
        f'<li><i class="{part.look}"></i>{text(part.what)} <b>{gib(part.n_bytes)}</b></li>' for part in parts
    )
    return (
        f'<div class="device"><span class="device-name">{text(name)}</span>'
        f'<span class="device-size">{gib(total_bytes)}</span>'
        f'<span class="memory" aria-hidden="true">{drawn}</span><ul class="shares">{told}</ul></div>'
    )


def plot(points: Sequence[tuple[float, float]], *, name: str, now_s: float, over_s: float) -> str:
    """A small plot of (when, value from 0 to 1) over the last `over_s` seconds, up to now. Where nobody
    looked for a while there is a gap, and a value that is not of the last seconds is not told as the present
    one."""
    lines: list[list[str]] = []
    before_s = -1e9
    for at_s, value in points:
        if at_s < now_s - over_s:
            continue
        if at_s - before_s > GAP_S:
            lines.append([])
        x, y = 300 * (1 - (now_s - at_s) / over_s), 58 - 56 * min(max(value, 0.0), 1.0)
        lines[-1].append(f"{x:.1f},{y:.1f}")
        before_s = at_s
    now = f"{points[-1][1]:.0%}" if points and now_s - points[-1][0] <= GAP_S else "not known"
    drawn = "".join(f'<polyline points="{" ".join(line)}"/>' for line in lines)
    began = f"{over_s / 60:.0f} min ago"
    return (
        f"<figure><figcaption><span>{text(name)}</span><b>{now}</b></figcaption>"
        f'<svg class="plot" viewBox="0 0 300 60" preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="M0 2H300M0 30H300"/>{drawn}</svg>'
        f'<div class="axis" aria-hidden="true"><span>{began}</span><span>now</span></div></figure>'
    )
