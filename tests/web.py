"""A web server on loopback with faults to order: statuses, cut connections, no ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Web(ThreadingHTTPServer):
    """Serves `files` by name.

    Attributes:
        faults: what happens to the next requests instead: a status, or cut after so many bytes where it is negative.
        ranges: whether it knows ranges.
        asked: name and first byte of each request.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.faults: list[int] = []
        self.ranges = True
        self.asked: list[tuple[str, int]] = []

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/models/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/models/")
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.server.asked.append((name, start))
        fault = self.server.faults.pop(0) if self.server.faults else 0
        content = self.server.files.get(name)
        if fault > 0 or content is None:
            self._head(fault if fault > 0 else 404, 0)
        elif start >= len(content) > 0 and start and self.server.ranges:
            self._head(416, 0)
        else:
            start = start if self.server.ranges else 0
            self._head(206 if start else 200, len(content) - start, start)
            self.wfile.write(content[start : start - fault if fault else None])
            self.close_connection = True

    def _head(self, status: int, length: int, start: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + length - 1}/{start + length}")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(files: dict[str, bytes]) -> Iterator[Web]:
    server = Web(files)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
