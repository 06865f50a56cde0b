"""NemoLocal's port beside llama.cpp's own server and benchmarks: one machine, one file, one load, one run.

Each server is started, measured over streaming HTTP and stopped before the next one starts; `llama-bench` and
`llama-batched-bench` give the ceiling of the library. README.md says what the loads are and how to read it.

    python benchmarks/peers.py --model FILE.gguf --llama-bin DIR [--only NAME,…] [--loads a,b,c,d] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import peer_loads
import peer_report
from peer_loads import N_BESIDE, SAMPLING, Row, Target

START_LIMIT_S = 90
SERVERS = (
    "nemolocal",
    "nemolocal-split",
    "llama-server",
    "llama-server-bs",
    "llama-server-kvu",
    "llama-server-kvu-bs",
)
CEILINGS = ("llama-bench", "llama-batched-bench")
LOADS = {"a": (524, 128), "b": (16, 256)}  # tokens of the prompt, tokens of the answer


@dataclass(frozen=True)
class Peer:
    """How a server is started. `n_per_request` is the most tokens that one request may take."""

    command: list[str]
    port: int
    ready: str
    served_as: str
    n_per_request: int
    n_streams: int = 1 << 30
    environment: dict[str, str] = field(default_factory=dict)


def find_peer(name: str, options: argparse.Namespace, home: str) -> Peer:
    port = free_port()
    threads = [str(options.threads)] if options.threads else []
    if name.startswith("nemolocal"):
        # As llama-server without and with -kvu: a share of the context for each slot, or one for all.
        n_ctx = options.context // options.slots if name.endswith("-split") else options.context
        layout = "split" if name.endswith("-split") else "shared"
        command = [sys.executable, "-m", "nemolocal.cli.app", "serve", "--model", str(options.model)]
        command += ["--port", str(port), "--ctx", str(n_ctx), "--slots", str(options.slots)]
        command += ["--kv-layout", layout]
        command += ["--threads", *threads] if threads else []
        environment = {"NEMOLOCAL_HOME": home, "NEMOLOCAL_OFFLINE": "1"}
        return Peer(
            command + shlex.split(options.nemolocal_args),
            port,
            "/health",
            str(options.model),
            n_ctx,
            environment=environment,
        )
    if name == "llama_cpp.server":
        command = [options.peer_python, "-m", "llama_cpp.server", "--model", str(options.model)]
        command += ["--port", str(port), "--n_ctx", str(options.context), "--n_gpu_layers", "-1"]
        command += ["--flash_attn", "true", "--model_alias", "bench", "--interrupt_requests", "false"]
        command += ["--n_threads", *threads, "--n_threads_batch", *threads] if threads else []
        # It answers one request after another; more streams than a few would only wait.
        return Peer(command, port, "/v1/models", "bench", options.context, n_streams=N_BESIDE)
    flags = set(name.split("-")[2:])
    command = [str(options.llama_bin / "llama-server"), "-m", str(options.model), "-a", "bench"]
    command += ["--port", str(port), "-ngl", "99", "-fa", "on", "-c", str(options.context)]
    command += ["-np", str(options.slots), *(f"-{flag}" for flag in ("kvu", "bs") if flag in flags)]
    command += ["-t", *threads] if threads else []
    # With -np and without -kvu, each slot has its equal share of the context and no more.
    n_per_request = options.context if "kvu" in flags else options.context // options.slots
    return Peer(command + shlex.split(options.server_args), port, "/health", "bench", n_per_request)


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[float]:
    """The server for the time of the block; yields the seconds until it was ready."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, **peer.environment}
        process = subprocess.Popen(peer.command, stdout=log, stderr=log, env=environment)
        try:
            while not _answers(f"http://127.0.0.1:{peer.port}{peer.ready}"):
                if process.poll() is not None or time.perf_counter() - begin > START_LIMIT_S:
                    log.seek(0)
                    said = log.read().decode(errors="replace") + _read_logs(peer)
                    raise RuntimeError("it did not come up: " + said[-1500:])
                time.sleep(0.1)
            yield time.perf_counter() - begin
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read_logs(peer: Peer) -> str:
    logs = Path(peer.environment.get("NEMOLOCAL_HOME", "/nowhere")).glob("logs/*.log")
    return "".join(path.read_text(encoding="utf-8", errors="replace")[-700:] for path in sorted(logs))


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def measure(name: str, peer: Peer, options: argparse.Namespace) -> AsyncIterator[Row]:
    """The rows of one server, each the median of its repeats."""
    banned = tuple(options.ban.split(",")) if options.ban and name == "llama_cpp.server" else ()
    target = Target(peer.port, peer.served_as, banned)
    await peer_loads.warm_up(target, min(options.slots, peer.n_streams))
    for load in options.loads:
        for keys, n_needed, run in steps(load, target, options):
            row = {"server": name, "load": load, **keys}
            if keys.get("streams", 1) > peer.n_streams:
                continue
            if n_needed > peer.n_per_request:
                yield {**row, "left_out": f"takes {n_needed:,} tokens, a slot has {peer.n_per_request:,}"}
            elif time.perf_counter() > options.deadline:
                yield {**row, "left_out": "the time was up"}
            else:
                yield {**row, **median_of([await run() for _ in range(options.repeats)])}


