"""A node process's end of the connection to a loop, in threads of the test."""

import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from decod.system import anonymous_file

DEADLINE_S = 30.0

Fields = dict[str, Any]


class FakeNode:
    """One node. It greets the loop, and tells `policy` of all that comes later.

    Args:
        policy: Called in the node's thread with this node and each message. None: the test takes
            the messages with `expect`.
        fetching: Whether the loop must load a state before it trains.
    """

    def __init__(
        self,
        policy: "Callable[[FakeNode, Fields], None] | None" = None,
        *,
        fetching: bool = False,
        refusal: Fields | None = None,
    ) -> None:
        self._policy, self._fetching, self._refusal = policy, fetching, refusal
        self.hello: Fields = {}
        self.received: queue.Queue[Fields] = queue.Queue()
        self.kept: list[Fields] = []
        """All messages, for the test to look at."""
        self.num_samples = 0

    def connect(self) -> tuple[socket.socket, None]:
        """Stand in for `start_node`."""
        self._socket, theirs = socket.socketpair()
        self._fd = anonymous_file("fake-arena")
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        return theirs, None

    def _serve(self) -> None:
        # Another node of the run may end in the middle of an average, and close its memory.
        with self._socket, self._socket.makefile("rb") as lines, suppress(OSError):
            for line in lines:
                self._take(json.loads(line))
        os.close(self._fd)

    def _take(self, message: Fields) -> None:
        self.kept.append(message)
        if message["kind"] == "hello":
            self._greet(message)
        elif message["kind"] == "read_back":
            pass  # The loop has read what was given back. The memory here is never used again.
        elif self._policy is not None:
            self._policy(self, message)
        else:
            self.received.put(message)

    def _greet(self, hello: Fields) -> None:
        self.hello = hello
        if self._refusal is not None:
            self.send("refused", **self._refusal)
            return
        self.wide: torch.dtype = getattr(torch, hello["wide"])
        self.size = hello["num_elements"] * self.wide.itemsize
        os.ftruncate(self._fd, 4 * self.size)
        line = {"kind": "ready", "join_string": "decod1-v-fake", "fetching": self._fetching}
        socket.send_fds(self._socket, [json.dumps(line).encode() + b"\n"], [self._fd])

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the loop."""
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        with suppress(OSError):
            self._socket.sendall(line)

    def end(self) -> None:
        """Die."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def expect(self, kind: str) -> Fields:
        """The next message, which is of this kind."""
        message = self.received.get(timeout=DEADLINE_S)
        assert message["kind"] == kind, message
        return message

    def region(self, index: int) -> Fields:
        """One of the four regions of the arena."""
        return {"offset": index * self.size, "num_bytes": self.size}

    def read(self, index: int) -> Tensor:
        """What is in a region."""
        data = bytearray(os.pread(self._fd, self.size, index * self.size))
        return torch.frombuffer(data, dtype=self.wide)

    def write(self, index: int, values_P: Tensor) -> None:
        """Put something into a region."""
        data = values_P.to(self.wide).contiguous().numpy().tobytes()
        assert len(data) == self.size
        os.pwrite(self._fd, data, index * self.size)

    def contribute(self, request: int = 1, index: int = 0) -> None:
        self.send("contribute", request=request, region=self.region(index))

    def average(self, round_number: int, average_P: Tensor, *, included: bool) -> None:
        """Send an average."""
        self.write(1, average_P)
        facts = {"total_samples": 1, "peers": 1, "seconds": 0.0}
        region = self.region(1)
        self.send("average", round=round_number, region=region, included=included, **facts)

    def go(self, message: Fields, kind: str = "go") -> None:
        """Answer a step."""
        self.send(kind, step=message["step"])


def alone(target: int) -> Callable[[FakeNode, Fields], None]:
    """A policy: nobody else is there."""

    def answer(node: FakeNode, message: Fields) -> None:
        if message["kind"] == "step":
            node.num_samples += message["samples"]
            if node.num_samples >= target:
                node.num_samples = 0
                round_number = 1 + sum(each["kind"] == "applied" for each in node.kept)
                node.send("alone", round=round_number, samples=target)
            node.go(message)

    return answer


class FakeRun:
    """Some nodes that average: a round ends once all together have `target` samples.

    Args:
        num_peers: All of them take part in each round.
        target: Samples of a round.
        shares: Samples after which each waits for the average.
        waits: Whether anybody waits.
    """

    def __init__(
        self, num_peers: int, target: int, shares: list[int], *, waits: bool = True
    ) -> None:
        self.nodes = [FakeNode(self._take) for _ in range(num_peers)]
        self._target, self._shares, self._waits = target, shares, waits
        self._lock = threading.Lock()
        self._samples = [0] * num_peers
        self._given: dict[int, Fields] = {}
        self.round = 0
        self.totals: list[int] = []

    def _take(self, node: FakeNode, message: Fields) -> None:
        with self._lock:
            peer = self.nodes.index(node)
            if message["kind"] == "step":
                self._samples[peer] += message["samples"]
                waits = self._waits and self._samples[peer] >= self._shares[peer]
                node.go(message, "wait" if waits else "go")
                if sum(self._samples) >= self._target and not self._given:
                    self._given = {-1: {}}
                    for each in self.nodes:
                        each.contribute()
            elif message["kind"] == "contributed":
                self._given[peer] = message
                if len(self._given) == len(self.nodes) + 1:
                    self._average()

    def _average(self) -> None:
        del self._given[-1]
        total = sum(message["samples"] for message in self._given.values())
        self.totals.append(total)
        sums = [node.read(0) for node in self.nodes]
        average_P = sum(sums[1:], sums[0]) / total
        self.round += 1
        for peer, node in enumerate(self.nodes):
            self._samples[peer] -= self._given[peer]["samples"]
            node.average(self.round, average_P, included=self._given[peer]["samples"] > 0)
        self._given = {}
