"""A real server in a process of its own, as a person starts it; for tests marked `model`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process

    @property
    def engine(self) -> psutil.Process:
        """The child that holds the model: the one that uses most memory."""
        return max(self.process.children(recursive=True), key=lambda child: child.memory_info().rss)


@contextlib.contextmanager
def starter_server(
    starter_path: Path,
    home: Path,
    *flags: str,
    ref: str = "starter",
    is_offline: bool = True,
    has_page: bool = False,
) -> Iterator[Server]:
    """`nemolocal serve`, or `ui` where it `has_page`, with the starter model by one of its names, on a free
    port and below `home`, once it answers. Fails when it printed a traceback or does not end when told to."""
    folder = home / "data" / "models" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / starter_path.name).exists():
        (folder / starter_path.name).symlink_to(starter_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = ["ui", "--no-browser"] if has_page else ["serve"]
    command = [sys.executable, "-m", "nemolocal.cli.app", *start, "--model", ref, "--port", str(port)]
    command += [*(["--offline"] if is_offline else []), *flags]
    env = os.environ | {"NEMOLOCAL_HOME": str(home)}
    with (home / "output").open("w+") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process, home / "output")
            yield Server(url, psutil.Process(process.pid))
            assert "Traceback" not in (home / "output").read_text()
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], output: Path) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{url}/health", timeout=5)
            if answer.status_code == 200:
                return
            assert answer.json().get("status") == "loading", answer.text
        assert process.poll() is None, output.read_text()
        time.sleep(0.1)
    raise AssertionError(output.read_text())
