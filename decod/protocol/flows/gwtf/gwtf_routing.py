"""The routing `gwtf`: the paper's own search for flows (V-C), as one node takes part in it.

The search begins with the first flows, which Request Flow has built (`building`). From then on each
relay looks for better hops among the nodes of its stage (`HopSearch`), and changes them with the
consent of all concerned (`HopChanges`: Request Change, Request Redirect), sometimes for the worse
(`Annealing`). Nobody knows a flow as a whole: each node has its hop (`FlowHops`), of its own
version, and a request for another version is refused. What is found is settled like a draft of
decod's own search, except that it consists of flows already: nobody decides whose they become.

What a node has answered and decided it remembers as long as the view's version lasts. In a new view
the search begins anew, with the first flows of that view.

Deviations: those of the machines above, in their docstrings; and settling, for which the paper has
no need, because its microbatches find their way hop by hop.
"""

from dataclasses import dataclass, field
from random import Random
from typing import ClassVar, get_args

from typing_extensions import override

from decod.ids import FlowId, NodeId
from decod.planner.graph import Objective
from decod.protocol.core.compute_queue import ComputeQueue
from decod.protocol.core.messages.routing_messages import (
    PEER_FLOWS_MAX,
    ExchangeHops,
    GwtfMessage,
    HopsAnswer,
    HopsDecision,
    LinkUse,
    PeerFlow,
    PeerFlows,
    PeerQuery,
    RequestRedirect,
)
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.gwtf.hops import (
    TEMPERATURE,
    Annealing,
    FlowHop,
    FlowHops,
    HopChanges,
    build_ticks,
    cost_unit,
    difference,
)
from decod.protocol.flows.negotiation.settling import Settling, SettlingMessage
from decod.protocol.flows.position import Position
from decod.protocol.flows.searching import Search, SearchingRouting

_REPLY_TICKS = 4
"""Answers to a query are waited for this long."""

_CHANGES_MAX = 4
"""Most changes asked for after one query. With the objective MAX one: each alters what the others
would save."""

_PAUSE_TICKS_MIN = 2
_PAUSE_TICKS_MAX = 16
"""The longest rest, after a find and after many queries without one."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A change that this node could ask for."""

    delta: float
    peer: NodeId
    theirs: PeerFlow
    own: FlowHop | None
    """None: a redirect."""

    @property
    def key(self) -> tuple[float, NodeId, FlowId, int]:
        own = self.own.number if self.own else 0
        return (self.delta, self.peer, FlowId(self.theirs.data_node, self.theirs.number), own)


