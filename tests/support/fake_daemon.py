"""A control socket that answers as a daemon would, and the status that it tells."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

from decod.daemon.control import SOCKET_NAME


def node(name: str, **changes: object) -> dict[str, Any]:
    return {
        "id": f"{name}-id-0123456789",
        "name": name,
        "address": "127.0.0.1:7701",
        "state": "training",
        "capacity": 4,
        "flows": 3,
        "microbatches": 120,
    } | changes


def status_answer(**changes: object) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "decod_version": "0.1.0",
        "run_id": "r" * 26,
        "run_name": "wiki",
        "run_state": "training",
        "state": "training",
        "iteration": 12,
        "loss": 2.9131,
        "tokens_per_s": 1830.4,
        "leader": {"id": "l" * 26, "name": "data-1", "address": "127.0.0.1:7700", "term": 1},
        "node": node("data-1", role="data", stage_index=0, device="cpu"),
        "stages": [
            {"index": 0, "nodes": [node("data-1")]},
            {"index": 1, "nodes": [node("relay-1"), node("relay-2", state="syncing")]},
            {"index": 2, "nodes": []},
        ],
        "candidates": [{"id": "c" * 26, "name": "relay-9", "capacity": 2, "stage_index": None}],
        "join_string": "decod1-abc@127.0.0.1:7700",
        "counters": {"messages_refused": 0},
        "message": "stage 2 has no member",
    } | changes


class FakeDaemon:
    """Answers requests on a control socket: with the object of the command, else with `answer`."""

    def __init__(self, state_dir: Path) -> None:
        self.answer: dict[str, Any] = status_answer()
        self.answers: dict[str, dict[str, Any]] = {}
        self._path = state_dir / SOCKET_NAME
        self.requests: list[dict[str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as stream:
                line = stream.readline()
                if not line:
                    return
                self.requests.append(request := json.loads(line))
                answer = self.answers.get(request["command"], self.answer)
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._listener.getsockname())
        self._thread.join()
        self._listener.close()
        self._path.unlink()
