"""The draft: a routing that the nodes improve among themselves until no change makes it cheaper.

A draft says how many units each link carries, and not whose: a unit that begins at one data node
may end at another, which is put right when the draft is settled (`settling`). So the draft is a
minimum-cost flow in one commodity, and cancelling negative cycles finds its exact optimum with
what neighbours tell each other: see `residual`. Training does not use the draft; it may change
at any time without disturbing a microbatch.

A node does once in each round, in `tick`: tell neighbours what it believes of shared links where
the two do not agree; prolong the cheapest walks that neighbours told of; tell neighbours of its
own where they changed; and, where a walk closes to a cycle that saves something, ask all nodes on
it to change (`draft_changes`).

Deviations from GWTF (V-C): no annealing, because longer cycles leave no local optimum to escape
from; and data nodes' identities are left open until the end. The paper's own rules are `gwtf`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from decod.ids import NodeId
from decod.protocol.core.messages.routing_messages import (
    ChangeAnswer,
    ChangeDecision,
    DraftOffer,
    DraftUnits,
    RequestChange,
    RequestUnits,
    ResidualWalk,
    UnitsAnswer,
)
from decod.protocol.core.residual import (
    ENTRANCE,
    EXIT,
    MAX_STEPS,
    Improvement,
    Place,
    Walk,
    closed,
    empty_walk,
)
from decod.protocol.flows.negotiation.draft_changes import Changes, DraftLink, DraftLinks
from decod.protocol.flows.position import Position

_TICKS_PER_STAGE = 3
"""Offers pass a stage in one round; those that are refused ask others, each time in two more."""

_REPAIR_TICKS_PER_STAGE = 2
"""The same where most of an earlier draft still stands: fewer ask for the same."""

_REPEAT_TICKS = 4
"""A request that nobody has answered is repeated this often."""

BuildMessage = DraftOffer | RequestUnits | UnitsAnswer


@dataclass(slots=True)
class _Offer:
    sequence: int
    units: int
    cost: float


@dataclass(slots=True)
class _Request:
    request_id: int
    units: int
    cost: float
    """Of one unit from this node to the sink."""
    age: int = 0


@dataclass(slots=True)
class DraftBuilding:
    """One node's part in building.

    A node with units on their way to a sink that nobody sends it yet (unpaired outflow) offers them
    to the previous stage, with their cost. A node with room asks for the cheapest, its link
    included, and offers what it has asked for at once, before it is answered: so offers run ahead,
    one stage a round, and requests follow. A request waits until the node that got it knows what it
    has. The end comes after as many rounds as that takes, and a few more: what has no other half by
    then is let go.
    """

    position: Position
    links: DraftLinks
    changes: Changes
    view_version: int
    ticks_left: int = field(init=False)
    _offers: dict[NodeId, _Offer] = field(default_factory=dict)
    _pending: dict[NodeId, _Request] = field(default_factory=dict)
    _waiting: dict[NodeId, RequestUnits] = field(default_factory=dict)
    _answers: dict[NodeId, UnitsAnswer] = field(default_factory=dict)
    _offered: tuple[int, float] = (0, 0.0)
    _cost: float = 0.0
    """Mean cost to the sink of this node's units."""
    _next_id: int = 1
    _sequence: int = 0

    def __post_init__(self) -> None:
        self.ticks_left = _TICKS_PER_STAGE * self.position.num_stages + 2

    def repair(self) -> None:
        """Begin with an earlier draft's units."""
        self.ticks_left = _REPAIR_TICKS_PER_STAGE * self.position.num_stages + 4

    @property
    def active(self) -> bool:
        return self.ticks_left > 0

    def received(self, sender: NodeId, message: BuildMessage) -> None:
        match message:
            case DraftOffer():
                known = self._offers.get(sender)
                if sender in self.links.outward and (
                    known is None or message.sequence > known.sequence
                ):
                    self._offers[sender] = _Offer(message.sequence, message.units, message.cost)
            case RequestUnits():
                answer = self._answers.get(sender)
                if answer is not None and answer.request_id >= message.request_id:
                    if answer.request_id == message.request_id:
                        self.position.out.send(sender, answer)
                elif sender in self.links.inward:
                    self._waiting[sender] = message
            case UnitsAnswer():
                self._answered(sender, message)

    def _answered(self, sender: NodeId, answer: UnitsAnswer) -> None:
        request = self._pending.get(sender)
        if request is None or request.request_id != answer.request_id:
            return
        del self._pending[sender]
        self.changes.expected -= request.units
        units = min(answer.units, request.units)
        if units > 0:
            num_used = self.links.num_out
            self._cost = (self._cost * num_used + request.cost * units) / (num_used + units)
            self.links.outward[sender].grow(units)

    def tick(self) -> None:
        """Answer, ask, offer."""
        self._repeat()
        if self.active:
            self.ticks_left -= 1
            self._answer()
            self._ask()
            self._offer()
        else:
            self._refuse_all()

    @property
    def _surplus(self) -> int:
        """Units on their way to a sink that nobody sends this node yet."""
        if self.position.data:
            return self.changes.room_as_sink
        return self.changes.num_missing

    def _answer(self) -> None:
        cost = self.position.cost_from
        for sender in sorted(self._waiting, key=lambda peer: (cost(peer), peer)):
            request = self._waiting[sender]
            units = max(0, min(request.units, self._surplus))
            if units == 0 and self._pending and not self.position.data:
                continue  # It may have some when it has been answered itself.
            del self._waiting[sender]
            if units > 0:
                self.links.inward[sender].grow(units)
            answer = UnitsAnswer(self.view_version, request.request_id, units)
            self._answers[sender] = answer
            self.position.out.send(sender, answer)

    def _refuse_all(self) -> None:
        waiting = self._waiting
        self._waiting = {}
        for sender, request in waiting.items():
            answer = self._answers[sender] = UnitsAnswer(self.view_version, request.request_id, 0)
            self.position.out.send(sender, answer)

    def _repeat(self) -> None:
        """Repeat what nobody has answered, beyond the end too: room is kept for the answer."""
        for peer, request in self._pending.items():
            request.age += 1
            if request.age % _REPEAT_TICKS == 0:
                repeat = RequestUnits(self.view_version, request.request_id, request.units)
                self.position.out.send(peer, repeat)

    def _ask(self) -> None:
        room = self.changes.room_as_source
        if self.position.share is not None:
            room = min(room, self.position.share - self.links.num_out - self.changes.expected)
        cost = self.position.cost_to
        nearest = sorted(
            (offer.cost + cost(peer), peer)
            for peer, offer in self._offers.items()
            if offer.units > 0 and peer not in self._pending
        )
        for total, peer in nearest:
            units = min(room, self._offers[peer].units)
            if units <= 0:
                break
            room -= units
            self._offers[peer].units -= units
            self.changes.expected += units
            self._pending[peer] = _Request(self._next_id, units, total)
            request = RequestUnits(self.view_version, self._next_id, units)
            self.position.out.send(peer, request)
            self._next_id += 1

    def _offer(self) -> None:
        """Tell the previous stage what there is, or will be, to take up."""
        expected = sum(request.units for request in self._pending.values())
        units = self._surplus + (0 if self.position.data else expected)
        num_used = self.links.num_out
        cost = 0.0
        if not self.position.data and num_used + expected:
            ahead = sum(request.units * request.cost for request in self._pending.values())
            cost = (self._cost * num_used + ahead) / (num_used + expected)
        offer = (max(0, units), cost)
        if offer == self._offered:
            return
        self._offered = offer
        self._sequence += 1
        message = DraftOffer(self.view_version, self._sequence, *offer)
        self.position.out.send_all(self.position.previous, message)


