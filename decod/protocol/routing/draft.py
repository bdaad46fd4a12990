"""The draft: a routing that the nodes improve among themselves until no change makes it cheaper.

A draft says how many units each link carries, and not whose: a unit that begins at one data node
may end at another, which is put right when the draft is settled (`settling`). So the draft is a
minimum-cost flow in one commodity, and cancelling negative cycles finds its exact optimum with
what neighbours tell each other: see `residual`. Training does not use the draft; it may change
at any time without disturbing a microbatch.

A node does once in each round, in `tick`: tell neighbours what it believes of shared links where
the two do not agree; prolong the cheapest walks that neighbours told of; tell neighbours of its
own where they changed; and, where a walk closes to a cycle that saves something, ask all nodes on
it to change (`changes`).

Deviations from GWTF (V-C): no annealing, because longer cycles leave no local optimum to escape
from; and data nodes' identities are left open until the end. The paper's own rules are `gwtf`.
"""

from collections.abc import Mapping
from random import Random

from decod.ids import NodeId
from decod.protocol.effects import Effect, Send
from decod.protocol.routing.build import Build, BuildMessage
from decod.protocol.routing.changes import Changes
from decod.protocol.routing.links import DraftLink, DraftLinks
from decod.protocol.routing.messages import (
    ChangeAnswer,
    ChangeDecision,
    DraftOffer,
    DraftUnits,
    RequestChange,
    RequestUnits,
    ResidualWalk,
    UnitsAnswer,
)
from decod.protocol.routing.position import Position
from decod.protocol.routing.residual import (
    ENTRANCE,
    EXIT,
    MAX_STEPS,
    Detour,
    Place,
    Walk,
    closed,
    empty_walk,
)

_REFRESH_TICKS = 8
"""All walks are told again this often, whether or not they changed: messages may be lost."""

_STUCK_TICKS = 2
"""How long units that a vanished node has left without a way on wait for another."""

_MISSING_TICKS = 2
"""How long units that nobody sends wait for somebody, after the draft has been built."""

_UNITS_MAX = 1 << 16

DraftMessage = (
    BuildMessage | DraftUnits | ResidualWalk | RequestChange | ChangeAnswer | ChangeDecision
)


