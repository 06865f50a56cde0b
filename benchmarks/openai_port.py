"""NemoLocal's port beside `python -m llama_cpp.server`: same file, threads and context, in one run.

Both servers are started and stay up; rounds alternate between them, so that whatever else the machine does
meets both alike. Each request has its own prompt, so that neither answers from what it has read before.

    python benchmarks/openai_port.py [--model REF] [--peer-python PYTHON] ...     (README.md says more)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from nemolocal import config
from nemolocal.models import store

WORDS = (
    "river garden window letter music winter bridge summer kitchen doctor island mirror market forest "
    "engine planet school basket silver candle thunder library village journey captain shadow orchard "
    "railway pencil harbour blanket teacher mountain lantern compass feather cottage bicycle painter meadow"
)
TASK = "Write a long story of at least five hundred words in which all of these words appear in turn:"
START_LIMIT_S = 120
REQUEST_LIMIT_S = 600


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times are seconds: to the first text, and from there to the last."""

    first_s: float
    decode_s: float
    n_tokens: int
    n_prompt: int
    problem: str = ""


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds with `n_streams` at once; speeds are tokens per second."""

    server: str
    n_streams: int
    first_s: float
    per_stream: float
    total: float
    n_answers: int
    n_served: int
    n_tokens: float
    n_prompt: float
    problem: str


def prompt(seed: int, n_words: int) -> str:
    rng = random.Random(seed)
    return " ".join([str(seed), TASK, *rng.choices(WORDS.split(), k=max(n_words - len(TASK.split()) - 1, 1))])


async def ask(client: httpx.AsyncClient, url: str, seed: int, options: argparse.Namespace) -> Answer:
    body = {
        "model": options.served_as,
        "messages": [{"role": "user", "content": prompt(seed, options.prompt_words)}],
        "max_tokens": options.new_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    first = last = 0.0
    n_pieces, problem = 0, "the stream ended early"
    usage: dict[str, int] = {}
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return Answer(0, 0, 0, 0, f"{response.status_code}: {text[:150]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    problem = ""
                    break
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if choice["delta"].get("content"):
                        last = time.perf_counter()
                        first = first or last
                        n_pieces += 1
    except httpx.HTTPError as error:
        problem = type(error).__name__
    if not first:
        return Answer(0, 0, 0, 0, problem or "the answer is empty")
    # A server that reports no usage sends one token in each piece.
    n_tokens = usage.get("completion_tokens", n_pieces)
    return Answer(first - begin, last - first, n_tokens, usage.get("prompt_tokens", 0), problem)


async def run_round(url: str, seeds: list[int], options: argparse.Namespace) -> tuple[float, list[Answer]]:
    """All streams at once; the seconds until the last has ended."""
    async with httpx.AsyncClient(timeout=REQUEST_LIMIT_S, trust_env=False) as client:
        begin = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, url, seed, options) for seed in seeds))
        return time.perf_counter() - begin, list(answers)


def summarise(server: str, n_streams: int, rounds: list[tuple[float, list[Answer]]]) -> Figures:
    answers = [answer for _, answers in rounds for answer in answers]
    served = [answer for answer in answers if not answer.problem]
    speeds = [(a.n_tokens - 1) / a.decode_s for a in served if a.n_tokens > 1 and a.decode_s > 0]
    totals = [sum(a.n_tokens for a in of_round if not a.problem) / seconds for seconds, of_round in rounds]
    return Figures(
        server=server,
        n_streams=n_streams,
        first_s=_median([answer.first_s for answer in served]),
        per_stream=_median(speeds),
        total=_median(totals),
        n_answers=len(answers),
        n_served=len(served),
        n_tokens=_median([float(answer.n_tokens) for answer in served]),
        n_prompt=_median([float(answer.n_prompt) for answer in served]),
        problem=next((answer.problem for answer in answers if answer.problem), ""),
    )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


async def measure(urls: dict[str, str], options: argparse.Namespace) -> list[Figures]:
    seed = 1000
    figures: list[Figures] = []
    for n_streams in options.streams:
        rounds: dict[str, list[tuple[float, list[Answer]]]] = {server: [] for server in urls}
        for i in range(-1, options.rounds):  # one to warm up
            seeds = list(range(seed, seed + n_streams))
            seed += n_streams
            # Each goes first in every other round.
            for server in list(urls) if i % 2 else reversed(urls):
                done = await run_round(urls[server], seeds, options)
                if i >= 0:
                    rounds[server].append(done)
                await asyncio.sleep(options.pause)
        figures += [summarise(server, n_streams, rounds[server]) for server in urls]
    return figures


@contextlib.contextmanager
def serving(command: list[str], url: str, ready: str, environment: dict[str, str]) -> Iterator[None]:
    """A server for the time of the block. Ends the script when it does not come up."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        try:
            if not _is_up(process, url + ready):
                log.seek(0)
                sys.exit(
                    f"{' '.join(command)} did not come up:\n{log.read().decode(errors='replace')[-2000:]}"
                )
            yield
        finally:
            process.terminate()
            process.wait(30)


