"""The programs that hold memory of a GPU, by names that a person knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import PurePath

import psutil

from nemolocal.hardware.parts import Holder

OURS = "NemoLocal"
UNNAMED = "unknown program"
N_PARENTS = 2  # an engine's process is the server's child, on Windows perhaps with a launcher between


def name_all(found: Iterable[Sequence[int]]) -> tuple[Holder, ...]:
    """From pairs of process number and bytes, the largest first. A program that has ended meanwhile is left
    out."""
    holders = []
    for pid, n_bytes in found:
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            holders.append(Holder(pid, _name(psutil.Process(pid)), n_bytes))
    return tuple(sorted(holders, key=lambda holder: (-holder.used_bytes, holder.pid)))


def _name(process: psutil.Process) -> str:
    """Python's programs are told apart by their script."""
    try:
        name = process.name()
    except psutil.AccessDenied:
        return UNNAMED
    words = _words(process)
    if not name.lower().startswith("python"):
        return OURS if _is_ours(words) else name
    with contextlib.suppress(psutil.Error):
        if any(_is_ours(_words(each)) for each in (process, *process.parents()[:N_PARENTS])):
            return OURS
    script = _script(words)
    return f"{name} ({script})" if script else name


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_ours(words: Sequence[str]) -> bool:
    """Whether a command line starts NemoLocal: `nemolocal`, `python …/nemolocal`, `python -m nemolocal…`."""
    program = _script(words) if len(words) > 1 else ""
    starts = {PurePath(words[0]).stem, program.removesuffix(".exe").split(".")[0]} if words else set()
    return "nemolocal" in starts


def _script(words: Sequence[str]) -> str:
    """What an interpreter runs: the name of a file or module, "" for code on its command line."""
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] in ("-W", "-X") else 1]
    if rest and rest[0] == "-m":
        return rest[1] if len(rest) > 1 else ""
    return PurePath(rest[0]).name if rest and rest[0] != "-c" else ""
