"""The part of the Hugging Face Hub's protocol that huggingface_hub speaks, on loopback.

It holds repositories in memory, and breaks connections, changes files and refuses as it is told.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_ThisIsTheTokenThatMustNotBeSeen42"
"""The token of an account that may read everything and write to its own repositories."""
OWNER = "someone"

_AT_ONCE = struct.pack("ii", 1, 0)
_LARGE_BYTES = 4096
"""Files of at least this size are in git's large storage."""


@dataclass
class Repository:
    """One model's commits and branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by name, by commit."""
    revisions: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    is_gated: bool = False
    is_private: bool = False

    def commit(self, files: dict[str, bytes], message: str, revision: str = "main") -> str:
        """Add files to a branch; return the commit."""
        content = {**self.commits.get(self.revisions.get(revision, ""), {}), **files}
        commit = hashlib.sha1(repr((len(self.commits), content)).encode()).hexdigest()
        self.commits[commit] = content
        self.revisions[revision] = commit
        self.messages.append(message)
        return commit

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the main branch."""
        return self.commits[self.revisions["main"]]


class HubServer:
    """The repositories, what goes wrong with them, and what was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, Repository] = {}
        self.breaks: dict[str, list[int]] = {}
        """File -> after how many bytes its next answers end."""
        self.resets = False
        """Whether connections that break are reset instead of closed."""
        self.altered: dict[str, bytes] = {}
        """File -> bytes in its place, of the same number."""
        self.status: int | None = None
        """With which everything is answered; None: it works."""
        self.words = "no"
        self.asked: list[str] = []
        """Method and path of each request."""
        self.ranges: list[tuple[str, int]] = []
        """Files and the bytes from which on they were asked for."""
        self.fetched: Counter[str] = Counter()
        """How often a file was asked for."""
        self.given_bytes: Counter[str] = Counter()
        """How much of a file was asked for."""
        self.tokens: set[str | None] = set()
        self.large: dict[str, bytes] = {}
        """What was uploaded into large storage, by hash."""

    def add(self, name: str, folder: Path, **facts: bool) -> str:
        """Put the files of a folder into a repository; return the commit."""
        repository = self.repositories.setdefault(name, Repository(**facts))
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        return repository.commit(files, "first")