def steps(load: str, target: Target, options: argparse.Namespace) -> Iterator[tuple[Row, int, Any]]:
    """What a load measures: its keys, the tokens that its longest request takes, and one measurement."""
    if load in LOADS:
        n_prompt, n_new = (max(n // options.shrink, 16) for n in LOADS[load])
        for n in options.streams:
            yield (
                {"streams": n, "prompt_tokens": n_prompt, "new_tokens": n_new},
                n_prompt + n_new,
                lambda n=n: peer_loads.streams(target, n, n_prompt, n_new),
            )
    elif load == "c":
        for n_prompt in (LOADS["a"][0] // options.shrink, 8192 // options.shrink):
            yield {"prompt_tokens": n_prompt}, n_prompt + 16, lambda n=n_prompt: peer_loads.twice(target, n)
    else:
        n_prompt = 30_000 // options.shrink
        n_new = min(2000, (options.context - n_prompt - 1000) // N_BESIDE)
        yield {"prompt_tokens": n_prompt}, n_prompt + 16, lambda: peer_loads.arrival(target, n_prompt, n_new)


def median_of(repeats: list[Row]) -> Row:
    """The median of each figure, and the repeats themselves. What a repeat could not measure is NaN there."""
    row: Row = {}
    for key in (key for key, value in repeats[0].items() if not isinstance(value, str)):
        seen = [repeat[key] for repeat in repeats if not math.isnan(repeat[key])]
        row[key] = statistics.median(seen) if seen else float("nan")
    problem = next((repeat["problem"] for repeat in repeats if repeat["problem"]), "")
    return {**row, "problem": problem, "repeats": repeats}


def measure_ceiling(name: str, options: argparse.Namespace) -> Iterator[tuple[list[str], list[Row]]]:
    """The commands of one of llama.cpp's benchmarks, and what each printed."""
    common = [str(options.llama_bin / name), "-m", str(options.model), "-ngl", "99", "-fa", "on"]
    common += ["-t", str(options.threads)] if options.threads else []
    if name == "llama-bench":
        n_prompt, n_new = (512 // options.shrink, 128 // options.shrink)
        command = [*common, "-p", str(n_prompt), "-n", str(n_new), "-r", str(options.repeats), "-o", "json"]
        tests = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        yield (
            command,
            [
                {
                    "test": f"pp{t['n_prompt']}" if t["n_prompt"] else f"tg{t['n_gen']}",
                    "tokens_per_s": t["avg_ts"],
                }
                for t in tests
            ],
        )
        return
    n_streams = ",".join(map(str, options.streams))
    for load in (load for load in options.loads if load in LOADS):
        n_prompt, n_new = (max(n // options.shrink, 16) for n in LOADS[load])
        for layout in ([], ["-kvu"]):
            command = [*common, "-c", str(options.context), "-npp", str(n_prompt), "-ntg", str(n_new)]
            command += ["-npl", n_streams, *layout, "--output-format", "jsonl"]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
            tests = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
            yield (
                command,
                [
                    {
                        "load": load,
                        "streams": t["pl"],
                        "layout": "unified" if layout else "per slot",
                        "tokens_per_s": t["speed_tg"],
                        "prompt_tokens_per_s": t["speed_pp"],
                        "tokens_per_s_with_prompts": t["pl"] * t["tg"] / t["t"],
                    }
                    for t in tests
                ],
            )


def describe_versions(options: argparse.Namespace) -> Row:
    ask_ours = "import nemolocal, llama_cpp; print(nemolocal.__version__, llama_cpp.__version__)"
    ours = subprocess.run([sys.executable, "-c", ask_ours], capture_output=True, text=True, check=False)
    versions = dict(zip(("nemolocal", "llama-cpp-python"), ours.stdout.split(), strict=False))
    with contextlib.suppress(OSError):
        here = Path(__file__).parent
        command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        versions["commit"] = commit or "unknown"
    if options.llama_bin:
        command = [str(options.llama_bin / "llama-server"), "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        versions["llama-server"] = next(
            (line for line in (said.stdout + said.stderr).splitlines() if line.startswith("version")),
            "unknown",
        )
    return versions


def write(report: Row, options: argparse.Namespace) -> None:
    """Both files anew after each server, so that a run that is broken off leaves what it has."""
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"peers-{report['date'].replace(':', '').replace(' ', '-')}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text("\n".join(peer_report.markdown(report)) + "\n", encoding="utf-8")


async def run_server(name: str, options: argparse.Namespace, report: Row) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        peer = find_peer(name, options, home)
        report["commands"][name] = [peer.command]
        with running(peer) as start_s:
            print(f"{name}: ready after {start_s:.1f} s", flush=True)
            async for row in measure(name, peer, options):
                report["runs"].append(row)
                print(peer_report.summary(row), flush=True)
            report["servers"][name] = {"start_s": start_s, "gpu_memory": peer_report.ask_smi("memory.used")}


def run_ceiling(name: str, options: argparse.Namespace, report: Row) -> None:
    for command, rows in measure_ceiling(name, options):
        report["commands"].setdefault(name, []).append(command)
        report["ceilings"].setdefault(name, []).extend(rows)
        for row in rows:
            print(f"{name}: {row}", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the GGUF file that all of them serve")
    add("--llama-bin", type=Path, help="folder of llama-server, llama-bench, llama-batched-bench")
    add(
        "--only",
        default="",
        help=f"of {', '.join((*CEILINGS, *SERVERS))} and llama_cpp.server (not by default)",
    )
    add("--loads", default="a,b,c,d", help="which loads (default a,b,c,d)")
    add("--streams", default="1,8,32", help="streams of loads a and b (default 1,8,32)")
    add("--repeats", type=int, default=2, help="runs of each, of which the median counts (default 2)")
    add("--context", type=int, default=65_536, help="tokens of context for all slots (default 65536)")
    add("--slots", type=int, default=32, help="slots of each server (default 32)")
    add("--threads", type=int, default=0, help="CPU threads of each (default: each one's own choice)")
    add(
        "--shrink",
        type=int,
        default=1,
        help="divide all lengths by this, to try the script on a small machine",
    )
    add("--limit-s", type=int, default=520, help="seconds after which no further load is begun (default 520)")
    add("--nemolocal-args", default="", help="more arguments for `nemolocal serve`")
    add("--server-args", default="", help="more arguments for llama-server")
    add("--peer-python", default=sys.executable, help="a Python that has llama-cpp-python[server]")
    add("--ban", default="", help="ids of the end tokens, for llama_cpp.server, which knows no ignore_eos")
    add("--out", type=Path, default=Path("peers-results"), help="folder of the two result files")
    options = parser.parse_args()
    options.loads, options.streams = options.loads.split(","), [int(n) for n in options.streams.split(",")]
    known = (*CEILINGS, *SERVERS, "llama_cpp.server")
    options.only = options.only.split(",") if options.only else [*CEILINGS, *SERVERS]
    for given, allowed in ((options.only, known), (options.loads, "abcd")):
        if unknown := set(given) - set(allowed):
            parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(allowed)}")
    if not options.llama_bin and set(options.only) - {"nemolocal", "llama_cpp.server"}:
        parser.error("--llama-bin is needed for llama.cpp's programs; --only leaves them out")
    if not options.model.is_file():
        parser.error(f"there is no file {options.model}")
    options.model = options.model.resolve()
    options.deadline = time.perf_counter() + options.limit_s
    return options


def main() -> int:
    # A run that is told to end takes its server with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = read_options()
    report: Row = {
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "machine": peer_report.describe_machine(),
        "versions": describe_versions(options),
        "model": options.model.name,
        **{key: getattr(options, key) for key in ("context", "slots", "repeats", "shrink", "loads")},
        "sampling": SAMPLING,
        **{key: {} for key in ("commands", "servers", "ceilings", "problems")},
        "runs": [],
    }
    print(report["machine"], report["versions"], flush=True)
    for name in (name for name in (*CEILINGS, *SERVERS, "llama_cpp.server") if name in options.only):
        begin = time.perf_counter()
        try:
            if name in CEILINGS:
                run_ceiling(name, options, report)
            else:
                asyncio.run(run_server(name, options, report))
        except (RuntimeError, OSError, subprocess.CalledProcessError, ValueError) as error:
            report["problems"][name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {error}", flush=True)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
        write(report, options)
    print("\n".join(peer_report.markdown(report)))
    return 1 if report["problems"] or any(row.get("problem") for row in report["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
