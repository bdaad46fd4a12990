"""How long an iteration takes in the pipeline organisation, with given hosts for each stage.

A microbatch takes one relay of each stage, forward and backward. Relays keep their stage's whole
state. At the end of an iteration, the members of each stage average, and all hosts agree on the
step.

The passes of all microbatches take about as long as the busiest device, access or link, and the
way of one microbatch until it gets there. `planner.servers.objective` explains the formula: it is
the mean of two extremes, of which one interleaves forward and backward work, and the other doesn't.

Assumptions:

- Relays of a stage share the microbatches so that the slowest ends first. Each gets a whole number.
- Between two stages, microbatches take the cheapest pairs of relays, as flows do. If a link would
  hold up the iteration then, they spread over all pairs.
- Uplink, downlink and device of a host work at the same time.
- Of one microbatch's computation, a third is the forward pass.
- At most W microbatches are under way at a time, where W is what the smallest stage can hold.
- To agree on a step takes `_VOTE_TRIPS` messages from or to the data node that is farthest away.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from decod.lab.planner.bottleneck import ResourceKind
from decod.lab.planner.hosts import HostKind
from decod.lab.planner.organisations.exchange_time import ButterflyTime, butterfly
from decod.lab.planner.organisations.run_work import WHOLE, RunProblem
from decod.lab.planner.servers.stage_time import share_out
from decod.planner.partition import dealt, part_sizes

_FORWARD = 1 / 3
_VOTE_TRIPS = 4

StageHosts = tuple[tuple[int, ...], ...]
"""The relays of each stage, by their index."""


_WIRES = (ResourceKind.UPLINK, ResourceKind.DOWNLINK, ResourceKind.LINK)


@dataclass(frozen=True, slots=True)
class Limit:
    """What an iteration waits for, and for how long."""

    kind: ResourceKind
    busy_s: float
    stage_index: int | None = None
    """From 0. None if it belongs to no single stage."""
    host: int | None = None
    peer: int | None = None
    """The receiver, for a link."""


@dataclass(frozen=True, slots=True)
class TimeOfPasses:
    """The time until the last microbatch is home, and its parts."""

    total_s: float
    fill_s: float
    """The way of one microbatch through all idle stages and back."""
    compute_s: float
    """Of the busiest device, beyond its part of `fill_s`."""
    limit: Limit
    shares: tuple[dict[int, int], ...]
    """For each stage, the microbatches of each relay with one."""
    layers: tuple[int, ...]
    """Of each stage."""
    access_s: float = 0.0
    """How long the busiest uplink, downlink or link carries tensors."""
    window: float = math.inf
    """Most microbatches that are under way at a time."""
    score: float = field(default=math.inf, compare=False)
    """`total_s`, and a little for what does not decide now."""

    @property
    def communication_s(self) -> float:
        """What the passes take beyond computing and the way of one microbatch."""
        return max(0.0, self.total_s - self.fill_s - self.compute_s)


IMPOSSIBLE = TimeOfPasses(math.inf, math.inf, 0.0, Limit(ResourceKind.DEVICE, math.inf), (), ())
"""The time of a stage without a relay, or without memory for its layers."""


class PipelineClock:
    """Computes the times of stages of hosts.

    Args:
        problem: Hosts, links and the run.
        local: Members step by themselves, which takes more memory.
    """

    def __init__(self, problem: RunProblem, *, local: bool = False) -> None:
        self.problem, self.local = problem, local
        base, run = problem.base, problem.run
        size, everyone = run.activation_bytes, range(len(base.hosts))
        self.data_nodes = tuple(base.indexes(HostKind.DATA))
        self._speed = [host.speed_layers_per_s for host in base.hosts]
        self._way_s = [[base.transfer_s(i, j, size) for j in everyone] for i in everyone]
        self._byte_s = [
            [1 / rate if rate > 0 else math.inf for rate in row]
            for row in base.bandwidths_bytes_per_s
        ]
        self._access_s = [
            2 * size / min(host.uplink_bytes_per_s, host.downlink_bytes_per_s)
            for host in base.hosts
        ]
        self._far_s = [
            max(
                max(base.latencies_s[i][node], base.latencies_s[node][i])
                for node in self.data_nodes
            )
            for i in everyone
        ]
        self._hops: dict[object, _Hop] = {}

    # --- what fits ----------------------------------------------------------------------------

    def room(self, host: int, num_layers: int) -> float:
        """Return how many microbatches a relay can hold. 0: it can't hold the layers."""
        spec, layer = self.problem.hosts[host], self.problem.run.layer
        if spec.speed_layers_per_s <= 0:
            return 0
        room = math.inf if spec.num_microbatches_max is None else spec.num_microbatches_max
        if spec.memory_bytes is None:
            return room
        state = layer.local_state_bytes if self.local else layer.state_bytes
        left = spec.memory_bytes - num_layers * state
        if left < 0:
            return 0
        each = num_layers * layer.microbatch_bytes
        return min(room, math.floor(left / each)) if each > 0 else room

    def layers(self, num_stages: int) -> tuple[int, ...]:
        """Return the number of layers of each stage if they differ by one at most."""
        return tuple(part_sizes(self.problem.run.num_layers, num_stages))

    def fitted_layers(self, stages: StageHosts) -> tuple[int, ...]:
        """Return the numbers of layers with which the slowest stage is done first.

        Only devices and memory count. Empty: no cut fits.
        """
        num_layers = self.problem.run.num_layers
        return dealt(num_layers, len(stages), lambda k, num: self._each_s(stages[k], num))

    def _each_s(self, hosts: Sequence[int], num_layers: int) -> float:
        """Return the time for a microbatch in a stage that is busy. inf: no relay can hold it."""
        power = sum(self._speed[host] for host in hosts if self.room(host, num_layers) >= 1)
        return num_layers / power if power else math.inf

    # --- passes -------------------------------------------------------------------------------

    def passes(self, stages: StageHosts, layers: tuple[int, ...] | None = None) -> TimeOfPasses:
        """Return how long the passes of an iteration take.

        Args:
            stages: The relays of each stage.
            layers: Of each stage. None: they differ by one at most.
        """
        run, layers = self.problem.run, layers or self.layers(len(stages))
        num, shares, window = run.num_microbatches, [], math.inf
        for hosts, num_layers in zip(stages, layers, strict=True):
            share, room = self._shared(hosts, num_layers)
            if not share:
                return IMPOSSIBLE
            shares.append(share)
            window = min(window, room)
        tally = _Tally(num)
        data = {node: num / len(self.data_nodes) for node in self.data_nodes}
        for node, load in data.items():
            tally.add(Limit(ResourceKind.UPLINK, load * self._access_s[node], None, node))
        tally.hop(self._hop(data, shares[0], tally.device_s))
        for index, (share, num_layers) in enumerate(zip(shares, layers, strict=True)):
            self._add_stage(tally, index, share, num_layers)
            following = shares[index + 1] if index + 1 < len(shares) else data
            tally.hop(self._hop(share, following, tally.device_s))
        head_s = num / len(self.data_nodes) * run.head_s
        tally.pass_through(Limit(ResourceKind.HEAD, head_s, None, self.data_nodes[0]), run.head_s)
        return tally.result(tuple(shares), layers, window)

    def _shared(self, hosts: Sequence[int], num_layers: int) -> tuple[dict[int, int], float]:
        """Return the microbatches of each relay of a stage, and how many the stage can hold."""
        rooms = {host: self.room(host, num_layers) for host in hosts}
        able = [host for host in hosts if rooms[host] >= 1]
        if not able:
            return {}, 0.0
        tasks = [max(num_layers / self._speed[host], self._access_s[host]) for host in able]
        counts = share_out(tasks, self.problem.run.num_microbatches)
        share = {host: count for host, count in zip(able, counts, strict=True) if count}
        return share, sum(rooms[host] for host in share)

    def _add_stage(self, tally: "_Tally", index: int, share: dict[int, int], layers: int) -> None:
        for host, count in share.items():
            access_s = count * self._access_s[host]
            spec = self.problem.hosts[host]
            up = spec.uplink_bytes_per_s <= spec.downlink_bytes_per_s
            tally.add(
                Limit(ResourceKind.UPLINK if up else ResourceKind.DOWNLINK, access_s, index, host)
            )
        each_s = {host: layers / self._speed[host] for host in share}
        mean_s = sum(each_s[host] * count for host, count in share.items()) / tally.num
        slowest = max(share, key=lambda host: share[host] * each_s[host])
        busy_s = share[slowest] * each_s[slowest]
        tally.pass_through(Limit(ResourceKind.DEVICE, busy_s, index, slowest), mean_s)

    def _hop(
        self,
        begins: "dict[int, int] | dict[int, float]",
        ends: "dict[int, int] | dict[int, float]",
        busy_s: float,
    ) -> "_Hop":
        """Return the traffic between two stages, by the cheapest pairs or by all."""
        key = tuple(begins.items()), tuple(ends.items())
        near = self._hops.get(key)
        if near is None:
            near = self._hops[key] = self._measure(self._nearest(begins, ends))
        if near.busy_s <= busy_s:
            return near
        even = self._hops.get((key, "even"))
        if even is None:
            num = sum(begins.values())
            pairs = [(i, j, n * m / num) for i, n in begins.items() for j, m in ends.items()]
            even = self._hops[key, "even"] = self._measure(pairs)
        return min(near, even, key=lambda hop: max(hop.busy_s, busy_s) + hop.fill_s)

    def _nearest(
        self, begins: "dict[int, int] | dict[int, float]", ends: "dict[int, int] | dict[int, float]"
    ) -> list[tuple[int, int, float]]:
        left, right = dict(begins), dict(ends)
        pairs = [(self._way_s[i][j] + self._way_s[j][i], i, j) for i in left for j in right]
        heapq.heapify(pairs)
        found = []
        while pairs and left:
            _, i, j = heapq.heappop(pairs)
            if i in left and j in right:
                part = min(left[i], right[j])
                found.append((i, j, part))
                for side, host in ((left, i), (right, j)):
                    side[host] -= part
                    if side[host] <= 1e-9:
                        del side[host]
        return found

    def _measure(self, pairs: Sequence[tuple[int, int, float]]) -> "_Hop":
        size, fill_s, busy_s, link = self.problem.run.activation_bytes, 0.0, 0.0, (0, 0)
        num = self.problem.run.num_microbatches
        for i, j, part in pairs:
            fill_s += part * (self._way_s[i][j] + self._way_s[j][i]) / num
            slower = max((self._byte_s[i][j], i, j), (self._byte_s[j][i], j, i))
            if part * size * slower[0] > busy_s:
                busy_s, link = part * size * slower[0], slower[1:]
        return _Hop(fill_s, busy_s, link)

    # --- averages -----------------------------------------------------------------------------

    def average(self, time: TimeOfPasses, format_name: str = WHOLE) -> ButterflyTime:
        """Return how long averaging takes in the slowest stage."""
        run, base = self.problem.run, self.problem.base
        slowest = butterfly(base, self.data_nodes, run.outer.wire_bytes[format_name])
        for share, num_layers in zip(time.shares, time.layers, strict=True):
            size = num_layers * run.layer.wire_bytes[format_name]
            slowest = max(slowest, butterfly(base, tuple(share), size), key=lambda e: e.time_s)
        return slowest

    def step_s(self, time: TimeOfPasses) -> float:
        """Return the time of a step and of agreeing on it."""
        far_s = max(self._far_s[host] for share in time.shares for host in share)
        return max(time.layers) * self.problem.run.step_s + _VOTE_TRIPS * far_s


