"""One host of the study: trains as a script of a user does, one point after another.

Lines on the socket, JSON objects:

    <- {"point": {..}, "index": 0, "join": "", "state_dir": "/tmp/.."}
    -> {"join": "decod1-.."}             it has joined, and waits
    <- {}                                all others have, too
    -> {"runtime_s": .., ..}             what has come of it
"""

import argparse
import json
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from decod.errors import DataError
from decod.host_limits import num_processors
from decod.insight.round_files import read_records
from decod.journal.records import RoundRow
from decod.lab.study.grid import Point
from decod.lab.study.pictures import make_model, pictures
from decod.optimizer import CollaborativeOptimizer

_MOMENTUM = 0.9  # As in the thesis.
_SEED = 3
_NUM_TRIALS = 8
_TAIL = 4
"""Accuracy is that of the last of so many parts."""


@dataclass(slots=True)
class _Tally:
    """What a loop has measured."""

    optimizer_s: float = 0.0
    accuracies: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def tail(self, values: list[float]) -> float:
        last = values[-max(1, len(values) // _TAIL) :]
        return sum(last) / len(last)


class _Loop:
    """One host's training loop.

    Args:
        point: What is run.
        index: Of this host: it takes every so many-th picture.
    """

    def __init__(self, point: Point, index: int) -> None:
        hosts = max(1, point.peers)
        self._point = point
        _choose_threads(max(1, num_processors() // hosts), point.batch_size)
        every, kinds = pictures(point.num_samples, _SEED)
        self._pictures, self._kinds = every[index::hosts], kinds[index::hosts]
        self.model = make_model()
        self.plain = torch.optim.SGD(self.model.parameters(), lr=point.rate, momentum=_MOMENTUM)
        self._storage = threading.Event()
        """Never set: waiting for it stands for slow storage."""

    def _load(self, begin: int) -> tuple[Tensor, Tensor]:
        some = slice(begin, begin + self._point.batch_size)
        inputs, kinds = self._pictures[some], self._kinds[some]
        if self._point.load_s:
            self._storage.wait(self._point.load_s * len(inputs))
        return inputs, kinds

    def train(self, optimizer: CollaborativeOptimizer | None) -> _Tally:
        """Train on all of this host's pictures once.

        Args:
            optimizer: Of the run. None: the plain one is used.
        """
        tally, every = _Tally(), self._point.accumulation
        for step, begin in enumerate(range(0, len(self._pictures), self._point.batch_size), 1):
            inputs, kinds = self._load(begin)
            outputs = self.model(inputs)
            loss = nn.functional.cross_entropy(outputs, kinds)
            tally.losses.append(loss.item())
            tally.accuracies.append((outputs.argmax(1) == kinds).float().mean().item())
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                begun_s = perf_counter()
                optimizer.step(batch_size=len(inputs))
                tally.optimizer_s += perf_counter() - begun_s
                continue
            (loss / every).backward()  # type: ignore[no-untyped-call]
            if step % every == 0:
                begun_s = perf_counter()
                self.plain.step()
                tally.optimizer_s += perf_counter() - begun_s
                self.plain.zero_grad()
        return tally


def _choose_threads(num_max: int, batch_size: int) -> None:
    """Compute with as many threads as make a step fastest: small passes gain nothing by several."""
    inputs, kinds = pictures(batch_size, _SEED)
    model = make_model()
    found: dict[int, float] = {}
    for num_threads in sorted({1, num_max}):
        torch.set_num_threads(num_threads)
        for _ in range(_NUM_TRIALS):
            begun_s = perf_counter()
            nn.functional.cross_entropy(model(inputs), kinds).backward()  # type: ignore[no-untyped-call]
            spent_s = perf_counter() - begun_s
            found[num_threads] = min(spent_s, found.get(num_threads, spent_s))
    torch.set_num_threads(min(found, key=found.__getitem__))


class _Talk:
    """Lines to and from the process that runs the study."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")

    def next(self) -> dict[str, Any] | None:
        line = self._stream.readline()
        return json.loads(line) if line else None

    def say(self, **fields: Any) -> None:
        self._stream.write(json.dumps(fields).encode() + b"\n")
        self._stream.flush()


def _run(talk: _Talk, asked: dict[str, Any]) -> None:
    """Run one point, from joining to leaving."""
    point, state_dir = Point(**asked["point"]), Path(asked["state_dir"])
    loop = _Loop(point, asked["index"])
    optimizer: CollaborativeOptimizer | None = None
    with ExitStack() as stack:
        if point.peers:
            optimizer = stack.enter_context(_join(loop, point, asked["join"], state_dir))
        talk.say(join="" if optimizer is None else optimizer.join_string)
        talk.next()
        begun_s = perf_counter()
        tally = loop.train(optimizer)
        runtime_s = perf_counter() - begun_s
    rounds, dropped = (0, 0) if optimizer is None else (optimizer.round, optimizer.samples_dropped)
    talk.say(
        runtime_s=runtime_s,
        optimizer_s=tally.optimizer_s,
        accuracy=tally.tail(tally.accuracies),
        loss=tally.tail(tally.losses),
        rounds=rounds,
        dropped=dropped,
        **_recorded(state_dir, point),
    )


def _join(loop: _Loop, point: Point, join: str, state_dir: Path) -> CollaborativeOptimizer:
    return CollaborativeOptimizer(
        loop.plain,
        run=None if join else "study",
        join=join or None,
        target_batch_size=point.target,
        batch_size_per_step=point.batch_size,
        use_local_updates=point.local,
        gradient_accumulation_steps=point.accumulation,
        listen="127.0.0.1:0",
        state_dir=state_dir,
        verbose=False,
    )


def _recorded(state_dir: Path, point: Point) -> dict[str, float]:
    """Return what the node has recorded of its rounds. It does not record the first."""
    rows: list[RoundRow] = []
    if point.peers:
        try:
            rows = read_records([state_dir]).rounds
        except DataError:  # There was no second round.
            rows = []
    whole = [row for row in rows if row.peers == point.peers]
    return {
        "wait_s": sum(row.wait_s or 0.0 for row in rows),
        "sent_bytes": sum(row.average_sent_bytes or 0 for row in rows),
        "whole_rounds": len(whole) / len(rows) if rows else 1.0,
        "averaging_s": sum((r.matchmaking_s or 0.0) + (r.averaging_s or 0.0) for r in whole)
        / max(1, len(whole)),
    }


def main() -> None:
    """Run points until the connection is closed."""
    parser = argparse.ArgumentParser(prog="python -m decod.lab.study.study_worker")
    parser.add_argument("--socket-fd", type=int, required=True)
    with socket.socket(fileno=parser.parse_args().socket_fd) as connection:
        talk = _Talk(connection)
        while (asked := talk.next()) is not None:
            _run(talk, asked)


if __name__ == "__main__":
    main()
