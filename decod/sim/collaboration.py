"""Collaborative runs in virtual time: uneven peers that come, go and vanish, and what is checked.

Checked at every average that a loop applies:

    once   no step of a loop is in a state twice
    same   loops with the same state have applied the same steps
    begun  no state comes from a newcomer's own weights
    held   a peer holds few tensors (I6), the same as its driver

and at the end of a run, that each loop's samples are counted: in the state, outstanding, or
dropped. Once loops rest, peers hold nothing but contributions.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from decod.ids import NodeId
from decod.protocol.collaboration.loop import PeerFound, RoundConfig
from decod.protocol.core.effects import Note
from decod.protocol.core.messages.round_messages import Height
from decod.sim.kernel import Kernel, seeded
from decod.sim.network import LinkFaults, Links, LinkSpec, Network
from decod.sim.simulated_peers import LoopSpec, PeerWorld, Pieces, SimPeer, StepPiece

START = Height(0, "0" * 64)
"""The state that all loops begin with."""

_FIND_S = 1.0

_REMEMBERED_MAX = 2000
"""States whose content is remembered."""

_TAKING_MAX = 6
"""Models' sizes of which a peer may hold as much at a time as it takes part in rounds."""

_HELD_MAX = 24
"""Models' sizes that a host's memory has room for."""

_REST_S = 300.0
"""After so long, whatever was under way has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollaborationSpec:
    """A collaborative run."""

    num_peers: int
    num_rounds: int
    seed: int = 0
    steps_per_round: int = 32
    """Of the average peer."""
    step_s: float = 1.0
    spread: float = 0.5
    """How uneven the peers' speeds are, as a share."""
    churn: float = 0.0
    """Share of the peers that vanish in a round. As many come."""
    pauses: float = 0.0
    """Share of the peers whose loops begin to stand still in a round, for up to 20 rounds."""
    link: LinkSpec = field(default_factory=lambda: LinkSpec(0.02, 12_500_000.0))
    faults: LinkFaults = field(default_factory=LinkFaults)
    model_bytes: int = 4_000_000
    config: RoundConfig | None = None
    duration_max_s: float = 1e6


@dataclass(slots=True)
class Tally:
    """What has come of a run."""

    num_rounds: int = 0
    num_whole: int = 0
    """Rounds in which all peers took part that were alive and level from its beginning to its
    end."""
    num_repeated: int = 0
    num_lost: int = 0
    """Attempts that ended without an average."""
    round_s: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    """Of all loops, without the time that averages took."""
    averaging_s: float = 0.0
    """Of all loops that waited, while averages were on their way."""
    alive_s: float = 0.0
    """Of all loops."""
    longest_wait_s: float = 0.0
    absent: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, float]:
        """Return the figures that people ask for. Shares are in percent."""
        alive_s = max(self.alive_s, 1e-9)
        return {
            "rounds": self.num_rounds,
            "seconds_a_round": sum(self.round_s) / max(len(self.round_s), 1),
            "whole_rounds_percent": 100 * self.num_whole / max(self.num_rounds, 1),
            "waiting_percent": 100 * self.wait_s / alive_s,
            "averaging_percent": 100 * self.averaging_s / alive_s,
            "longest_wait_s": self.longest_wait_s,
            "repeated_attempts": self.num_repeated,
            "lost_rounds": self.num_lost,
        }


