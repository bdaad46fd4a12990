"""How long one stage of the servers organisation is busy in an iteration.

The traffic of a microbatch is one activation and one gradient on each of these legs: the stage
before to a frontal server, frontal server to worker, worker to backward server, and back. Servers
of a duty handle equal parts of the microbatches. A *worker* is a client, or a server with a device.

Assumptions:

- Uplink, downlink and device of a host work at the same time, each at one message or task at a
  time. A worker has its next task before it needs it.
- A forward pass is a third of a worker's computation.
- A worker takes t = max(compute, sending, receiving) for a microbatch. The network's part is what
  its access and each of its links need for two activations and two gradients.
- Microbatches go to the worker that has them done first. Each worker therefore gets a whole number
  of them, and a slow worker may get none.
- Every frontal server spreads its part over all workers alike. A server that computes saves the leg
  to itself for 1/n of its microbatches, where n servers share the duty.
- All workers send their gradients at once, in as many parts as the stage has servers. Then all
  servers exchange the means at once. A client without a microbatch sends nothing.
- What a client has computed is lost with it, and the others compute it again. Clients are lost
  independently, at any time of an iteration, and return for the next one.
- With delay 1, clients fetch parameters during the next batch. That takes time of the servers'
  uplinks and of the clients' downlinks, and an iteration is no shorter than step and fetch.

Source: `Reliable/unreliable parameter servers`, sections 3.2.1 and 3.3.1. The paper's equation (1)
adds the times of transfer and compute; here they overlap.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from decod.lab.planner.bottleneck import ResourceKind
from decod.lab.planner.hosts import TrainingProblem
from decod.lab.planner.servers.servers_layout import DraftStage


@dataclass(frozen=True, slots=True)
class StageTime:
    """The parts of an iteration that one stage decides. Seconds; `inf` if it cannot work."""

    fill_s: float
    """A microbatch's way through the idle stage, forward and backward, as a mean."""
    late_s: float
    """The end of the busiest resource's work, from the first microbatch's arrival on."""
    resource: ResourceKind
    """The busiest resource: WORKERS, UPLINK or DOWNLINK."""
    host: int | None
    """Its host. None for WORKERS."""
    busy_s: float
    """How long it is busy."""
    forward_s: float
    """The busiest resource's forward work."""
    backward_s: float
    """The busiest resource's backward work."""
    aggregation_s: float
    """From the last gradient until the next batch may begin."""
    background_s: float
    """Step and fetch, if they overlap with the next batch; otherwise 0."""
    room: float
    """Most microbatches that its workers hold at a time. `inf` if there is no limit."""
    shares: tuple[tuple[int, int], ...]
    """Each worker with a microbatch, and the number of its microbatches."""


IMPOSSIBLE = StageTime(
    fill_s=math.inf,
    late_s=math.inf,
    resource=ResourceKind.WORKERS,
    host=None,
    busy_s=math.inf,
    forward_s=math.inf,
    backward_s=math.inf,
    aggregation_s=math.inf,
    background_s=0.0,
    room=math.inf,
    shares=(),
)
"""The time of a stage without a worker, or with more layers than a server can hold."""


_FORWARD = 1 / 3
"""Part of the forward pass in the computation. The backward pass has twice as many operations."""


class _Worker(NamedTuple):
    host: int
    task_s: float
    compute_s: float
    frontal_s: float
    """Mean transfer time from and to the frontal servers."""
    backward_s: float
    """Mean transfer time from and to the backward servers."""
    network_s: float
    """The network's part of a task: half of it forward, half of it backward."""


