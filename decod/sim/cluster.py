"""Hosts, links and churn of a scenario, for policies that are not decod's: a cost model.

What is compared with decod's machines here has no machines of its own: a policy says where each
microbatch goes next, and this module gives it devices that work on one job at a time, links that
carry one tensor at a time in each direction between two hosts, and hosts that crash and come
back.

What decod's machines pay for in the simulator is paid for here, on the same links and with the
same parameters:

- A crashed host vanishes. A tensor that is sent to it fails `retry_timeout_s` after it should have
  arrived; who sends it nothing finds out after `heartbeat_timeout_s` and `probe_timeout_s`. Until
  then all take it for alive, and may choose it.
- Before a relay gets an activation it is asked whether it has room: one round trip.
- A link's bandwidth is known once a tensor has crossed it, either way. One that none has crossed is
  taken for the mean of the others of the sender to that stage, or of all the sender's.
- At the end of an iteration the trainers tell all members that the batch is complete, every stage
  averages its gradients, each member one part, and all are told to go on: on the way there and
  back the longest latency, and between them the slowest stage. A crash meanwhile is waited for as
  above, and the averaging is repeated without the host.
- Who comes back asks to be taken in (a round trip); its donor copies the state and sends it.

What is better here than it could be in the world: nobody votes or waits for a view; who comes back
takes part as soon as it has the state, in the middle of an iteration too, and everybody knows of it
at once; averages travel on links that nothing else uses.
"""

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from decod.protocol.core.events import Fault
from decod.sim.churn import Churn, Instants
from decod.sim.compute import ComputeProfile
from decod.sim.kernel import Kernel
from decod.sim.meter import IterationFigures
from decod.sim.network import InFlight, Network
from decod.sim.scenario import Scenario


@dataclass(eq=False, slots=True)
class Peer:
    """A host: one device, which does backward work first."""

    name: str
    stage_index: int
    """0 for data nodes."""
    capacity: int
    profile: ComputeProfile
    reachable: bool = True
    refuses: bool = True
    frozen_until_s: float = 0.0
    loaded: bool = True
    """It holds its stage's state."""
    life: int = 0
    """Grows with each crash: what was planned before is void."""
    donor: "Peer | None" = None
    """Whom it loads the state from."""
    missed: bool = False
    """It has crashed, and nobody knows yet."""
    jobs: tuple[deque["_Job"], deque["_Job"]] = field(default_factory=lambda: (deque(), deque()))
    """Backward, and forward."""
    running: bool = False

    @property
    def serving(self) -> bool:
        return self.reachable and self.loaded


@dataclass(eq=False, slots=True)
class Trip:
    """A microbatch of the present iteration."""

    home: Peer
    spent_s: dict[Peer, float] = field(default_factory=dict)
    """Compute that the step will hold, as far as it is known now."""
    step: int = 0
    """Grows with all that happens to it: what was planned before is void."""
    done: bool = False
    folded: set[Peer] = field(default_factory=set)
    """Whose sums hold its gradient."""
    lost: bool = False
    """One of them is gone, and the gradient of its stage with it."""


@dataclass(frozen=True, slots=True)
class _Job:
    trip: Trip
    step: int
    duration_s: float
    then: Callable[[], None]


class Policy(Protocol):
    """Where microbatches go, and what becomes of them when a host crashes."""

    def begin(self, trip: Trip) -> None:
        """A microbatch is embedded and sets out from home."""

    def crashed(self, peer: Peer, under_way: Iterable[Trip]) -> None:
        """It has become known that a relay is gone, with all that it held."""

    def joined(self, peer: Peer) -> None:
        """A relay has come back and holds its stage's state."""


