"""Who is with a peer, and which of them coordinates.

    alone, and coordinates itself  --meets a run that has come further-->  follows its coordinator
    follows                        --the coordinator is lost-->            the oldest peer succeeds
    follows, and never had the     --nobody is left who has it-->          seeks, then stops
    run's state

A peer coordinates itself until it meets others. Of two coordinators that meet, the one whose run
has come further goes on, and the other follows it with all of its peers. So any number of peers
become one run, and halves of a run that were cut off from each other become one again.

Only a peer that has the run's state coordinates. A newcomer has weights of its own, from which the
run must not go on. It takes nobody in, and nobody yields to it. It seeks those who have the state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decod.ids import NodeId
from decod.protocol.collaboration.coordinator import Coordinator
from decod.protocol.collaboration.loading import Past
from decod.protocol.collaboration.loop import PeerSink, RoundConfig, UseAddresses
from decod.protocol.core.messages.round_messages import (
    Farewell,
    Greeting,
    Height,
    PeerEntry,
    Progress,
    Roll,
    Standing,
)


@dataclass(slots=True)
class Following:
    """A peer's knowledge of its coordinator."""

    coordinator: NodeId
    roll: Roll
    heard_s: float
    """When the coordinator has last shown that it lives."""
    height: Height
    """The run's, as far as it is known here."""
    lost: set[NodeId] = field(default_factory=set)
    """Coordinators that were silent, since one was heard."""
    standing: Standing | None = None
    standing_s: float = 0.0

    @property
    def term(self) -> int:
        return self.roll.term

    def entry(self, node: NodeId) -> PeerEntry | None:
        """Return what the coordinator says of a peer; None if it does not know it."""
        return next((each for each in self.roll.peers if each.node_id == node), None)

    def said(self, now_s: float, standing: Standing) -> None:
        """The coordinator has told how far the round is."""
        self.heard_s = now_s
        self.standing = standing
        self.standing_s = now_s
        self.height = standing.height
        self.lost.clear()

    def closing_in_s(self, now_s: float, target: int) -> float | None:
        """Return in how many seconds the batch is full, as it seems. None: it is not known."""
        standing = self.standing
        if standing is None or standing.averaging or standing.samples_per_s <= 0:
            return None
        since_s = now_s - self.standing_s
        missing = target - standing.num_samples - since_s * standing.samples_per_s
        return max(0.0, missing / standing.samples_per_s)

    def successor(self) -> NodeId | None:
        """Return who coordinates if the coordinator is lost: the oldest that has the run's state.

        None: the coordinator knew of nobody else.
        """
        gone = {*self.lost, self.coordinator}
        return next((p.node_id for p in self.roll.peers if p.level and p.node_id not in gone), None)


_STRANGERS_MAX = 32
"""Nodes that were greeted, or have greeted, and are in no roll yet."""