def _is_up(process: subprocess.Popen[bytes], url: str) -> bool:
    for _ in range(START_LIMIT_S * 5):
        if process.poll() is not None:
            return False
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).status_code == 200:
                return True
        time.sleep(0.2)
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_options() -> argparse.Namespace:
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", default="starter", help="reference of a local model, or a path")
    add("--peer-python", default=sys.executable, help="a Python that has llama-cpp-python[server]")
    add("--no-peer", action="store_true", help="measure NemoLocal alone")
    add("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8], help="default 1,8")
    add("--rounds", type=int, default=5, help="measured rounds for each number of streams (default 5)")
    add("--new-tokens", type=int, default=64, help="tokens of an answer (default 64)")
    add("--prompt-words", type=int, default=100, help="words of a prompt (default 100)")
    add("--temperature", type=float, default=0.8, help="sampling temperature (default 0.8)")
    add("--threads", type=int, default=cores, help=f"CPU threads of each server (default {cores})")
    add("--ctx", type=int, default=8192, help="context in tokens (default 8192)")
    add("--gpu-layers", type=int, default=0, help="layers on the GPU, for both; -1 is all (default 0)")
    add("--pause", type=float, default=0.5, help="seconds between rounds (default 0.5)")
    add("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def print_figures(figures: list[Figures]) -> None:
    print(f"{'streams':>7}  {'server':<12} {'first text':>10} {'per stream':>12} {'in all':>12}  served")
    for f in figures:
        print(
            f"{f.n_streams:>7}  {f.server:<12} {f.first_s * 1000:>7.0f} ms {f.per_stream:>6.1f} tok/s "
            f"{f.total:>6.1f} tok/s  {f.n_served} of {f.n_answers}"
            f" ({f.n_tokens:.0f} tokens each){f'; {f.problem}' if f.problem else ''}"
        )
    by_streams: dict[int, dict[str, Figures]] = {}
    for f in figures:
        by_streams.setdefault(f.n_streams, {})[f.server] = f
    for n_streams, of in by_streams.items():
        if len(of) == 2:
            ours, peer = of["nemolocal"], of["llama_cpp"]
            print(
                f"nemolocal / llama_cpp at {n_streams}: "
                f"speed per stream {ours.per_stream / peer.per_stream:.2f}, "
                f"in all {ours.total / peer.total:.2f}; "
                f"time to the first text {ours.first_s / peer.first_s:.2f}"
            )


def main() -> None:
    options = read_options()
    model = store.resolve(options.model, config.load())
    # One name that both servers answer to: NemoLocal by the path, the other by an alias.
    options.served_as = str(model.path)
    busy = psutil.cpu_percent(interval=2)  # by others: nothing of ours runs yet
    urls = {"nemolocal": f"http://127.0.0.1:{free_port()}"}
    with contextlib.ExitStack() as servers:
        home = servers.enter_context(tempfile.TemporaryDirectory())
        ours = [sys.executable, "-m", "nemolocal.cli.app", "serve", "--model", str(model.path)]
        ours += ["--port", urls["nemolocal"].rpartition(":")[2], "--ctx", str(options.ctx)]
        ours += ["--threads", str(options.threads), "--gpu-layers", str(options.gpu_layers)]
        ours += ["--slots", str(max(options.streams))]
        environment = {"NEMOLOCAL_HOME": home, "NEMOLOCAL_OFFLINE": "1"}
        servers.enter_context(serving(ours, urls["nemolocal"], "/health", environment))
        if not options.no_peer:
            urls["llama_cpp"] = f"http://127.0.0.1:{free_port()}"
            peer = [options.peer_python, "-m", "llama_cpp.server", "--model", str(model.path)]
            peer += ["--port", urls["llama_cpp"].rpartition(":")[2], "--n_ctx", str(options.ctx)]
            peer += ["--n_threads", str(options.threads), "--n_threads_batch", str(options.threads)]
            peer += ["--n_gpu_layers", str(options.gpu_layers), "--model_alias", options.served_as]
            # By default it breaks off an answer when the next request comes; so it answers them in turn.
            peer += ["--interrupt_requests", "false"]
            servers.enter_context(serving(peer, urls["llama_cpp"], "/v1/models", {}))
        print(f"{model.path.name}, {options.threads} threads, context {options.ctx}, {platform.platform()}")
        print(f"Processors busy before the start: {busy:.0f} %{'; the figures suffer' if busy > 10 else ''}")
        figures = asyncio.run(measure(urls, options))
    print_figures(figures)
    if options.json:
        options.json.write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