class StageClock:
    """Computes the times of stages of one problem, and remembers them."""

    def __init__(self, problem: TrainingProblem) -> None:
        self.problem = problem
        self._known: dict[DraftStage, StageTime] = {}
        self._routes: dict[
            tuple[tuple[int, ...], tuple[int, ...]], dict[int, tuple[float, float, float]]
        ] = {}
        hosts, size = problem.hosts, problem.work.activation_bytes
        everyone = range(len(hosts))
        self._up = [host.uplink_bytes_per_s for host in hosts]
        self._down = [host.downlink_bytes_per_s for host in hosts]
        self._speed = [host.speed_layers_per_s for host in hosts]
        self._limit = [
            math.inf if host.num_layers_max is None else host.num_layers_max for host in hosts
        ]
        self._room = [
            math.inf if host.num_microbatches_max is None else host.num_microbatches_max
            for host in hosts
        ]
        self._lost = [host.lost_ratio for host in hosts]
        one_way = [[problem.transfer_s(i, j, size) for j in everyone] for i in everyone]
        self.round_trip_s = [[one_way[i][j] + one_way[j][i] for j in everyone] for i in everyone]
        """(hosts, hosts). An activation's way there and its gradient's way back."""
        self.byte_s = [
            [
                0.0 if i == j else 1 / bandwidth if bandwidth > 0 else math.inf
                for j, bandwidth in enumerate(row)
            ]
            for i, row in enumerate(problem.bandwidths_bytes_per_s)
        ]
        """(hosts, hosts). A byte's time on each link."""
        self._slower = [
            [max(self.byte_s[i][j], self.byte_s[j][i]) for j in everyone] for i in everyone
        ]

    def time(self, stage: DraftStage) -> StageTime:
        """Return a stage's times."""
        found = self._known.get(stage)
        if found is None:
            found = self._known[stage] = self._measure(stage)
        return found

    def task_s(self, host: int, stage: DraftStage) -> float:
        """Return the time of a microbatch at a host that would work for a stage."""
        worker = self._worker(host, stage)
        return worker.task_s if worker is not None else math.inf

    def can_work(self, host: int, num_layers: int) -> bool:
        """Return whether a host can compute a stage of so many layers."""
        return self._speed[host] > 0 and self._limit[host] >= num_layers

    def _measure(self, stage: DraftStage) -> StageTime:
        servers, work = stage.servers, self.problem.work
        if not servers or any(self._limit[server] < stage.num_layers for server in servers):
            return IMPOSSIBLE
        found = [self._worker(host, stage) for host in servers + stage.clients]
        workers = [worker for worker in found if worker is not None and worker.task_s < math.inf]
        if not workers:
            return IMPOSSIBLE
        counts = share_out([worker.task_s for worker in workers], work.num_microbatches)
        active = [(worker, count) for worker, count in zip(workers, counts, strict=True) if count]
        num = work.num_microbatches
        frontal_s = sum(worker.frontal_s * count for worker, count in active) / num
        compute_s = sum(worker.compute_s * count for worker, count in active) / num
        backward_s = sum(worker.backward_s * count for worker, count in active) / num
        shares = {worker.host: count for worker, count in active}
        again = self._again(active)
        makespan_s = again * max(worker.task_s * count for worker, count in active)
        late_s, busy_s = frontal_s / 2 + makespan_s, makespan_s
        resource, host = ResourceKind.WORKERS, None
        for busy, kind, other in self._busy(stage, shares):
            # A backward server has nothing to do before the first microbatch was computed.
            behind = other in stage.backward and other not in stage.frontal
            late = busy + (frontal_s + compute_s if behind else 0.0)
            if late > late_s:
                late_s, busy_s, resource, host = late, busy, kind, other
        aggregation_s, background_s = self._aggregation(stage, shares)
        phases = [self._phases(stage, shares)]
        for worker, count in active:
            ahead, back = _FORWARD * worker.compute_s, (1 - _FORWARD) * worker.compute_s
            half, num_passes = worker.network_s / 2, again * count
            phases.append((num_passes * max(half, ahead), num_passes * max(half, back)))
        return StageTime(
            fill_s=frontal_s + compute_s + backward_s,
            late_s=late_s,
            resource=resource,
            host=host,
            busy_s=busy_s,
            forward_s=max(forward for forward, _ in phases),
            backward_s=max(backward for _, backward in phases),
            aggregation_s=aggregation_s,
            background_s=background_s,
            room=sum(self._room[worker.host] for worker, _ in active),
            shares=tuple(shares.items()),
        )

    def _again(self, active: Sequence[tuple[_Worker, int]]) -> float:
        """Return the time of a stage's work relative to that without losses.

        If clients with a part x of the stage's speed are lost, the others take 1 / (1 - x) times as
        long. The slowest stage decides, so this is more than the mean: that of the mean x, and one
        standard deviation.
        """
        mean = variance = 0.0
        for worker, count in active:
            lost, part = self._lost[worker.host], count / self.problem.work.num_microbatches
            mean += lost * part
            variance += lost * (1 - lost) * part**2
        return 1 / (1 - mean) + math.sqrt(variance) / (1 - mean) ** 2

    def _worker(self, host: int, stage: DraftStage) -> _Worker | None:
        """Return what a host does for a stage; None if it cannot compute it."""
        if not self.can_work(host, stage.num_layers):
            return None
        duties = stage.frontal, stage.backward
        routes = self._routes.get(duties)
        if routes is None:
            routes = self._routes[duties] = {}
        route = routes.get(host)
        if route is None:
            route = routes[host] = self._route(host, *duties)
        compute_s = stage.num_layers / self._speed[host]
        return _Worker(host, max(compute_s, route[2]), compute_s, *route)

    def _route(
        self, host: int, frontal: tuple[int, ...], backward: tuple[int, ...]
    ) -> tuple[float, float, float]:
        """Return the last three values of a `_Worker`. They don't depend on the layers."""
        size = self.problem.work.activation_bytes
        round_trip, slower = self.round_trip_s[host], self._slower[host]
        at_frontal = max(slower[server] for server in frontal) / len(frontal)
        at_backward = max(slower[server] for server in backward) / len(backward)
        # The only server of a stage has both legs on one link.
        both = frontal == backward
        link = at_frontal + at_backward if both else max(at_frontal, at_backward)
        far = 2.0 - (host in frontal) / len(frontal) - (host in backward) / len(backward)
        access = far / min(self._up[host], self._down[host])
        frontal_s = sum(round_trip[server] for server in frontal) / len(frontal)
        backward_s = sum(round_trip[server] for server in backward) / len(backward)
        return frontal_s, backward_s, size * max(link, access)

    def _busy(
        self, stage: DraftStage, shares: dict[int, int]
    ) -> list[tuple[float, ResourceKind, int]]:
        """Return how long the links of servers and clients are busy.

        Pipeline traffic is the same in both directions: what a server is sent, it sends on.
        """
        work, servers = self.problem.work, stage.servers
        model = stage.num_layers * work.layer_bytes if work.delay else 0.0
        fetching = sum(client in shares for client in stage.clients)
        found = []
        for server in servers:
            own = shares.get(server, 0)
            duty = (server in stage.frontal) / len(stage.frontal)
            duty += (server in stage.backward) / len(stage.backward)
            messages = 2 * (work.num_microbatches - own) * duty + 2 * own
            traffic = work.activation_bytes * messages
            fetched = traffic + fetching * model / len(servers)
            found.append((fetched / self._up[server], ResourceKind.UPLINK, server))
            found.append((traffic / self._down[server], ResourceKind.DOWNLINK, server))
        for client in stage.clients:
            if client in shares and model:
                traffic = 2 * shares[client] * work.activation_bytes + model
                found.append((traffic / self._down[client], ResourceKind.DOWNLINK, client))
        return found

    def _phases(self, stage: DraftStage, shares: dict[int, int]) -> tuple[float, float]:
        """Return how long the busiest server's links are busy, forward and backward."""
        work = self.problem.work
        num, size = work.num_microbatches, work.activation_bytes
        forward_s = backward_s = 0.0
        for server in stage.servers:
            own = shares.get(server, 0)
            frontal = (server in stage.frontal) / len(stage.frontal)
            backward = (server in stage.backward) / len(stage.backward)
            # What it sends forward is as much as it receives backward, and the other way round.
            ahead = size * ((num - own) * frontal + num * backward + own * (1 - backward))
            back = size * (num * frontal + (num - own) * backward + own * (1 - frontal))
            up, down = self._up[server], self._down[server]
            forward_s = max(forward_s, ahead / up, back / down)
            backward_s = max(backward_s, back / up, ahead / down)
        return forward_s, backward_s

    def _aggregation(self, stage: DraftStage, shares: dict[int, int]) -> tuple[float, float]:
        """Return the time of the aggregation, and of what overlaps with the next batch."""
        work, servers = self.problem.work, stage.servers
        clients = [client for client in stage.clients if client in shares]
        model = stage.num_layers * work.layer_bytes
        part = model / len(servers)
        gather = self._exchange(list(shares), servers, part)
        spread = self._exchange(servers, servers, part)
        after = stage.num_layers * work.step_s + self._exchange(servers, clients, part)
        return (gather + spread, after) if work.delay else (gather + spread + after, 0.0)

    def _exchange(self, senders: Sequence[int], receivers: Sequence[int], part: float) -> float:
        """Return how long it takes until every sender has sent a part to every receiver."""
        latencies, time_s = self.problem.latencies_s, 0.0
        for sender in senders:
            others = [receiver for receiver in receivers if receiver != sender]
            if not others:
                continue
            row, wait = self.byte_s[sender], latencies[sender]
            link_s = max(wait[other] + part * row[other] for other in others)
            access_s = max(wait[other] for other in others) + part * len(others) / self._up[sender]
            time_s = max(time_s, link_s, access_s)
        for receiver in receivers:
            num = len(senders) - (receiver in senders)
            time_s = max(time_s, part * num / self._down[receiver])
        return time_s


def share_out(task_s: Sequence[float], num_tasks: int) -> list[int]:
    """Return how many tasks each worker gets, if each task goes where it is done first.

    The result has the least possible end of the last task. Of equals, the earlier worker is first.

    Args:
        task_s: The time of a task at each worker. Above 0 and finite.
        num_tasks: At least 1.
    """
    end_s = num_tasks / sum(1 / task for task in task_s)
    # A float just below a whole number of tasks counts as that number.
    counts = [int(end_s / task * (1 + 1e-12)) for task in task_s]
    missing = num_tasks - sum(counts)
    if missing < 0:
        counts[counts.index(max(counts))] += missing
        return counts
    ends = [((count + 1) * task_s[index], index) for index, count in enumerate(counts)]
    heapq.heapify(ends)
    for _ in range(missing):
        end_s, index = ends[0]
        counts[index] += 1
        heapq.heapreplace(ends, (end_s + task_s[index], index))
    return counts
