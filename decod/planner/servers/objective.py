"""How long an iteration takes with a layout, and what it waits for.

A pipeline is as fast as its busiest resource. The first microbatch reaches that resource late, and
the last one leaves it early, by its way through the stages before. So an iteration lasts

    max over resources of (way before + busy time), at least the way of one microbatch, + aggregation

where the aggregation is the longest of all stages. Assumptions, besides those of `stage_time`:

- Data nodes have equal shares. Each shares its microbatches out evenly over the first frontal
  servers. Between two stages, the even cut is by index, so that a backward server meets few frontal
  servers, in their order.
- A link between two hosts carries activations in one direction and gradients in the other. If such
  a link is the busiest resource, nothing hides the rest of a microbatch's way.
- At most W microbatches are under way at a time, where W is what the smallest stage can hold. An
  iteration then takes at least M / W ways of a microbatch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from decod.ids import NodeId
from decod.planner.hosts import HostKind, TrainingProblem
from decod.planner.servers.layout import Draft, ServersLayout, to_draft
from decod.planner.servers.stage_time import ResourceKind, StageClock, StageTime

_GUIDE = 0.01
"""Weight of the other stages in `LayoutClock.score`. Small enough to decide among near equals
only."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The resource that an iteration waits for."""

    kind: ResourceKind
    stage_index: int | None
    """From 0. None if it belongs to no single stage."""
    host_id: NodeId | None
    peer_id: NodeId | None
    """The receiver, for a LINK."""
    busy_s: float
    """How long it is busy, or how long the way takes."""


@dataclass(frozen=True, slots=True)
class IterationTime:
    """The time of an iteration, and its parts. Seconds; `inf` if a stage cannot work."""

    total_s: float
    pipeline_s: float
    """From the first microbatch until the last is home."""
    fill_s: float
    """A microbatch's way through all idle stages and back. It is a part of `pipeline_s`."""
    aggregation_s: float
    """Averaging in the slowest stage, and what the next batch waits for after it."""
    bottleneck: Bottleneck
    """Of the pipeline, or the STEP if an iteration waits for that."""
    stages: tuple[StageTime, ...]


@dataclass(frozen=True, slots=True)
class HopTime:
    """The time of the traffic between two stages, or a stage and the data nodes."""

    fill_s: float
    """A microbatch's transfers there and back, as a mean."""
    excess_s: float
    """How long the slowest link is busy after its first message."""
    link: tuple[int, int]
    """The slowest link."""


def iteration_time_s(problem: TrainingProblem, layout: ServersLayout) -> IterationTime:
    """Return the time of an iteration with a layout that breaks no rule."""
    return LayoutClock(problem).explain(to_draft(problem, layout))


