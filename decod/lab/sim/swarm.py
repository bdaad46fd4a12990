"""SWARM, the system that decod is compared with, in two readings of its recovery from a loss.

`Pipelines` is SWARM as GWTF describes it. Each node sends a microbatch to the node of the next
stage that has room and will finish first. If a relay crashes in the forward pass, the relay before
it sends to another. If a relay is missing in the backward pass, its microbatches are *begun again*,
by all relays of a new pipeline.

`Closest` differs only in the wiring, which also comes from GWTF. There SWARM's wiring is greedy and
takes no account of memory, and the baseline is "sending to the next stage closest node". A sender
asks the node with the least d(i, j), whatever its load or room. A full node refuses, which costs
the round trip of an empty message, and the sender asks the next closest. GWTF takes d(i, j) for
known, so this model knows it from the start. GWTF does not say what a refused sender does. In the
paper's heterogeneous settings 5 of 8 microbatches were excluded; to exclude them here would waste
more.

`Trainers` is SWARM's public code. Only the trainers know pipelines. A trainer calls one server of
each stage with the input and gets the output back. In the backward pass it calls any server of the
stage, not necessarily the same one, with the input *and* the gradient. That server computes the
forward pass again. A loss therefore costs one call. Every activation travels through the trainer,
and a backward call carries two. Trainers share out calls by each server's throughput, an
exponential mean of measurements: the next server is the one whose calls so far would end first.

The model is generous where the sources are silent or a rule would be slow:

- Everything that `decod.lab.sim.cluster` does not charge for is free. A crash that one host knows
  of is known to all. The data node keeps the embedded microbatch.
- If a relay is lost, the gradients that it had added up are *not* computed again, which would take
  longer: neither source says that they would be. The step is taken without them. Their
  microbatches do not count as committed, because at least one stage has not learnt from them.
- A sender knows the amount under way on each of its links, and the peers that have room. A
  throughput that was not measured yet is that of an idle link with the estimated cost.
- A trainer's server takes any number of calls. It keeps nothing between them, so its capacity does
  not limit it.
- Work without room waits. It is not put off to the next iteration.

Source: SWARM parallelism (arXiv:2301.11913), section 3.2 and algorithm 1, and `ExpertBalancer`,
`PerformanceEMA`, `BalancedRemoteExpert` and `ExpertBackend` of its public code; GWTF, sections
III, V-D and VI.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from decod.lab.sim.cluster import Cluster, Peer, Trip
from decod.sim.kernel import seeded

_BACKWARD_SIZE = 2.5
"""Size of a backward call, in forward calls, as in the public code."""

_EMA_ALPHA = 0.1
"""Weight of the newest measurement of a throughput, as in the public code."""


@dataclass(slots=True)
class _Way:
    """The way of a microbatch so far."""

    path: list[Peer] = field(default_factory=list)
    """One relay per stage. The last one may not have finished its forward pass."""
    lost: set[Peer] = field(default_factory=set)
    """Relays that are gone, with the data for their backward pass."""
    num_forward: int = 0
    """Number of relays in `path` that have finished their forward pass."""
    num_left: int = 0
    """Number of relays that still have to compute their backward pass."""
    returning: bool = False
    on_link: bool = False
    """Whether the gradient is between two hosts."""


class Pipelines:
    """SWARM as GWTF describes it, with SWARM's wiring: to the peer that would finish first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._num_stages = cluster.scenario.stages.num_relay_stages
        self._forwarding: dict[Trip, _Way] = {}
        self._held: dict[Peer, set[Trip]] = {peer: set() for peer in cluster.peers.values()}
        """The microbatches that take up each relay's capacity."""
        self._under_way: Counter[tuple[Peer, Peer]] = Counter()
        """Number of forward passes that each sender waits for, by peer."""
        self._waiting: dict[int, deque[Trip]] = {
            stage: deque() for stage in range(1, self._num_stages + 1)
        }
        self._rng = seeded(cluster.scenario.seed, "wiring")

    def begin(self, trip: Trip) -> None:
        """Start on a new pipeline."""
        self._forwarding[trip] = _Way()
        self._forward(trip)

    # --- forward ------------------------------------------------------------------------------

    def _forward(self, trip: Trip) -> None:
        """Send a microbatch on from the last relay that has computed its forward pass."""
        way, home = self._forwarding[trip], trip.home
        here = way.path[-1] if way.path else home
        stage = len(way.path) + 1
        if stage > self._num_stages:
            self._cluster.send(trip, here, home, partial(self._at_head, trip))
            return
        peer = self._choose(here, stage)
        if peer is None:
            self._waiting[stage].append(trip)
            return
        way.path.append(peer)
        self._held[peer].add(trip)
        self._under_way[here, peer] += 1
        forward_s = peer.profile.forward_s
        done = partial(self._forwarded, trip, here)
        arrived = partial(self._cluster.compute, trip, peer, forward_s, done)
        self._cluster.send(trip, here, peer, arrived, refused_by=self._refused_by(here, peer))

    def _choose(self, here: Peer, stage: int) -> Peer | None:
        """Return the peer with room that is first in the sender's order."""
        open_to = [p for p in self._cluster.of_stage(stage) if not self._full(p)]
        return min(open_to, key=lambda peer: self._order(here, peer), default=None)

    def _full(self, peer: Peer) -> bool:
        return len(self._held[peer]) >= peer.capacity

    def _order(self, here: Peer, peer: Peer) -> tuple[float, float]:
        """Return when a peer would finish one more microbatch, and a tie-breaker."""
        num = self._under_way[here, peer] + 1
        return num * self._cluster.cost_s(here, peer), self._rng.random()

    def _refused_by(
        self,
        here: Peer,  # noqa: ARG002 - `Closest` uses them.
        peer: Peer,  # noqa: ARG002
    ) -> Sequence[Peer]:
        """Return the peers that refused the sender before it found this one."""
        return ()

    def _forwarded(self, trip: Trip, sender: Peer) -> None:
        way = self._forwarding[trip]
        self._under_way[sender, way.path[-1]] -= 1
        way.num_forward += 1
        self._forward(trip)

    # --- backward -----------------------------------------------------------------------------

    def _at_head(self, trip: Trip) -> None:
        way = self._forwarding[trip]
        way.returning, way.num_left = True, self._num_stages
        head_s = trip.home.profile.head_s
        self._cluster.compute(trip, trip.home, head_s, partial(self._backward, trip), backward=True)

    def _backward(self, trip: Trip) -> None:
        """Send the gradient one stage back."""
        way, cluster = self._forwarding[trip], self._cluster
        here = way.path[way.num_left] if way.num_left < self._num_stages else trip.home
        peer = way.path[way.num_left - 1] if way.num_left else trip.home
        if peer in way.lost:
            self._again(trip, way)
            return
        profile = peer.profile
        if peer is trip.home:
            duration_s, done = profile.backward_ratio * profile.embed_s, self._home
        else:
            duration_s, done = profile.backward_ratio * profile.forward_s, self._returned
        then = partial(done, trip)
        way.on_link = True
        cluster.send(trip, here, peer, partial(self._arrived, trip, peer, duration_s, then))

    def _arrived(self, trip: Trip, peer: Peer, duration_s: float, then: Callable[[], None]) -> None:
        self._forwarding[trip].on_link = False
        self._cluster.compute(trip, peer, duration_s, then, backward=True)

    def _returned(self, trip: Trip) -> None:
        way = self._forwarding[trip]
        way.num_left -= 1
        trip.folded.add(way.path[way.num_left])
        self._free(trip, way.path[way.num_left])
        self._backward(trip)

    def _home(self, trip: Trip) -> None:
        del self._forwarding[trip]
        self._cluster.finish(trip)

    def _free(self, trip: Trip, peer: Peer) -> None:
        self._held[peer].discard(trip)
        self._admit(peer.stage_index)

    def _admit(self, stage: int) -> None:
        """Send on the microbatches that wait for room at a stage."""
        waiting, self._waiting[stage] = self._waiting[stage], deque()
        for trip in waiting:
            if trip in self._forwarding and len(self._forwarding[trip].path) == stage - 1:
                self._forward(trip)

    # --- churn --------------------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        """Use the new room."""
        self._admit(peer.stage_index)

    def crashed(self, peer: Peer, under_way: Iterable[Trip]) -> None:
        """Go round the relay in the forward pass. In the backward pass, begin again."""
        self._held[peer].clear()
        for link in [link for link in self._under_way if peer in link]:
            del self._under_way[link]
        for trip in under_way:
            way = self._forwarding.get(trip)
            if way is None or peer not in way.path:
                continue
            index = way.path.index(peer)
            if way.returning and index >= way.num_left + way.on_link:
                continue
            if way.returning and index >= way.num_left - 1:
                self._again(trip, way)
            elif way.returning or index < way.num_forward - 1:
                way.lost.add(peer)
            else:
                self._go_round(trip, way, index)

    def _go_round(self, trip: Trip, way: _Way, index: int) -> None:
        """Let others compute the forward pass. The last relay before the gap sends again."""
        while index and way.path[index - 1] in way.lost:
            index -= 1
        trip.step += 1
        self._leave(trip, way, way.path[index:])
        way.lost.difference_update(way.path[index:])
        del way.path[index:]
        way.num_forward = len(way.path)
        self._forward(trip)

    def _again(self, trip: Trip, way: _Way) -> None:
        """Compute everything again, on a new pipeline."""
        trip.step += 1
        trip.folded.clear()
        trip.lost = False
        relays = way.path[:]
        self._forwarding[trip] = _Way()
        self._leave(trip, way, relays)
        self._cluster.waste(trip, [*relays, trip.home])
        self._forward(trip)

    def _leave(self, trip: Trip, way: _Way, relays: Iterable[Peer]) -> None:
        """Give up the places at these relays."""
        for waiting in self._waiting.values():
            if trip in waiting:
                waiting.remove(trip)
        for relay in [*relays]:
            index = way.path.index(relay)
            if index >= way.num_forward:
                sender = way.path[index - 1] if index else trip.home
                self._under_way[sender, relay] = max(0, self._under_way[sender, relay] - 1)
            self._held[relay].discard(trip)
            self._admit(relay.stage_index)


