"""Changes of the draft: all nodes on a closed walk change together, or none does.

The node that found the walk asks all others on it (`RequestChange`). Each reserves the units that
it would take from its links and the room that it would need, and says what the change costs by its
own measurements. If all agree and it still saves something, the asker decides to carry it out, else
to drop it; that decision is made once and never changes. A participant repeats its answer until it
hears the decision, so that no loss of messages leaves it behind. What is reserved can't be promised
twice: changes that meet on a node both go ahead if there is enough for both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from decod.ids import NodeId
from decod.planner.graph import Objective
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.messages.routing_messages import (
    ChangeAnswer,
    ChangeDecision,
    DraftUnits,
    RequestChange,
)
from decod.protocol.core.residual import MAX_STEPS, Change, Improvement, Place, change_at, last_part
from decod.protocol.flows.position import Position


@dataclass(slots=True)
class DraftLink:
    """One direction of the link to one neighbour."""

    units: int = 0
    version: int = 0
    """Changes so far. Both ends count them, so what was said before a change is known as stale."""
    peer_units: int | None = 0
    """What the other end says it carries; None: it has not spoken."""
    reserved: int = 0
    """Units that a change under way may take from it."""

    @property
    def agreed(self) -> bool:
        return self.peer_units == self.units

    @property
    def available(self) -> int:
        return self.units - self.reserved if self.agreed else 0

    def grow(self, units: int) -> None:
        """Add units (or take them away) in a change that the other end carries out too.

        Ends that had not agreed before do not agree now.
        """
        self.units += units
        if self.peer_units is not None:
            self.peer_units += units
        self.version += 1


@dataclass(slots=True)
class DraftLinks:
    """All links of one node, by direction."""

    out: EffectSink[Effect]
    outward: dict[NodeId, DraftLink] = field(default_factory=dict)
    inward: dict[NodeId, DraftLink] = field(default_factory=dict)

    def side(self, *, outward: bool) -> dict[NodeId, DraftLink]:
        return self.outward if outward else self.inward

    @property
    def num_out(self) -> int:
        return sum([link.units for link in self.outward.values()])

    @property
    def num_in(self) -> int:
        return sum([link.units for link in self.inward.values()])

    @property
    def agreed(self) -> bool:
        return all(link.agreed for side in (self.outward, self.inward) for link in side.values())

    def said(self, sender: NodeId, message: DraftUnits, *, busy: bool) -> bool:
        """Take in the other end's number. Returns whether it should be told this end's at once.

        A node that has promised to take part in a change (`busy`) lowers nothing meanwhile: the
        promise may rest on it. While the two differ each says its number once a round, and not in
        answer to the other's, or they would go on and on.
        """
        link = self.side(outward=not message.outward).get(sender)
        if link is None or message.link_version != link.version:
            return False
        if link.peer_units is None or message.units < link.peer_units:
            link.peer_units = message.units
        if not busy:
            link.units = min(link.units, link.peer_units)
        return link.agreed and not message.agreed

    def lower(
        self, side: dict[NodeId, DraftLink], target: int, cost: Callable[[NodeId], float]
    ) -> None:
        """Let go of units of one side until it has no more than `target`; dearest links first."""
        excess = sum(link.units for link in side.values()) - target
        for _, peer in sorted(((-cost(peer), peer) for peer in side) if excess > 0 else ()):
            dropped = min(max(excess, 0), side[peer].units)
            side[peer].units -= dropped
            excess -= dropped

    def tell_disagreed(self, view_version: int) -> None:
        """Tell the other end of each link on which the two do not agree yet."""
        for outward in (False, True):
            for peer, link in self.side(outward=outward).items():
                if not link.agreed:
                    self.tell(view_version, peer, outward=outward)

    def tell(self, view_version: int, peer: NodeId, *, outward: bool) -> None:
        """Tell the other end of a link this end's number."""
        link = self.side(outward=outward)[peer]
        message = DraftUnits(view_version, outward, link.version, link.units, link.agreed)
        self.out.send(peer, message)


_PATIENCE_TICKS = 6
"""How long the asker waits for answers before it drops a change."""

_REPEAT_TICKS = 4
"""How long a participant waits for the decision before it repeats its answer."""

_REFUSALS_FREE = 4
_REFUSALS_FREE_CYCLE = 8
_PAUSE_MAX_TICKS = 32
"""From the fifth refusal in a row on, or the ninth if it was of a cycle, the asker pauses for a
random time of up to 32 ticks: where many want the same, one of them gets through."""

_REACH_MIN = 4
"""A walk that makes the flow larger is asked for in part, if it was refused: half of it, then a
quarter, and so on down to this many places. The shorter, the fewer others are in its way."""

_SAVES = -1e-9
"""A change must cost less than this: what rounding may bring about is no improvement."""


