"""A fake model hub: an HTTP server on loopback that answers like the real one where NemoLocal asks.

Repository info with file sizes and hashes, tree listings, search by words and by what was quantized,
redirects for repositories that were renamed or are written with other capitals, and files: small ones by the
hub itself, large ones by a redirect to a signed address of a storage under another host name, with ranges.
Each way in which the real one, or the line to it, fails can be switched on.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

BLOCK_BYTES = 1 << 16


def pattern(n_bytes: int, *, step: int = 31) -> bytes:
    """Bytes that differ from place to place, so that a shifted copy is another text."""
    return bytes((i * step) % 251 for i in range(251)) * (n_bytes // 251) + bytes(
        (i * step) % 251 for i in range(n_bytes % 251)
    )


@dataclass
class FakeFile:
    """`announced_bytes` is what a listing says in place of the real size; a file outside LFS has no hash."""

    data: bytes
    announced_bytes: int | None = None
    is_lfs: bool = True

    @property
    def size(self) -> int:
        return len(self.data) if self.announced_bytes is None else self.announced_bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class FakeRepo:
    """`token` is the one that may read it: needed for listing when private, for the files when gated.
    `base` is the repository that its card names as what was quantized."""

    files: dict[str, FakeFile]
    is_gated: bool = False
    is_private: bool = False
    is_disabled: bool = False
    base: str = ""
    n_downloads: int = 5
    token: str = "hf_right"
    licence: str = "mit"

    @property
    def commit(self) -> str:
        text = "".join(f"{name}{file.sha256}" for name, file in sorted(self.files.items()))
        return hashlib.sha1(text.encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class FakeHub:
    """`requests` records what was asked. The rest are faults, off by default.

    `status` answers everything so (with `retry_after` seconds, or `reset_after` in the hub's own header);
    `cut_after` ends each body when that place of the file is reached, `stall_after` falls silent there;
    `ignores_range` always sends the whole file, `refuses_range` answers 416; `damages` changes a byte on the
    way; `page` answers a page in place of JSON; `n_storage_failures` answers 503 so often before it works,
    `n_expired` takes so many signed addresses for expired. `renamed` leads from old names to new ones.
    """

    repos: dict[str, FakeRepo] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    storage: str = ""
    status: int = 0
    retry_after: int = 0
    reset_after: int = 0
    cut_after: int | None = None
    stall_after: int | None = None
    ignores_range: bool = False
    refuses_range: bool = False
    damages: bool = False
    page: str = ""
    n_storage_failures: int = 0
    n_expired: int = 0
    n_sent_bytes: int = 0
    release: threading.Event = field(default_factory=threading.Event)

    def add(self, repo: str, files: Mapping[str, bytes | FakeFile], **options: Any) -> FakeRepo:
        made = {name: f if isinstance(f, FakeFile) else FakeFile(f) for name, f in files.items()}
        self.repos[repo] = FakeRepo(made, **options)
        return self.repos[repo]

    def transfers(self) -> list[Request]:
        """The requests that a file's bytes were asked with."""
        return [r for r in self.requests if r.method == "GET" and r.path.startswith("/storage/")]


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A hub that is there as long as the context lasts."""
    hub = FakeHub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    port = server.server_address[1]
    hub.url = f"http://127.0.0.1:{port}"
    hub.storage = f"http://localhost:{port}/storage"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:
        """Not onto the test's output."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        headers = {name.title(): value for name, value in self.headers.items()}
        self.hub.requests.append(Request(self.command, self.path, headers))
        path = unquote(urlsplit(self.path).path)
        if self.hub.status:
            self._send(self.hub.status, b"", self._patience())
        elif path.startswith("/storage/"):
            self._send_stored(path.removeprefix("/storage/"))
        elif path.startswith("/api/resolve-cache/models/"):
            owner, repo, _, name = path.removeprefix("/api/resolve-cache/models/").split("/", 3)
            self._send_file(self.hub.repos[f"{owner}/{repo}"].files[name].data)
        elif path == "/api/models":
            self._search()
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(found[1])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(found[1])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[3])
        else:
            self._send(404, b"")

    def _patience(self) -> dict[str, str]:
        headers = {}
        if self.hub.retry_after:
            headers["Retry-After"] = str(self.hub.retry_after)
        if self.hub.reset_after:
            headers["RateLimit"] = f'"api";r=0;t={self.hub.reset_after}'
            headers["RateLimit-Policy"] = '"fixed window";"api";q=500;w=300'
        return headers

    # What the hub itself answers

    def _info(self, name: str) -> None:
        repo = self._readable(name)
        if repo is None:
            return
        siblings = [
            {"rfilename": path, "size": file.size, "blobId": "0" * 40}
            | ({"lfs": {"sha256": file.sha256, "size": file.size, "pointerSize": 134}} if file.is_lfs else {})
            for path, file in repo.files.items()
        ]
        self._send_json(
            {
                "_id": "1",
                "id": name,
                "modelId": name,
                "sha": repo.commit,
                "private": repo.is_private,
                "gated": "auto" if repo.is_gated else False,
                "tags": ["gguf", f"license:{repo.licence}"],
                "downloads": repo.n_downloads,
                "likes": 1,
                "lastModified": "2026-08-03T10:00:00.000Z",
                "cardData": {"license": repo.licence},
                "siblings": siblings,
            }
        )

    def _tree(self, name: str) -> None:
        repo = self._readable(name)
        if repo is not None:
            self._send_json(
                [
                    {"type": "file", "path": path, "size": file.size, "oid": "0" * 40}
                    | (
                        {"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 134}}
                        if file.is_lfs
                        else {}
                    )
                    for path, file in repo.files.items()
                ]
            )

    def _search(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        words = query.get("search", [""])[0].lower()
        bases = [f for f in query.get("filter", []) if f.startswith("base_model:quantized:")]
        found = [
            {
                "id": name,
                "downloads": repo.n_downloads,
                "likes": 1,
                "gated": repo.is_gated,
                "lastModified": "2026-08-03T10:00:00.000Z",
            }
            | ({"siblings": [{"rfilename": path} for path in repo.files]} if "full" in query else {})
            for name, repo in self.hub.repos.items()
            if words in name.lower()
            and any(path.endswith(".gguf") for path in repo.files)
            and all(repo.base and base.endswith(f":{repo.base}") for base in bases)
        ]
        found.sort(key=lambda hit: -hit["downloads"])
        self._send_json(found[: int(query.get("limit", ["100"])[0])])

    def _resolve(self, name: str, path: str) -> None:
        repo = self._readable(name, wants_file=True)
        if repo is None:
            return
        file = repo.files.get(path)
        if file is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{"0" * 40}"'}
        if not file.is_lfs:
            place = quote(f"/api/resolve-cache/models/{name}/{repo.commit}/{path}")
            self._send(307, b"", headers | {"Location": place})
            return
        headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
        address = f"{self.hub.storage}/{quote(f'{name}/{path}')}?Expires=1&Signature=abc"
        self._send(302, b"", headers | {"Location": address})

    def _readable(self, name: str, *, wants_file: bool = False) -> FakeRepo | None:
        """The repository, or None when the refusal, or where it is now, was sent."""
        canonical = {known.lower(): known for known in self.hub.repos}
        new = self.hub.renamed.get(name) or canonical.get(name.lower(), name)
        if new != name:
            self._send(307, b"", {"Location": self.path.replace(name, new, 1)})
            return None
        repo = self.hub.repos.get(name)
        authorization = self.headers.get("Authorization", "")
        if authorization == "Bearer hf_wrong":
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
            return None
        knows = repo is not None and authorization == f"Bearer {repo.token}"
        if repo is None or (repo.is_private and not knows):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return None
        if repo.is_disabled:
            self._send(403, b"", {"X-Error-Message": "Access to this resource is disabled."})
            return None
        if wants_file and repo.is_gated and not knows:
            status = 403 if authorization else 401
            self._send(status, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return None
        return repo

    # What its storage answers

    def _send_stored(self, place: str) -> None:
        owner, repo, path = place.split("/", 2)
        if self.hub.n_storage_failures:
            self.hub.n_storage_failures -= 1
            self._send(503, b"")
            return
        if self.headers.get("Authorization"):
            self._send(400, b"Only one auth mechanism allowed")
            return
        if self.hub.n_expired or "Signature=abc" not in self.path:
            self.hub.n_expired -= 1
            self._send(403, b"Request has expired")
            return
        self._send_file(self.hub.repos[f"{owner}/{repo}"].files[path].data)

    def _send_file(self, data: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        is_range = wanted and not self.hub.ignores_range
        start = int(wanted[1]) if wanted and is_range else 0
        end = min(int(wanted[2]) + 1, len(data)) if wanted and is_range and wanted[2] else len(data)
        if is_range and (self.hub.refuses_range or start >= len(data)):
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        self.send_response(206 if is_range else 200)
        if is_range:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", '"storage-has-another"')
        self.end_headers()
        if self.command == "GET":
            self._send_body(data[:end], start)

    def _send_body(self, data: bytes, start: int) -> None:
        hub = self.hub
        stop = min(x for x in (len(data), hub.cut_after, hub.stall_after) if x is not None)
        if hub.damages:
            data = bytes([data[0] ^ 1]) + data[1:]
        try:
            for at in range(start, stop, BLOCK_BYTES):
                block = data[at : min(stop, at + BLOCK_BYTES)]
                self.wfile.write(block)
                hub.n_sent_bytes += len(block)
            if stop < len(data):
                self.wfile.flush()
                if hub.stall_after is not None:
                    hub.release.wait(30)
                self.close_connection = True
        except OSError:  # the client has had enough
            self.close_connection = True

    def _send_json(self, value: object) -> None:
        body = self.hub.page.encode() or json.dumps(value).encode()
        self._send(200, body, {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
