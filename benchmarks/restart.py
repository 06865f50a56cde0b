"""What a long document costs the first time, again, and after the server was started anew: the time to the
first token of `nemolocal serve`, over streaming HTTP.

    python benchmarks/restart.py --model FILE.gguf [--tokens 30000] [--nemolocal-args "…"]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import peer_loads
from peer_loads import Answer, Target

N_NEW = 16
START_LIMIT_S = 120
SAVE_LIMIT_S = 120


def start(options: argparse.Namespace, home: str, port: int) -> subprocess.Popen[bytes]:
    """A server that answers on `port`."""
    n_ctx = options.tokens + 2048
    command = [sys.executable, "-m", "nemolocal.cli.app", "serve", "--model", str(options.model)]
    command += ["--port", str(port), "--ctx", str(n_ctx), *shlex.split(options.nemolocal_args)]
    environment = {**os.environ, "NEMOLOCAL_HOME": home, "NEMOLOCAL_OFFLINE": "1"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
                if response.status == 200:
                    return server
        except OSError:
            time.sleep(0.1)
    server.kill()
    raise SystemExit("the server did not come up")


def stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGINT)
    server.wait(60)


def wait_until_saved(home: str) -> float:
    """Until the states on disk have stopped to grow; their size in GB."""
    until, last = time.monotonic() + SAVE_LIMIT_S, -1
    while time.monotonic() < until:
        time.sleep(3)
        sizes = [path.stat().st_size for path in Path(home).rglob("states/*") if path.is_file()]
        if sizes and sum(sizes) == last:
            return last / 1e9
        last = sum(sizes)
    raise SystemExit("nothing was saved")


def show(what: str, answer: Answer) -> None:
    details = answer.usage.get("prompt_tokens_details") or {}
    problem = f"  ({answer.problem})" if answer.problem else ""
    print(
        f"{what}: first text after {answer.first_s:.3f} s, {details.get('cached_tokens')} of "
        f"{answer.usage.get('prompt_tokens')} prompt tokens were known{problem}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--port", type=int, default=7399)
    parser.add_argument("--nemolocal-args", default="")
    options = parser.parse_args()
    target = Target(options.port, str(options.model))
    document = target.prompt(options.tokens)

    def ask(question: str) -> Answer:
        return asyncio.run(peer_loads.ask(target, f"{document}\n\n{question}", N_NEW))

    with tempfile.TemporaryDirectory() as home:
        server = start(options, home, options.port)
        try:
            asyncio.run(peer_loads.ask(target, "Hello", N_NEW))
            show("read for the first time", ask("What is it about?"))
            show("another question", ask("Who is named in it?"))
            print(f"saved: {wait_until_saved(home):.2f} GB", flush=True)
            stop(server)
            server = start(options, home, options.port)
            asyncio.run(peer_loads.ask(target, "Hello", N_NEW))
            show("after a restart, a third question", ask("Where does it take place?"))
            show("a fourth question", ask("How does it end?"))
        finally:
            stop(server)


if __name__ == "__main__":
    main()
