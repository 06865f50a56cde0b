"""What a plan says beside what the driver counts: for each model and each limit of free memory, the bytes on
each GPU after the load and after a whole context was read, and the speed of one answer.

    python -m benchmarks.fit [--models ID:TYPE,…] [--limits all,24,16,12,8] [--folder DIR]
                             [--most N] [--nemolocal-args "--split layer"]

The models have the catalogue's shapes and weights of nothing but zeros, which take a moment to write. A limit
is GiB of each GPU that the plan believes to be free; more is there, so that a plan that lies is seen and not
cut short. Prints a table in Markdown, and exits with 1 where a row failed or differs from its plan.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pynvml

from nemolocal import config, hardware
from nemolocal.hardware import Gpu, Hardware
from nemolocal.models import catalog
from tests import synthetic

MODELS = (
    "llama-3.1-nemotron-nano-8b:Q4_0,llama-3.1-nemotron-70b:Q4_0,"
    "llama-3.3-nemotron-super-49b:Q4_0,nemotron-3-nano-30b-a3b:Q4_0"
)
GIB, MIB = 1 << 30, 1 << 20
START_LIMIT_S, ANSWER_LIMIT_S = 180, 400
N_NEW = 64
SHARE_ALLOWED, BYTES_ALLOWED = 0.03, 200 * MIB
HEAD = (
    "| model | free | context, slots, split | GPU | planned MiB | after the load | with a full context | | "
    "tokens/s |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Case:
    """A model's file, and the GiB that are free on each GPU; None: as many as there are."""

    name: str
    path: Path
    limit_gib: int | None


def write_model(text: str, folder: Path) -> tuple[str, Path]:
    """The file of a shape of the catalogue, named as ID:TYPE."""
    model_id, _, type_name = text.partition(":")
    listed = catalog.load().get(model_id)
    if listed is None or listed.dimensions is None:
        raise SystemExit(f"{model_id} has no shape in the catalogue")
    path = folder / f"{model_id}-{type_name}.gguf"
    return text, synthetic.write(path, listed.dimensions, weights="none", type_name=type_name)


def limited(machine: Hardware, limit_gib: int | None) -> Hardware:
    """The machine with less free memory on each GPU."""
    if limit_gib is None:
        return machine
    gpus = tuple(replace(gpu, free_bytes=min(gpu.free_bytes, limit_gib * GIB)) for gpu in machine.gpus)
    return replace(machine, gpus=gpus)


def profile(machine: Hardware) -> str:
    """The machine as a hardware profile, in TOML."""
    return "\n".join([*map(_gpu_table, machine.gpus), _host_tables(machine)])


def _gpu_table(gpu: Gpu) -> str:
    return (
        f'[[gpu]]\nname = "{gpu.name}"\nuuid = "{gpu.uuid}"\n'
        f'compute_capability = "{gpu.compute_capability}"\n'
        f"total_bytes = {gpu.total_bytes}\nfree_bytes = {gpu.free_bytes}\nn_links = {gpu.n_links}\n"
    )


def _host_tables(machine: Hardware) -> str:
    return (
        f"[ram]\ntotal_bytes = {machine.ram.total_bytes}\navailable_bytes = {machine.ram.available_bytes}\n"
        f'[cpu]\nname = "{machine.cpu.name}"\nphysical_cores = {machine.cpu.physical_cores}\n'
    )


def used_bytes(gpus: tuple[Gpu, ...]) -> list[int]:
    """What the driver counts on each GPU now."""
    handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


