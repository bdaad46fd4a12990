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
    Cycle,
    Place,
    Walk,
    closed,
    empty_walk,
)

_REFRESH_TICKS = 8
"""All walks are told again this often, whether or not they changed: messages may be lost."""

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
        self.held = False
        """A claim has passed: this node's links stand still."""
        self._view_version = view_version
        self._heard: dict[tuple[NodeId, bool], tuple[int, Walk | None]] = {}
        self._told: dict[tuple[NodeId, bool], Walk | None] = {}
        self._sequence = 0
        self._num_ticks = 0

    def carry_over(self, before: "Draft") -> None:
        """Go on from the draft of the view before, as far as its nodes are still there."""
        for outward in (False, True):
            mine = self.links.side(outward=outward)
            for peer, link in before.links.side(outward=outward).items():
                if peer in mine and link.units > 0:
                    mine[peer] = DraftLink(link.units, peer_units=None)

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
                if self.links.said(sender, message):
                    outward = not message.outward
                    return [self.links.statement(self._view_version, sender, outward=outward)]
                return []
            case ResidualWalk():
                key = (sender, message.exit)
                if message.sequence > self._heard.get(key, (0, None))[0]:
                    self._heard[key] = (message.sequence, message.walk)
                return []
            case RequestChange():
                return self.changes.requested(sender, message, refuse=self.held)
            case ChangeAnswer():
                return self.changes.answered(sender, message)
            case ChangeDecision():
                return self.changes.decided(sender, message)
            case DraftOffer() | RequestUnits() | UnitsAnswer():
                return self.build.received(sender, message)

    # --- once in each round -------------------------------------------------------------------

    def tick(self) -> list[Effect]:
        """Do what a node does once in each round."""
        self._num_ticks += 1
        effects = self.changes.tick()
        if self.held:
            self.build.active = False
        effects += self.build.tick()
        if not self.changes.any_reserved and not self.build.active:
            self._balance()
        effects += self.links.statements(self._view_version)
        if self.held:
            return effects
        cycle, walks = self._relax()
        effects += self._tell(walks)
        if cycle is not None:
            effects += self.changes.ask(cycle)
        return effects

    def _balance(self) -> None:
        """Let go of what no longer goes through; data nodes only begin and end units."""
        position, links = self.position, self.links
        if not position.data:
            links.balance(position.capacity, position.cost_to, position.cost_from)

    def _relax(self) -> tuple[Cycle | None, dict[bool, Walk]]:
        """Return the best cycle that closes here, and the cheapest walks that end here."""
        search = _Search(self.position.node_id)
        position, links = self.position, self.links
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
        return search.cycle, search.walks

    def _relax_data(self, search: "_Search") -> None:
        """Walks may change the data node where a unit begins or ends, if there is room for it."""
        room = self.changes.room_as_source
        for peer in self.position.data_peers:
            if room > 0 and (walk := self._walk(peer, EXIT)) is not None:
                search.prolong(walk, EXIT, 0.0, room)
            if (walk := self._walk(peer, ENTRANCE)) is not None:
                search.prolong(walk, ENTRANCE, 0.0, _UNITS_MAX)
        both = min(room, self.changes.room_as_sink)
        if both > 0:
            search.prolong(search.walks[ENTRANCE], EXIT, -self.position.reward, both)

    def _walk(self, peer: NodeId, side: bool) -> Walk | None:  # noqa: FBT001 - half of a place.
        return self._heard.get((peer, side), (0, None))[1]

    def _tell(self, walks: Mapping[bool, Walk]) -> list[Effect]:
        """Tell neighbours of the walks that they could prolong, where those have changed."""
        refresh = self._num_ticks % _REFRESH_TICKS == 0
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
            tell = len(walk.places) > 1 and walk.places[-2][0] != peer
            news = walk if tell else None
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

    def __init__(self, node_id: NodeId) -> None:
        self._places: dict[bool, Place] = {
            ENTRANCE: (node_id, ENTRANCE),
            EXIT: (node_id, EXIT),
        }
        self.walks = {
            side: empty_walk(place, units=_UNITS_MAX) for side, place in self._places.items()
        }
        self.cycle: Cycle | None = None

    def prolong(self, walk: Walk, side: bool, cost: float, units: int) -> None:  # noqa: FBT001
        """Try the walk with one step more, to this node's `side`."""
        place = self._places[side]
        total = walk.costs[-1] + cost
        if total >= self.walks[side].costs[-1] - 1e-9 or len(walk.places) >= MAX_STEPS:
            return
        if place in walk.places:
            cycle = closed(walk, place, cost, units)
            best = self.cycle.cost if self.cycle is not None else -1e-9
            if cycle.cost < best:
                self.cycle = cycle
            return
        self.walks[side] = walk.to(place, cost, units)