_REFRESH_TICKS = 8
"""All walks are told again this often, whether or not they changed: messages may be lost."""

_EXPIRY_TICKS = 3 * _REFRESH_TICKS
"""A walk that has not been told again for so long is forgotten: that it is gone may be lost too."""

_BAN_TICKS = 8
_BAN_DOUBLINGS = 6
"""A walk that led to a refused change is left alone up to so long: two that meet do so once. From
the third time on, up to twice as long with each: then it is not others that are in its way, but
the nodes on it measure costs that differ from what it says."""

_CYCLE_STEPS = 32
"""Longest walk in search of a cycle: longer ones are out of date before they close."""

_STUCK_TICKS = 2
"""How long units that a vanished node has left without a way on wait for another."""

_MISSING_TICKS_PER_STAGE = 2
"""How long units that nobody sends wait for somebody, after the draft has been built: walks from
where units wait need a round for each stage to reach them."""

_MISSING_TICKS_REPAIR = 2
"""The same where most of an earlier draft still stands: only few are missing, and their parts of
paths are soon made anew."""

_MISSING_TICKS_SEEN = 4
"""The same since this node last knew of a unit that could come."""

_UNITS_MAX = 1 << 16

DraftMessage = (
    BuildMessage | DraftUnits | ResidualWalk | RequestChange | ChangeAnswer | ChangeDecision
)


_Source = tuple[NodeId, bool, bool]
"""Who told of a walk, to which of its places, and whether a unit waits at the walk's begin."""

