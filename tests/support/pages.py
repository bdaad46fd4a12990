"""A page with a simulated run behind it, over real HTTP, and a way to ask it."""

import asyncio
import gzip
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from decod.clocks import wall_clock
from decod.daemon.page.acting import Acting
from decod.daemon.page.app import page_app, public_app
from decod.daemon.page.feed import PageFeed
from decod.daemon.page.http_server import HttpServer
from decod.ids import NodeId
from decod.journal.history import RunHistory, SeenMember
from tests.support.noted import noted


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page has answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def get(
    port: int,
    path: str = "/",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes = b"",
) -> Answer:
    """Send one request to a page on this machine. A `Host` among the headers replaces the usual."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        given = {"Host": f"127.0.0.1:{port}", "Accept-Encoding": "gzip"} | (headers or {})
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            connection.putheader(name, value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        content = answer.read()
        if names.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        return Answer(answer.status, names, content)
    finally:
        connection.close()


@dataclass(slots=True)
class SimulatedRun:
    """A run that never was: its status, and its history."""

    num_stages: int
    num_per_stage: int
    organisation: str = "pipeline"
    history: RunHistory = field(default_factory=RunHistory)
    names: dict[str, str] = field(default_factory=dict)
    """Names of nodes that are not called as usual, by their ids."""
    iteration: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    """What readers have asked the node to do."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Its answers, by the command."""

    async def answer(self, line: bytes) -> dict[str, Any]:
        """Answer a request of the control socket."""
        self.asked.append(json.loads(line))
        return dict(self.answers.get(self.asked[-1]["command"], {}))

    def train(self, num_iterations: int, *, period_s: float = 2.0) -> None:
        """Commit iterations, the last of them now."""
        now_s = wall_clock()
        for index in range(num_iterations):
            self.iteration += 1
            loss = 2.5 + 8.0 / (1 + self.iteration / 20) + 0.05 * (self.iteration * 7 % 11 - 5) / 5
            num_tokens = int(period_s * (5000 + 300 * (self.iteration * 13 % 7)))
            fields = {"iteration": f"{self.iteration}.1", "loss": loss, "num_tokens": num_tokens}
            time_s = now_s - period_s * (num_iterations - 1 - index)
            self.history.take(noted("step.committed", fields, time_s))
            if not self.iteration % 25:
                told = {"iteration": self.iteration, "loss": loss + 0.2}
                self.history.take(noted("evaluation.done", told, time_s))
                wrote = {"prompt": "Once upon a time", "text": f" there was {self.iteration}"}
                self.history.take(noted("text.written", told | wrote, time_s))

    def see(self, *, without: frozenset[str] = frozenset()) -> None:
        """Tell the history of the members, but for some."""
        seen = [
            SeenMember(NodeId(node["id"]), node["name"], stage["index"], node["microbatches"])
            for stage in self._stages()
            for node in stage["nodes"]
            if node["id"] not in without
        ]
        self.history.see(seen, time_s=wall_clock())

    def lose(self, node_id: str, reason: str = "does not answer") -> None:
        fields = {"peer": node_id, "reason": reason}
        self.history.take(noted("member.lost", fields, wall_clock()))

    async def ask(self) -> dict[str, Any]:
        """Return the leader's status."""
        stages = self._stages()
        leader = stages[0]["nodes"][0]
        return {
            "schema_version": 1,
            "decod_version": "0.1.0",
            "run_id": "r" * 26,
            "run_name": "tiny-stories",
            "run_state": "training",
            "state": "training",
            "organisation": self.organisation,
            "iteration": self.iteration,
            "loss": 3.21,
            "gradient_norm": 0.7,
            "tokens_per_s": 6100.0,
            "num_iterations": 4000,
            "num_tokens": 8192 * self.iteration,
            "left_s": 7320.0,
            "message": "",
            "leader": {"id": leader["id"], "name": leader["name"], "term": 1, "electing": False},
            "node": {**leader, "role": "data", "device": "cuda:0", "stage_index": 0},
            "stages": stages,
            "links": list(self._links(stages)),
            "candidates": [],
            "checkpoint": {"iteration": 40},
            "contributed": {"num_microbatches": 320, "num_tokens": 81_920},
            "data": {"num_skipped": 0, "num_deferred": 0, "num_reread": 0},
            "counters": {"refused": 1},
            "timing": {"compute_s": 12.5, "num_passes": 640},
            "recent": [{"age_s": 12.0, "event": "member.lost", "text": "swift-eel is gone"}],
            "join_string": "decod1-secret",
        }

    def _stages(self) -> list[dict[str, Any]]:
        return [
            {"index": stage, "nodes": [self._node(stage, index) for index in range(num)]}
            for stage, num in enumerate([1, *[self.num_per_stage] * (self.num_stages - 1)])
        ]

    def _node(self, stage: int, index: int) -> dict[str, Any]:
        node_id = f"{'abcdefghij'[stage]}{index:07d}".ljust(52, "x")
        servers = self.organisation == "servers" and stage
        role = "data" if not stage else "relay" if not servers or index < 2 else "client"
        return {
            "id": node_id,
            "name": self.names.get(node_id, f"relay-{stage}-{index}" if stage else "leader"),
            "address": "192.0.2.1:7700",
            "role": role,
            "duty": ("frontal", "backward")[index] if servers and index < 2 else None,
            "state": "paused" if index == 3 else "training",
            "device": "NVIDIA GeForce RTX 4090",
            "memory_bytes": 24_000_000_000,
            "reach": "dialled",
            "waits_for": [],
            "computing_s": 1.2,
            "waiting_s": 0.6,
            "sending_s": 0.4,
            "capacity": 4,
            "flows": 0 if servers else 2,
            "microbatches": 40 + 7 * (index % 5) + self.iteration,
        }

    def _links(self, stages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        home = [*stages, stages[0]]
        for here, there in itertools.pairwise(home):
            most = max(len(here["nodes"]), len(there["nodes"]))
            for index in range(most):
                begin = here["nodes"][index % len(here["nodes"])]
                end = there["nodes"][(index * 7 + 1) % len(there["nodes"])]
                yield {
                    "from": begin["id"],
                    "to": end["id"],
                    "num_flows": 0 if self.organisation == "servers" else 1 + index % 3,
                    "cost_s": 0.08,
                    "latency_s": 0.021,
                    "bandwidth_bytes_per_s": 1.2e6 if index % 9 == 1 else 1.25e7,
                }


@contextmanager
def served(
    run: SimulatedRun, acting: Acting | None = None, *, public: bool = False
) -> Iterator[int]:
    """Serve the page of a simulated run, or its public page; yield its port."""
    feed = PageFeed(run.ask, run.history, time.monotonic)
    app = public_app(feed, time.monotonic) if public else page_app(feed, "127.0.0.1", acting)
    with served_app(app) as port:
        yield port


@contextmanager
def served_app(app: ASGIApp) -> Iterator[int]:
    """Serve an application; yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app)
    loop = asyncio.new_event_loop()
    serving = loop.create_task(server.run(listener))
    thread = threading.Thread(target=_run_until_cancelled, args=(loop, serving))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        loop.close()
        listener.close()


def _run_until_cancelled(loop: asyncio.AbstractEventLoop, serving: "asyncio.Task[None]") -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(serving)
