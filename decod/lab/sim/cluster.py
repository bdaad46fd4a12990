"""A cost model of a scenario's hosts, links and churn, for policies other than decod's.

The policies compared with decod have no machines here. A policy says where each microbatch goes
next. This module supplies the rest: devices, links and hosts. A device runs one job at a time. A
link carries one tensor at a time in each direction. Hosts crash and come back.

The model charges for everything that decod's machines pay for in the simulator, on the same links
and with the same parameters:

- A crashed host vanishes. A tensor sent to it fails `retry_timeout_s` after its expected arrival.
  Peers that send it nothing notice after `heartbeat_timeout_s` and `probe_timeout_s`. Until then
  all policies take the host for alive and may choose it.
- A relay is asked for room before it gets an activation: one round trip.
- A link's bandwidth is known once a tensor has crossed it in either direction. Until then the
  sender assumes the mean of its known links to that stage, or else of all its known links.
- At the end of an iteration the trainers tell all members that the batch is complete. Every stage
  averages its gradients, one part per member, and all members are told to go on. This costs the
  longest round trip plus the slowest stage. If a host crashes meanwhile, the averaging waits until
  that is known, as above, and is repeated without the host.
- A returning host asks to be admitted (a round trip). Its donor then copies the state and sends it.

The model is kinder than the world in three ways. Nobody votes or waits for a view. A returning host
takes part as soon as it has the state, even in the middle of an iteration, and everybody knows of
it at once. Averages travel on links that carry nothing else.
"""

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from decod.protocol.core.events import Fault
from decod.sim.kernel import Kernel
from decod.sim.meter import IterationFigures
from decod.sim.network import InFlight, Network
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Churn, Instants, Scenario


@dataclass(eq=False, slots=True)
class Peer:
    """A host with one device, which does backward work first."""

    name: str
    stage_index: int
    """0 for data nodes."""
    capacity: int
    profile: ComputeProfile
    reachable: bool = True
    refuses: bool = True
    frozen_until_s: float = 0.0
    loaded: bool = True
    """Whether it holds its stage's state."""
    life: int = 0
    """Grows with each crash, which voids everything planned before."""
    donor: "Peer | None" = None
    """The host that it loads the state from."""
    missed: bool = False
    """Whether it has crashed and nobody knows yet."""
    jobs: tuple[deque["_Job"], deque["_Job"]] = field(default_factory=lambda: (deque(), deque()))
    """Backward jobs, then forward jobs."""
    running: bool = False

    @property
    def serving(self) -> bool:
        return self.reachable and self.loaded


@dataclass(eq=False, slots=True)
class Trip:
    """A microbatch of the present iteration."""

    home: Peer
    spent_s: dict[Peer, float] = field(default_factory=dict)
    """Compute that the step will contain, as known now."""
    step: int = 0
    """Grows with every change to the microbatch, which voids everything planned before."""
    done: bool = False
    folded: set[Peer] = field(default_factory=set)
    """Relays whose gradient sums contain its gradient."""
    lost: bool = False
    """Whether one of those relays is gone, and with it its stage's gradient."""


@dataclass(frozen=True, slots=True)
class _Job:
    trip: Trip
    step: int
    duration_s: float
    then: Callable[[], None]


class Policy(Protocol):
    """Decides where microbatches go, and what happens to them when a host crashes."""

    def begin(self, trip: Trip) -> None:
        """Send off a microbatch that has just been embedded."""

    def crashed(self, peer: Peer, under_way: Iterable[Trip]) -> None:
        """Handle the news that a relay is gone, with everything that it held."""

    def joined(self, peer: Peer) -> None:
        """Use a relay that has come back and holds its stage's state."""


class Cluster:
    """One run of a scenario whose hosts are described.

    Args:
        scenario: The setting. The model ignores its faults and most of its protocol.
        policy: Makes the policy for this cluster.

    Attributes:
        figures: Figures of the iterations so far.
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
        """Pairs of hosts that a tensor has travelled between."""
        self._averaging: int | None = None
        """Attempt number of the averaging under way; None while microbatches are out."""
        self._policy = policy(self)

    def run(self) -> list[IterationFigures]:
        """Run all iterations and return their figures."""
        self._open(1)
        num = self.scenario.num_iterations
        self.kernel.run(until_s=self.scenario.duration_max_s, done=lambda: len(self.figures) == num)
        assert len(self.figures) == num, f"{len(self.figures)} of {num} iterations"
        return self.figures

    def of_stage(self, stage_index: int) -> list[Peer]:
        """Return the hosts that the others believe to serve a stage now."""
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
        """Carry `num` activations or gradients, then call `then`. A crash at either end voids both.

        An activation leaves for a relay only after the sender has asked that relay for room, and
        before it every relay in `refused_by`. Each question costs a round trip.
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
        """Run a job on a host's device, then call `then`."""
        peer.jobs[0 if backward else 1].append(_Job(trip, trip.step, duration_s, then))
        if not peer.running:
            self._run_next(peer)

    def waste(self, trip: Trip, peers: Iterable[Peer]) -> None:
        """Count the compute of these hosts on a microbatch as wasted."""
        self._wasted_s += sum(trip.spent_s.pop(peer, 0.0) for peer in [*peers])

    def finish(self, trip: Trip) -> None:
        """Take in a microbatch that is home: its gradient is in the sums of all stages."""
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
        self._trips = [
            Trip(home) for home in homes for _ in range(self.scenario.batch.num_microbatches)
        ]
        for trip in self._trips:
            self.compute(
                trip,
                trip.home,
                trip.home.profile.embed_s,
                lambda trip=trip: self._policy.begin(trip),  # type: ignore[misc]
            )

    def _average(self, attempt: int) -> None:
        """Average once all crashes are known. All microbatches are home."""
        self._averaging = attempt
        if not any(peer.missed for peer in self.peers.values()):
            self.kernel.after(self._averaging_s(), self._commit, attempt)

    def _commit(self, attempt: int) -> None:
        if self._averaging != attempt:
            return  # A host has crashed meanwhile.
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
        """Return how long the slowest stage takes to average its gradients and to step."""
        slowest_s = 0.0
        for stage_index in range(self.scenario.stages.num_relay_stages + 1):
            members = self.of_stage(stage_index)
            profile = self.scenario.profile
            part_bytes = profile.parameter_bytes / max(1, len(members))
            both_ways_s = 0.0
            for sender, receiver in itertools.permutations(members, 2):
                spec = self._network.spec(sender, receiver)
                one_way_s = spec.latency_s + part_bytes / spec.bandwidth_bytes_per_s
                both_ways_s = max(both_ways_s, 2 * one_way_s)
            # Cut the sum into parts, and add up one part.
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
            # Never crash the last holder of a stage's state.
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
        """Make a host's crash known, unless it is known already."""
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
        """Fetch a stage's state: its parameters and two moments."""
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
        """Return the sender's estimate of an activation's time on an idle link, one way.

        The estimate for an unmeasured link is the mean of the sender's measured ones.
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
        """Return the true time of an activation on an idle link, one way."""
        spec = self._network.spec(sender, receiver)
        size_bytes = self.scenario.profile.activation_bytes
        return spec.latency_s + size_bytes / spec.bandwidth_bytes_per_s
