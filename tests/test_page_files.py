"""The real page behind the real port gives away no file and fetches nothing for a stranger."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from nemolocal.ui import app
from tests.api.serving import running
from tests.fakes import FakeService

pytestmark = pytest.mark.anyio


async def test_no_route_of_the_page_leads_to_a_file_or_another_host(home: Path) -> None:
    secret = home / "config.toml"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text("# SECRET\n")
    service = FakeService()
    up = "../" * 12
    coded = "..%2f" * 12
    named = [
        str(secret),
        "/etc/passwd",
        f"{up}etc/passwd",
        f"{coded}etc/passwd",
        "pyproject.toml",
        "/proc/self/environ",
    ]
    roots = [
        "gradio_api/file=",
        "file=",
        "file/",
        "static/",
        "assets/",
        "custom_component/a/b/c/",
    ]
    paths = [f"/{root}{name}" for root in roots for name in named]
    paths += ["/gradio_api/proxy=http://127.0.0.1:9/x", "/gradio_api/file=http://127.0.0.1:9/x"]
    async with running(service, page=lambda: app.page(service)) as live, httpx.AsyncClient() as caller:
        async with asyncio.timeout(60):
            while (await caller.get(f"{live.url}/")).status_code != 200:
                await asyncio.sleep(0.1)
        for path in paths:
            # Not through the client's own address, which would resolve the dots before they are sent.
            request = caller.build_request("GET", live.url, extensions={"target": path.encode()})
            answer = await caller.send(request)
            assert answer.status_code in (400, 403, 404), path
            assert "SECRET" not in answer.text
            assert "root:" not in answer.text
        for path in ("/gradio_api/queue/join", "/gradio_api/upload", "/gradio_api/run/predict"):
            answer = await caller.post(
                f"{live.url}{path}",
                content=b'{"data": [], "fn_index": 0, "session_hash": "x"}',
                headers={"Content-Type": "text/plain", "Origin": "https://evil.example"},
            )
            assert answer.status_code == 403, path
            assert "access-control-allow-origin" not in answer.headers
    assert service.model.calls == []