@dataclass(frozen=True, slots=True)
class _Hop:
    """The traffic between two stages."""

    fill_s: float
    """A microbatch's transfers there and back, as a mean."""
    busy_s: float
    """How long its busiest link carries tensors in one direction."""
    link: tuple[int, int]


class _Tally:
    """Adds up the stages and hops of a way."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.way_s = 0.0
        self.device_s = self._device_fill_s = 0.0
        """Of the busiest device, and its time for one microbatch."""
        self._late: list[tuple[float, Limit]] = []
        self._forward_s = self._backward_s = self._rest_s = self._access_s = 0.0

    def add(self, limit: Limit, *, ahead: float = 0.5) -> None:
        """Take in a resource that microbatches reach after the way so far."""
        self._late.append((self.way_s + limit.busy_s, limit))
        self._forward_s = max(self._forward_s, ahead * limit.busy_s)
        self._backward_s = max(self._backward_s, (1 - ahead) * limit.busy_s)
        self._rest_s += limit.busy_s
        if limit.kind in _WIRES:
            self._access_s = max(self._access_s, limit.busy_s)

    def pass_through(self, limit: Limit, mean_s: float) -> None:
        """Take in a stage's devices, of which the busiest is `limit`."""
        self.add(limit, ahead=_FORWARD)
        if limit.busy_s > self.device_s:
            self.device_s, self._device_fill_s = limit.busy_s, mean_s
        self.way_s += mean_s

    def hop(self, hop: _Hop) -> None:
        """Take in the traffic between two stages: activations one way, gradients the other."""
        limit = Limit(ResourceKind.LINK, hop.busy_s, None, *hop.link)
        self._late.append((self.way_s + hop.fill_s / 2 + hop.busy_s, limit))
        self._forward_s = max(self._forward_s, hop.busy_s)
        self._backward_s = max(self._backward_s, hop.busy_s)
        self._rest_s += hop.busy_s
        self._access_s = max(self._access_s, hop.busy_s)
        self.way_s += hop.fill_s

    def result(
        self, shares: tuple[dict[int, int], ...], layers: tuple[int, ...], window: float
    ) -> TimeOfPasses:
        num, fill_s = self.num, self.way_s
        ends = [*self._late, (fill_s, Limit(ResourceKind.WAY, fill_s))]
        if window < num:
            held_s = fill_s * num / window
            ends.append((held_s, Limit(ResourceKind.MEMORY, held_s)))
        mixed_s, limit = max(ends, key=lambda end: end[0])
        phased_s = fill_s + (self._forward_s + self._backward_s) * (1 - 1 / num)
        total_s = max(mixed_s, (mixed_s + phased_s) / 2)
        compute_s = max(0.0, min(self.device_s - self._device_fill_s, total_s - fill_s))
        score = total_s + 0.01 * (fill_s + self._rest_s / (3 * len(shares)))
        return TimeOfPasses(
            total_s=total_s,
            fill_s=fill_s,
            compute_s=compute_s,
            limit=limit,
            shares=shares,
            layers=layers,
            access_s=self._access_s,
            window=window,
            score=score,
        )
