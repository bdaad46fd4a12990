"""The draft's first units, built from the sinks backwards (GWTF V-C, Request Flow, in bulk).

A node with units on their way to a sink that nobody sends it yet (unpaired outflow) offers them to
the previous stage, with their cost. A node with room asks for the cheapest, its link included, and
offers what it has asked for at once, before it is answered: so offers run ahead, one stage a round,
and requests follow. A request waits until the node that got it knows what it has. The end comes
after as many rounds as that takes, and a few more: what has no other half by then is let go.
"""

from dataclasses import dataclass, field

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages.routing_messages import DraftOffer, RequestUnits, UnitsAnswer
from decod.protocol.flows.negotiation.draft_changes import Changes
from decod.protocol.flows.negotiation.draft_links import DraftLinks
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
    """One node's part in building."""

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

    def received(self, sender: NodeId, message: BuildMessage) -> list[Effect]:
        match message:
            case DraftOffer():
                known = self._offers.get(sender)
                if sender in self.links.outward and (
                    known is None or message.sequence > known.sequence
                ):
                    self._offers[sender] = _Offer(message.sequence, message.units, message.cost)
                return []
            case RequestUnits():
                answer = self._answers.get(sender)
                if answer is not None and answer.request_id >= message.request_id:
                    return [Send(sender, answer)] if answer.request_id == message.request_id else []
                if sender in self.links.inward:
                    self._waiting[sender] = message
                return []
            case UnitsAnswer():
                return self._answered(sender, message)

    def _answered(self, sender: NodeId, answer: UnitsAnswer) -> list[Effect]:
        request = self._pending.get(sender)
        if request is None or request.request_id != answer.request_id:
            return []
        del self._pending[sender]
        self.changes.expected -= request.units
        units = min(answer.units, request.units)
        if units > 0:
            num_used = self.links.num_out
            self._cost = (self._cost * num_used + request.cost * units) / (num_used + units)
            self.links.outward[sender].grow(units)
        return []

    def tick(self) -> list[Effect]:
        """Answer, ask, offer."""
        repeats = self._repeat()
        if not self.active:
            return repeats + self._refuse_all()
        self.ticks_left -= 1
        return repeats + self._answer() + self._ask() + self._offer()

    @property
    def _surplus(self) -> int:
        """Units on their way to a sink that nobody sends this node yet."""
        if self.position.data:
            return self.changes.room_as_sink
        return self.changes.num_missing

    def _answer(self) -> list[Effect]:
        effects: list[Effect] = []
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
            effects.append(Send(sender, answer))
        return effects

    def _refuse_all(self) -> list[Effect]:
        waiting, self._waiting = self._waiting, {}
        effects: list[Effect] = []
        for sender, request in waiting.items():
            answer = self._answers[sender] = UnitsAnswer(self.view_version, request.request_id, 0)
            effects.append(Send(sender, answer))
        return effects

    def _repeat(self) -> list[Effect]:
        """Repeat what nobody has answered, beyond the end too: room is kept for the answer."""
        effects: list[Effect] = []
        for peer, request in self._pending.items():
            request.age += 1
            if request.age % _REPEAT_TICKS == 0:
                repeat = RequestUnits(self.view_version, request.request_id, request.units)
                effects.append(Send(peer, repeat))
        return effects

    def _ask(self) -> list[Effect]:
        effects: list[Effect] = []
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
            effects.append(Send(peer, RequestUnits(self.view_version, self._next_id, units)))
            self._next_id += 1
        return effects

    def _offer(self) -> list[Effect]:
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
            return []
        self._offered = offer
        self._sequence += 1
        message = DraftOffer(self.view_version, self._sequence, *offer)
        return [Send(peer, message) for peer in self.position.previous]
