"""What peers.py writes: the machine, the tables, and NemoLocal's figures as shares of the others'."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer_loads import N_BESIDE, Row

STREAM_COLUMNS = {
    "streams": ("streams", "plain"),
    "server": ("server", "plain"),
    "in all": ("tokens_per_s_total", "tok/s"),
    "first text, p50": ("ttft_p50", "ms"),
    "decode per stream, p50": ("tokens_per_s_stream", "tok/s"),
    "decode in all": ("tokens_per_s_decode", "tok/s"),
    "whole answers": ("n_full", "plain"),
}
TABLES = {
    "a": ("Load a: prompts of {prompt_tokens} tokens, {new_tokens} new", STREAM_COLUMNS),
    "b": ("Load b: prompts of {prompt_tokens} tokens, {new_tokens} new", STREAM_COLUMNS),
    "c": (
        "Load c: the same prompt twice, time to the first text",
        {
            "prompt": ("n_prompt", "plain"),
            "server": ("server", "plain"),
            "first": ("ttft_first", "ms"),
            "again": ("ttft_again", "ms"),
            "tokens remembered": ("n_cached", "plain"),
        },
    ),
    "d": (
        f"Load d: a prompt of {{prompt_tokens}} tokens arrives while {N_BESIDE} streams run",
        {
            "server": ("server", "plain"),
            "first text alone": ("ttft_alone", "ms"),
            "beside the streams": ("ttft_under", "ms"),
            "gap before, p50": ("gap_before_p50", "ms"),
            "gap meanwhile, p50": ("gap_p50", "ms"),
            "p99": ("gap_p99", "ms"),
            "longest": ("gap_max", "ms"),
        },
    ),
}


def describe_machine() -> Row:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    gpus = ask_smi("name,driver_version,memory.total")
    return {"gpus": gpus, "cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}


def ask_smi(query: str) -> list[str]:
    """What nvidia-smi says of each GPU; [] where there is none."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().splitlines()


def markdown(report: Row) -> Iterator[str]:
    machine, versions = report["machine"], report["versions"]
    gpus = "; ".join(machine["gpus"]) or "no GPU"
    yield f"{report['date']}, {gpus}, {machine['cpu']} with {machine['cores']} threads, {machine['system']}."
    yield "; ".join(f"{name} {version}" for name, version in versions.items()) + "."
    yield (
        f"{report['model']}, context {report['context']:,} for {report['slots']} slots; each figure is the "
        f"median of {report['repeats']} runs.\n"
    )
    rows = [row for row in report["runs"] if "left_out" not in row]
    for load, (title, columns) in TABLES.items():
        of_load = [row for row in rows if row["load"] == load]
        if of_load:
            of_load.sort(key=lambda row: (row.get("streams", 0), row["prompt_tokens"]))
            yield from _table(title, columns, of_load)
    for name, ceiling in report["ceilings"].items():
        keys = list(ceiling[0]) if ceiling else []
        yield from _table(f"`{name}`", {key.replace("_", " "): (key, "plain") for key in keys}, ceiling)
    yield from compare(rows, report["ceilings"].get("llama-batched-bench", []))
    yield "\nCommands:\n\n```"
    yield from (shlex.join(command) for commands in report["commands"].values() for command in commands)
    yield "```"
    left_out = [row for row in report["runs"] if "left_out" in row]
    yield from [f"\n{_name(row)} was left out: {row['left_out']}." for row in left_out]
    problems = [f"- {_name(row)}: {row['problem']}" for row in rows if row["problem"]]
    problems += [f"- {name}: {problem}" for name, problem in report["problems"].items()]
    yield from ["\nNot as it should be:\n", *problems] if problems else []


def _name(row: Row) -> str:
    at = f" at {row['streams']} streams" if "streams" in row else f", prompt of {row['prompt_tokens']:,}"
    return f"{row['server']}, load {row['load']}{at}"


def _table(title: str, columns: dict[str, tuple[str, str]], rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    yield f"\n{title.format_map(rows[0])}:\n"
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(key), unit) for key, unit in columns.values())} |"


def _cell(value: Any, unit: str) -> str:
    if isinstance(value, str) or value is None:
        return value or ""
    if math.isnan(value):
        return "–"
    if unit == "ms":
        return f"{value * 1000:,.0f} ms" if value >= 0.1 else f"{value * 1000:.1f} ms"
    text = f"{value:,.1f}" if value != int(value) else f"{value:,.0f}"
    return text if unit == "plain" else f"{text} {unit}"


def compare(rows: list[Row], ceilings: list[Row]) -> Iterator[str]:
    """NemoLocal's figures as shares of the others'."""
    ours = {(r["load"], r.get("streams"), r["prompt_tokens"]): r for r in rows if r["server"] == "nemolocal"}
    yield ""
    for row in rows:
        mine = ours.get((row["load"], row.get("streams"), row["prompt_tokens"]))
        if not mine or mine is row:
            continue
        for key, what in (
            ("tokens_per_s_total", "tokens in all"),
            ("ttft_p50", "time to the first text"),
            ("ttft_again", "time to the first text again"),
            ("ttft_under", "time to the first text beside streams"),
            ("gap_p99", "gap p99"),
        ):
            if key in row:
                at = f" at {row['streams']}" if "streams" in row else f", {row['prompt_tokens']:,} tokens"
                yield f"- load {row['load']}{at}: {mine[key] / row[key]:.2f} of {row['server']}'s {what}"
    for ceiling in ceilings:
        for (load, n_streams, _), mine in ours.items():
            if (load, n_streams) == (ceiling["load"], ceiling["streams"]):
                share = mine["tokens_per_s_decode"] / ceiling["tokens_per_s"]
                peer = f"llama-batched-bench's decoding ({ceiling['layout']})"
                yield f"- load {load} at {n_streams}: {share:.2f} of {peer}"


def summary(row: Row) -> str:
    """One line of progress."""
    skip = ("server", "load", "streams", "prompt_tokens", "new_tokens", "n_prompt")
    figures = (f"{k}={v:.4g}" for k, v in row.items() if k not in skip and isinstance(v, int | float))
    return f"{_name(row)}: {' '.join(figures)} {row.get('left_out') or row['problem']}".rstrip()