class Cluster:
    """One run of a scenario whose hosts are described.

    Args:
        scenario: Of its protocol and faults nothing is used.
        policy: Made for this cluster.

    Attributes:
        figures: Of the iterations so far.
    """

    def __init__(self, scenario: Scenario, policy: Callable[["Cluster"], Policy]) -> None:
        self.scenario = scenario
        self.kernel = Kernel()
        self.figures: list[IterationFigures] = []
        self.peers = {
            host.name: Peer(host.name, host.stage_index, host.capacity, host.profile)
            for host in scenario.hosts
        }
        self._network = Network(
            self.kernel, scenario.links, scenario.link_faults, seed=scenario.seed
        )
        self._instants = Instants(scenario.churn)
        self._trips: list[Trip] = []
        self._opened_s = 0.0
        self._communication_s = self._wasted_s = self._lost_s = 0.0
        self._known_links: set[frozenset[str]] = set()
        """Pairs of hosts between which a tensor has been carried."""
        self._averaging: int | None = None
        """Of the averaging under way, if all microbatches are home: grows when it is repeated."""
        self._policy = policy(self)

    def run(self) -> list[IterationFigures]:
        """Run all iterations."""
        self._open(1)
        num = self.scenario.num_iterations
        self.kernel.run(until_s=self.scenario.duration_max_s, done=lambda: len(self.figures) == num)
        assert len(self.figures) == num, f"{len(self.figures)} of {num} iterations"
        return self.figures

    def of_stage(self, stage_index: int) -> list[Peer]:
        """Return who is taken to serve a stage now."""
        return [p for p in self._of(stage_index) if p.serving or p.missed]

    def _of(self, stage_index: int) -> list[Peer]:
        return [p for p in self.peers.values() if p.stage_index == stage_index]

    # --- what policies do ---------------------------------------------------------------------

    def send(
        self,
        trip: Trip,
        sender: Peer,
        receiver: Peer,
        then: Callable[[], None],
        *,
        num: int = 1,
        refused_by: Iterable[Peer] = (),
    ) -> None:
        """Carry some activations or gradients, and go on; a crash at either end makes it void.

        Forward to a relay only after it has been asked, and before it those who refuse.
        """
        step = trip.step
        if receiver.stage_index == (sender.stage_index + 1):
            self.kernel.after(
                sum(self._round_trip_s(sender, asked) for asked in (*refused_by, receiver)),
                self._send_asked,
                trip,
                step,
                sender,
                receiver,
                then,
                num,
            )
        else:
            self._send_asked(trip, step, sender, receiver, then, num)

    def _send_asked(
        self,
        trip: Trip,
        step: int,
        sender: Peer,
        receiver: Peer,
        then: Callable[[], None],
        num: int,
    ) -> None:
        if trip.step != step or not sender.reachable:
            return
        begin_s = self.kernel.now_s

        def arrived() -> None:
            self._communication_s += self.kernel.now_s - begin_s
            if trip.step == step:
                then()

        size_bytes = num * self.scenario.profile.activation_bytes
        self._carry(sender, receiver, size_bytes, arrived)

    def compute(
        self,
        trip: Trip,
        peer: Peer,
        duration_s: float,
        then: Callable[[], None],
        *,
        backward: bool = False,
    ) -> None:
        """Compute on a host's device, and go on."""
        peer.jobs[0 if backward else 1].append(_Job(trip, trip.step, duration_s, then))
        if not peer.running:
            self._run_next(peer)

    def waste(self, trip: Trip, peers: Iterable[Peer]) -> None:
        """Count as wasted what these hosts have computed on a microbatch."""
        self._wasted_s += sum(trip.spent_s.pop(peer, 0.0) for peer in [*peers])

    def finish(self, trip: Trip) -> None:
        """A microbatch is home, and its gradient is in the sums of all stages."""
        trip.done = True
        if all(other.done for other in self._trips):
            self._average(0)

    # --- devices and links --------------------------------------------------------------------

    def _run_next(self, peer: Peer) -> None:
        for queue in peer.jobs:
            while queue:
                job = queue.popleft()
                if job.trip.step == job.step:
                    peer.running = True
                    self.kernel.after(job.duration_s, self._computed, peer, peer.life, job)
                    return
        peer.running = False

    def _computed(self, peer: Peer, life: int, job: _Job) -> None:
        if peer.life != life:
            return
        spent_s = job.trip.spent_s
        spent_s[peer] = spent_s.get(peer, 0.0) + job.duration_s
        if job.trip.step == job.step:
            job.then()
        else:
            self.waste(job.trip, [peer])
        self._run_next(peer)

    def _carry(
        self, sender: Peer, receiver: Peer, size_bytes: int, then: Callable[[], None]
    ) -> None:
        lives = (sender.life, receiver.life)

        def delivered() -> None:
            if lives == (sender.life, receiver.life):
                self._known_links.add(frozenset((sender.name, receiver.name)))
                then()

        def failed(_reason: str, _fault: Fault) -> None:
            self._notice(receiver, receiver.life)

        self._network.send_tensor(
            InFlight(sender, receiver, size_bytes, delivered, sent=None, failed=failed)
        )

    def _round_trip_s(self, here: Peer, there: Peer) -> float:
        spec = self._network.spec
        return spec(here, there).latency_s + spec(there, here).latency_s

    # --- iterations ---------------------------------------------------------------------------

    def _open(self, iteration: int) -> None:
        self._opened_s = self.kernel.now_s
        for delay_s, churn in self._instants.opened(self.kernel.now_s, iteration):
            self.kernel.after(delay_s, self._come_or_go, churn)
        homes = [peer for peer in self.peers.values() if peer.stage_index == 0]
        self._trips = [Trip(home) for home in homes for _ in range(self.scenario.num_microbatches)]
        for trip in self._trips:
            self.compute(
                trip,
                trip.home,
                trip.home.profile.embed_s,
                lambda trip=trip: self._policy.begin(trip),  # type: ignore[misc]
            )

    def _average(self, attempt: int) -> None:
        """All microbatches are home: average, as soon as all who are gone are known to be."""
        self._averaging = attempt
        if not any(peer.missed for peer in self.peers.values()):
            self.kernel.after(self._averaging_s(), self._commit, attempt)

    def _commit(self, attempt: int) -> None:
        if self._averaging != attempt:
            return  # Somebody has crashed meanwhile.
        self._averaging = None
        useful_s = sum(sum(trip.spent_s.values()) for trip in self._trips)
        self.figures.append(
            IterationFigures(
                len(self.figures) + 1,
                self.kernel.now_s - self._opened_s,
                sum(not trip.lost for trip in self._trips),
                self._communication_s,
                self._wasted_s,
                useful_s,
                self._lost_s,
            )
        )
        self._communication_s = self._wasted_s = self._lost_s = 0.0
        self._open(len(self.figures) + 1)

    def _averaging_s(self) -> float:
        """Return how long the slowest stage takes to average its gradients, and to step."""
        slowest_s = 0.0
        for stage_index in range(self.scenario.num_relay_stages + 1):
            members = self.of_stage(stage_index)
            profile = self.scenario.profile
            part_bytes = profile.parameter_bytes / max(1, len(members))
            both_ways_s = 0.0
            for sender, receiver in itertools.permutations(members, 2):
                spec = self._network.spec(sender, receiver)
                one_way_s = spec.latency_s + part_bytes / spec.bandwidth_bytes_per_s
                both_ways_s = max(both_ways_s, 2 * one_way_s)
            # Cutting the sum into parts, and adding up a part.
            slowest_s = max(slowest_s, both_ways_s + 2 * profile.reduce_s)
        told_s = max(
            self._round_trip_s(home, peer)
            for home in self.of_stage(0)
            for peer in self.peers.values()
            if peer.serving
        )
        return told_s + slowest_s + self.scenario.profile.optimizer_s

    # --- churn --------------------------------------------------------------------------------

    def _come_or_go(self, churn: Churn) -> None:
        peer = self.peers[churn.host]
        if churn.returns:
            if not peer.reachable:
                self._notice(peer, peer.life)
                peer.reachable = True
                home = self.of_stage(0)[0]
                asked_s = self._round_trip_s(peer, home)
                self.kernel.after(asked_s, self._load, peer, peer.life)
        elif peer.reachable and self._others(peer):
            # Never the last one of a stage.
            self._crash(peer)

    def _others(self, peer: Peer) -> list[Peer]:
        return [p for p in self._of(peer.stage_index) if p is not peer and p.serving]

    def _crash(self, peer: Peer) -> None:
        peer.missed = peer.loaded
        peer.reachable = peer.refuses = peer.loaded = peer.running = False
        peer.donor = None
        peer.life += 1
        for queue in peer.jobs:
            queue.clear()
        for trip in self._trips:
            self._lost_s += trip.spent_s.get(peer, 0.0)
            self.waste(trip, [peer])
            trip.lost = trip.lost or peer in trip.folded
        if self._averaging is not None:
            self._averaging += 1
        config = self.scenario.protocol
        silence_s = config.heartbeat_timeout_s + config.probe_timeout_s
        self.kernel.after(silence_s, self._notice, peer, peer.life)

    def _notice(self, peer: Peer, life: int) -> None:
        """It becomes known that a host has crashed, if that is still news."""
        if not peer.missed or peer.life != life:
            return
        peer.missed = False
        self._policy.crashed(peer, [trip for trip in self._trips if not trip.done])
        for other in self.peers.values():
            if other.donor is peer:
                self._load(other, other.life)
        if self._averaging is not None:
            self._average(self._averaging)

    def _load(self, peer: Peer, life: int) -> None:
        """Fetch a stage's state: parameters and two moments."""
        if peer.life != life:
            return
        size_bytes = 3 * self.scenario.profile.parameter_bytes
        donor = max(
            self._others(peer), key=lambda d: self._network.spec(d, peer).bandwidth_bytes_per_s
        )
        peer.donor = donor
        copied = partial(self._carry, donor, peer, size_bytes, partial(self._fetched, peer, donor))
        self.kernel.after(self.scenario.profile.optimizer_s, copied)

    def _fetched(self, peer: Peer, donor: Peer) -> None:
        if peer.donor is donor:
            self.kernel.after(self.scenario.profile.optimizer_s, self._loaded, peer, peer.life)

    def _loaded(self, peer: Peer, life: int) -> None:
        if peer.life != life:
            return
        peer.donor, peer.loaded = None, True
        self._policy.joined(peer)

    def cost_s(self, sender: Peer, receiver: Peer) -> float:
        """Return how long an activation takes on an idle link, one way, as its sender believes.

        On a link of which that is not known yet: as long as on others.
        """
        stage = receiver.stage_index
        for wanted in (lambda p: p is receiver, lambda p: p.stage_index == stage, lambda _: True):
            known = [
                self.distance_s(sender, peer)
                for peer in self.peers.values()
                if wanted(peer) and frozenset((sender.name, peer.name)) in self._known_links
            ]
            if known:
                return statistics.mean(known)
        return 1.0

    def distance_s(self, sender: Peer, receiver: Peer) -> float:
        """Return how long an activation does take on an idle link, one way."""
        spec = self._network.spec(sender, receiver)
        size_bytes = self.scenario.profile.activation_bytes
        return spec.latency_s + size_bytes / spec.bandwidth_bytes_per_s
