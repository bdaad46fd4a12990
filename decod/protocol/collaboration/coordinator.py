"""What the coordinator of a collaborative run decides: who takes part, and when they average.

    GATHERING -> CLOSING -> AVERAGING -> GATHERING ...
                    ^           |
                    `-----------'   (a peer was lost: the next attempt goes on without it)

Peers say how many samples they have. Once there are enough, the coordinator has each contribute
what it has. It waits only for what is on its way, never for a step. Then it says who averages, and
how much each has given. The average counts once all of these have it.

If a peer is lost meanwhile, the others average again, with the same contributions. So the lost
peer's part is all that is missing.

A coordinator needs no quorum. A peer whom nobody can reach coordinates itself.
"""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from decod.ids import AveragingId, Iteration, NodeId
from decod.protocol.averaging.averager import Weight
from decod.protocol.collaboration.groups import num_rows
from decod.protocol.collaboration.loading import Past
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.collaboration.rounds import ROWS
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.events import earliest
from decod.protocol.core.messages.round_messages import (
    BeginRound,
    CloseRound,
    CommitRound,
    Height,
    PeerEntry,
    Progress,
    Roll,
    RoundClosed,
    RoundReady,
    Standing,
)

_NUM_STANDINGS = 20
"""Words on how far a round is, if it is long enough."""

_PATIENCE = 4.0
_CLOSING_MIN_S = 0.2
"""A peer may take so many times as long as the faster half to close, and a little longer."""

_NUM_SILENT = 4
"""Signs of life that a peer may leave out while others wait for it."""

_FORGETTING = 0.95
"""What is left of the longest closing, from one round to the next."""

_FORGETTING_LATE = 0.99
"""What is left of a delay, from one sign of life to the next."""

_NOTHING = Weight(0, 0)


class CoordinatorState(Enum):
    GATHERING = "gathering"
    """Peers work."""
    CLOSING = "closing"
    """The peers have been asked to contribute."""
    AVERAGING = "averaging"


@dataclass(slots=True)
class _Peer:
    """A peer, as its coordinator knows it."""

    node_id: NodeId
    address: str
    height: Height
    heard_s: float
    level: bool = False
    name: str = ""
    num_samples: int = 0
    samples_per_s: float = 0.0
    awaited: tuple[NodeId, ...] = ()
    late_s: float = 0.0
    """How late the peer's signs of life have come, of late."""


@dataclass(slots=True)
class _Attempt:
    """What has come of an attempt at a round."""

    averaging: AveragingId
    begun_s: float
    asked: tuple[NodeId, ...]
    closed: dict[NodeId, Weight] = field(default_factory=dict)
    half_s: float | None = None
    """How long the faster half of the peers took to close."""
    begun: BeginRound | None = None
    ready: dict[NodeId, str] = field(default_factory=dict)
    """The hash of the average at each."""


