"""Rounds in virtual time, with records of them: what the models of `decod.insight` must predict.

These simulations know nothing of the models. They move one step or microbatch at a time. A test
records a run, has the model predict a change, and simulates the run with that change.
"""

import heapq
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

from decod.journal.records import Mode, RoundRow

RUN = "testrun"

_RATIOS = {"none": 1.0, "bf16": 0.5, "int8": 0.26, "int4": 0.135}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPeer:
    """One peer of a collaborative optimizer. Times are of one step."""

    name: str
    data_s: float = 0.01
    forward_s: float = 0.03
    backward_s: float = 0.06
    accumulate_s: float = 0.0
    uplink_bytes_per_s: float = 1e8


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOptimizer:
    """A run of the collaborative optimizer."""

    peers: tuple[SimulatedPeer, ...]
    step_samples: int = 4
    target: int = 256
    model_bytes: float = 1e7
    matchmaking_s: float = 0.1
    arithmetic_s: float = 0.05
    apply_s: float = 0.02
    optimizer_s: float = 0.02
    """Of one step of the optimizer."""
    local_updates: bool = False
    accumulation_steps: int = 1
    overlap: bool = False
    compression: str = "none"

    def rows(self, num_rounds: int = 30) -> list[RoundRow]:
        """Return what the peers would record."""
        return _OptimizerRun(self).run(num_rounds)

    def samples_per_s(self, num_rounds: int = 60) -> float:
        """Return the speed of the run."""
        rows = self.rows(num_rounds)
        name = self.peers[0].name
        own = [row for row in rows if row.name == name][1:]
        return sum(row.round_samples or 0 for row in own) / sum(row.round_s for row in own)


