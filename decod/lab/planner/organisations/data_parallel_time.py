"""How long a round takes if each host trains the whole model: the collaborative optimizer.

Hosts add up microbatches at their own speeds, until all of them together have as many as a batch
has. Then they average. A host that would hold up the average more than it helps stays out. So does
one without memory for the model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from decod.lab.planner.bottleneck import Bottleneck, ResourceKind
from decod.lab.planner.hosts import HostKind
from decod.lab.planner.organisations.exchange_time import ButterflyTime, butterfly
from decod.lab.planner.organisations.forecast import (
    Forecast,
    OrganisationName,
    PlacedHost,
    PlacedStage,
    TimeParts,
)
from decod.lab.planner.organisations.run_work import WHOLE, RunProblem
from decod.lab.planner.servers.stage_time import share_out

_NUM_GROUPS_MAX = 24
"""Groups of peers that are tried: the hosts with the fastest access, more and more of them."""


@dataclass(frozen=True, slots=True)
class RoundTime:
    """A group of peers, and the parts of its rounds."""

    peers: tuple[int, ...]
    counts: tuple[int, ...]
    """Microbatches of each peer in a round."""
    compute_s: float
    average: ButterflyTime

    def total_s(self, *, overlap: bool) -> float:
        """Return the time of a round. With overlap, nobody waits for an average that is faster."""
        average_s = self.average.time_s
        return max(self.compute_s, average_s) if overlap else self.compute_s + average_s


class DataParallelClock:
    """Computes the times of rounds.

    Args:
        problem: Hosts, links and the run.
    """

    def __init__(self, problem: RunProblem) -> None:
        self._problem = problem

    @property
    def able(self) -> list[int]:
        """Hosts that can hold the whole model, those with the fastest access first."""
        hosts, run = self._problem.hosts, self._problem.run
        need = run.outer.state_bytes + run.outer.microbatch_bytes
        need += run.num_layers * (run.layer.state_bytes + run.layer.microbatch_bytes)
        found = [
            index
            for index, host in enumerate(hosts)
            if host.kind != HostKind.DATA
            and host.speed_layers_per_s > 0
            and (host.memory_bytes is None or host.memory_bytes >= need)
        ]

        def access(index: int) -> float:
            return min(hosts[index].uplink_bytes_per_s, hosts[index].downlink_bytes_per_s)

        return sorted(found, key=lambda index: (-access(index), index))

    def microbatch_s(self, host: int) -> float:
        """Return the time of a microbatch through the whole model."""
        run = self._problem.run
        return (run.num_layers + run.outer_layers) / self._problem.hosts[host].speed_layers_per_s

    def round(self, peers: Sequence[int], format_name: str = WHOLE) -> RoundTime:
        """Return the time of a round of some peers."""
        run = self._problem.run
        each_s = [self.microbatch_s(host) for host in peers]
        counts = share_out(each_s, run.num_microbatches)
        compute_s = max(count * s for count, s in zip(counts, each_s, strict=True))
        size = (
            run.outer.wire_bytes[format_name] + run.num_layers * run.layer.wire_bytes[format_name]
        )
        return RoundTime(
            tuple(peers), tuple(counts), compute_s, butterfly(self._problem.base, peers, size)
        )

    def best(self, format_name: str, *, overlap: bool) -> RoundTime | None:
        """Return the round of the best group of peers; None if no host can hold the model."""
        able = self.able
        sizes = sorted(
            {
                math.ceil(len(able) * (index + 1) / _NUM_GROUPS_MAX)
                for index in range(_NUM_GROUPS_MAX)
            }
        )
        # A host alone averages with nobody, so the fastest device is a group of its own.
        groups = [able[:size] for size in sizes if size]
        if able:
            groups.append([min(able, key=self.microbatch_s)])
        rounds = [self.round(group, format_name) for group in groups]
        return min(rounds, key=lambda each: each.total_s(overlap=overlap), default=None)


def collaborative_forecasts(problem: RunProblem) -> list[Forecast]:
    """Return a forecast for each format, with and without overlap.

    Empty: no host can hold the whole model.
    """
    clock, found = DataParallelClock(problem), list[Forecast]()
    for overlap in (False, True):
        for name in problem.run.formats:
            best = clock.best(name, overlap=overlap)
            if best is not None:
                found.append(_forecast(problem, best, name, overlap=overlap))
    return found


def _forecast(problem: RunProblem, time: RoundTime, name: str, *, overlap: bool) -> Forecast:
    hosts, run = problem.hosts, problem.run
    average = time.average
    waits_s = time.total_s(overlap=overlap) - time.compute_s
    slowest = max(range(len(time.peers)), key=lambda k: time.counts[k] / _speed(problem, time, k))
    kind, busy_s, host = ResourceKind.DEVICE, time.compute_s, time.peers[slowest]
    if average.host is not None and average.time_s > time.compute_s:
        kind, busy_s, host = ResourceKind.AVERAGE, average.time_s, average.host
    peers = tuple(
        PlacedHost(host_id=hosts[peer].host_id, duty="peer", num_microbatches=count)
        for peer, count in zip(time.peers, time.counts, strict=True)
    )
    remarks = ["each host reads data of its own; use_local_updates takes as long"]
    if overlap:
        remarks.append("an average counts one step later")
    if name != WHOLE:
        remarks.append("averages are compressed; coding and decoding count as no time")
    first_s = min(clock_s for clock_s in (time.compute_s, *_firsts(problem, time)))
    return Forecast(
        organisation=OrganisationName.COLLABORATIVE,
        variant=", ".join(filter(None, (name if name != WHOLE else "", "overlap" * overlap))),
        parts=TimeParts(
            compute_s=time.compute_s - first_s,
            communication_s=0.0,
            fill_s=first_s,
            aggregation_s=waits_s,
        ),
        bottleneck=Bottleneck(kind, None, hosts[host].host_id, None, busy_s),
        stages=(PlacedStage(num_layers=run.num_layers, hosts=peers),),
        exact=not overlap and name == WHOLE,
        settings={"overlap": overlap, "compression": name},
        remarks=tuple(remarks),
    )


def _speed(problem: RunProblem, time: RoundTime, position: int) -> float:
    return problem.hosts[time.peers[position]].speed_layers_per_s


def _firsts(problem: RunProblem, time: RoundTime) -> list[float]:
    clock = DataParallelClock(problem)
    return [clock.microbatch_s(peer) for peer in time.peers]
