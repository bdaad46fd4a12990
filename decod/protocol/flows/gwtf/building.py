"""Request Flow (GWTF V-C): flows are built from the sinks backwards, one hop after the other.

A node with unpaired outflows tells the previous stage their number and least cost for each data
node (`FlowCost`). A node with an unpaired inflow asks for an outflow to the same data node, the
cheapest with its link included; one with room and nothing unpaired asks for the cheapest of all.
The owner gives one at no more than the cost that the asker believes, or refuses and tells the
current cost.

Written anew, and not with `protocol.flows.building`: there hops stand once they are granted, here
they are exchanged and taken back. The messages are the same.

Where the paper is silent: an unanswered request is repeated until it is answered (or the view
says that the peer is gone), and a repeat gets the same answer; offers are repeated, ever less
often, while nobody takes them up; an unpaired inflow that finds no outflow for a while goes back
to the node before (`DenyHop`), like the DENY of V-D.

Deviation: a relay with one unpaired outflow asks for another. By the paper it waits until the one
is paired; then 120 rounds are too few to fill stages whose nodes carry 15 flows each.
"""

import math
from dataclasses import dataclass, field

from decod.ids import FlowId, NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import FlowAnswer, FlowCost, RequestFlow
from decod.protocol.core.messages.gwtf import DenialNoted, DenyHop, NextHop
from decod.protocol.flows.gwtf.hops import FlowHop, FlowHops
from decod.protocol.flows.position import Position

_UNPAIRED_MAX = 2
"""A relay with so many unpaired outflows, and such that it has asked for, asks for no more."""

_REPEAT_TICKS = 4

_OFFER_TICKS_MIN = 8
_OFFER_TICKS_MAX = 64
"""Pauses between repeats of an offer that nobody takes up; each is twice the one before."""

_STUCK_TICKS = 12
"""An unpaired inflow that has found nothing for so long is given back."""

_COST_TOLERANCE = 1e-9

BuildMessage = FlowCost | RequestFlow | FlowAnswer | DenyHop | DenialNoted


@dataclass(slots=True)
class _Offer:
    cost: float
    num_unpaired: int


@dataclass(slots=True)
class _Request:
    peer: NodeId
    message: RequestFlow
    age: int = 0


@dataclass(slots=True)
class _Denial:
    peer: NodeId
    age: int = 0