_News = tuple[Walk | None, Walk | None]
"""A walk that saves something, and one at whose begin a unit waits."""

_NO_NEWS: _News = (None, None)


@dataclass(slots=True)
class _Heard:
    """What a neighbour has told."""

    sequence: int
    walk: Walk | None
    until: int
    refused: Walk | None = None
    """What led to a refused change. It is kept while the neighbour tells of others, or of none:
    what changes that meet have reserved makes walks come and go."""
    banned_until: int = 0
    num_refused: int = 0


class Draft:
    """One node's part of the draft, for one version of the view."""

    def __init__(self, position: Position, view_version: int, rng: Random) -> None:
        self.position = position
        self.links = DraftLinks(
            position.out,
            {peer: DraftLink() for peer in position.next},
            {peer: DraftLink() for peer in position.previous},
        )
        self.changes = Changes(position, self.links, view_version, rng)
        self.build = DraftBuilding(position, self.links, self.changes, view_version)
        self._missing_ticks_left = _MISSING_TICKS_PER_STAGE * position.num_stages
        self._uneven = False
        """This node waits for changes under way to let go of units; it takes on no other."""
        self.frozen = False
        """A claim has passed: this node's links stand still."""
        self._view_version = view_version
        self._rng = rng
        self._heard: dict[_Source, _Heard] = {}
        self._told: dict[tuple[NodeId, bool], _News] = {}
        self._sequence = 0
        self.num_ticks = 0

    def carry_over(self, before: "Draft") -> None:
        """Go on from the draft of the view before, as far as its nodes are still there."""
        for outward in (False, True):
            mine = self.links.side(outward=outward)
            for peer, link in before.links.side(outward=outward).items():
                if peer in mine and link.units > 0:
                    mine[peer] = DraftLink(link.units, peer_units=None)
        if before.num_ticks:
            self.build.repair()
            self._missing_ticks_left = _MISSING_TICKS_REPAIR

    @property
    def passable(self) -> bool:
        """Whether every unit that comes in goes on, as agreed on, and nothing is under way."""
        links = self.links
        onward = self.position.data or links.num_in <= links.num_out
        return onward and links.agreed and not self.changes.any_reserved

    def beginning(self) -> list[NodeId]:
        """At a data node: where each unit that begins here goes on."""
        return [peer for peer, link in self.links.outward.items() for _ in range(link.units)]

    def onward(
        self,
        data_node: NodeId,  # noqa: ARG002 - a draft does not say whose its units are.
        upstream: NodeId,  # noqa: ARG002
        taken: Iterable[tuple[NodeId, NodeId, NodeId]],
    ) -> NodeId | None:
        """Return where a unit goes on that no other claim has taken."""
        used = [onward for _, _, onward in taken]
        links = self.links.outward.items()
        return next((peer for peer, link in links if used.count(peer) < link.units), None)

    # --- messages -----------------------------------------------------------------------------

    def received(self, sender: NodeId, message: DraftMessage) -> None:
        match message:
            case DraftUnits():
                if self.links.said(sender, message, busy=self.changes.any_reserved):
                    self.links.tell(self._view_version, sender, outward=not message.outward)
            case ResidualWalk():
                self._hear(sender, message)
            case RequestChange():
                self.changes.requested(sender, message, refuse=self.frozen or self._uneven)
            case ChangeAnswer():
                self.changes.answered(sender, message)
            case ChangeDecision():
                self.changes.decided(sender, message)
            case DraftOffer() | RequestUnits() | UnitsAnswer():
                self.build.received(sender, message)

    def _hear(self, sender: NodeId, message: ResidualWalk) -> None:
        walk = message.walk
        for waiting in (False, True) if walk is None else (walk.costs[0] < 0,):
            source = (sender, message.exit, waiting)
            known = self._heard.get(source)
            if known is None or message.sequence > known.sequence:
                until = self.num_ticks + _EXPIRY_TICKS
                heard = self._heard[source] = _Heard(message.sequence, walk, until)
                if known is not None:
                    heard.refused = known.refused
                    heard.num_refused = known.num_refused
                    heard.banned_until = known.banned_until

    # --- once in each round -------------------------------------------------------------------

    def tick(self) -> None:
        """Do what a node does once in each round."""
        self.num_ticks += 1
        position = self.position
        self.changes.tick()
        if self.frozen:
            self.build.ticks_left = 0
        self.build.tick()
        if not self.build.active:
            self._missing_ticks_left -= 1
        if self.num_ticks > _STUCK_TICKS and not position.data:
            self._balance()
        self.links.tell_disagreed(self._view_version)
        if self.frozen or self._uneven:
            return
        if (refused := self.changes.take_refused()) is not None:
            self._ban(refused)
        search = self._relax()
        near = self.position.near_places
        supplied = (side for side, walk in search.waiting.items() if len(walk.places) <= near)
        self.changes.supplied = frozenset(supplied)
        if ENTRANCE in self.changes.supplied:
            self._missing_ticks_left = max(self._missing_ticks_left, _MISSING_TICKS_SEEN)
        self._tell(search)
        if search.detour is not None:
            self.changes.ask(search.detour)

    def _ban(self, refused: Improvement) -> None:
        """Leave alone for a while the walk that a refused detour came by."""
        node_id = self.position.node_id
        peer, side = next(place for place in reversed(refused.places) if place[0] != node_id)
        heard = self._heard.get((peer, side, not refused.closed))
        if heard is not None:
            if self.num_ticks > heard.banned_until + _EXPIRY_TICKS:
                heard.num_refused = 0
            doublings = min(max(0, heard.num_refused - 1), _BAN_DOUBLINGS)
            heard.num_refused += 1
            heard.refused = heard.walk or heard.refused
            heard.banned_until = self.num_ticks + self._rng.randint(1, _BAN_TICKS << doublings)

    def _balance(self) -> None:
        """Let go of what does not go through, as soon as no promise rests on it."""
        position = self.position
        links = self.links
        ahead = min(links.num_out + self.changes.expected, position.capacity)
        end = self._missing_ticks_left <= 0 and not self.frozen
        target = min(ahead, links.num_in) if end else ahead
        uneven = links.num_in > target or links.num_out > target
        if uneven and not self.changes.any_reserved:
            links.lower(links.inward, target, position.cost_from)
            links.lower(links.outward, target, position.cost_to)
            uneven = False
        self._uneven = uneven

    def _relax(self) -> "_Search":
        """Find the best detour that ends here, and the best walks to go on from here."""
        position = self.position
        links = self.links
        waiting = self.changes.room_as_source if position.data else self.changes.num_stuck
        search = _Search(position.node_id, waiting, position.reward)
        if not self.build.active or position.data:
            wanted = self.changes.room_as_sink if position.data else self.changes.num_missing
            search.num_wanted = wanted
        for peer, link in links.inward.items():
            cost = position.unit_cost(peer, link.units + 1, outward=False)
            for walk in self._walks(peer, EXIT):
                search.prolong(walk, ENTRANCE, cost, _UNITS_MAX)
        for peer, link in links.outward.items():
            if link.available > 0:
                saved = position.unit_cost(peer, link.units, outward=True)
                search.prolong(_begin(peer, ENTRANCE), EXIT, -saved, link.available)
                for walk in self._walks(peer, ENTRANCE):
                    search.prolong(walk, EXIT, -saved, link.available)
        if position.data:
            self._relax_data(search)
        else:
            num_out = links.num_out
            wait = position.queue_cost()
            num_used = max(links.num_in, num_out)
            search.pass_through(ENTRANCE, wait * num_used, self.changes.room)
            search.pass_through(EXIT, -wait * max(0, num_used - 1), num_out)
        return search

    def _relax_data(self, search: "_Search") -> None:
        """Walks may change the data node where a unit begins or ends, if there is room for it."""
        room = self.changes.room_as_source
        for peer in self.position.data_peers:
            if room > 0:
                for walk in self._walks(peer, EXIT):
                    search.prolong(walk, EXIT, 0.0, room)
            for walk in self._walks(peer, ENTRANCE):
                search.prolong(walk, ENTRANCE, 0.0, _UNITS_MAX)

    def _walks(self, peer: NodeId, side: bool) -> list[Walk]:  # noqa: FBT001 - half of a place.
        now = self.num_ticks
        walks = list[Walk]()
        for waiting in (False, True):
            heard = self._heard.get((peer, side, waiting))
            if heard is None or heard.walk is None or heard.until <= now:
                continue
            if heard.banned_until <= now or not _same_way(heard.refused, heard.walk):
                walks.append(heard.walk)
        return walks

    def _tell(self, search: "_Search") -> None:
        """Tell neighbours of the walks that they could prolong, where those have changed."""
        refresh = self.num_ticks % _REFRESH_TICKS == 0
        position = self.position
        links = self.links
        listeners = [(peer, EXIT) for peer in position.next]
        listeners += [(peer, ENTRANCE) for peer, link in links.inward.items() if link.units > 0]
        sink_room = position.data and self.changes.room_as_sink > 0
        for peer in position.data_peers:
            listeners.append((peer, EXIT))
            if sink_room:
                listeners.append((peer, ENTRANCE))
        told = {(peer, side): search.news(side, peer) for peer, side in listeners}
        told |= {key: _NO_NEWS for key in self._told if key not in told}
        for (peer, side), news in told.items():
            before = self._told.get((peer, side), _NO_NEWS)
            if news == before and (not refresh or news == _NO_NEWS):
                continue
            for walk in _differences(before, news, refresh=refresh):
                self._sequence += 1
                message = ResidualWalk(self._view_version, self._sequence, side, walk)
                position.out.send(peer, message)
        self._told = told