class Coordinator:
    """One coordinator, in one term.

    Args:
        own: This peer.
        term: Of the coordinator.
        past: This peer's state, and what led to it.
        config: Of the run.
        out: Where this peer says what it wants done.
        now_s: The present.
    """

    def __init__(
        self,
        own: PeerEntry,
        term: int,
        past: Past,
        config: RoundConfig,
        out: EffectSink[Effect],
        now_s: float,
    ) -> None:
        self.term = term
        self.version = 1
        self._node_id = own.node_id
        self._past = past
        self._config = config
        self._out = out
        peer = _Peer(own.node_id, own.address, past.height, now_s, own.level, own.name)
        self._peers = {own.node_id: peer}
        self._attempt: _Attempt | None = None
        self.rests = False
        """The coordinator begins no round: this peer's loop ends it by itself, though others may
        have come meanwhile, or averages have not left this peer yet."""
        self._num_attempts = 0
        """In the round."""
        self._closing: tuple[AveragingId | None, float] = (None, 0.0)
        """What peers were asked last to contribute to, and when."""
        self._slowest_s = 0.0
        """How long the slowest of them took of late, even if it was too late."""
        self._accused: dict[NodeId, dict[NodeId, float]] = {}
        """Whom each peer could not reach in the round, and when it said so."""
        self._committed: AveragingId | None = None
        self._contributors: tuple[NodeId, ...] = ()
        """To the last average."""
        self._before = past.height
        self._standing_s = now_s
        """When the next word is due."""
        self._round_s = 0.0
        self._opened_s = now_s

    # --- who is there -------------------------------------------------------------------------

    @property
    def state(self) -> CoordinatorState:
        if self._attempt is None:
            return CoordinatorState.GATHERING
        begun = self._attempt.begun is not None
        return CoordinatorState.AVERAGING if begun else CoordinatorState.CLOSING

    @property
    def peers(self) -> tuple[NodeId, ...]:
        return tuple(self._peers)

    @property
    def others(self) -> tuple[NodeId, ...]:
        return tuple(node for node in self._peers if node != self._node_id)

    @property
    def num_samples(self) -> int:
        """Outstanding at all peers that are level."""
        return sum(peer.num_samples for peer in self._peers.values() if peer.level)

    @property
    def samples_per_s(self) -> float:
        return sum(peer.samples_per_s for peer in self._peers.values() if peer.level)

    @property
    def fit_successor(self) -> tuple[NodeId, str] | None:
        """The first other peer that had a part in the last average, and its address."""
        fit = (self._peers[node] for node in self._contributors if node in self._peers)
        others = ((peer.node_id, peer.address) for peer in fit if peer.node_id != self._node_id)
        return next(others, None)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._peers

    def heard_s(self, node: NodeId) -> float:
        """Return when a peer has last shown that it lives; minus infinity if it is none."""
        return self._peers[node].heard_s if node in self._peers else -math.inf

    def roll(self) -> Roll:
        """Return who takes part."""
        peers = tuple(
            PeerEntry(peer.node_id, peer.address, peer.level, peer.name)
            for peer in self._peers.values()
        )
        past = self._past
        return Roll(self.term, self.version, past.height, past.ids, peers)

    def admit(self, now_s: float, node: NodeId, address: str, height: Height, name: str) -> None:
        """Take a peer in, or learn anew where it is."""
        known = self._peers.get(node)
        same = (address, height, name)
        if known is not None and (known.address, known.height, known.name) == same:
            self._out.send(node, self.roll())
        else:
            level = height == self._past.height
            self._peers[node] = _Peer(node, address, height, now_s, level, name)
            number = self._past.height.round
            self._out.note("peer.admitted", peer=node, is_level=level, round=number)
            self._tell_roll()

    def remove(self, now_s: float, node: NodeId, reason: str) -> None:
        """Go on without a peer."""
        if node == self._node_id or node not in self._peers:
            return
        del self._peers[node]
        self._out.note("peer.lost", peer=node, reason=reason)
        self._tell_roll()
        self._go_on_without(now_s, {node})

    def _tell_roll(self) -> None:
        self.version += 1
        self._out.send_all(self.peers, self.roll())

    # --- progress -----------------------------------------------------------------------------

    def progressed(self, now_s: float, node: NodeId, message: Progress) -> None:
        """A peer says how far it is."""
        peer = self._peers.get(node)
        if peer is None:
            return
        peer.late_s = max(self._late_s(now_s, peer), _FORGETTING_LATE * peer.late_s)
        peer.heard_s = now_s
        peer.height = message.height
        peer.num_samples = message.num_samples
        peer.samples_per_s = message.samples_per_s
        peer.awaited = message.awaited
        if message.height == self._past.height and not peer.level:
            peer.level = True
            self._tell_roll()
        elif message.height not in (self._past.height, self._before) and peer.level:
            peer.level = False
            self._tell_roll()
        if message.version != self.version or message.term != self.term:
            self._out.send(node, self.roll())
        self._close(now_s)

    def _late_s(self, now_s: float, peer: _Peer) -> float:
        """Return how much later than it was due a peer's sign of life comes."""
        attempt = self._attempt
        config = self._config
        late_s = now_s - peer.heard_s - config.heartbeat_max_s
        if attempt is None or peer.node_id not in attempt.asked:
            return late_s
        since_s = max(attempt.begun_s, peer.heard_s)
        return max(late_s, now_s - since_s - config.heartbeat_busy_s)

    @property
    def is_alone(self) -> bool:
        return len(self._peers) == 1

    def _close(self, now_s: float) -> None:
        """Have all contribute, if there are enough samples. A lone peer steps by itself."""
        is_full = self.num_samples >= self._config.target_batch_size
        if self._attempt is not None or not is_full or self.is_alone or self.rests:
            return
        level = tuple(peer.node_id for peer in self._peers.values() if peer.level)
        self._attempt = _Attempt(self._next_id(), now_s, level)
        self._closing = (self._attempt.averaging, now_s)
        self._out.send_all(level, CloseRound(self._attempt.averaging))

    def _next_id(self) -> AveragingId:
        self._num_attempts += 1
        number = self._past.height.round + 1
        return AveragingId(Iteration(number, self._num_attempts, self.term), ROWS)

    # --- a round ------------------------------------------------------------------------------

    def closed(self, now_s: float, node: NodeId, message: RoundClosed) -> None:
        """A peer's contribution stands."""
        attempt, (last, since_s) = self._attempt, self._closing
        if message.averaging == last:
            self._slowest_s = max(now_s - since_s, _FORGETTING * self._slowest_s)
        if attempt is None or attempt.begun is not None or node not in attempt.asked:
            return
        if message.averaging == attempt.averaging:
            attempt.closed[node] = Weight(message.num_samples, message.digest)
            if attempt.half_s is None and 2 * len(attempt.closed) >= len(attempt.asked):
                attempt.half_s = now_s - attempt.begun_s
        self._begin_if_closed(now_s)

    def _begin_if_closed(self, now_s: float, *, overdue: bool = False) -> None:
        attempt = self._attempt
        assert attempt is not None
        if attempt.begun is None and (overdue or {*attempt.asked} <= attempt.closed.keys()):
            self._begin(now_s, attempt.closed)

    def _begin(self, now_s: float, given: dict[NodeId, Weight]) -> None:
        """Have those average who have given something."""
        weights = {node: given[node] for node in self._peers if given.get(node, _NOTHING).num}
        if not weights:
            self._abandon("nobody had a contribution")
            return
        averaging = self._next_id()
        rows = num_rows(len(weights))
        roster = tuple(weights) if rows == 1 else _shuffled([*weights], averaging)
        begun = BeginRound(
            averaging,
            self._past.height,
            roster=roster,
            weights=tuple(weights[node].num for node in roster),
            digests=tuple(weights[node].digest for node in roster),
            num_rows=rows,
            listeners=tuple(node for node in self._peers if node not in weights),
        )
        self._attempt = _Attempt(averaging, now_s, roster, weights, begun=begun)
        self._out.send_all(self.peers, begun)

    def say_again(self, node: NodeId, message: BeginRound) -> None:
        """A peer that lives has not got this: without it, all others would wait."""
        attempt = self._attempt
        if attempt is not None and attempt.begun == message and node in self._peers:
            self._out.send(node, message)

    def ready(self, now_s: float, node: NodeId, message: RoundReady) -> None:
        """A peer has the whole average, or can't have it."""
        attempt = self._attempt
        begun = None if attempt is None else attempt.begun
        if attempt is None or begun is None or message.averaging != attempt.averaging:
            return
        if node not in self._needed(begun):
            return
        if message.failure:
            self._out.note("round.failed", peer=node, reason=message.failure)
            lost = {each for each in message.lost if each in begun.roster}
            # Who says so of one living peer after another is the one whom they can't hear.
            accused = self._accused.setdefault(node, {})
            # A word may have been on its way.
            pause_s = self._config.heartbeat_busy_s
            if not lost or any(self.heard_s(n) > at_s + pause_s for n, at_s in accused.items()):
                lost = {node}
            accused.update(dict.fromkeys(lost, now_s))
            self._go_on_without(now_s, lost)
        else:
            attempt.ready[node] = message.average_hash
            self._commit_if_ready(now_s)

    def _needed(self, begun: BeginRound) -> set[NodeId]:
        """Return the peers that must have an average before it counts: this one too."""
        return {*begun.roster, self._node_id}

    def _commit_if_ready(self, now_s: float) -> None:
        attempt = self._attempt
        assert attempt is not None
        assert attempt.begun is not None
        begun = attempt.begun
        if self._needed(begun) - attempt.ready.keys():
            return
        if len({*attempt.ready.values()}) > 1:
            most, _ = Counter(attempt.ready.values()).most_common(1)[0]
            odd = {node for node, found in attempt.ready.items() if found != most}
            self._go_on_without(now_s, odd)
            return
        average_hash = attempt.ready[begun.roster[0]]
        for node in begun.roster:
            self._peers[node].num_samples = 0
        self._contributors = begun.roster
        self._end_round(now_s, begun.averaging)
        self._out.send_all(self.peers, CommitRound(begun.averaging, average_hash))

    def _end_round(self, now_s: float, averaging: AveragingId | None) -> None:
        self._committed = averaging
        self._attempt = None
        self._num_attempts = 0
        self._accused.clear()
        self._round_s = now_s - self._opened_s
        self._opened_s = now_s

    def advanced(self, before: Height) -> None:
        """This peer's own state has come on from `before`: it is the run's."""
        self._before = before
        attempt = self._attempt
        if attempt is not None and attempt.averaging.iteration.number <= self._past.height.round:
            self._attempt = None  # An average of the last coordinator was that round's.

    def stepped_alone(self, now_s: float) -> None:
        """This peer has ended a round by itself. Whoever has come meanwhile has another state."""
        self._before = self._past.height
        self._end_round(now_s, None)
        if self.is_alone:
            return
        for node in self.others:
            self._peers[node].level = False
            self._peers[node].num_samples = 0
        self._tell_roll()

    def _go_on_without(self, now_s: float, lost: set[NodeId]) -> None:
        """Some peers can't take part in the attempt: average without them."""
        attempt = self._attempt
        if attempt is None or not lost & {*attempt.asked, self._node_id}:
            return
        if attempt.begun is None:
            attempt.asked = tuple(node for node in attempt.asked if node not in lost)
            for node in lost:
                attempt.closed.pop(node, None)
            self._begin_if_closed(now_s)
        else:
            given = {node: w for node, w in attempt.closed.items() if node not in lost}
            self._out.note("round.repeated", averaging=attempt.averaging, lost=sorted(lost))
            self._begin(now_s, given)

    def _abandon(self, reason: str) -> None:
        attempt = self._attempt
        self._attempt = None
        assert attempt is not None
        for peer in self._peers.values():
            peer.num_samples = 0
        self._out.note("round.abandoned", averaging=attempt.averaging, reason=reason)

    # --- time ---------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        doubted_s = min(map(self._doubt_s, self._awaited), default=None)
        found = earliest(self._standing_s, self._silent_s, self._overdue_s, doubted_s)
        assert found is not None
        return found

    @property
    def _silent_s(self) -> float | None:
        heard = [peer.heard_s for node, peer in self._peers.items() if node != self._node_id]
        return min(heard) + self._config.silence_max_s if heard else None

    @property
    def _overdue_s(self) -> float | None:
        attempt = self._attempt
        config = self._config
        if attempt is None:
            return None
        if attempt.begun is not None:
            return attempt.begun_s + config.averaging_timeout_s
        limit_s = config.closing_max_s
        if attempt.half_s is not None:
            usual_s = max(_PATIENCE * attempt.half_s, self._slowest_s)
            limit_s = min(limit_s, _CLOSING_MIN_S + usual_s)
        return attempt.begun_s + limit_s

    def _doubt_s(self, node: NodeId) -> float:
        """Return until when a peer of the attempt may be silent. Others wait for it."""
        attempt = self._attempt
        peer = self._peers[node]
        assert attempt is not None
        patience_s = _NUM_SILENT * self._config.heartbeat_busy_s + 2 * peer.late_s
        return max(attempt.begun_s, peer.heard_s) + patience_s

    @property
    def _awaited(self) -> list[NodeId]:
        """The peers for whose word the attempt waits."""
        attempt = self._attempt
        if attempt is None:
            return []
        told = attempt.closed if attempt.begun is None else attempt.ready
        return [
            node
            for node in attempt.asked
            if node not in told and node in self._peers and node != self._node_id
        ]

    def overdue(self, now_s: float) -> None:
        """Do what is due."""
        silence_s = self._config.silence_max_s  # Summed up as in `_silent_s`, to the last bit.
        for node, peer in list(self._peers.items()):
            if node != self._node_id and peer.heard_s + silence_s <= now_s:
                self.remove(now_s, node, "it was silent")
        doubted = {node for node in self._awaited if self._doubt_s(node) <= now_s}
        if doubted:
            self._go_on_without(now_s, doubted)
        overdue_s = self._overdue_s
        if overdue_s is not None and overdue_s <= now_s:
            self._hurry(now_s)
        if self._standing_s <= now_s:
            self.say_standing(now_s)

    def _hurry(self, now_s: float) -> None:
        """An attempt takes too long: go on without those who keep it."""
        attempt = self._attempt
        assert attempt is not None
        if attempt.begun is None:
            self._begin_if_closed(now_s, overdue=True)
            return
        late = self._needed(attempt.begun) - attempt.ready.keys()
        known = {node: {*self._peers[node].awaited} for node in late if node in self._peers}
        only_here = late == {self._node_id}
        awaited = Counter(
            node for each in known.values() for node in each if node in late or only_here
        )
        worst = {node for node, _ in awaited.most_common(1)}
        self._go_on_without(now_s, worst or late)

    def say_standing(self, now_s: float) -> None:
        """Tell all how far the round is."""
        config = self._config
        pause_s = max(config.heartbeat_min_s, self._round_s / _NUM_STANDINGS)
        self._standing_s = now_s + min(pause_s, config.heartbeat_max_s)
        standing = Standing(
            self.term,
            self.version,
            self._past.height,
            self._committed,
            self.num_samples,
            self.samples_per_s,
            averaging=self.state is CoordinatorState.AVERAGING,
        )
        self._out.send_all(self.others, standing)


def _shuffled(nodes: list[NodeId], averaging: AveragingId) -> tuple[NodeId, ...]:
    """Return peers in an order that is another one at each attempt, so that groups mix."""

    def drawn(node: NodeId) -> bytes:
        return hashlib.sha256(f"{averaging} {node}".encode()).digest()

    return tuple(sorted(nodes, key=drawn))
