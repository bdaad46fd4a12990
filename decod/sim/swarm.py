"""SWARM, which decod is compared with, by two readings of how it recovers from a loss.

`Pipelines` is how GWTF describes it: each node sends a microbatch on to the node of the next
stage that will be done first and has room; a relay that crashes in the forward pass is passed
over by the one before it; one that is missed in the backward pass has its microbatches *begun
again*, by all relays of a new pipeline.

`Closest` differs in the wiring alone, and takes that from GWTF too: SWARM's is greedy and takes no
account of memory, and the baseline is "sending to the next stage closest node". So a sender asks
the node with the least d(i, j), whatever is under way to it and whoever has room; one that is full
refuses, which takes a there-and-back of an empty message, and the sender asks the next closest. Of
d(i, j) GWTF takes for granted that it is known, so here it is from the start. What a refused sender
does is not said; that a microbatch is excluded, as happened to 5 of 8 in the paper's heterogeneous
settings, would waste more.

`Trainers` is SWARM's public code: pipelines exist in the trainers alone. A trainer calls one
server of each stage with the input and gets the output back; in the backward pass it calls any
server of the stage, not necessarily the same, with the input *and* the gradient, and that
computes the forward pass again. So a loss costs one call. Every activation travels by way of the
trainer, and the backward call carries two. Trainers share out calls by each server's throughput,
an exponential mean of what was measured: the server whose calls so far would be over first is
next.

Where the sources are silent or a rule would be slow, the baseline gets the better of it:

- What `decod.sim.cluster` does not charge for is for nothing. A crash that has become known to
  anybody is known to all. The data node keeps the embedded microbatch.
- A gradient that a relay had added up, and that is lost with it, is *not* computed again, which
  would take longer: neither source says that it would be. The step is taken without it, and the
  microbatch does not count as committed, since one stage or more have not learnt from it.
- A sender knows how much it has under way on each link, and which peers have room; a throughput
  that was not measured yet is that of an idle link with the cost that is believed.
- A server of a trainer takes any number of calls: it keeps nothing between them, so its capacity
  does not bound it.
- Work that finds no room waits for it; it is not put off to the next iteration.

Source: SWARM parallelism (arXiv:2301.11913), section 3.2 and algorithm 1, and `ExpertBalancer`,
`PerformanceEMA`, `BalancedRemoteExpert` and `ExpertBackend` of its public code; GWTF, sections
III, V-D and VI.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from decod.sim.cluster import Cluster, Peer, Trip
from decod.sim.kernel import seeded

_BACKWARD_SIZE = 2.5
"""What a backward call counts for, in forward calls; as in the public code."""

_EMA_ALPHA = 0.1
"""Weight of the newest measurement of a throughput; as in the public code."""


@dataclass(slots=True)
class _Way:
    """Where a microbatch has been."""

    path: list[Peer] = field(default_factory=list)
    """A relay of each stage; the last has perhaps not computed its forward pass yet."""
    lost: set[Peer] = field(default_factory=set)
    """Relays that are gone with what they need for the backward pass."""
    num_forward: int = 0
    """How many of them have."""
    num_left: int = 0
    """In the backward pass: how many relays are still to compute theirs."""
    returning: bool = False
    on_link: bool = False
    """A gradient is on its way from the relay that computed the last backward pass."""


class Pipelines:
    """SWARM as GWTF describes it, with SWARM's wiring: who would be done first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._num_stages = cluster.scenario.num_relay_stages
        self._forwarding: dict[Trip, _Way] = {}
        self._held: dict[Peer, set[Trip]] = {peer: set() for peer in cluster.peers.values()}
        """What takes up each relay's capacity."""
        self._under_way: Counter[tuple[Peer, Peer]] = Counter()
        """Forward passes that each sender waits for."""
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
        """Return the peer with room that comes first in the sender's order."""
        open_to = [p for p in self._cluster.of_stage(stage) if not self._full(p)]
        return min(open_to, key=lambda peer: self._order(here, peer), default=None)

    def _full(self, peer: Peer) -> bool:
        return len(self._held[peer]) >= peer.capacity

    def _order(self, here: Peer, peer: Peer) -> tuple[float, float]:
        """Return when a peer would be done with one more, and a tie-breaker."""
        num = self._under_way[here, peer] + 1
        return num * self._cluster.cost_s(here, peer), self._rng.random()

    def _refused_by(
        self,
        here: Peer,  # noqa: ARG002 - others ask the closest first.
        peer: Peer,  # noqa: ARG002
    ) -> Sequence[Peer]:
        """Return whom the sender has asked in vain before the peer that it sends to."""
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
        """Let those go on that wait for room at a stage."""
        waiting, self._waiting[stage] = self._waiting[stage], deque()
        for trip in waiting:
            if trip in self._forwarding and len(self._forwarding[trip].path) == stage - 1:
                self._forward(trip)

    # --- churn --------------------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        """There is more room."""
        self._admit(peer.stage_index)

    def crashed(self, peer: Peer, under_way: Iterable[Trip]) -> None:
        """Go round it in the forward pass; else begin again."""
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
        """Have others compute the forward pass; the last one before the gap sends again."""
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
    """SWARM as GWTF measured it: every sender asks the closest node of the next stage first."""

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
    """What a trainer knows of a server."""

    ends_s: float
    """When its calls so far would be over, if they began at 0 and came one after another."""
    call_s: float
    """Of a forward call on an idle link, until one was measured."""
    mean_s: float = 0.0
    num: int = 0

    def measured(self, duration_s: float, size: float) -> None:
        """Take in how long a call of this size took."""
        self.num += 1
        self.mean_s += _EMA_ALPHA * (duration_s / size - self.mean_s)
        # As much as the mean of a few values is drawn towards its beginning at 0.
        self.call_s = self.mean_s / (1 - (1 - _EMA_ALPHA) ** self.num)


@dataclass(slots=True)
class _Call:
    """What a trainer waits for."""

    stage: int
    backward: bool
    server: Peer
    begin_s: float


class Trainers:
    """SWARM's public code: trainers call servers, which keep nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._num_stages = cluster.scenario.num_relay_stages
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
        """A new server is tried soon: it counts as the least used."""
        for (home, stage), known in self._known.items():
            if stage == peer.stage_index:
                least_s = min((other.ends_s for other in known.values()), default=0.0)
                call_s = 2 * self._cluster.cost_s(home, peer) + peer.profile.forward_s
                known[peer] = _Throughput(least_s, call_s)

    def crashed(self, peer: Peer, under_way: Iterable[Trip]) -> None:
        """Make its calls again, to others."""
        for known in self._known.values():
            known.pop(peer, None)
        for trip in under_way:
            call = self._calls.get(trip)
            if call is not None and call.server is peer:
                trip.step += 1
                self._call(trip, call.stage, backward=call.backward)
