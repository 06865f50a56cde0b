"""What loads on this machine have taken, and how fast models wrote: kept in the database, and found again as
corrections to plans.

A measurement counts for the version of the library and of the driver that it was made with, and for the very
file: its path, size and time of change. Knows neither engines nor how anything is measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sqlite3
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from nemolocal import database
from nemolocal.config import Config
from nemolocal.errors import DatabaseError
from nemolocal.hardware import Hardware
from nemolocal.models.learned import Learned
from nemolocal.models.memory import CUDA_CONTEXT_BYTES, Load

log = logging.getLogger(__name__)

Kind = Literal["weights", "kv", "state", "compute", "overhead"]

N_COUNTED: Final = 5
"""So many of the newest measurements count: the most that was taken of them, the middle of the speeds."""
N_KEPT: Final = 20
"""Loads of one file that stay in the database."""
RATIO_LEAST: Final = 0.8
RATIO_MOST: Final = 2.0
"""Between these a correction of the buffers stays, whatever was measured."""
OVERHEAD_DOUBTED_BYTES: Final = 512 << 20
"""What a GPU holds so much beyond what is known counts only once it was measured again: where the driver
names no process, what another program took meanwhile is among it."""
OVERHEAD_ALIKE_BYTES: Final = 64 << 20

_RAM: Final = ""


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a load was planned to take and took of one kind on one device, a GPU's UUID or "" for the RAM.
    `used_bytes` is None where that could not be told."""

    device: str
    kind: Kind
    planned_bytes: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class LoadTaken:
    """One load: `load` are its parameters, and `compute_ratio` what its buffers took over what the
    uncorrected arithmetic had planned for them, None where that says nothing about other loads."""

    file: str
    load: Mapping[str, Any]
    is_on_gpus: bool
    bytes: tuple[Bytes, ...]
    compute_ratio: float | None


def keep_load(taken: LoadTaken, config: Config, hardware: Hardware) -> None:
    """Store what a load took; of one file the oldest are dropped. Raises DatabaseError, and OSError where
    the file is gone."""
    status = Path(taken.file).stat()
    with database.session(config) as connection:
        cursor = connection.execute(
            "INSERT INTO loads (at_s, file, size_bytes, mtime_ns, library, driver, load_json, is_on_gpus,"
            " compute_ratio) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                time.time(),
                taken.file,
                status.st_size,
                status.st_mtime_ns,
                library_version(),
                _driver(hardware),
                json.dumps(taken.load),
                taken.is_on_gpus,
                taken.compute_ratio,
            ),
        )
        connection.executemany(
            "INSERT INTO load_bytes VALUES (?, ?, ?, ?, ?)",
            [(cursor.lastrowid, x.device, x.kind, x.planned_bytes, x.used_bytes) for x in taken.bytes],
        )
        connection.execute(
            "DELETE FROM loads WHERE file = ? AND id NOT IN"
            " (SELECT id FROM loads WHERE file = ? ORDER BY id DESC LIMIT ?)",
            (taken.file, taken.file, N_KEPT),
        )


def keep_speed(placed: tuple[str, str], tokens_per_s: float, config: Config, hardware: Hardware) -> None:
    """Store how fast one stream of a file was, with its layers where they were. Raises DatabaseError, and
    OSError where the file is gone."""
    file, where = placed
    status = Path(file).stat()
    with database.session(config) as connection:
        connection.execute(
            "INSERT INTO speeds (at_s, file, size_bytes, mtime_ns, library, driver, placed, tokens_per_s)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                time.time(),
                file,
                status.st_size,
                status.st_mtime_ns,
                library_version(),
                _driver(hardware),
                where,
                tokens_per_s,
            ),
        )
        connection.execute(
            "DELETE FROM speeds WHERE file = ? AND placed = ? AND id NOT IN"
            " (SELECT id FROM speeds WHERE file = ? AND placed = ? ORDER BY id DESC LIMIT ?)",
            (file, where, file, where, N_COUNTED),
        )