class Company:
    """One peer's company.

    Args:
        own: This peer.
        past: This peer's state.
        config: Of the run.
        out: Where this peer says what it wants done.
    """

    def __init__(self, own: PeerEntry, past: Past, config: RoundConfig, out: PeerSink) -> None:
        self._own, self._node_id, self._address = own, own.node_id, own.address
        self._past = past
        self._config = config
        self._out = out
        self.coordinating: Coordinator | None = None
        self.following: Following | None = None
        self.num_lost = 0
        """Samples in averages that count no longer, since the run went on from another state."""
        self._addresses: dict[NodeId, str] = {}
        self._told: tuple[tuple[NodeId, str], ...] = ()
        self._moved = False
        self._astray: Height | None = None
        """A state of this peer's, which the run has not come to."""
        self._seeking_s: float | None = None
        """Since when this peer looks for somebody who has the run's state. None: it has it, or
        follows."""

    # --- what others see ----------------------------------------------------------------------

    @property
    def coordinator(self) -> NodeId:
        return self._node_id if self.following is None else self.following.coordinator

    @property
    def term(self) -> int:
        if self.coordinating is not None:
            return self.coordinating.term
        return self.following.term if self.following is not None else 0

    @property
    def version(self) -> int:
        """Of the roll that this peer knows."""
        if self.coordinating is not None:
            return self.coordinating.version
        return self.following.roll.version if self.following is not None else 0

    @property
    def peers(self) -> Sequence[NodeId]:
        """The run's peers, as far as they are known, this one included."""
        if self.coordinating is not None:
            return self.coordinating.peers
        assert self.following is not None
        return [entry.node_id for entry in self.following.roll.peers]

    @property
    def entries(self) -> Sequence[PeerEntry]:
        """The run's peers, with whether they have its state."""
        if self.coordinating is not None:
            return self.coordinating.roll().peers
        assert self.following is not None
        return self.following.roll.peers

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the run's peers, the coordinator's first."""
        known = [self.coordinator, *self.peers]
        found = dict.fromkeys(self._addresses[n] for n in known if n in self._addresses)
        return tuple(found)

    @property
    def level(self) -> bool:
        """Whether this peer has the run's present state."""
        if self.following is None:
            return self._past.has_state
        return self.following.height == self._past.height

    @property
    def silent_s(self) -> float | None:
        """Until when the coordinator may be silent. None: it is this peer."""
        if self.following is None:
            return None
        return self.following.heard_s + self._config.silence_max_s

    @property
    def seeking_until_s(self) -> float | None:
        """How long this peer looks for somebody who has the run's state. None: it does not."""
        since_s = None if self._past.has_state else self._seeking_s
        return None if since_s is None else since_s + self._config.seeking_max_s

    def closing_in_s(self, now_s: float) -> float | None:
        """Return in how many seconds the batch is full, as it seems. None: it is not known."""
        target = self._config.target_batch_size
        if self.following is not None:
            return self.following.closing_in_s(now_s, target)
        assert self.coordinating is not None
        rate = self.coordinating.samples_per_s
        missing = target - self.coordinating.num_samples
        return max(0.0, missing / rate) if rate > 0 else None

    @property
    def donors(self) -> list[NodeId]:
        """Other peers that have the run's state."""
        if self.following is None:
            return []
        peers = self.following.roll.peers
        return [p.node_id for p in peers if p.level and p.node_id != self._node_id]

    def take_moved(self) -> bool:
        """Return whether another coordinator counts since this was asked last."""
        moved = self._moved
        self._moved = False
        return moved

    def come_level(self) -> None:
        """This peer's state has come on: so has the run's."""
        following = self.following
        if self._past.height == self._astray:
            return
        if following is not None and self._past.came_from(following.height):
            following.height = self._past.height
        # A newcomer may have begun with the same weights.
        self._past.has_state |= following is not None and self.level

    # --- coordinators -------------------------------------------------------------------------

    def coordinate(self, now_s: float, term: int) -> Coordinator:
        """Coordinate from now on; without the run's state, nobody but itself."""
        own = self._own
        self.coordinating = Coordinator(own, term, self._past, self._config, self._out, now_s)
        self.following = None
        self._moved = True
        self._seeking_s = now_s
        return self.coordinating

    def took_roll(self, now_s: float, sender: NodeId, roll: Roll) -> None:
        """A coordinator says who takes part."""
        following = self.following
        if (
            following is not None
            and roll.term > following.term
            and self._past.came_from(roll.height)
        ):
            # The successor has missed the last average, and would have the run go back.
            self.coordinate(now_s, roll.term + 1)
            self._greet(sender)
        elif following is not None and sender == following.coordinator:
            self._took_own_roll(now_s, following, roll)
        elif all(entry.node_id != self._node_id for entry in roll.peers):
            return
        elif following is None and not self._yields_to(sender, roll):
            self._greet(sender)
        elif following is not None and roll.term <= following.term and not following.lost:
            self._greet(sender)  # It does not know whom this peer follows.
        else:
            self._follow(now_s, sender, roll)

    def _took_own_roll(self, now_s: float, following: Following, roll: Roll) -> None:
        """The coordinator that this peer follows says who takes part."""
        if (roll.term, roll.version) < (following.term, following.roll.version):
            return
        following.roll = roll
        following.heard_s = now_s
        following.height = roll.height
        if following.entry(self._node_id) is None:
            self._moved = True  # A round that is under way goes on without this peer.
            self._greet(following.coordinator)
        else:
            self._take_addresses(roll)

    def _yields_to(self, sender: NodeId, roll: Roll) -> bool:
        """Whether another coordinator's run goes on, and not this one's."""
        theirs = (roll.height.round, len(roll.peers) - 1, sender)
        succeeds = roll.term > self.term and _leads_to(self._past.height, roll)
        return succeeds or theirs > self._rank_beside(sender)

    def _rank_beside(self, other: NodeId) -> tuple[int, int, NodeId]:
        """Return how far this peer's run has come, to be compared with another coordinator's."""
        return (self._past.height.round, self._num_peers_beside(other), self._node_id)

    def _num_peers_beside(self, other: NodeId) -> int:
        """Return how many peers the coordinator has. 0: it has not even the run's state.

        Of two coordinators neither counts the other, which it may have taken in before that had
        peers of its own. If one of them did, each could think for ever that the other must yield.
        """
        if self.following is None and not self._past.has_state:
            return 0
        return sum(node != other for node in self.peers)

    def _follow(self, now_s: float, coordinator: NodeId, roll: Roll) -> None:
        """Follow a coordinator from now on; so do those who have followed this peer."""
        if self.coordinating is not None:
            address = next(e.address for e in roll.peers if e.node_id == coordinator)
            others = [n for n in self.coordinating.others if n != coordinator]
            self._out.send_all(others, Farewell(coordinator, address))
        self.coordinating = self._seeking_s = None
        self.following = Following(coordinator, roll, now_s, roll.height)
        self._moved = True
        self._take_addresses(roll)
        lost = self._past.num_since((roll.height.state_id, *roll.past))
        if lost and not self.level:
            self.lost(lost)
        self._out.note("coordinator.followed", peer=coordinator, round=roll.height.round)

    def strayed(self, num_samples: int) -> None:
        """This peer's loop has stepped by itself, though it follows another peer by now."""
        self._astray = self._past.height
        self.lost(num_samples)

    def lost(self, num_samples: int) -> None:
        """Samples that were in an average count no longer."""
        self.num_lost += num_samples
        self._out.note("samples.lost", samples=num_samples, coordinator=self.coordinator)

    def succeed_if_asked(self, now_s: float, sender: NodeId, message: Progress) -> None:
        """Another peer takes this one for the next coordinator."""
        following = self.following
        if following is None or message.term <= following.term or following.entry(sender) is None:
            return
        silence_s = now_s - following.heard_s
        if self._past.has_state and silence_s >= 2 * self._config.heartbeat_max_s:
            self.succeed(now_s)

    def succeed(self, now_s: float) -> None:
        """The coordinator is lost: the oldest peer that is left and level takes its place.

        If there is none, those who have had the run's state go on from it. The others seek them.
        """
        following = self.following
        assert following is not None
        following.lost.add(following.coordinator)
        self._out.note("coordinator.lost", peer=following.coordinator)
        successor = following.successor()
        if successor is not None and successor != self._node_id:
            following.coordinator = successor
            following.heard_s = now_s
            self._moved = True
        else:
            self._take_over(now_s, following)

    def _take_over(self, now_s: float, following: Following) -> None:
        """Coordinate those whom the last coordinator has led, if this peer has the run's state."""
        term = following.term + 1
        coordinating = self.coordinate(now_s, term)
        if not self._past.has_state:
            self._out.note("state.sought")
            others = [e.node_id for e in following.roll.peers if e.node_id != self._node_id]
            for node in others:
                self._greet(node)
            return
        self._out.note("coordinator.succeeded", term=term, round=self._past.height.round)
        for entry in following.roll.peers:
            if entry.node_id not in following.lost and entry.node_id != self._node_id:
                height = self._past.height if entry.level else Height(0, "")
                coordinating.admit(now_s, entry.node_id, entry.address, height, entry.name)

    def hand_over(self) -> None:
        """Have a peer that trains coordinate instead of this one, whose loop stands still."""
        assert self.coordinating is not None
        found = self.coordinating.fit_successor
        if found is not None:
            successor, address = found
            self._out.note("coordinator.leaves", successor=successor)
            self._out.send(successor, Farewell(successor, address))

    @property
    def is_courting(self) -> bool:
        """Whether this peer takes another one for the next coordinator, and has no word of it."""
        return self.following is not None and bool(self.following.lost)

    # --- meeting ------------------------------------------------------------------------------

    @property
    def _coordinator_address(self) -> str:
        return self._addresses.get(self.coordinator, self._address)

    def _greet(self, node: NodeId) -> None:
        greeting = Greeting(
            self._address,
            self._past.height,
            self._past.ids,
            self._num_peers_beside(node),
            self.coordinator,
            self._coordinator_address,
            self._own.name,
        )
        self._out.send(node, greeting)

    def found(self, node: NodeId, address: str) -> None:
        """Greet another node of the run, unless it is with this peer already."""
        if node != self._node_id and node not in self.peers:
            self._addresses[node] = address
            self._greet(node)

    def greeted(self, now_s: float, sender: NodeId, message: Greeting) -> None:
        """Another peer is there: one of both coordinators goes on, the other follows."""
        self._addresses[sender] = message.address
        if self.coordinating is None:
            self._greeted_following(now_s, sender, message)
        elif not self._past.has_state:
            self._greeted_seeking(sender, message)
        elif message.coordinator not in (sender, self._node_id):
            self._addresses[message.coordinator] = message.coordinator_address
            self.coordinating.remove(now_s, sender, "it follows another one")
            self._greet(message.coordinator)
        else:
            theirs = (message.height.round, message.num_peers, sender)
            if message.coordinator == sender and theirs > self._rank_beside(sender):
                self._greet(sender)
            else:
                at, height = message.address, message.height
                self.coordinating.admit(now_s, sender, at, height, message.name)

    def _greeted_following(self, now_s: float, sender: NodeId, message: Greeting) -> None:
        """Another peer is there, while this one follows a coordinator."""
        if message.coordinator == self.coordinator:
            if not message.num_peers:
                # It has started anew, without the state that it has had.
                self.succeed(now_s)
                self.greeted(now_s, sender, message)
        elif message.coordinator == self._node_id:
            self._out.send(sender, Farewell(self.coordinator, self._coordinator_address))
        else:
            # Coordinators settle it between them: two followers would greet each other for ever.
            self._addresses[message.coordinator] = message.coordinator_address
            self._greet(message.coordinator)

    def _greeted_seeking(self, sender: NodeId, message: Greeting) -> None:
        """Another peer is there, while this one looks for the run's state."""
        if message.coordinator == self._node_id:
            self._out.send(sender, Farewell())
        elif message.num_peers:  # Otherwise it looks for the state, too.
            self._addresses[message.coordinator] = message.coordinator_address
            self._greet(message.coordinator)

    def parted(self, now_s: float, sender: NodeId, message: Farewell) -> None:
        """A peer leaves, or a coordinator follows another one."""
        if self.coordinating is not None:
            self.coordinating.remove(now_s, sender, "it has left")
            return
        following = self.following
        assert following is not None
        if sender != following.coordinator:
            return
        successor = message.successor
        address = message.successor_address
        if successor == self._node_id:
            self._take_over(now_s, following)
        elif successor is None or address is None:
            self.succeed(now_s)
        else:
            self._addresses[successor] = address
            self.coordinate(now_s, following.term + 1)
            self._greet(successor)

    def leave(self) -> None:
        """Say goodbye."""
        coordinating = self.coordinating
        nodes = (self.coordinator,) if coordinating is None else coordinating.others
        self._out.send_all(nodes, Farewell())

    def unreached(self, now_s: float, node: NodeId) -> None:
        """A peer has not taken a message. Whoever shows signs of life is not lost."""
        recently_s = now_s - 2 * self._config.heartbeat_max_s
        coordinating = self.coordinating
        following = self.following
        if coordinating is not None:
            if coordinating.heard_s(node) < recently_s:
                coordinating.remove(now_s, node, "it can't be reached")
            return
        assert following is not None
        if node == following.coordinator and following.heard_s < recently_s:
            self.succeed(now_s)

    # --- addresses ----------------------------------------------------------------------------

    def _take_addresses(self, roll: Roll) -> None:
        self._addresses = {entry.node_id: entry.address for entry in roll.peers}

    def use_addresses(self) -> None:
        """Say where peers can be dialled, if that has changed."""
        known = {*self.peers}
        strangers = [node for node in self._addresses if node not in known]
        for node in strangers[:-_STRANGERS_MAX]:
            del self._addresses[node]
        told = tuple(sorted(self._addresses.items()))
        if told != self._told:
            self._told = told
            self._out.put(UseAddresses(told))


def _leads_to(height: Height, roll: Roll) -> bool:
    return height.state_id in (roll.height.state_id, *roll.past)
