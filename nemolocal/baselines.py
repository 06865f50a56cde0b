"""Results of earlier benches: kept by name for each model and machine, or in a file, and what a new one comes
to beside them.

Knows results as the JSON that a bench prints, never how they were measured.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemolocal.config import Config, expand
from nemolocal.errors import UsageError

SLOWER = 0.9  # a run that comes to less than this share of the baseline's is called slower
SUFFIX = ".json"
FORMAT = "nemolocal-bench-1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYS = ("streams", "prompt_tokens", "new_tokens")

Result = Mapping[str, Any]
"""What `bench` prints as JSON."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A run beside the same one of the baseline: its speed as a share of that one's, over 1 where it is
    faster; `ttft` is over 1 where the first text takes longer."""

    streams: int
    tokens_per_s_total: float
    ttft: float

    @property
    def is_slower(self) -> bool:
        return self.tokens_per_s_total < SLOWER


@dataclass(frozen=True, slots=True)
class Comparison:
    """A result beside a baseline. `differences` says in one line each what else is not alike; `runs` has an
    entry for each run that both have."""

    name: str
    date: str
    differences: tuple[str, ...]
    runs: tuple[Compared, ...]

    @property
    def slower(self) -> tuple[Compared, ...]:
        return tuple(run for run in self.runs if run.is_slower)


def place(given: str, config: Config, *, model: str, hardware: Result) -> Path:
    """The file that a `--save` or `--compare` means: a path ends in .json, anything else is a name.

    Raises UsageError for what is neither, and for a path into a folder that there is not.
    """
    if given.lower().endswith(SUFFIX):
        path = expand(given).absolute()
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"There is no folder {path.parent} for a baseline.")
        return path
    if not _NAME.fullmatch(given):
        raise UsageError(
            f"'{given}' cannot name a baseline.",
            hint="Use letters, digits, dots and dashes, or a path that ends in .json.",
        )
    return _folder(config, model, hardware) / f"{given}{SUFFIX}"


def last(config: Config, *, model: str, hardware: Result) -> Path | None:
    """The baseline of this model on this machine that was saved last."""
    found = sorted(_folder(config, model, hardware).glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def read(path: Path) -> dict[str, Any]:
    """A baseline. Raises UsageError where there is none or the file holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        others = ", ".join(sorted(other.stem for other in path.parent.glob(f"*{SUFFIX}")))
        hint = f"There are {others}." if others else "`nemolocal bench --save NAME` keeps one."
        raise UsageError(f"There is no baseline {path.stem} ({path}).", hint=hint) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot read the baseline {path}: {error}.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(f"{path} is no baseline of a bench.", hint="`nemolocal bench --save` writes them.")
    return found


def write(result: Result, path: Path) -> None:
    """Keep a result, in one piece or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({"format": FORMAT, **result}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def compare(result: Result, baseline: Result, name: str) -> Comparison:
    """Set a result beside a baseline that `read` gave. Raises UsageError where that one lacks something."""
    try:
        earlier = {tuple(run[key] for key in _KEYS): run for run in baseline["runs"]}
        pairs = [(run, earlier.get(tuple(run[key] for key in _KEYS))) for run in result["runs"]]
        return Comparison(
            name,
            str(baseline["date"]),
            tuple(_differences(result, baseline)),
            tuple(_compared(run, other) for run, other in pairs if other and _is_measured(other)),
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"The baseline {name} is damaged ({type(error).__name__}: {error}).") from None


def _is_measured(run: Result) -> bool:
    """Whether anything came: a model whose answers were empty has no speed to compare with."""
    return bool(run["tokens_per_s_total"] > 0 and run["ttft_p50"] > 0)


def _compared(run: Result, earlier: Result) -> Compared:
    return Compared(run["streams"], *(run[key] / earlier[key] for key in ("tokens_per_s_total", "ttft_p50")))


def _differences(result: Result, baseline: Result) -> Iterator[str]:
    sides = {
        "machine": _machine,
        "model": lambda side: side["model"],
        "library": lambda side: side["library"],
        "version of NemoLocal": lambda side: side["nemolocal"],
        "plan": _plan,
    }
    for what, of in sides.items():
        if of(result) != of(baseline):
            yield f"The baseline is of another {what}: {of(baseline)}; this is {of(result)}."


def _machine(side: Result) -> str:
    found = side["hardware"]
    gpus = [gpu["name"] for gpu in found["gpus"] if gpu["state"] == "ok"]
    return ", ".join([*gpus, f"{found['cpu']['name']} with {found['cpu']['physical_cores']} cores"])


def _plan(side: Result) -> str:
    plan = side["plan"]
    split = "" if plan["split_mode"] == "none" else f", split by {plan['split_mode']}"
    on = f"{sum(device['n_layers'] for device in plan['devices'])} layers on GPUs"
    cache = f"{plan['kv_layout']} {plan['kv_type']} cache"
    return f"{plan['context']:,} tokens, {plan['slots']} slots, {cache}, {on}{split}"


def _folder(config: Config, model: str, hardware: Result) -> Path:
    """Where the baselines of one model on one machine are kept: readable, and told apart by a hash."""
    machine = _machine({"hardware": hardware})
    key = hashlib.sha256(f"{model}\n{machine}".encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", model).strip("-.")[:48]
    return config.paths.data / "bench" / f"{readable}-{key}"