def learned(config: Config, hardware: Hardware) -> Learned:
    """What the newest measurements say for plans on this machine. Nothing for a machine that a profile
    describes, and nothing, with a line in the log, where the database cannot be read."""
    if config.settings.hardware or not (config.paths.data / database.FILE).exists():
        return Learned()
    now = (library_version(), _driver(hardware))
    try:
        with database.reading(config) as connection:
            return Learned(
                overhead_bytes=_overheads(connection, now),
                compute_ratios=_ratios(connection, now, is_on_gpus=hardware.mode == "gpu"),
                tokens_per_s=_speeds(connection, now),
            )
    except DatabaseError as error:
        log.warning("what earlier loads took is left out of the plan: %s", error)
        return Learned()


@cache
def library_version() -> str:
    """The version of the package that llama.cpp comes in, "" where it is not installed."""
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver(hardware: Hardware) -> str:
    """A machine has one driver for all its GPUs."""
    return next((gpu.driver for gpu in hardware.gpus if gpu.driver), "")


def _overheads(connection: sqlite3.Connection, now: tuple[str, str]) -> dict[str, int]:
    rows = connection.execute(
        "SELECT device, used_bytes FROM load_bytes JOIN loads ON loads.id = load_id"
        " WHERE library = ? AND driver = ? AND kind = 'overhead' AND used_bytes IS NOT NULL AND device != ?"
        " ORDER BY load_id DESC",
        (*now, _RAM),
    )
    newest: defaultdict[str, list[int]] = defaultdict(list)
    for device, used_bytes in rows:
        newest[device].append(used_bytes)
    found = {device: _most_credible(values[:N_COUNTED]) for device, values in newest.items()}
    return {device: n_bytes for device, n_bytes in found.items() if n_bytes is not None}


def _most_credible(values: Sequence[int]) -> int | None:
    """The most of these, without what is far beyond the usual and was measured only once."""
    limit = min(CUDA_CONTEXT_BYTES, *values) + OVERHEAD_DOUBTED_BYTES
    return max(
        (
            value
            for value in values
            if value <= limit or sum(abs(value - other) <= OVERHEAD_ALIKE_BYTES for other in values) > 1
        ),
        default=None,
    )


def _ratios(
    connection: sqlite3.Connection, now: tuple[str, str], *, is_on_gpus: bool
) -> dict[tuple[str, Load], float]:
    rows = connection.execute(
        "SELECT file, load_json, size_bytes, mtime_ns, compute_ratio FROM loads"
        " WHERE library = ? AND driver = ? AND is_on_gpus = ? AND compute_ratio IS NOT NULL ORDER BY id DESC",
        (*now, is_on_gpus),
    )
    newest = _by_file([((file, load), size, mtime, ratio) for file, load, size, mtime, ratio in rows])
    return {
        (file, load): min(max(max(values[:N_COUNTED]), RATIO_LEAST), RATIO_MOST)
        for (file, text), values in newest.items()
        if (load := _load(text))
    }


def _load(text: str) -> Load | None:
    """The load that was kept; None for one of another version of this program."""
    try:
        return Load(**json.loads(text))
    except (TypeError, ValueError):
        return None


def _speeds(connection: sqlite3.Connection, now: tuple[str, str]) -> dict[tuple[str, str], float]:
    rows = connection.execute(
        "SELECT file, placed, size_bytes, mtime_ns, tokens_per_s FROM speeds"
        " WHERE library = ? AND driver = ? ORDER BY id DESC",
        now,
    )
    newest = _by_file([((file, where), size, mtime, speed) for file, where, size, mtime, speed in rows])
    return {
        (file, where): round(statistics.median(values[:N_COUNTED]), 1)
        for (file, where), values in newest.items()
    }


def _by_file(
    rows: Sequence[tuple[tuple[str, ...], int, int, float]],
) -> dict[tuple[str, ...], list[float]]:
    """The values of each key, which begins with a file, without those of a file that is gone or changed."""
    identities: dict[str, tuple[int, int]] = {}
    found: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for key, size_bytes, mtime_ns, value in rows:
        file = key[0]
        if file not in identities:
            try:
                status = Path(file).stat()
                identities[file] = (status.st_size, status.st_mtime_ns)
            except OSError:
                identities[file] = (-1, -1)
        if identities[file] == (size_bytes, mtime_ns):
            found[key].append(value)
    return found