class Draft:
    """One node's part of the draft, for one version of the view."""

    def __init__(self, position: Position, view_version: int, rng: Random) -> None:
        self.position = position
        self.links = DraftLinks(
            {peer: DraftLink() for peer in position.next},
            {peer: DraftLink() for peer in position.previous},
        )
        self.changes = Changes(position, self.links, view_version, rng)
        self.build = Build(position, self.links, self.changes, view_version)
        self._missing_ticks_left = _MISSING_TICKS
        self._uneven = False
        """It waits for changes under way to let go of units; it takes on no other."""
        self.held = False
        """A claim has passed: this node's links stand still."""
        self._view_version = view_version
        self._heard: dict[tuple[NodeId, bool], tuple[int, Walk | None]] = {}
        self._told: dict[tuple[NodeId, bool], Walk | None] = {}
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

    @property
    def steady(self) -> bool:
        """Whether this node's links are agreed on and balanced, and nothing is under way."""
        links = self.links
        balanced = self.position.data or links.num_in == links.num_out
        return balanced and links.agreed and not self.changes.any_reserved

    # --- messages -----------------------------------------------------------------------------

    def received(self, sender: NodeId, message: DraftMessage) -> list[Effect]:
        match message:
            case DraftUnits():
                if self.links.said(sender, message, busy=self.changes.any_reserved):
                    outward = not message.outward
                    return [self.links.statement(self._view_version, sender, outward=outward)]
                return []
            case ResidualWalk():
                key = (sender, message.exit)
                if message.sequence > self._heard.get(key, (0, None))[0]:
                    self._heard[key] = (message.sequence, message.walk)
                return []
            case RequestChange():
                return self.changes.requested(sender, message, refuse=self.held or self._uneven)
            case ChangeAnswer():
                return self.changes.answered(sender, message)
            case ChangeDecision():
                return self.changes.decided(sender, message)
            case DraftOffer() | RequestUnits() | UnitsAnswer():
                return self.build.received(sender, message)

    # --- once in each round -------------------------------------------------------------------

    def tick(self) -> list[Effect]:
        """Do what a node does once in each round."""
        self.num_ticks += 1
        position = self.position
        effects = self.changes.tick()
        if self.held:
            self.build.ticks_left = 0
        effects += self.build.tick()
        if not self.build.active:
            self._missing_ticks_left -= 1
        if self.num_ticks > _STUCK_TICKS and not position.data:
            self._balance()
        effects += self.links.statements(self._view_version)
        if self.held or self._uneven:
            return effects
        detour, walks = self._relax()
        effects += self._tell(walks)
        if detour is not None:
            effects += self.changes.ask(detour)
        return effects

    def _balance(self) -> None:
        """Let go of what does not go through, as soon as no promise rests on it."""
        position, links = self.position, self.links
        ahead = min(links.num_out + self.changes.expected, position.capacity)
        end = self._missing_ticks_left <= 0
        target = min(ahead, links.num_in) if end else ahead
        uneven = links.num_in > target or links.num_out > target
        if uneven and not self.changes.any_reserved:
            links.lower(links.inward, target, position.cost_from)
            links.lower(links.outward, target, position.cost_to)
            uneven = False
        self._uneven = uneven

    def _relax(self) -> tuple[Detour | None, dict[bool, Walk]]:
        """Return the best cycle that closes here, and the cheapest walks that end here."""
        position, links = self.position, self.links
        waiting = self.changes.room_as_source if position.data else self.changes.num_stuck
        search = _Search(position.node_id, waiting, position.reward)
        if not self.build.active or position.data:
            wanted = self.changes.room_as_sink if position.data else self.changes.num_missing
            search.num_wanted = wanted
        for peer, link in links.inward.items():
            if (walk := self._walk(peer, EXIT)) is not None:
                cost = position.unit_cost(peer, link.units + 1, outward=False)
                search.prolong(walk, ENTRANCE, cost, _UNITS_MAX)
        for peer, link in links.outward.items():
            if link.available > 0:
                saved = position.unit_cost(peer, link.units, outward=True)
                walk = self._walk(peer, ENTRANCE) or empty_walk((peer, ENTRANCE), units=_UNITS_MAX)
                search.prolong(walk, EXIT, -saved, link.available)
        room = self.changes.room
        if position.data:
            self._relax_data(search)
        else:
            if room > 0:
                search.prolong(search.walks[ENTRANCE], EXIT, 0.0, room)
            through = links.num_out
            if through > 0:
                search.prolong(search.walks[EXIT], ENTRANCE, 0.0, through)
        return search.detour, search.walks

    def _relax_data(self, search: "_Search") -> None:
        """Walks may change the data node where a unit begins or ends, if there is room for it."""
        room = self.changes.room_as_source
        for peer in self.position.data_peers:
            if room > 0 and (walk := self._walk(peer, EXIT)) is not None:
                search.prolong(walk, EXIT, 0.0, room)
            if (walk := self._walk(peer, ENTRANCE)) is not None:
                search.prolong(walk, ENTRANCE, 0.0, _UNITS_MAX)

    def _walk(self, peer: NodeId, side: bool) -> Walk | None:  # noqa: FBT001 - half of a place.
        return self._heard.get((peer, side), (0, None))[1]

    def _tell(self, walks: Mapping[bool, Walk]) -> list[Effect]:
        """Tell neighbours of the walks that they could prolong, where those have changed."""
        refresh = self.num_ticks % _REFRESH_TICKS == 0
        self._sequence += 1
        effects: list[Effect] = []
        position, links = self.position, self.links
        listeners = [(peer, EXIT) for peer in position.next]
        listeners += [(peer, ENTRANCE) for peer, link in links.inward.items() if link.units > 0]
        sink_room = position.data and self.changes.room_as_sink > 0
        for peer in position.data_peers:
            listeners.append((peer, EXIT))
            if sink_room:
                listeners.append((peer, ENTRANCE))
        told: dict[tuple[NodeId, bool], Walk | None] = {}
        for peer, side in listeners:
            walk = walks[side]
            # Not to where it comes from: that would only close it at once.
            back = len(walk.places) > 1 and walk.places[-2][0] == peer
            news = walk if walk.cost < 0 and not back else None
            told[peer, side] = news
        for key in self._told.keys() - told.keys():
            told[key] = None
        for (peer, side), news in told.items():
            if news != self._told.get((peer, side)) or (refresh and news is not None):
                effects.append(
                    Send(peer, ResidualWalk(self._view_version, self._sequence, side, news))
                )
        self._told = told
        return effects


class _Search:
    """The cheapest walks to a node's two places, and the best cycle found on the way."""

    def __init__(self, node_id: NodeId, num_waiting: int, reward: float) -> None:
        self._places: dict[bool, Place] = {ENTRANCE: (node_id, ENTRANCE), EXIT: (node_id, EXIT)}
        self.walks = {
            side: empty_walk(place, units=_UNITS_MAX) for side, place in self._places.items()
        }
        if num_waiting > 0:
            self.walks[EXIT] = empty_walk((node_id, EXIT), units=num_waiting, cost=-reward)
        self.detour: Detour | None = None
        self.num_wanted = 0
        """Units that are welcome at this node's entrance."""

    def prolong(self, walk: Walk, side: bool, cost: float, units: int) -> None:  # noqa: FBT001
        """Try the walk with one step more, to this node's `side`."""
        place = self._places[side]
        total = walk.costs[-1] + cost
        if total >= self.walks[side].costs[-1] - 1e-9 or len(walk.places) >= MAX_STEPS:
            return
        if place in walk.places:
            self._found(closed(walk, place, cost, units))
            return
        longer = self.walks[side] = walk.to(place, cost, units)
        if side == ENTRANCE and self.num_wanted > 0 and walk.costs[0] < 0:
            units = min(longer.units, self.num_wanted)
            self._found(Detour(longer.places, longer.cost, units, closed=False))

    def _found(self, detour: Detour) -> None:
        best = self.detour.cost if self.detour is not None else -1e-9
        if detour.cost < best:
            self.detour = detour