class Closest(Pipelines):
    """SWARM as GWTF measured it: a sender asks the closest node of the next stage first."""

    @override
    def _order(self, here: Peer, peer: Peer) -> tuple[float, float]:
        return self._cluster.distance_s(here, peer), self._rng.random()

    @override
    def _refused_by(self, here: Peer, peer: Peer) -> Sequence[Peer]:
        distance_s = self._cluster.distance_s
        limit_s = distance_s(here, peer)
        others = self._cluster.of_stage(peer.stage_index)
        return [p for p in others if self._full(p) and distance_s(here, p) < limit_s]


@dataclass(slots=True)
class _Throughput:
    """A trainer's knowledge of a server."""

    ends_s: float
    """When the calls so far would end if they began at 0 and came one after another."""
    call_s: float
    """Time of a forward call: on an idle link, until it has been measured."""
    mean_s: float = 0.0
    num: int = 0

    def measured(self, duration_s: float, size: float) -> None:
        """Take in the duration of a call of this size."""
        self.num += 1
        self.mean_s += _EMA_ALPHA * (duration_s / size - self.mean_s)
        # Correct the bias of a mean of few values towards its start at 0.
        self.call_s = self.mean_s / (1 - (1 - _EMA_ALPHA) ** self.num)


@dataclass(slots=True)
class _Call:
    """A call whose answer a trainer waits for."""

    stage: int
    backward: bool
    server: Peer
    begin_s: float