@dataclass(slots=True)
class FlowBuild:
    """One node's part in building."""

    position: Position
    hops: FlowHops
    view_version: int
    active: bool = True
    num_reserved: int = 0
    """Hops that a redirect under way may bring: room for them is kept."""
    _offers: dict[tuple[NodeId, NodeId], _Offer] = field(default_factory=dict)
    """By peer and data node."""
    _requests: dict[int, _Request] = field(default_factory=dict)
    _answers: dict[tuple[NodeId, int], FlowAnswer] = field(default_factory=dict)
    _denials: dict[int, _Denial] = field(default_factory=dict)
    _denied: set[tuple[NodeId, int]] = field(default_factory=set)
    _announced: dict[NodeId, tuple[float, int]] = field(default_factory=dict)
    _offer_ticks: int = _OFFER_TICKS_MIN
    _offer_age: int = 0
    _next_id: int = 1

    @property
    def room(self) -> int:
        """At a relay: flows more that it could carry."""
        waiting: dict[NodeId, int] = {}
        for request in self._requests.values():
            data_node = request.message.data_node
            waiting[data_node] = waiting.get(data_node, 0) + 1
        for hop in self.hops.unpaired_inflows:
            if waiting.get(hop.data_node, 0) > 0:
                waiting[hop.data_node] -= 1  # What comes will go on with this one.
        expected = sum(waiting.values()) + self.num_reserved
        return self.position.capacity - len(self.hops.hops) - expected

    @property
    def seeking(self) -> bool:
        """Whether there is anything that this node asks for, or waits for."""
        return bool(self._requests) or self._best() is not None

    def received(self, sender: NodeId, message: BuildMessage) -> list[Effect]:
        match message:
            case FlowCost():
                if sender in self.position.next:
                    offer = _Offer(message.cost_s, message.num_unpaired)
                    self._offers[sender, message.data_node] = offer
                return []
            case RequestFlow():
                return self._requested(sender, message)
            case FlowAnswer():
                self._answered(sender, message)
                return []
            case DenyHop():
                return self._hop_denied(sender, message)
            case DenialNoted():
                self._denials.pop(message.number, None)
                return []

    def tick(self) -> list[Effect]:
        """Pair what fits; ask; offer; give back."""
        self.hops.pair()
        effects = self._repeat()
        while self.active and (best := self._best()) is not None:
            effects.append(self._ask(*best))
        effects += self._announce()
        effects += self._deny()
        return effects

    # --- as asker -----------------------------------------------------------------------------

    def _best(self) -> tuple[NodeId, NodeId] | None:
        """Return from whom to ask for a flow next, and to which data node."""
        wanted: dict[NodeId, int] = {}
        for hop in self.hops.unpaired_inflows:
            wanted[hop.data_node] = wanted.get(hop.data_node, 0) + 1
        for request in self._requests.values():
            data_node = request.message.data_node
            wanted[data_node] = wanted.get(data_node, 0) - 1
        anything = not self.hops.unpaired_inflows and self._may_ask_for_more()
        cost_to = self.position.cost_to
        fitting = [
            (offer.cost + cost_to(peer), peer, data_node)
            for (peer, data_node), offer in self._offers.items()
            if offer.num_unpaired > 0
            and offer.cost < math.inf
            and (anything or wanted.get(data_node, 0) > 0)
        ]
        return min(fitting)[1:] if fitting else None

    def _may_ask_for_more(self) -> bool:
        num_unpaired = len(self.hops.unpaired_outflows) + len(self._requests)
        return not self.position.data and num_unpaired < _UNPAIRED_MAX and self.room > 0

    def _ask(self, peer: NodeId, data_node: NodeId) -> Effect:
        offer = self._offers[peer, data_node]
        offer.num_unpaired -= 1
        message = RequestFlow(self.view_version, self._next_id, data_node, offer.cost)
        self._requests[self._next_id] = _Request(peer, message)
        self._next_id += 1
        return Send(peer, message)

    def _repeat(self) -> list[Effect]:
        effects: list[Effect] = []
        for request in self._requests.values():
            request.age += 1
            if request.age % _REPEAT_TICKS == 0:
                effects.append(Send(request.peer, request.message))
        for number, denial in self._denials.items():
            denial.age += 1
            if denial.age % _REPEAT_TICKS == 0:
                effects.append(Send(denial.peer, DenyHop(self.view_version, number)))
        return effects

    def _answered(self, sender: NodeId, answer: FlowAnswer) -> None:
        request = self._requests.get(answer.request_id)
        if request is None or request.peer != sender:
            return
        del self._requests[answer.request_id]
        data_node = request.message.data_node
        pending = sum(
            r.peer == sender and r.message.data_node == data_node for r in self._requests.values()
        )
        offer = self._offers[sender, data_node]
        offer.num_unpaired = max(0, answer.num_unpaired - pending)
        granted = answer.flow_id
        if granted is None:
            offer.cost = answer.cost_s
            return
        if (sender, granted.slot) in self._denied:
            return  # It was taken back before this answer came.
        next_hop = NextHop(sender, granted.slot, answer.cost_s)
        inflows = [hop for hop in self.hops.unpaired_inflows if hop.data_node == data_node]
        if inflows:
            assert inflows[0].upstream is not None
            self.hops.relink(inflows[0], inflows[0].upstream, next_hop)
        else:
            assert not self.position.data
            self.hops.add(data_node, upstream=None, next_hop=next_hop)

    # --- as owner of unpaired outflows --------------------------------------------------------

    def _outflows(self, data_node: NodeId) -> list[FlowHop]:
        """Return the unpaired outflows to a data node that may be given away, cheapest first."""
        hops = self.hops
        fitting = [h for h in hops.unpaired_outflows if h.data_node == data_node and hops.free(h)]
        return sorted(fitting, key=lambda hop: (hops.cost(hop), hop.number))

    def _offer(self, data_node: NodeId) -> tuple[float, int]:
        outflows = self._outflows(data_node)
        return self.hops.cost(outflows[0]) if outflows else math.inf, len(outflows)

    def _requested(self, sender: NodeId, request: RequestFlow) -> list[Effect]:
        key = (sender, request.request_id)
        if (known := self._answers.get(key)) is not None:
            return [Send(sender, known)]
        if sender not in self.position.previous:
            return []
        cost, num_unpaired = self._offer(request.data_node)
        flow_id = None
        if num_unpaired and cost <= request.cost_s + _COST_TOLERANCE:
            hop = self._outflows(request.data_node)[0]
            hop.upstream = sender
            hop.version += 1
            flow_id = FlowId(request.data_node, hop.number)
            num_unpaired -= 1
        answer = FlowAnswer(self.view_version, request.request_id, flow_id, cost, num_unpaired)
        self._answers[key] = answer
        return [Send(sender, answer)]

    def _announce(self) -> list[Effect]:
        """Tell the previous stage of changes, and now and then of what nobody has taken up."""
        offered = {hop.data_node for hop in self.hops.unpaired_outflows}
        self._offer_age += 1
        repeat = self._offer_age >= self._offer_ticks
        if repeat:
            self._offer_age = 0
            self._offer_ticks = min(2 * self._offer_ticks, _OFFER_TICKS_MAX)
        effects: list[Effect] = []
        for data_node in sorted(offered | self._announced.keys()):
            offer = self._offer(data_node)
            known = self._announced.get(data_node, (math.inf, 0))
            if offer != known:
                self._offer_age, self._offer_ticks = 0, _OFFER_TICKS_MIN
            elif not (repeat and offer[1] > 0):
                continue
            self._announced[data_node] = offer
            cost = FlowCost(self.view_version, data_node, *offer, compute_s=0.0)
            effects += [Send(peer, cost) for peer in self._listeners(data_node)]
        return effects

    def _listeners(self, data_node: NodeId) -> list[NodeId]:
        """Return who may take up an outflow: before the first stage, its own data node alone."""
        previous = list(self.position.previous)
        return [data_node] if data_node in previous else previous

    # --- what finds no way on -----------------------------------------------------------------

    def _deny(self) -> list[Effect]:
        """Give back unpaired inflows that have found nothing for long."""
        effects: list[Effect] = []
        for hop in [] if self.position.data else self.hops.unpaired_inflows:
            hop.num_ticks_stuck += 1
            if hop.num_ticks_stuck > _STUCK_TICKS and self.hops.free(hop):
                assert hop.upstream is not None
                self.hops.remove(hop)
                self._denials[hop.number] = _Denial(hop.upstream)
                effects.append(Send(hop.upstream, DenyHop(self.view_version, hop.number)))
        return effects

    def _hop_denied(self, sender: NodeId, message: DenyHop) -> list[Effect]:
        if sender not in self.position.next:
            return []
        hop = self.hops.with_next(sender, message.number)
        if hop is not None:
            if not self.hops.free(hop):
                return []  # It will be said again.
            self.hops.lose_next(hop)
        self._denied.add((sender, message.number))
        return [Send(sender, DenialNoted(self.view_version, message.number))]