@contextmanager
def served(path: Path, arguments: list[str], environment: dict[str, str], port: int) -> Iterator[None]:
    """`nemolocal serve` with the model loaded."""
    command = [*_nemolocal("serve"), "--model", str(path), "--port", str(port), *arguments]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                    if response.status == 200:
                        break
            except OSError:
                pass
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the model was not loaded")
            time.sleep(0.2)
        yield
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def answer(port: int, path: Path, n_prompt: int, n_new: int) -> dict[str, Any]:
    """One answer to a prompt of so many tokens, with its usage and timings."""
    ids = [300 + n % 97 for n in range(n_prompt)]
    body = {"model": str(path), "prompt": ids, "max_tokens": n_new, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as response:
        found: dict[str, Any] = json.load(response)
    return found


def run(case: Case, machine: Hardware, options: argparse.Namespace) -> list[str]:
    """The rows of one case, one for each GPU of its plan."""
    free = "all" if case.limit_gib is None else f"{case.limit_gib} GiB"
    with tempfile.TemporaryDirectory() as home:
        described = Path(home, "machine.toml")
        described.write_text(profile(limited(machine, case.limit_gib)), encoding="utf-8")
        environment = {**os.environ, "NEMOLOCAL_HOME": home, "NEMOLOCAL_OFFLINE": "1"}
        arguments = ["--hardware", str(described), "--draft", "off", *shlex.split(options.nemolocal_args)]
        made = subprocess.run(
            [*_nemolocal("plan"), str(case.path), "--json", *arguments],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        plan = json.loads(made.stdout or "{}")
        if made.returncode:
            return [f"| {case.name} | {free} | does not fit | | | | | | |"]
        gpus = tuple(gpu for device in plan["devices"] for gpu in machine.gpus if gpu.uuid == device["id"])
        before = used_bytes(gpus)
        try:
            with served(case.path, arguments, environment, options.port):
                loaded = used_bytes(gpus)
                speed = answer(options.port, case.path, 64, N_NEW)["timings"]["predicted_per_second"]
                answer(options.port, case.path, min(plan["context"] - 64, options.most), 16)
                full = used_bytes(gpus)
        except (RuntimeError, OSError) as error:
            return [f"| {case.name} | {free} | {error} | | | | | **failed** | |"]
    how = f"{plan['context']:,}, {plan['slots']}, {plan['split_mode']}"
    how += ", experts in RAM" if plan["host_experts"] else ""
    rows = []
    for device, *used in zip(plan["devices"], before, loaded, full, strict=True):
        planned, first, most = device["total_bytes"], used[1] - used[0], used[2] - used[0]
        is_right = abs(most - planned) <= max(SHARE_ALLOWED * planned, BYTES_ALLOWED)
        verdict = "" if is_right else "**differs**"
        cells = [
            f"{planned / MIB:,.0f}",
            f"{first / MIB:,.0f}",
            f"{most / MIB:,.0f} ({most / planned - 1:+.1%})",
        ]
        cells = [case.name, free, how, device["name"], *cells, verdict, f"{speed:.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows or [f"| {case.name} | {free} | {how} | on the CPU | | | | | {speed:.1f} |"]


def _nemolocal(command: str) -> list[str]:
    return [sys.executable, "-m", "nemolocal.cli.app", command]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--limits", default="all,24,16,12,8")
    parser.add_argument(
        "--folder", type=Path, help="where the models are written; and stay; default: a temporary one"
    )
    parser.add_argument("--most", type=int, default=1 << 30, help="tokens of a context that are read")
    parser.add_argument("--port", type=int, default=7398)
    parser.add_argument("--nemolocal-args", default="")
    options = parser.parse_args()
    machine = hardware.survey(config.load())
    if machine.gpus:
        pynvml.nvmlInit()
    limits = [None if text == "all" else int(text) for text in options.limits.split(",")]
    print(HEAD, flush=True)
    is_right = True
    with tempfile.TemporaryDirectory() as scratch:
        for text in options.models.split(","):
            name, path = write_model(text, options.folder or Path(scratch))
            for limit_gib in limits:
                rows = run(Case(name, path, limit_gib), machine, options)
                is_right = is_right and not any("**" in row for row in rows)  # failed, or differs
                print("\n".join(rows), flush=True)
            if options.folder is None:
                path.unlink()  # the next one may need its room
    if not is_right:
        sys.exit(1)


if __name__ == "__main__":
    main()