@dataclass(slots=True)
class _Asked:
    """A change that this node asked for."""

    detour: Improvement
    waiting: set[NodeId]
    units: int
    cost: float
    age: int = 0


@dataclass(slots=True)
class _Reserved:
    """A change that this node has promised to take part in."""

    change: Change
    answer: ChangeAnswer
    age: int = 0


@dataclass(slots=True)
class Changes:
    """One node's changes under way, as asker and as participant."""

    position: Position
    links: DraftLinks
    view_version: int
    rng: Random
    expected: int = 0
    """Units that the node has asked for otherwise and may get: room for them is kept."""
    supplied: frozenset[bool] = frozenset()
    """Places of this node that a near walk leads to, from where a unit could come. A change may
    leave a unit missing there, and this node then finds one."""
    _asked: _Asked | None = None
    _next_id: int = 1
    _refused: Improvement | None = None
    _num_refused: int = 0
    """In a row."""
    _reach: int = MAX_STEPS
    """Longest part of a walk that is asked for at once, to make the flow larger."""
    _pause: int = 0
    _made: dict[int, int] = field(default_factory=dict)
    """Units of each change that was asked for here and carried out; all others were dropped."""
    _reserved: dict[tuple[NodeId, int], _Reserved] = field(default_factory=dict)
    _decided: dict[NodeId, int] = field(default_factory=dict)
    """The last change of each asker that has been decided. One has decided on all before it."""

    @property
    def any_reserved(self) -> bool:
        return bool(self._reserved)

    @property
    def room(self) -> int:
        """Units more that a relay could let through."""
        return min(self.room_as_source, self.room_as_sink)

    @property
    def num_stuck(self) -> int:
        """Units that come in and have no way on, beyond those that changes under way lead on."""
        reserved = self._promised(lambda change: change.net_out - change.net_in)
        return self.links.num_in - self.links.num_out - reserved - self.expected

    @property
    def num_missing(self) -> int:
        """Units that go on and nobody sends, beyond those that changes under way bring."""
        reserved = self._promised(lambda change: change.net_in - change.net_out)
        return self.links.num_out - self.links.num_in - reserved

    @property
    def room_as_source(self) -> int:
        """Units more that this node could send on, whether or not any come in."""
        reserved = self._promised(lambda change: change.net_out)
        return self.position.capacity - self.links.num_out - self.expected - reserved

    @property
    def room_as_sink(self) -> int:
        """Units more that could come in, whether or not they go on."""
        reserved = self._promised(lambda change: change.net_in)
        return self.position.capacity - self.links.num_in - reserved

    def _promised(self, net: Callable[[Change], int]) -> int:
        """Return units that changes under way take, where `net` is what one of them would take."""
        if not self._reserved:
            return 0
        return sum(r.answer.units * max(0, net(r.change)) for r in self._reserved.values())

    def tick(self) -> None:
        """Let time pass: drop what was not answered, ask again what was decided."""
        self._pause = max(0, self._pause - 1)
        if self._asked is not None:
            self._asked.age += 1
            if self._asked.age > _PATIENCE_TICKS:
                self._decide(0)
        for (asker, _), reserved in self._reserved.items():
            reserved.age += 1
            if reserved.age % _REPEAT_TICKS == 0:
                self.position.out.send(asker, reserved.answer)

    def ask(self, detour: Improvement) -> None:
        """Ask all nodes on the detour for the change, unless this node has just done so."""
        if self._asked is not None or self._pause:
            return
        node_id = self.position.node_id
        if not detour.closed and len(detour.places) <= self.position.near_places:
            detour = last_part(detour, self._reach)
        units = min(detour.units, self.position.capacity)
        request = RequestChange(
            self.view_version, self._next_id, detour.places, detour.closed, units
        )
        self._next_id += 1
        own = self._promise(node_id, request)
        if own.units == 0:
            self._refused = detour
            return
        others = {place[0] for place in detour.places} - {node_id}
        reward = 0.0 if detour.closed else self.position.reward
        self._asked = _Asked(detour, set(others), own.units, own.cost - reward)
        self.position.out.send_all(sorted(others), request)

    def take_refused(self) -> Improvement | None:
        """Return what this node asked for last, if it has been refused."""
        refused = self._refused
        self._refused = None
        return refused

    def requested(self, sender: NodeId, request: RequestChange, *, refuse: bool = False) -> None:
        """Reserve what a change would take, or refuse."""
        known = self._reserved.get((sender, request.change_id))
        if known is not None:
            answer = known.answer
        elif request.change_id <= self._decided.get(sender, 0):
            return
        elif refuse:
            answer = ChangeAnswer(self.view_version, request.change_id, 0, 0.0)
        else:
            answer = self._promise(sender, request)
        self.position.out.send(sender, answer)

    def answered(self, sender: NodeId, answer: ChangeAnswer) -> None:
        """Count a participant's answer; decide with the last one."""
        asked = self._asked
        change_id = answer.change_id
        if 0 < change_id < self._next_id - (asked is not None):
            if answer.units:
                made = self._made.get(change_id, 0)
                decision = ChangeDecision(self.view_version, change_id, made)
                self.position.out.send(sender, decision)
        elif asked is not None and change_id == self._next_id - 1 and sender in asked.waiting:
            asked.waiting.discard(sender)
            asked.units = min(asked.units, answer.units)
            asked.cost += answer.cost
            if asked.units == 0 or not asked.waiting:
                self._decide(asked.units if asked.cost < _SAVES else 0)

    def decided(self, sender: NodeId, decision: ChangeDecision) -> None:
        """Carry a change out, or give back what was reserved for it."""
        key = (sender, decision.change_id)
        self._decided[sender] = max(decision.change_id, self._decided.get(sender, 0))
        if (reserved := self._reserved.pop(key, None)) is not None:
            self._release(reserved, min(decision.units, reserved.answer.units))

    # ------------------------------------------------------------------------------------------

    def _promise(self, asker: NodeId, request: RequestChange) -> ChangeAnswer:
        change = change_at(self.position.node_id, request.places, is_closed=request.is_closed)
        units = min(request.units, self._most(change, request.places))
        cost = self._cost(change) if units > 0 else 0.0
        answer = ChangeAnswer(self.view_version, request.change_id, max(0, units), cost)
        if units > 0:
            self._reserved[asker, request.change_id] = _Reserved(change, answer)
            for links, changed in self._sides(change):
                for peer, sign in changed.items():
                    links[peer].reserved += units if sign < 0 else 0
        return answer

    def _sides(self, change: Change) -> list[tuple[dict[NodeId, DraftLink], dict[NodeId, int]]]:
        return [(self.links.outward, change.outward), (self.links.inward, change.inward)]

    def _most(self, change: Change, places: tuple[Place, ...]) -> int:
        """Return how many units this node could lead along the change; 0 refuses it."""
        if len(places) > MAX_STEPS or not (change.outward or change.inward):
            # A data node may be on the way only to pass a unit on to another.
            passed = self.position.data and len(places) <= MAX_STEPS
            return self.position.capacity if passed else 0
        # With any other objective each further unit has a price of its own.
        constant = self.position.objective is Objective.SUM and not self.position.queue_cost()
        most = self.position.capacity if constant else 1
        for links, changed in self._sides(change):
            for peer, sign in changed.items():
                link = links.get(peer)
                if link is None or not link.agreed:
                    return 0
                if sign < 0:
                    most = min(most, link.available // -sign)
        rooms = [(change.net_out, self.room_as_source), (change.net_in, self.room_as_sink)]
        if not self.position.data:
            rooms.append((change.net_in - change.net_out, self.num_missing))
            if places[0][1] not in self.supplied:
                rooms.append((change.net_out - change.net_in, self.num_stuck))
        for net, room in rooms:
            if net > 0:
                most = min(most, room // net)
        return most

    def _cost(self, change: Change) -> float:
        """Return what the change costs here, and on links that begin here, for one unit."""
        total = 0.0
        for peer, sign in change.outward.items():
            nth = self.links.outward[peer].units + (1 if sign > 0 else 0)
            total += sign * self.position.unit_cost(peer, nth, outward=True)
        if not self.position.data and change.net_in == change.net_out != 0:
            num_used = max(self.links.num_in, self.links.num_out)
            wait = self.position.queue_cost()
            total += wait * num_used if change.net_in > 0 else -wait * max(0, num_used - 1)
        return total

    def _decide(self, units: int) -> None:
        """Decide on what this node asked for, once and for all."""
        asked = self._asked
        assert asked is not None
        change_id = self._next_id - 1
        self._asked = None
        if units == 0:
            self._refused = asked.detour
            self._num_refused += 1
            free = _REFUSALS_FREE_CYCLE
            if not asked.detour.closed:
                free = _REFUSALS_FREE
                self._reach = max(_REACH_MIN, len(asked.detour.places) // 2)
            if self._num_refused > free:
                self._pause = self.rng.randint(0, _PAUSE_MAX_TICKS)
        else:
            self._made[change_id] = units
            self._num_refused = 0
            self._reach = min(MAX_STEPS, 2 * self._reach)
        decision = ChangeDecision(self.view_version, change_id, units)
        self.decided(self.position.node_id, decision)
        others = sorted({place[0] for place in asked.detour.places} - {self.position.node_id})
        self.position.out.send_all(others, decision)

    def _release(self, reserved: _Reserved, units: int) -> None:
        for links, changed in self._sides(reserved.change):
            for peer, sign in changed.items():
                link = links[peer]
                if sign < 0:
                    link.reserved -= reserved.answer.units
                if units:
                    link.grow(sign * units)
