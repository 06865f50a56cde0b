"""Hardware profiles: a machine described in a TOML file, in place of detection."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemolocal.config import expand
from nemolocal.errors import ConfigError
from nemolocal.hardware import host
from nemolocal.hardware.parts import Cpu, Gpu, Hardware, Holder, Ram

_KINDS = {
    str: "text",
    int: "a whole number, 0 or more",
    list: "a list of texts",
    dict: "a list of tables",
    bool: "true or false",
}
_STATES = ("ok", "unused", "lost", "mig", "error")

_GPU_KEYS: dict[str, type] = {
    "name": str,
    "uuid": str,
    "compute_capability": str,
    "total_bytes": int,
    "free_bytes": int,
    "pci_bus_id": str,
    "driver": str,
    "driver_cuda": str,
    "state": str,
    "problem": str,
    "shares_ram": bool,
    "is_slice": bool,
    "n_links": int,
    "holders": dict,
}
_HOLDER_KEYS: dict[str, type] = {"name": str, "pid": int, "used_bytes": int}
_RAM_KEYS: dict[str, type] = {"total_bytes": int, "available_bytes": int}
_CPU_KEYS: dict[str, type] = {"name": str, "physical_cores": int, "features": list, "n_numa_nodes": int}
_DISK_KEYS: dict[str, type] = {"free_bytes": int}


def load_profile(path: str | Path, *, models_dir: Path | None = None) -> Hardware:
    """Read a profile: any number of `[[gpu]]` tables, then `[ram]`, `[cpu]` and `[disk]`.

    A GPU needs `name` and `total_bytes`; all of it is free unless `free_bytes` says less. Below it may stand
    `[[gpu.holders]]`, who holds its memory, with `name`, `pid` and `used_bytes`. Where `[ram]` or `[cpu]` is
    left out, this machine's own is taken; without `[disk]`, the free space of `models_dir`.
    Raises ConfigError for a file that cannot be read, an unknown key, and a wrong, missing or doubled value.
    """
    path = expand(path)
    tables = _read(path)
    _check_keys(tables, {"gpu", "ram", "cpu", "disk"}, str(path))
    entries = tables.get("gpu", [])
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: gpu is not a list.", hint="Write each GPU below its own [[gpu]] line.")
    gpus = _number(_gpu(entry, at, f"{path}: gpu {at}") for at, entry in enumerate(entries))
    uuids = [gpu.uuid.casefold() for gpu in gpus]
    if twice := next((gpu.uuid for gpu in gpus if uuids.count(gpu.uuid.casefold()) > 1), ""):
        raise ConfigError(f"{path} has two GPUs of the uuid {twice}.", hint="Give each its own, or none.")
    disk = _table(tables, "disk", _DISK_KEYS, path)
    is_usable = any(gpu.state == "ok" for gpu in gpus)
    problem = next((gpu.problem for gpu in gpus if gpu.problem and not is_usable), "")
    return Hardware(
        mode="gpu" if is_usable else "cpu",
        reason=problem or f"Described by {path.name}, not detected.",
        gpus=gpus,
        cpu=_cpu(_table(tables, "cpu", _CPU_KEYS, path), path),
        ram=_ram(_table(tables, "ram", _RAM_KEYS, path), path),
        disk_free_bytes=disk.get("free_bytes", host.free_disk_bytes(models_dir) if models_dir else 0),
        warnings=tuple(dict.fromkeys(gpu.problem for gpu in gpus if gpu.state == "unused")),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no hardware profile at {path}.", hint="Check the path.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read the hardware profile {path}: {error.strerror}.") from None
    except ValueError as error:  # not UTF-8, or not TOML
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not a hardware profile in TOML: {reason}.") from None


def _table(tables: dict[str, Any], name: str, keys: dict[str, type], path: Path) -> dict[str, Any]:
    return _check(tables.get(name, {}), keys, f"{path}: {name}")


def _check(table: Any, keys: dict[str, type], where: str) -> dict[str, Any]:
    """The table, its keys known and their values of the right kind."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table.")
    _check_keys(table, set(keys), where)
    for key, value in table.items():
        kind = keys[key]
        is_right = type(value) is kind
        if kind is int:
            is_right = is_right and value >= 0
        elif kind in (list, dict):
            wanted = str if kind is list else dict
            is_right = isinstance(value, list) and all(isinstance(item, wanted) for item in value)
        if not is_right:
            raise ConfigError(f"{where}: {key} = {value!r} is not {_KINDS[kind]}.")
    return table


def _check_keys(table: dict[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where} has an unknown key '{key}'; known are {', '.join(sorted(known))}.")


def _gpu(entry: Any, index: int, where: str) -> Gpu:
    table = _check(entry, _GPU_KEYS, where)
    for key in ("name", "total_bytes"):
        if not table.get(key):
            raise ConfigError(f"{where} has no {key}.")
    total = table["total_bytes"]
    free = table.get("free_bytes", total)
    if free > total:
        raise ConfigError(f"{where}: free_bytes {free} is more than total_bytes {total}.")
    state = table.get("state", "ok")
    if state not in _STATES:
        raise ConfigError(f"{where}: state {state!r} is not one of {', '.join(_STATES)}.")
    is_read = state in ("ok", "unused")
    return Gpu(
        index=index,
        uuid=table.get("uuid", f"GPU-profile-{index}"),
        name=table["name"],
        compute_capability=table.get("compute_capability", ""),
        total_bytes=total if is_read else 0,
        free_bytes=free if is_read else 0,
        state=state,
        problem=table.get("problem", "" if state == "ok" else f"Described as {state}."),
        shares_ram=table.get("shares_ram", False),
        is_slice=table.get("is_slice", False),
        n_links=table.get("n_links", 0),
        pci_bus_id=table.get("pci_bus_id", ""),
        driver=table.get("driver", ""),
        driver_cuda=table.get("driver_cuda", ""),
        holders=tuple(_holder(each, f"{where}: holder") for each in table.get("holders", ())),
    )


def _number(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """Slices have the number of the GPU before them, which they were cut off."""
    found: list[Gpu] = []
    n = 0
    for gpu in gpus:
        found.append(replace(gpu, index=max(n - 1, 0) if gpu.is_slice else n))
        n += not gpu.is_slice
    return tuple(found)


def _holder(entry: Any, where: str) -> Holder:
    table = _check(entry, _HOLDER_KEYS, where)
    if not table.get("name"):
        raise ConfigError(f"{where} has no name.")
    return Holder(pid=table.get("pid", 0), name=table["name"], used_bytes=table.get("used_bytes", 0))


def _ram(table: dict[str, Any], path: Path) -> Ram:
    if not table:
        return host.read_ram()
    total = table.get("total_bytes")
    if not total:
        raise ConfigError(f"{path}: ram has no total_bytes.")
    available = table.get("available_bytes", total)
    if available > total:
        raise ConfigError(f"{path}: ram: available_bytes {available} is more than total_bytes {total}.")
    return Ram(total_bytes=total, available_bytes=available)


def _cpu(table: dict[str, Any], path: Path) -> Cpu:
    if not table:
        return host.read_cpu()
    n_cores = table.get("physical_cores", 0)
    if n_cores < 1:
        raise ConfigError(f"{path}: cpu has no physical_cores.")
    return Cpu(
        name=table.get("name", "CPU"),
        physical_cores=n_cores,
        features=tuple(table.get("features", ())),
        n_numa_nodes=table.get("n_numa_nodes", 1),
    )
