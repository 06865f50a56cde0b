"""A plan's devices in the terminal: a bar for each, and a table of their parts, which is the legend.

Each part has a character of its own, so that it can be told without colours too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from nemolocal import units
from nemolocal.cli import output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nemolocal.hardware import Hardware
    from nemolocal.models.plans import Bar, Plan

STYLES: Final = {
    "weights": "green",
    "KV cache": "blue",
    "state": "cyan",
    "buffers": "yellow",
    "overhead": "magenta",
    "margin": "dim",
    "other programs": "white",
    "free": "dim",
}
"""The parts of a bar, in their order, and the colour of each."""

_MARKS: Final = ("█", "▓", "▒", "░", "▞", "-", "/", "·")
_PLAIN_MARKS: Final = ("#", "K", "S", "B", "o", "-", "/", ".")
"""For streams whose encoding has no blocks."""

_WIDTH_MOST: Final = 56
_WIDTH_LEAST: Final = 10
_NOT_OURS: Final = {"margin", "other programs", "free"}


def show(plan: Plan, hardware: Hardware, console: Console) -> None:
    """Print the bars of all devices, and what they are made of."""
    bars = plan.bars(hardware)
    labels = _labels(bars, hardware)
    marks = _marks(console)
    indent = max(map(len, labels)) + 2
    sharing = ", ".join(gpu.name for gpu in hardware.gpus if gpu.state == "ok" and gpu.shares_ram)
    for label, bar in zip(labels, bars, strict=True):
        print()
        name = bar.name if bar.device else sharing
        for line in _bar(bar, console, marks=marks, head=f"{label:{indent}}", name=name):
            console.print(line, soft_wrap=True)
    for table in _tables(labels, bars, console, marks):
        console.print(table)


def cells(parts: Sequence[int], width: int) -> list[int]:
    """How many of `width` characters each part gets: by its size, but at least one, in all exactly `width`.
    There must be no more parts than characters."""
    total = max(sum(parts), 1)
    found = [max(1, width * part // total) for part in parts]
    while (missing := width - sum(found)) != 0:
        step = 1 if missing > 0 else -1
        # The one that is furthest from its share; of those with one character none can give it away.
        i = max(
            (i for i in range(len(parts)) if step > 0 or found[i] > 1),
            key=lambda i: step * (width * parts[i] / total - found[i]),
        )
        found[i] += step
    return found


def _labels(bars: Sequence[Bar], hardware: Hardware) -> list[str]:
    labels = {gpu.uuid: f"GPU {gpu.index}" for gpu in hardware.gpus}
    slices = [gpu.uuid for gpu in hardware.gpus if gpu.is_slice]
    labels |= {uuid: f"Slice {n}" for n, uuid in enumerate(slices, 1)}
    return [labels[bar.device] if bar.device else "RAM" for bar in bars]


def _marks(console: Console) -> Mapping[str, str]:
    try:
        "".join(_MARKS).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return dict(zip(STYLES, _PLAIN_MARKS, strict=True))
    return dict(zip(STYLES, _MARKS, strict=True))


def _bar(bar: Bar, console: Console, *, marks: Mapping[str, str], head: str, name: str) -> Iterator[Text]:
    """The GPU's name where there is one, then the bar."""
    from rich.text import Text

    used = sum(n for what, n in bar.parts if what not in _NOT_OURS)
    words = f"  {used / units.GIB:.1f} of {units.gib(bar.total_bytes)} for it"
    width = min(max(console.width - len(head) - len(words), _WIDTH_LEAST), _WIDTH_MOST)
    drawn = Text()
    for (what, _), n in zip(bar.parts, cells([n for _, n in bar.parts], width), strict=True):
        drawn.append(marks[what] * n, STYLES[what])
    if name:
        yield Text(f"{head}{name}")
        head = " " * len(head)
    yield Text.assemble(head, drawn, words)


def _tables(
    labels: Sequence[str], bars: Sequence[Bar], console: Console, marks: Mapping[str, str]
) -> Iterator[Table]:
    """GiB of each part on each device, in as many tables as the window's width asks for."""
    first = max(map(len, STYLES)) + 6
    n_columns = max(1, (console.width - first) // (max(map(len, labels)) + 3))
    for at in range(0, len(bars), n_columns):
        yield _table(labels[at : at + n_columns], bars[at : at + n_columns], marks)


def _table(labels: Sequence[str], bars: Sequence[Bar], marks: Mapping[str, str]) -> Table:
    from rich.text import Text

    table = output.table("GiB", *labels, right=labels, whole=labels)
    found = [dict(bar.parts) for bar in bars]
    for what in STYLES:
        if any(what in parts for parts in found):
            name = Text.assemble((marks[what], STYLES[what]), f" {what}")
            table.add_row(name, *(_gib(parts.get(what, 0)) for parts in found))
    table.add_row("  in all", *(f"{bar.total_bytes / units.GIB:.1f}" for bar in bars))
    table.add_row("  layers", *(str(bar.n_layers or "") for bar in bars))
    return table


def _gib(n_bytes: int) -> str:
    """One decimal; what is there but would read as nothing keeps a second one."""
    gib = n_bytes / units.GIB
    return "" if not n_bytes else f"{gib:.1f}" if gib >= 0.05 else "<0.1"
