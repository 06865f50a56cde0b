"""A model that is here is served by its repository's name while the hub never answers."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.real_server import starter_server

pytestmark = pytest.mark.model

REF = "hf:HuggingFaceTB/SmolLM2-135M-Instruct"


def test_no_start_waits_for_the_hub(
    starter_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with starter_server(starter_path, tmp_path, "--ctx", "512", ref=REF, is_offline=False) as server:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
            started = time.monotonic()
            models = httpx.get(f"{server.url}/v1/models", timeout=20).json()["data"]
            assert models
            assert time.monotonic() - started < 5
        silent.settimeout(0)
        with pytest.raises(BlockingIOError):  # nobody knocked
            silent.accept()