class _OptimizerRun:
    """Peers that step at their own pace, until the batch is full."""

    def __init__(self, run: SimulatedOptimizer) -> None:
        self._run = run
        self._lengths_s = {peer.name: sum(self._step_parts(peer).values()) for peer in run.peers}
        self._due = [(length_s, name) for name, length_s in self._lengths_s.items()]
        heapq.heapify(self._due)
        self._waiting: list[str] = []
        self._steps: Counter[str] = Counter()
        self._contributed: Counter[str] = Counter()
        self._ends_s: float | None = None
        """When the average that is under way ends."""

    def _step_parts(self, peer: SimulatedPeer) -> dict[str, float]:
        run = self._run
        parts = {
            "data_s": peer.data_s,
            "forward_s": peer.forward_s,
            "backward_s": peer.backward_s,
            "accumulate_s": peer.accumulate_s / run.accumulation_steps,
        }
        if run.local_updates:
            parts["optimizer_s"] = run.optimizer_s / run.accumulation_steps
        return parts

    def _sending_s(self, peer: SimulatedPeer) -> float:
        num, ratio = len(self._run.peers), _RATIOS[self._run.compression]
        return 2 * (num - 1) / num * self._run.model_bytes * ratio / peer.uplink_bytes_per_s

    @property
    def _full(self) -> bool:
        return self._steps.total() * self._run.step_samples >= self._run.target

    def _begin_average(self, now_s: float) -> None:
        run = self._run
        self._contributed, self._steps = self._steps, Counter()
        transfer_s = max(map(self._sending_s, run.peers))
        self._ends_s = now_s + run.matchmaking_s + run.arithmetic_s + transfer_s

    def run(self, num_rounds: int) -> list[RoundRow]:
        run, rows, begun_s = self._run, list[RoundRow](), 0.0
        apply_s = run.apply_s + (0.0 if run.local_updates else run.optimizer_s)
        for number in range(1, num_rounds + 1):
            while self._ends_s is None or (self._due and self._due[0][0] <= self._ends_s):
                self._step()
            now_s, self._ends_s = self._ends_s + apply_s, None
            rows += self._rows(self._contributed, now_s, begun_s, number)
            begun_s = now_s
            if self._full:
                self._begin_average(now_s)
            # Those in the middle of a step apply the average behind it.
            self._due = [(at_s + apply_s, name) for at_s, name in self._due]
            self._due += [(now_s + self._lengths_s[name], name) for name in self._waiting]
            heapq.heapify(self._due)
            self._waiting = []
        return rows

    def _step(self) -> None:
        """Let the next peer end its step."""
        at_s, name = heapq.heappop(self._due)
        self._steps[name] += 1
        if self._full and self._ends_s is None:
            self._begin_average(at_s)
        averages = self._ends_s is not None
        if averages and (self._full or not self._run.overlap):
            self._waiting.append(name)
        else:
            heapq.heappush(self._due, (at_s + self._lengths_s[name], name))

    def _rows(
        self, steps: Counter[str], now_s: float, begun_s: float, number: int
    ) -> list[RoundRow]:
        run = self._run
        common: dict[str, Any] = {
            "mode": Mode.OPTIMIZER,
            "time_s": now_s,
            "run": RUN,
            "round": number,
            "round_s": now_s - begun_s,
            "round_samples": steps.total() * run.step_samples,
            "matchmaking_s": run.matchmaking_s,
            "averaging_s": run.arithmetic_s + max(map(self._sending_s, run.peers)),
            "averaging_compute_s": run.arithmetic_s,
            "apply_s": run.apply_s,
            "peers": len(run.peers),
            "target_batch_size": run.target,
            "batch_size_per_step": run.step_samples,
            "local_updates": run.local_updates,
            "overlap": run.overlap,
            "compression": run.compression,
        }
        rows = []
        for peer in run.peers:
            num = steps[peer.name]
            parts = {key: value * num for key, value in self._step_parts(peer).items()}
            parts.setdefault("optimizer_s", run.optimizer_s)
            rows.append(
                RoundRow(
                    **common,
                    **parts,
                    peer=f"id-{peer.name}",
                    name=peer.name,
                    steps=num,
                    samples=num * run.step_samples,
                    average_sending_s=self._sending_s(peer),
                )
            )
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedNode:
    """One node of a pipeline. Times are of one microbatch."""

    name: str
    stage: int
    data_s: float = 0.0
    forward_s: float = 0.01
    backward_s: float = 0.02
    send_s: float = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPipeline:
    """A pipeline run with one data node, which is the first of `nodes`."""

    nodes: tuple[SimulatedNode, ...]
    num_microbatches: int = 16
    start_s: float = 0.02
    transfer_s: float = 0.05
    """Of an average."""
    arithmetic_s: float = 0.01
    step_s: float = 0.01
    vote_s: float = 0.01
    every: int = 1
    compression: str = "float32"

    def rows(self, num_rounds: int = 16) -> list[RoundRow]:
        """Return what the nodes would record."""
        return [row for number in range(1, num_rounds + 1) for row in self._round(number)]

    def samples_per_s(self, num_rounds: int = 16) -> float:
        """Return the speed of the run."""
        own = [row for row in self.rows(num_rounds) if row.stage == 0]
        return sum(row.round_samples or 0 for row in own) / sum(row.round_s for row in own)

    def _round(self, number: int) -> list[RoundRow]:
        passes = _Passes(self)
        passes_s = passes.run()
        averages = number % self.every == 0
        transfer_s, arithmetic_s = (self.transfer_s, self.arithmetic_s) if averages else (0.0, 0.0)
        averaging_s = transfer_s + arithmetic_s + self.step_s + self.vote_s
        round_s = self.start_s + passes_s + averaging_s
        rows = []
        for node in self.nodes:
            num = passes.num_entered[node.name]
            rows.append(
                RoundRow(
                    mode=Mode.PIPELINE,
                    time_s=number * round_s,
                    run=RUN,
                    peer=f"id-{node.name}",
                    name=node.name,
                    stage=node.stage,
                    round=number,
                    round_s=round_s,
                    steps=num,
                    samples=num,
                    round_samples=self.num_microbatches,
                    data_s=num * node.data_s,
                    forward_s=num * node.forward_s,
                    backward_s=num * node.backward_s,
                    optimizer_s=self.step_s,
                    matchmaking_s=self.start_s + passes.first_s[node.name],
                    averaging_s=averaging_s,
                    averaging_compute_s=arithmetic_s,
                    average_sending_s=transfer_s,
                    sending_s=passes.sending_s[node.name],
                    peers=len(self.nodes),
                    averages_every=self.every,
                    compression=self.compression,
                    activation_compression="none",
                )
            )
        return rows