def _begin(peer: NodeId, side: bool) -> Walk:  # noqa: FBT001
    return empty_walk((peer, side), units=_UNITS_MAX)


def _differences(before: _News, news: _News, *, refresh: bool) -> Iterator[Walk | None]:
    """Say what turns what was told before into the news. None takes back all of it."""
    if any(old is not None and new is None for old, new in zip(before, news, strict=True)):
        yield None
        before = _NO_NEWS
    for old, new in zip(before, news, strict=True):
        if new is not None and (refresh or new != old):
            yield new


class _Search:
    """The best walks to a node's two places, and the best detour found on the way.

    A walk that has a unit waiting at its begin is wanted for where it leads, not for what it saves:
    of those the shortest is kept. It has no use for cycles, and no cycle makes it longer.
    """

    def __init__(self, node_id: NodeId, num_waiting: int, reward: float) -> None:
        self._places: dict[bool, Place] = {ENTRANCE: (node_id, ENTRANCE), EXIT: (node_id, EXIT)}
        self.walks = {
            side: empty_walk(place, units=_UNITS_MAX) for side, place in self._places.items()
        }
        self.waiting: dict[bool, Walk] = {}
        if num_waiting > 0:
            self.waiting[EXIT] = empty_walk((node_id, EXIT), units=num_waiting, cost=-reward)
        self.detour: Improvement | None = None
        self.num_wanted = 0
        """Units that are welcome at this node's entrance."""

    def prolong(self, walk: Walk, side: bool, cost: float, units: int) -> None:  # noqa: FBT001
        """Try the walk with one step more, to this node's `side`."""
        if walk.costs[0] < 0:
            self._lead(walk, side, cost, units)
            return
        place = self._places[side]
        total = walk.costs[-1] + cost
        if total >= self.walks[side].costs[-1] - 1e-9 or len(walk.places) >= _CYCLE_STEPS:
            return
        if place in walk.places:
            self._found(closed(walk, place, cost, units))
            return
        self.walks[side] = walk.to(place, cost, units)

    def pass_through(self, side: bool, cost: float, units: int) -> None:  # noqa: FBT001
        """Try the walks to one place with a step more, to the other."""
        if units > 0:
            self.prolong(self.walks[side], not side, cost, units)
            if side in self.waiting:
                self.prolong(self.waiting[side], not side, cost, units)

    def news(self, side: bool, peer: NodeId) -> _News:  # noqa: FBT001
        """Return what a neighbour may want to know of the walks to one place."""
        walk = self.walks[side]
        waiting = self.waiting.get(side)
        return (
            walk if walk.cost < 0 and not _comes_from(walk, peer) else None,
            waiting if waiting is not None and not _comes_from(waiting, peer) else None,
        )

    def _lead(self, walk: Walk, side: bool, cost: float, units: int) -> None:  # noqa: FBT001
        place = self._places[side]
        known = self.waiting.get(side)
        if place in walk.places or len(walk.places) >= MAX_STEPS:
            return
        longer = walk.to(place, cost, units)
        if side == ENTRANCE and self.num_wanted > 0:
            units = min(longer.units, self.num_wanted)
            self._found(Improvement(longer.places, longer.cost, units, closed=False))
        if known is None or _length(longer) < _length(known):
            self.waiting[side] = longer

    def _found(self, detour: Improvement) -> None:
        best = self.detour.cost if self.detour is not None else -1e-9
        if detour.cost < best:
            self.detour = detour


def _length(walk: Walk) -> tuple[int, float]:
    return len(walk.places), walk.cost


def _same_way(a: Walk | None, b: Walk | None) -> bool:
    """Whether walks are the same but for how many units could take them."""
    return a is not None and b is not None and a.places == b.places and a.costs == b.costs


def _comes_from(walk: Walk, peer: NodeId) -> bool:
    """Whether the peer would only close the walk at once."""
    return len(walk.places) > 1 and walk.places[-2][0] == peer
