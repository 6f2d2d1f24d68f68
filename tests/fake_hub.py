"""A model hub in this process, of one repository."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """As much of the model hub's HTTP interface as its client needs to list and download one repository."""

    daemon_threads = True

    def __init__(self, directory: Path, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), HubHandler)
        self.directory = directory
        self.repo = "org/tiny"
        self.sent: Counter[str] = Counter()
        self.goes_on = threading.Event()
        """Unless set, of a file that ends on `stalled` its first half alone is sent."""
        self.goes_on.set()
        self.stalled = ".safetensors"
        self.stalls = threading.Event()
        """Set once such a half was sent; other weight files come after it."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)


class HubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = sorted(self.server.directory.iterdir())
        repo = self.server.repo
        if path.startswith(f"/api/models/{repo}/tree/"):
            self.answer(
                json.dumps([{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40} for f in files]).encode()
            )
        elif path == "/api/models":
            self.answer(json.dumps([{"id": repo, "safetensors": {"parameters": {"F32": 1 << 20}}}]).encode())
        elif path.startswith(f"/api/models/{repo}"):
            names = [{"rfilename": f.name} for f in files]
            self.answer(json.dumps({"id": repo, "sha": COMMIT, "siblings": names}).encode())
        elif path.startswith(f"/{repo}/resolve/") and (self.server.directory / path.rpartition("/")[2]).is_file():
            self.file(self.server.directory / path.rpartition("/")[2])
        else:
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def file(self, path: Path) -> None:
        data, status = path.read_bytes(), 200
        headers = {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if (wanted := self.headers.get("Range")) and self.command == "GET":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = min(int(last or len(data) - 1) + 1, len(data))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            data, status = data[int(first) : stop], 206
        if self.command == "GET":
            self.server.sent[path.name] += len(data)
        self.answer(data, status, headers)

    def answer(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            if self.path.endswith(self.server.stalled):
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.server.stalls.set()
                self.server.goes_on.wait(120)
                data = data[len(data) // 2 :]
            elif self.path.endswith(".safetensors"):
                self.server.stalls.wait(120)
            self.wfile.write(data)
