"""How long an iteration takes with a layout, and what it waits for.

A pipeline is as fast as its busiest resource. The first microbatch reaches that resource late, and
the last one leaves it early, by its way through the stages before. If forward and backward work
interleave, the last microbatch is home after

    max over resources of (way before + busy time), at least the way of one microbatch.

If all forward work comes first, as when data nodes send all microbatches at once, it is home after

    way of one microbatch + busiest resource forward + busiest resource backward.

Real runs are between the two: devices do backward work first, but links send in the order of
arrival. The prediction is the mean of both. The aggregation of the slowest stage comes after it.
Assumptions, besides those of `stage_time`:

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
from typing import NamedTuple

from decod.lab.planner.bottleneck import Bottleneck, ResourceKind
from decod.lab.planner.hosts import HostKind, TrainingProblem
from decod.lab.planner.servers.servers_layout import Draft, DraftStage, ServersLayout, to_draft
from decod.lab.planner.servers.stage_time import StageClock, StageTime

_GUIDE = 0.01
"""Weight of the other stages in `LayoutClock.score`. Small enough to decide among near equals
only."""


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
    forward_s: float
    """How long the slowest link is busy with activations."""
    backward_s: float
    """How long the slowest link is busy with gradients."""


class PartTime(NamedTuple):
    """The times of the first stages of a layout, added up. The start is `LayoutClock.start`."""

    way_s: float = 0.0
    """A microbatch's way through them, there and back."""
    excess_s: float = 0.0
    """The largest of their hops."""
    late_s: float = 0.0
    """The latest end of a stage's busiest resource."""
    forward_s: float = 0.0
    """The busiest resource's forward work."""
    backward_s: float = 0.0
    """The busiest resource's backward work."""
    aggregation_s: float = 0.0
    background_s: float = 0.0
    room: float = math.inf
    """What the smallest stage can hold."""
    rest_s: float = 0.0
    """Sum of all stages' work, for `LayoutClock.score`."""


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
        access = [
            (2 * num * work.activation_bytes / rate, kind, index)
            for index in self.data_nodes
            for rate, kind in (
                (problem.hosts[index].uplink_bytes_per_s, ResourceKind.UPLINK),
                (problem.hosts[index].downlink_bytes_per_s, ResourceKind.DOWNLINK),
            )
        ]
        self._access = max(access)
        self._head_busy_s = num * work.head_s
        half_s = self._access[0] / 2
        self.start = PartTime(forward_s=half_s, backward_s=max(half_s, self._head_busy_s))
        """The times of a layout without stages."""

    def time_s(self, draft: Draft) -> float:
        """Return the seconds of an iteration. `inf` if a stage cannot work."""
        return self.total_s(self._part(draft))

    def score(self, draft: Draft) -> float:
        """Return the seconds of an iteration, plus a little for work that does not decide now.

        Many layouts are equally fast, because one stage decides. The little extra leads a search
        through them.
        """
        part = self._part(draft)
        return self.total_s(part) + _GUIDE * (part.way_s + part.rest_s / len(draft))

    def explain(self, draft: Draft) -> IterationTime:
        """Return the time of an iteration with its parts."""
        part, stages = self._part(draft), tuple(self.stages.time(stage) for stage in draft)
        fill_s, total_s = part.way_s + self.problem.work.head_s, self.total_s(part)
        pipeline_s = self._pipeline_s(part)
        _, bottleneck = max(self._ends(draft, fill_s), key=lambda end: end[0])
        if part.background_s > pipeline_s + part.aggregation_s:
            slowest = max(range(len(stages)), key=lambda index: stages[index].background_s)
            bottleneck = Bottleneck(ResourceKind.STEP, slowest, None, None, part.background_s)
        return IterationTime(total_s, pipeline_s, fill_s, part.aggregation_s, bottleneck, stages)

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

    def add(self, part: PartTime, begins: tuple[int, ...], stage: DraftStage) -> PartTime:
        """Return the times of some first stages and one more.

        Args:
            part: The times of the first stages.
            begins: The backward servers of the last of them, or all data nodes.
            stage: The stage to add.
        """
        hop, time = self.hop(begins, stage.frontal), self.stages.time(stage)
        before_s = part.way_s + hop.fill_s
        return PartTime(
            before_s + time.fill_s,
            max(part.excess_s, hop.excess_s),
            max(part.late_s, before_s + time.late_s),
            max(part.forward_s, hop.forward_s, time.forward_s),
            max(part.backward_s, hop.backward_s, time.backward_s),
            max(part.aggregation_s, time.aggregation_s),
            max(part.background_s, time.background_s),
            min(part.room, time.room),
            part.rest_s + time.late_s + time.aggregation_s,
        )

    def total_s(self, part: PartTime) -> float:
        """Return the time of an iteration of these stages, without the last hop."""
        return max(self._pipeline_s(part) + part.aggregation_s, part.background_s)

    def _pipeline_s(self, part: PartTime) -> float:
        work = self.problem.work
        num, fill_s = work.num_microbatches, part.way_s + work.head_s
        excess_s = max(part.excess_s, self._head_busy_s - work.head_s, 0.0)
        window_s = fill_s * num / part.room if part.room < num else 0.0
        mixed_s = max(fill_s + excess_s, part.late_s, part.way_s / 2 + self._access[0], window_s)
        phased_s = fill_s + (part.forward_s + part.backward_s) * (1 - 1 / num)
        return max(mixed_s, (mixed_s + phased_s) / 2)

    def _part(self, draft: Draft) -> PartTime:
        """Return the times of all stages and the hop back to the data nodes."""
        part, begins = self.start, self.data_nodes
        for stage in draft:
            part = self.add(part, begins, stage)
            begins = stage.backward
        hop = self.hop(begins, self.data_nodes)
        way_s = part.way_s + hop.fill_s
        return part._replace(
            way_s=way_s,
            excess_s=max(part.excess_s, hop.excess_s),
            late_s=max(part.late_s, way_s / 2 + self._shared_link(draft)[0]),
            forward_s=max(part.forward_s, hop.forward_s),
            backward_s=max(part.backward_s, hop.backward_s),
        )

    def _shared_link(self, draft: Draft) -> tuple[float, int, int]:
        """Return how long the busiest link of data nodes carries two hops' traffic, and its ends.

        A layout's only server is before and behind the data nodes. With more servers, the time is
        0.
        """
        server = draft[0].frontal[0]
        if len(draft) > 1 or draft[0].servers != (server,):
            return 0.0, server, server
        work, byte_s = self.problem.work, self.stages.byte_s
        size = 2 * work.activation_bytes * work.num_microbatches / len(self.data_nodes)
        pairs = [(host, server) for host in self.data_nodes]
        pairs += [(server, host) for host in self.data_nodes]
        return max((size * byte_s[begin][end], begin, end) for begin, end in pairs)

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
        end_s = fill_s - work.head_s + self._head_busy_s
        data_id = name[self.data_nodes[0]].host_id
        yield end_s, Bottleneck(ResourceKind.HEAD, None, data_id, None, self._head_busy_s)
        busy_s, *ends = self._shared_link(draft)
        if busy_s:
            begin, end = (name[host].host_id for host in ends)
            shared = Bottleneck(ResourceKind.LINK, None, begin, end, busy_s)
            yield (fill_s - work.head_s) / 2 + busy_s, shared
        busy_s, kind, host = self._access
        end_s = (fill_s - work.head_s) / 2 + busy_s
        yield end_s, Bottleneck(kind, None, name[host].host_id, None, busy_s)

    def _measure_hop(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> HopTime:
        work, byte_s = self.problem.work, self.stages.byte_s
        even = self.data_nodes in (begins, ends)
        parts = _every_pair(begins, ends) if even else _cut(begins, ends)
        fill_s = excess_s = forward_s = backward_s = 0.0
        slowest = (begins[0], ends[0])
        for begin, end, part in parts:
            fill_s += part * self.stages.round_trip_s[begin][end]
            slower = max((byte_s[begin][end], begin, end), (byte_s[end][begin], end, begin))
            one_s, load = slower[0] * work.activation_bytes, part * work.num_microbatches
            excess = load * one_s - one_s if one_s < math.inf else math.inf
            if excess > excess_s:
                excess_s, slowest = excess, slower[1:]
            size = load * work.activation_bytes
            forward_s = max(forward_s, size * byte_s[begin][end])
            backward_s = max(backward_s, size * byte_s[end][begin])
        return HopTime(fill_s, excess_s, slowest, forward_s, backward_s)


def _every_pair(begins: tuple[int, ...], ends: tuple[int, ...]) -> Iterator[tuple[int, int, float]]:
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