def git_hash(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._route()

    def do_HEAD(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def do_PUT(self) -> None:
        self._route()

    def _route(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(f"{self.command} {path}")
        given = self.headers.get("Authorization")
        self._token = given.removeprefix("Bearer ") if given else None
        hub.tokens.add(self._token)
        if hub.status is not None:
            self._refuse(hub.status, "", hub.words)
            return
        for pattern, answer in (
            (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self._info),
            (r"/api/models/([^/]+/[^/]+)/tree/(.+)", self._tree),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._file),
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", self._validated),
            (r"/api/models/([^/]+/[^/]+)/preupload/main", self._modes),
            (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            (r"/large/([0-9a-f]{64})", self._keep),
            (r"/api/models/([^/]+/[^/]+)/commit/main", self._commit),
        ):
            if (found := re.fullmatch(pattern, path)) is not None:
                answer(*found.groups())
                return
        self._refuse(404, "", f"no route {path}")

    # --- answers ------------------------------------------------------------------------------

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, words: str) -> None:
        headers = {"X-Error-Message": words} | ({"X-Error-Code": code} if code else {})
        self._send(status, b"", headers)

    def _commit_of(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """Return a repository and a commit that exist and may be seen, or refuse."""
        repository = self.hub.repositories.get(name)
        if self._token not in (None, TOKEN):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repository is None or (repository.is_private and self._token != TOKEN):
            self._refuse(404 if self._token else 401, "RepoNotFound", "Repository not found")
        elif (commit := repository.revisions.get(revision, revision)) not in repository.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository, commit
        return None

    # --- reading ------------------------------------------------------------------------------

    def _info(self, name: str, revision: str | None) -> None:
        if (found := self._commit_of(name, revision or "main")) is not None:
            repository, commit = found
            siblings = [{"rfilename": file} for file in repository.commits[commit]]
            facts = {"id": name, "sha": commit, "siblings": siblings}
            self._send_json(facts | {"private": repository.is_private})

    def _tree(self, name: str, revision: str) -> None:
        if (found := self._commit_of(name, revision)) is None:
            return
        repository, commit = found
        deep = "recursive=true" in self.path.lower()
        entries: list[dict[str, Any]] = []
        for file, content in repository.commits[commit].items():
            entry: dict[str, Any] = {"type": "file", "path": file, "size": len(content)}
            entry["oid"] = git_hash(content)
            if len(content) >= _LARGE_BYTES:
                large = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": large, "size": len(content), "pointerSize": 134}
                entry["oid"] = "0" * 40
            if deep or "/" not in file:
                entries.append(entry)
        self._send_json(entries)

    def _file(self, name: str, revision: str, file: str) -> None:
        if (found := self._commit_of(name, revision)) is None:
            return
        repository, commit = found
        if repository.is_gated and self._token != TOKEN:
            self._refuse(401 if self._token is None else 403, "GatedRepo", "Access is restricted")
            return
        content = repository.commits[commit].get(file)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        is_large = len(content) >= _LARGE_BYTES
        tag = hashlib.sha256(content).hexdigest() if is_large else git_hash(content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        start, end, status = 0, len(content), 200
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is not None:
            start, status = int(wanted[1]), 206
            end = int(wanted[2]) + 1 if wanted[2] else end
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        body = self.hub.altered.get(file, content)[start:end]
        headers["Content-Length"] = str(len(body))
        if self.command == "GET":
            self.hub.fetched[file] += 1
            self.hub.ranges.append((file, start))
            self.hub.given_bytes[file] += len(body)
            if left := self.hub.breaks.get(file):
                body = body[: left.pop(0)]
                self.close_connection = True
                if self.hub.resets:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._send(status, body, headers)

    # --- writing ------------------------------------------------------------------------------

    def _may_write(self, name: str) -> bool:
        if self._token == TOKEN and name.startswith(f"{OWNER}/"):
            return True
        self._refuse(403 if self._token == TOKEN else 401, "", "You may not write here")
        return False

    def _create(self) -> None:
        asked = json.loads(self._body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self._may_write(name):
            return
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            self._send_json(url, 409)
            return
        is_private = asked.get("visibility") == "private"
        self.hub.repositories[name] = Repository(is_private=is_private)
        self.hub.repositories[name].commit({".gitattributes": b""}, "initial commit")
        self._send_json(url)

    def _validated(self) -> None:
        self._send_json({"errors": [], "warnings": []})

    def _modes(self, name: str) -> None:
        if self._may_write(name):
            files = json.loads(self._body)["files"]
            self._send_json(
                {
                    "files": [
                        {
                            "path": each["path"],
                            "uploadMode": "lfs" if each["size"] >= _LARGE_BYTES else "regular",
                            "shouldIgnore": False,
                        }
                        for each in files
                    ]
                }
            )

    def _batch(self, name: str) -> None:
        if self._may_write(name):
            objects = json.loads(self._body)["objects"]
            for each in objects:
                if each["oid"] not in self.hub.large:
                    href = f"{self.hub.url}/large/{each['oid']}"
                    each["actions"] = {"upload": {"href": href}}
            self._send_json({"transfer": "basic", "objects": objects})

    def _keep(self, oid: str) -> None:
        if hashlib.sha256(self._body).hexdigest() != oid:
            self._refuse(400, "", "other bytes")
            return
        if left := self.hub.breaks.get(oid):
            left.pop()
            self._refuse(500, "", "try again")
            return
        self.hub.large[oid] = self._body
        self._send(200, b"")

    def _commit(self, name: str) -> None:
        if not self._may_write(name):
            return
        lines = [json.loads(line) for line in self._body.splitlines()]
        files, message = {}, ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.large[value["oid"]]
        commit = self.hub.repositories[name].commit(files, message)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._send_json({"commitUrl": url, "commitOid": commit})


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve a Hub on a free port of the loopback while the context lasts."""
    hub = HubServer()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def asked_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve a Hub that this process asks, and processes that it starts.

    Args:
        cache: The folder of its cache.
        monkeypatch: Undoes all settings.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with hub_server() as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
        for name, value in (settings | {"HF_HUB_DISABLE_XET": "1"}).items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        # The library has read the environment when it was imported.
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, given in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(cache / "hub"),
            "HF_TOKEN_PATH": str(cache / "token"),
            "HF_STORED_TOKENS_PATH": str(cache / "stored_tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, given)
        try:
            yield hub
        finally:
            close_session()