class Trainers:
    """SWARM's public code: trainers call servers, and servers keep nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._num_stages = cluster.scenario.stages.num_relay_stages
        self._known: dict[tuple[Peer, int], dict[Peer, _Throughput]] = {}
        self._calls: dict[Trip, _Call] = {}
        self._rng = seeded(cluster.scenario.seed, "balancer")
        homes = cluster.of_stage(0)
        for home in homes:
            for stage in range(1, self._num_stages + 1):
                self._known[home, stage] = {}
        for peer in cluster.peers.values():
            if peer.stage_index:
                self.joined(peer)

    def begin(self, trip: Trip) -> None:
        """Call a server of the first stage."""
        self._call(trip, 1, backward=False)

    def _call(self, trip: Trip, stage: int, *, backward: bool) -> None:
        known, cluster = self._known[trip.home, stage], self._cluster
        server = min(known, key=lambda peer: (known[peer].ends_s, self._rng.random()))
        size = _BACKWARD_SIZE if backward else 1.0
        known[server].ends_s += size * known[server].call_s
        self._calls[trip] = _Call(stage, backward, server, cluster.kernel.now_s)
        duration_s = server.profile.forward_s
        if backward:
            duration_s *= 1 + server.profile.backward_ratio
        answer = partial(cluster.send, trip, server, trip.home, partial(self._answered, trip))
        pipeline = partial(cluster.compute, trip, server, duration_s, answer, backward=backward)
        cluster.send(trip, trip.home, server, pipeline, num=2 if backward else 1)

    def _answered(self, trip: Trip) -> None:
        call, home, cluster = self._calls.pop(trip), trip.home, self._cluster
        size = _BACKWARD_SIZE if call.backward else 1.0
        known = self._known[home, call.stage].get(call.server)
        if known is not None:
            known.measured(cluster.kernel.now_s - call.begin_s, size)
        if call.backward:
            trip.folded.add(call.server)
        profile = home.profile
        if not call.backward and call.stage < self._num_stages:
            self._call(trip, call.stage + 1, backward=False)
        elif not call.backward:
            then = partial(self._call, trip, self._num_stages, backward=True)
            cluster.compute(trip, home, profile.head_s, then, backward=True)
        elif call.stage > 1:
            self._call(trip, call.stage - 1, backward=True)
        else:
            embed_s = profile.backward_ratio * profile.embed_s
            done = partial(cluster.finish, trip)
            cluster.compute(trip, home, embed_s, done, backward=True)

    def joined(self, peer: Peer) -> None:
        """Try a new server soon: it counts as the least used."""
        for (home, stage), known in self._known.items():
            if stage == peer.stage_index:
                least_s = min((other.ends_s for other in known.values()), default=0.0)
                call_s = 2 * self._cluster.cost_s(home, peer) + peer.profile.forward_s
                known[peer] = _Throughput(least_s, call_s)

    def crashed(self, peer: Peer, under_way: Iterable[Trip]) -> None:
        """Repeat the relay's calls at other servers."""
        for known in self._known.values():
            known.pop(peer, None)
        for trip in under_way:
            call = self._calls.get(trip)
            if call is not None and call.server is peer:
                trip.step += 1
                self._call(trip, call.stage, backward=call.backward)
