"""An object store for tests: a folder over HTTP on loopback, which fails as it is told to."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_RANGE = re.compile(r"bytes=(\d+)-(\d+)\Z")


class HttpStore:
    """What a store serves, and how it fails.

    Args:
        folder: The files that it serves.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status: int | None = None
        """With which it answers everything; None: it works."""
        self.corrupt: dict[str, int] = {}
        """File -> how many more of its parts are served with wrong bytes."""
        self.truncate: dict[str, int] = {}
        """File -> how many more of its parts are served cut off."""
        self.knows_ranges = True
        self.asked: Counter[str] = Counter()
        """Requests for parts of each file."""
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, path: str, wanted: str | None) -> tuple[int, bytes]:
        """Return the status and the body for a request for a file or a part of it."""
        with self.lock:
            if self.status is not None:
                return self.status, b""
            file = path.rpartition("/")[2]
            try:
                content = (self.folder / file).read_bytes()
            except OSError:
                return 404, b""
            match = _RANGE.match(wanted or "")
            if match is None or not self.knows_ranges:
                return 200, content
            self.asked[file] += 1
            part = content[int(match[1]) : int(match[2]) + 1]
            if self._is_due(self.corrupt, file):
                part = bytes(len(part))
            if self._is_due(self.truncate, file):
                part = part[: len(part) // 2]
            return 206, part

    def _is_due(self, due: dict[str, int], file: str) -> bool:
        left = due.get(file, 0)
        due[file] = left - 1
        return left > 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: HttpStore

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, body = self.store.answer(self.path, self.headers.get("Range"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.store.knows_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def http_store(folder: Path) -> Iterator[HttpStore]:
    """Serve a folder on a free port of the loopback while the context lasts."""
    store = HttpStore(folder)
    handler = type("Handler", (_Handler,), {"store": store})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        store.url = f"http://127.0.0.1:{server.server_port}/bucket/corpus"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()