@dataclass(slots=True)
class HopSearch:
    """One node's search.

    It queries all nodes of its stage about their flows, and looks for two things: a flow to the
    same sink whose next hop it could exchange with one of its own (Request Change), and, if it has
    room, one that would be cheaper through itself (Request Redirect). It asks for the best changes
    that do not meet on a hop; if none is an improvement, for one at random, if annealing accepts
    it. Then it rests for a few ticks, drawn at random, so that nodes that refused each other meet
    again at other times; longer and longer while it finds nothing.
    """

    position: Position
    hops: FlowHops
    changes: HopChanges
    annealing: Annealing
    view_version: int
    rng: Random
    _replies: dict[NodeId, PeerFlows] = field(default_factory=dict)
    _waiting: set[NodeId] = field(default_factory=set)
    _age: int = 0
    _pause: int = 0
    _pause_max: int = _PAUSE_TICKS_MIN

    def tick(self) -> None:
        if self._waiting:
            self._age += 1
            if self._age > _REPLY_TICKS:
                self._choose()
        elif not self.changes.asking:
            if self._replies:
                self._choose()
            elif self._pause > 0:
                self._pause -= 1
            else:
                self._query()

    def queried(self, sender: NodeId) -> None:
        """Tell a peer of this node's flows."""
        position = self.position
        hops = self.hops
        if sender not in position.stage_peers:
            return
        flows = tuple(
            PeerFlow(
                number=hop.number,
                version=hop.version,
                data_node=hop.data_node,
                upstream=hop.upstream,
                upstream_cost=position.cost_from(hop.upstream),
                next=hop.next,
                open=not hop.locked,
            )
            for hop in hops
        )
        costs = tuple((peer, position.cost_to(peer)) for peer in position.next)
        position.out.send(sender, PeerFlows(self.view_version, flows[:PEER_FLOWS_MAX], costs))

    def replied(self, sender: NodeId, reply: PeerFlows) -> None:
        if sender in self._waiting:
            self._waiting.discard(sender)
            self._replies[sender] = reply

    def _query(self) -> None:
        if self.hops.room <= 0 and not self.hops.hops:
            return
        self._age = 0
        self._waiting = set(self.position.stage_peers)
        self.position.out.send_all(sorted(self._waiting), PeerQuery(self.view_version))

    def _choose(self) -> None:
        """Ask for the best changes, or for a bad one that annealing accepts."""
        candidates = self._exchanges() + self._redirects()
        self._waiting.clear()
        self._replies.clear()
        better = [c for c in candidates if c.delta < 0 and self.annealing.accepts(c.delta)]
        if not better and candidates:
            worse = self.rng.choice(candidates)
            better = [worse] if self.annealing.accepts(worse.delta) else []
        limit = 1 if self.position.objective is Objective.MAX else _CHANGES_MAX
        asked = False
        used: set[tuple[NodeId, FlowId]] = set()
        room = self.hops.room
        for candidate in sorted(better, key=lambda candidate: candidate.key):
            theirs = candidate.theirs
            ends = {(candidate.peer, FlowId(theirs.data_node, theirs.number))}
            if candidate.own is not None:
                ends.add((self.position.node_id, candidate.own.name))
            if ends & used or limit == 0 or (candidate.own is None and room == 0):
                continue
            used |= ends
            limit -= 1
            room -= candidate.own is None
            if self._ask(candidate):
                asked = True
        self._pause_max = _PAUSE_TICKS_MIN if asked else min(2 * self._pause_max, _PAUSE_TICKS_MAX)
        self._pause = self.rng.randint(1, self._pause_max)

    # --- what could be changed ----------------------------------------------------------------

    def _to(self, peer: NodeId) -> LinkUse:
        return LinkUse(self.position.cost_to(peer), self.hops.num_to(peer))

    def _exchanges(self) -> list[_Candidate]:
        """Return all exchanges of next hops with flows to the same sink."""
        own = [hop for hop in self.hops if not hop.locked]
        candidates: list[_Candidate] = []
        for peer, reply in sorted(self._replies.items()):
            theirs = _Uses(reply)
            for hop in own:
                for flow in theirs.flows:
                    if (
                        not flow.open
                        or flow.data_node != hop.data_node
                        or flow.next.peer == hop.next.peer
                        or flow.next.peer not in self.position.next
                        or hop.next.peer not in theirs.costs
                    ):
                        continue
                    delta = difference(
                        self.position.objective,
                        less=[self._to(hop.next.peer), theirs.to(flow.next.peer)],
                        more=[self._to(flow.next.peer), theirs.to(hop.next.peer)],
                    )
                    candidates.append(_Candidate(delta, peer, flow, hop))
        return candidates

    def _redirects(self) -> list[_Candidate]:
        """Return all flows of this stage that could go through this node instead."""
        if self.hops.room <= 0:
            return []
        candidates: list[_Candidate] = []
        for peer, reply in sorted(self._replies.items()):
            theirs = _Uses(reply)
            for flow in theirs.flows:
                reached = flow.upstream in self.position.previous
                if not (flow.open and reached and flow.next.peer in self.position.next):
                    continue
                delta = difference(
                    self.position.objective,
                    less=[theirs.come_from(flow), theirs.to(flow.next.peer)],
                    more=[*self._through(flow)],
                )
                candidates.append(_Candidate(delta, peer, flow, None))
        return candidates

    def _through(self, flow: PeerFlow) -> tuple[LinkUse, LinkUse]:
        cost = self.position.cost_from(flow.upstream)
        return LinkUse(cost, self.hops.num_from(flow.upstream)), self._to(flow.next.peer)

    def _ask(self, candidate: _Candidate) -> bool:
        flow = candidate.theirs
        own = candidate.own
        if own is None:
            redirect = RequestRedirect(
                view_version=self.view_version,
                change_id=self.changes.next_id,
                data_node=flow.data_node,
                number=self.hops.new_number(),
                other=candidate.peer,
                other_number=flow.number,
                other_version=flow.version,
                upstream=flow.upstream,
                next=flow.next,
                more=self._through(flow),
            )
            return self.changes.ask(redirect)
        exchange = ExchangeHops(
            view_version=self.view_version,
            change_id=self.changes.next_id,
            data_node=own.data_node,
            number=own.number,
            next=own.next,
            other=candidate.peer,
            other_number=flow.number,
            other_version=flow.version,
            other_next=flow.next,
            less=self._to(own.next.peer),
            more=self._to(flow.next.peer),
        )
        return self.changes.ask(exchange)