class Collaboration:
    """One simulated run.

    Args:
        spec: The run.
    """

    def __init__(self, spec: CollaborationSpec) -> None:
        self.spec = spec
        self.outcome = Tally()
        self.kernel = Kernel()
        network = Network(self.kernel, Links(spec.link), spec.faults, seed=spec.seed)
        self.world = PeerWorld(self.kernel, network, self)
        self._rng = seeded(spec.seed, "collaboration")
        self._born: dict[NodeId, float] = {}
        self._level_s: dict[NodeId, float] = {}
        self._content: dict[Height, tuple[Height, Pieces]] = {}
        """The state before each, and the steps that have led on from there."""
        self._included: dict[StepPiece, list[Height]] = {}
        """The states that a step has led to."""
        self._remembered: deque[Height] = deque()
        self._beginnings: set[Height] = set()
        """The states that the run may have begun with."""
        self._ended_s: dict[Height, float] = {}
        self._newest = START
        self._num_born = 0
        self._resting = False
        self.find_s = _FIND_S
        """How often a peer looks for others."""
        self.sizes: Counter[int] = Counter()
        """Of rounds, in samples."""
        self.trace: list[str] = []
        target = spec.num_peers * spec.steps_per_round * 8
        config = spec.config or RoundConfig(target_batch_size=target)
        self.config = replace(config, held_max_bytes=_TAKING_MAX * spec.model_bytes)
        self.on_round: Callable[[Height], None] = lambda _: None

    # --- peers --------------------------------------------------------------------------------

    @property
    def peers(self) -> dict[NodeId, SimPeer]:
        return self.world.peers

    @property
    def alive(self) -> list[SimPeer]:
        return [peer for peer in self.peers.values() if peer.reachable]

    def add(self, *, height: Height = START, has_state: bool = True) -> SimPeer:
        """Have another peer come."""
        if has_state:
            self._beginnings.add(height)
        spec = self.spec
        name = f"peer{self._num_born:03d}"
        self._num_born += 1
        rng = seeded(spec.seed, "peer", name)
        step_s = spec.step_s * rng.uniform(1 - spec.spread, 1 + spec.spread)
        loop = LoopSpec(
            step_s=step_s, num_samples=8, model_bytes=spec.model_bytes, has_state=has_state
        )
        peer = SimPeer(name, loop, self.config, self.world, rng, height)
        self.peers[peer.node_id] = peer
        self._born[peer.node_id] = self.kernel.now_s
        peer.start()
        self.kernel.after(0.01 * self.find_s, self._find, peer)
        return peer

    def meet(self, peer: SimPeer, other: SimPeer) -> None:
        """Let a peer know of another one."""
        peer.post(PeerFound(other.node_id, f"{other.name}:1"))

    def _find(self, peer: SimPeer) -> None:
        """Let a peer find another one, as it would in the DHT."""
        if not peer.reachable:
            return
        others = [each for each in self.alive if each is not peer]
        if others:
            self.meet(peer, self._rng.choice(others))
        self.kernel.after(self.find_s * self._rng.uniform(0.5, 1.5), self._find, peer)

    @property
    def _usual_s(self) -> float:
        """How long a round takes if all goes well."""
        return self.spec.steps_per_round * self.spec.step_s

    def _churn(self) -> None:
        """Let peers vanish and come at random, `churn` of them in a round."""
        self._now_and_then(self.spec.churn, self._replace_one)

    def _now_and_then(self, share: float, act: Callable[[], None]) -> None:
        """Do something once, after so long that on average this share of the peers has it done to
        them in a round."""
        if share:
            mean_s = self._usual_s / (share * self.spec.num_peers)
            self.kernel.after(self._rng.expovariate(1 / mean_s), act)

    def _pause(self) -> None:
        self._now_and_then(self.spec.pauses, self._pause_one)

    def _pause_one(self) -> None:
        if self._resting:
            return
        if self.alive:
            peer = self._rng.choice(self.alive)
            peer.pause_s = self._rng.uniform(0, 20) * self._usual_s
            self.say(peer, f"stands still for {peer.pause_s:.1f} s")
        self._pause()

    def _replace_one(self) -> None:
        if self._resting:
            return
        # The run ends with its last peer that has its state.
        level = [peer for peer in self.alive if peer.machine.company.level]
        mortal = (
            [peer for peer in self.alive if peer not in level] if len(level) < 2 else self.alive
        )
        if mortal:
            victim = self._rng.choice(mortal)
            self.outcome.alive_s += self.kernel.now_s - self._born[victim.node_id]
            self.say(victim, "vanishes")
            victim.kill(vanish=self._rng.random() < 0.5)
        own = Height(0, hashlib.sha256(f"weights {self._num_born}".encode()).hexdigest())
        self.add(height=own, has_state=False)
        self._churn()

    def run(self) -> Tally:
        """Play the run."""
        for _ in range(self.spec.num_peers):
            self.add()
        self._churn()
        self._pause()
        done = lambda: self.outcome.num_rounds >= self.spec.num_rounds  # noqa: E731
        whole = self.kernel.run(until_s=self.spec.duration_max_s, done=done)
        assert whole, f"only {self.outcome.num_rounds} rounds in {self.kernel.now_s:.0f} s"
        self.check_counts()
        for peer in self.alive:
            self.outcome.alive_s += self.kernel.now_s - self._born[peer.node_id]
        return self.outcome

    def say(self, peer: SimPeer, text: str) -> None:
        self.trace.append(f"{self.kernel.now_s:10.3f} {peer.name} {text}")

    # --- the judge ----------------------------------------------------------------------------

    def applied(self, peer: SimPeer, height: Height, before: Height, pieces: Pieces) -> None:
        """Check an average that a loop has applied."""
        assert len({*pieces}) == len(pieces), f"a step counts twice in {height}"
        known = self._content.get(height)
        assert before.round or before in self._beginnings, f"{before} is a newcomer's own"
        if known is None:
            for piece in pieces:
                earlier = self._included.setdefault(piece, [])
                twice = any(self._leads_to(each, before) for each in earlier)
                assert not twice, f"{piece} was in an earlier average"
                earlier.append(height)
            self._content[height] = before, pieces
            self._remembered.append(height)
            if height.round > self._newest.round:
                self._end_round(height, pieces)
            if len(self._remembered) > _REMEMBERED_MAX:
                self._forget(self._remembered.popleft())
        else:
            assert known == (before, pieces), f"{height} stands for different steps"
        self.say(peer, f"applied {height.round} {height.state_id[:6]}")

    def _leads_to(self, earlier: Height, height: Height) -> bool:
        """Whether a state is in the past of another, or is the same."""
        while height != earlier:
            if height not in self._content or height.round <= earlier.round:
                return False
            height, _ = self._content[height]
        return True

    def _forget(self, height: Height) -> None:
        _, pieces = self._content.pop(height)
        for piece in pieces:
            self._included[piece].remove(height)
            if not self._included[piece]:
                del self._included[piece]

    def _check_held(self, peer: SimPeer) -> None:
        """Check that a peer holds little, and that its driver knows the same tensors."""
        tensors = peer.machine.tensors
        num = len(tensors) + peer.machine.rounds.num_early
        assert num == peer.num_tensors, f"{peer.name}: core and driver differ"
        limit_bytes = _HELD_MAX * self.spec.model_bytes
        assert tensors.size_bytes <= limit_bytes, f"{peer.name} holds {tensors.size_bytes} bytes"

    def _check_all_held(self) -> None:
        for peer in self.alive:
            self._check_held(peer)

    def rest(self) -> None:
        """Have all loops rest, and check that peers hold contributions only."""
        self._resting = True
        for peer in self.alive:
            peer.rests = True
        self.kernel.run(until_s=self.kernel.now_s + _REST_S)
        for peer in self.alive:
            self._check_held(peer)
            expected = peer.machine.own.held is not None
            num_held = peer.num_tensors
            assert num_held == expected, f"{peer.name} holds {num_held} tensors"

    def _end_round(self, height: Height, pieces: Pieces) -> None:
        outcome = self.outcome
        now_s = self.kernel.now_s
        began_s = self._ended_s.get(self._newest, 0.0)
        self._newest = height
        self._ended_s = {height: now_s}
        outcome.num_rounds += 1
        outcome.round_s.append(now_s - began_s)
        self.sizes[sum(piece.num_samples for piece in pieces)] += 1
        took_part = {piece.peer for piece in pieces}
        expected = [
            peer
            for peer in self.alive
            if self._level_s.get(peer.node_id, 1e18) <= began_s
            and peer.spec.step_s < (now_s - began_s) / 2
        ]
        absent = [peer.name for peer in expected if peer.node_id not in took_part]
        outcome.num_whole += not absent
        for name in absent:
            outcome.absent[name] += 1
            self.trace.append(f"{now_s:10.3f} {name} ABSENT from {height.round}")
        for peer in self.alive:
            if peer.node_id not in self._level_s and peer.height.round >= height.round - 1:
                self._level_s[peer.node_id] = now_s
        self.kernel.after(0.0, self._check_all_held)
        self.on_round(height)

    def noted(self, peer: SimPeer, note: Note) -> None:
        """Count what cores note."""
        self.outcome.notes[note.event] += 1
        self.outcome.num_repeated += note.event == "round.repeated"
        self.outcome.num_lost += note.event == "round.abandoned"
        self.say(peer, f"{note.event} {dict(note.fields)}")

    def waited(self, peer: SimPeer, seconds: float, averaging_s: float) -> None:
        """Add up how long loops wait."""
        outcome = self.outcome
        outcome.wait_s += seconds - averaging_s
        outcome.averaging_s += averaging_s
        if seconds > 1.0:
            self.say(peer, f"waited {seconds:.2f} s, of which averaging {averaging_s:.2f} s")
        outcome.longest_wait_s = max(outcome.longest_wait_s, seconds)
        assert seconds <= self.config.averaging_timeout_s + 1e-6, (peer.name, seconds)

    def check_counts(self) -> None:
        """Check that the samples of each loop are counted."""
        for peer in self.alive:
            own = peer.machine.own
            asked = peer.num_stepped - own.num_stepped
            assert asked == 0, f"{peer.name} has stepped {asked} samples more than its node knows"
            counted = own.num_applied + own.num_outstanding + own.num_dropped
            assert counted == own.num_stepped, (peer.name, counted, own.num_stepped)