class LayoutClock:
    """Computes the times of layouts of one problem. Stages and hops that it knows cost nothing."""

    def __init__(self, problem: TrainingProblem) -> None:
        self.problem = problem
        self.stages = StageClock(problem)
        self.data_nodes = tuple(problem.indexes(HostKind.DATA))
        self._hops: dict[tuple[tuple[int, ...], tuple[int, ...]], HopTime] = {}
        work = problem.work
        num = math.ceil(work.num_microbatches / len(self.data_nodes))
        self.head_busy_s = num * work.head_s
        access = [
            (2 * num * work.activation_bytes / rate, kind, index)
            for index in self.data_nodes
            for rate, kind in (
                (problem.hosts[index].uplink_bytes_per_s, ResourceKind.UPLINK),
                (problem.hosts[index].downlink_bytes_per_s, ResourceKind.DOWNLINK),
            )
        ]
        self._access = max(access)
        self.access_busy_s = self._access[0]

    def time_s(self, draft: Draft) -> float:
        """Return the seconds of an iteration. `inf` if a stage cannot work."""
        return self._times(draft)[0]

    def score(self, draft: Draft) -> float:
        """Return the seconds of an iteration, plus a little for work that does not decide now.

        Many layouts are equally fast, because one stage decides. The little extra leads a search
        through them.
        """
        total_s, rest_s = self._times(draft)
        return total_s + _GUIDE * rest_s

    def explain(self, draft: Draft) -> IterationTime:
        """Return the time of an iteration with its parts."""
        stages = tuple(self.stages.time(stage) for stage in draft)
        fill_s = self._fill(draft)
        pipeline_s, bottleneck = max(self._ends(draft, fill_s), key=lambda end: end[0])
        aggregation_s = max(stage.aggregation_s for stage in stages)
        slowest = max(range(len(stages)), key=lambda index: stages[index].background_s)
        background_s = stages[slowest].background_s
        total_s = pipeline_s + aggregation_s
        if background_s > total_s:
            total_s = background_s
            bottleneck = Bottleneck(ResourceKind.STEP, slowest, None, None, background_s)
        return IterationTime(total_s, pipeline_s, fill_s, aggregation_s, bottleneck, stages)

    def hop(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> HopTime:
        """Return the time of the traffic from backward servers to frontal ones, and back.

        Args:
            begins: Backward servers in their order, or all data nodes.
            ends: Frontal servers in their order, or all data nodes.
        """
        key = begins, ends
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = self._measure_hop(begins, ends)
        return found

    def _times(self, draft: Draft) -> tuple[float, float]:
        """Return the time of an iteration, and a measure of the work beside the bottleneck."""
        late_s = excess_s = aggregation_s = background_s = way_s = rest_s = 0.0
        room, begins = math.inf, self.data_nodes
        for stage in draft:
            hop, time = self.hop(begins, stage.frontal), self.stages.time(stage)
            way_s += hop.fill_s
            late_s = max(late_s, way_s + time.late_s)
            excess_s = max(excess_s, hop.excess_s)
            aggregation_s = max(aggregation_s, time.aggregation_s)
            background_s = max(background_s, time.background_s)
            room = min(room, time.room)
            rest_s += time.late_s + time.aggregation_s
            way_s += time.fill_s
            begins = stage.backward
        hop = self.hop(begins, self.data_nodes)
        way_s += hop.fill_s
        total_s = self.finish(way_s, max(excess_s, hop.excess_s), late_s, room) + aggregation_s
        return max(total_s, background_s), way_s + rest_s / len(draft)

    def finish(self, way_s: float, excess_s: float, late_s: float, room: float) -> float:
        """Return the end of the pipeline's work from its parts.

        Args:
            way_s: A microbatch's way through all stages and back, without the head.
            excess_s: The largest of all hops.
            late_s: The latest end of a stage's busiest resource.
            room: What the smallest stage can hold.
        """
        work = self.problem.work
        fill_s = way_s + work.head_s
        excess_s = max(excess_s, self.head_busy_s - work.head_s, 0.0)
        window_s = fill_s * work.num_microbatches / room if room < work.num_microbatches else 0.0
        return max(fill_s + excess_s, late_s, way_s / 2 + self.access_busy_s, window_s)

    def _fill(self, draft: Draft) -> float:
        begins, fill_s = self.data_nodes, self.problem.work.head_s
        for stage in draft:
            fill_s += self.hop(begins, stage.frontal).fill_s + self.stages.time(stage).fill_s
            begins = stage.backward
        return fill_s + self.hop(begins, self.data_nodes).fill_s

    def _ends(self, draft: Draft, fill_s: float) -> Iterator[tuple[float, Bottleneck]]:
        """Yield when the pipeline's work could end, and what would be the reason."""
        work, name = self.problem.work, self.problem.hosts
        yield fill_s, Bottleneck(ResourceKind.WAY, None, None, None, fill_s)
        begins, way_s = self.data_nodes, 0.0
        rooms = []
        for index, stage in enumerate((*draft, None)):
            hop = self.hop(begins, stage.frontal if stage else self.data_nodes)
            begin, end = (name[host].host_id for host in hop.link)
            slow = Bottleneck(ResourceKind.LINK, None, begin, end, hop.excess_s)
            if hop.excess_s > 0:
                yield fill_s + hop.excess_s, slow
            if stage is None:
                break
            way_s += hop.fill_s
            time = self.stages.time(stage)
            host_id = None if time.host is None else name[time.host].host_id
            busy = Bottleneck(time.resource, index, host_id, None, time.busy_s)
            yield way_s + time.late_s, busy
            way_s += time.fill_s
            rooms.append((time.room, index))
            begins = stage.backward
        room, index = min(rooms)
        if room < work.num_microbatches:
            window_s = fill_s * work.num_microbatches / room
            yield window_s, Bottleneck(ResourceKind.MEMORY, index, None, None, window_s)
        end_s = fill_s - work.head_s + self.head_busy_s
        data_id = name[self.data_nodes[0]].host_id
        yield end_s, Bottleneck(ResourceKind.HEAD, None, data_id, None, self.head_busy_s)
        busy_s, kind, host = self._access
        end_s = (fill_s - work.head_s) / 2 + busy_s
        yield end_s, Bottleneck(kind, None, name[host].host_id, None, busy_s)

    def _measure_hop(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> HopTime:
        work, byte_s = self.problem.work, self.stages.byte_s
        even = self.data_nodes in (begins, ends)
        parts = _every_pair(begins, ends) if even else _cut(begins, ends)
        fill_s = excess_s = 0.0
        slowest = (begins[0], ends[0])
        for begin, end, part in parts:
            fill_s += part * self.stages.round_trip_s[begin][end]
            slower = max((byte_s[begin][end], begin, end), (byte_s[end][begin], end, begin))
            one_s = slower[0] * work.activation_bytes
            excess = part * work.num_microbatches * one_s - one_s if one_s < math.inf else math.inf
            if excess > excess_s:
                excess_s, slowest = excess, slower[1:]
        return HopTime(fill_s, excess_s, slowest)


def _every_pair(
    begins: tuple[int, ...], ends: tuple[int, ...]
) -> Iterator[tuple[int, int, float]]:
    part = 1 / (len(begins) * len(ends))
    yield from ((begin, end, part) for begin in begins for end in ends)


def _cut(begins: tuple[int, ...], ends: tuple[int, ...]) -> Iterator[tuple[int, int, float]]:
    """Yield the pairs of the even cut by index, with the part of the microbatches of each.

    From 2 servers to 3, the parts are 1/3 and 1/6 of the first, 1/6 and 1/3 of the second.
    """
    num_begins, num_ends = len(begins), len(ends)
    i = j = position = 0
    while i < num_begins and j < num_ends:
        # In units of 1 / (begins x ends), so that whole numbers are compared.
        end = min((i + 1) * num_ends, (j + 1) * num_begins)
        yield begins[i], ends[j], (end - position) / (num_begins * num_ends)
        i += end == (i + 1) * num_ends
        j += end == (j + 1) * num_begins
        position = end