class _Uses:
    """A peer's links, by what it said."""

    def __init__(self, reply: PeerFlows) -> None:
        self.costs = dict(reply.costs)
        self.flows = [flow for flow in reply.flows if flow.next.peer in self.costs]

    def to(self, peer: NodeId) -> LinkUse:
        num_flows = sum(flow.next.peer == peer for flow in self.flows)
        return LinkUse(self.costs[peer], num_flows)

    def come_from(self, flow: PeerFlow) -> LinkUse:
        num_flows = sum(other.upstream == flow.upstream for other in self.flows)
        return LinkUse(flow.upstream_cost, num_flows)


class GwtfSearch:
    """One node's part, for one version of the view."""

    BEGINS_WITH_FLOWS: ClassVar[bool] = True
    MESSAGES: ClassVar[tuple[type, ...]] = (*get_args(GwtfMessage), *get_args(SettlingMessage))

    def __init__(
        self,
        position: Position,
        *,
        view_version: int,
        settler: NodeId,
        rng: Random,
        temperature: float = TEMPERATURE,
    ) -> None:
        self.hops = FlowHops(position)
        self.annealing = Annealing(rng, cost_unit(position), temperature)
        self.changes = HopChanges(position, self.hops, self.annealing, view_version)
        self.search = HopSearch(
            position, self.hops, self.changes, self.annealing, view_version, rng
        )
        self.settling = Settling(position, self.hops, view_version, settler)
        self._ticks_left = build_ticks(position)

    @property
    def flows(self) -> dict[FlowId, tuple[NodeId, ...]]:
        """At a data node: the relays that each of its settled flows goes through, in order."""
        return {flow_id: flow.path for flow_id, flow in self.settling.decided.items()}

    def begin_with(self, flows: RelayFlows | DataFlows) -> None:
        """Take up first flows that have become whole since it was called last."""
        self.hops.begin_with(flows)

    def end(self) -> None:
        """Wait for nothing: flows are what was claimed."""

    def tick(self) -> None:
        """Do what a node does once in each round."""
        self._ticks_left -= 1
        self.changes.tick()
        if not self.hops.frozen and self._ticks_left < 0 and not self.hops.position.data:
            self.search.tick()
        self.settling.tick()

    def received(self, sender: NodeId, message: GwtfMessage | SettlingMessage) -> None:
        """Take in a peer's message of this view."""
        match message:
            case PeerQuery():
                self.search.queried(sender)
            case PeerFlows():
                self.search.replied(sender, message)
            case ExchangeHops() | RequestRedirect():
                self.changes.requested(sender, message, refuse=self.hops.frozen)
            case HopsAnswer():
                self.changes.answered(sender, message)
                self.settling.go_on()
            case HopsDecision():
                self.changes.decided(sender, message)
                self.settling.go_on()
            case _:
                self.settling.received(sender, message)

    def settle(self, epoch: int) -> None:
        """At a data node: have the flows, as they are now, used from an opening on."""
        self.settling.begin(epoch)


class GwtfRouting(SearchingRouting):
    """Request Change and Request Redirect, with annealing, on the flows of Request Flow."""

    @staticmethod
    @override
    def make_search(
        position: Position,
        *,
        view_version: int,
        settler: NodeId,
        compute: ComputeQueue,
        rng: Random,
        previous: Search | None,
    ) -> GwtfSearch:
        return GwtfSearch(position, view_version=view_version, settler=settler, rng=rng)