class _Passes:
    """The passes of one iteration: every node and every uplink does one thing at a time."""

    def __init__(self, run: SimulatedPipeline) -> None:
        self._nodes = {node.name: node for node in run.nodes}
        stages = sorted({node.stage for node in run.nodes})
        by_stage = [[n.name for n in run.nodes if n.stage == stage] for stage in stages]
        self._paths = [_path(by_stage, index) for index in range(run.num_microbatches)]
        self.num_entered = dict.fromkeys(self._nodes, 0)
        self.sending_s = dict.fromkeys(self._nodes, 0.0)
        self.first_s = dict.fromkeys(self._nodes, 0.0)
        self._events: list[tuple[float, int, bool, int, int]] = []
        """Instant, order, whether a pass ends (or a microbatch arrives), microbatch, place."""
        self._queues = {name: (deque[Any](), deque[Any]()) for name in self._nodes}
        self._free_s = dict.fromkeys(self._nodes, 0.0)
        self._uplink_free_s = dict.fromkeys(self._nodes, 0.0)
        self._count = 0

    def run(self) -> float:
        """Return how long all microbatches take, there and back."""
        for index in range(len(self._paths)):
            self._push(0.0, index, 0, ends=False)
        now_s = 0.0
        while self._events:
            now_s, _, ends, index, place = heapq.heappop(self._events)
            name = self._paths[index][place]
            if not ends:
                backward = place >= len(self._paths[index]) // 2
                self._queues[name][0 if backward else 1].append((index, place))
            self._work(name, now_s)
        return now_s

    def _push(self, at_s: float, index: int, place: int, *, ends: bool) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, ends, index, place))

    def _work(self, name: str, now_s: float) -> None:
        """Begin the next pass of a node, backward before forward, if its device is free."""
        queue = next((each for each in self._queues[name] if each), None)
        if queue is None or self._free_s[name] > now_s:
            return
        index, place = queue.popleft()
        node, path = self._nodes[name], self._paths[index]
        took_s = node.backward_s
        if place < len(path) // 2:
            took_s = node.data_s + node.forward_s
            self.first_s[name] = self.first_s[name] if self.num_entered[name] else now_s
            self.num_entered[name] += 1
        elif place == len(path) - 1:
            took_s = 0.0  # The head's pass has had the backward time of the data node.
        self._free_s[name] = done_s = now_s + took_s
        self._push(done_s, index, place, ends=True)
        if place + 1 < len(path):
            begin_s = max(done_s, self._uplink_free_s[name])
            self._uplink_free_s[name] = begin_s + node.send_s
            self.sending_s[name] += node.send_s
            self._push(begin_s + node.send_s, index, place + 1, ends=False)


def _path(by_stage: list[list[str]], index: int) -> list[str]:
    """Return the nodes of a microbatch's passes: out, the head, and back."""
    out = [names[index % len(names)] for names in by_stage]
    return [*out, out[0], *out[:0:-1], out[0]]


def with_node(run: SimulatedPipeline, name: str, **changed: Any) -> SimulatedPipeline:
    """Return a run in which one node differs."""
    nodes = tuple(replace(n, **changed) if n.name == name else n for n in run.nodes)
    return replace(run, nodes=nodes)


def with_peer(run: SimulatedOptimizer, name: str, **changed: Any) -> SimulatedOptimizer:
    """Return a run in which one peer differs."""
    peers = tuple(replace(p, **changed) if p.name == name else p for p in run.peers)
    return replace(run, peers=peers)
