"""GWTF's own search for flows (V-A to V-C), as one node takes part in it: the algorithm `gwtf`.

Flows are built hop by hop, back to front, for one data node each (`gwtf_build`: Request Flow). A
node that can't get more looks for better hops among the nodes of its stage (`gwtf_search`), and
changes them with the consent of all concerned (`gwtf_changes`: Request Change, Request Redirect),
sometimes for the worse (`gwtf_annealing`). Nobody knows a flow as a whole: each node has its hop
(`gwtf_hops`), of its own version, and a request for another version is refused.

In this module: what a view leaves to the next one, and the end. In a new view two neighbours first
tell each other which links they still have; what one of them lacks is dropped, so that a change
which the new view cut short leaves nothing half done, and so are flows' hops at nodes that are
gone. The open ends are built on like any others. When the flows are wanted, each data node sends
a trace along each of its own; nodes that it passes hold still, and the way that it took is the
flow's path. A trace waits where a change is under way.

What a node has answered and decided it remembers as long as the view's version lasts.

Deviations: those of the modules above, in their docstrings; and the trace, for which the paper has
no need, because its microbatches find their way hop by hop.
"""

from dataclasses import dataclass, field
from random import Random

from decod.ids import FlowId, NodeId
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages.gwtf import (
    ExchangeHops,
    FlowTrace,
    GwtfMessage,
    HopsAnswer,
    HopsDecision,
    PeerFlows,
    PeerQuery,
    RequestRedirect,
    StandingHops,
)
from decod.protocol.core.messages.negotiation import HOPS_MAX
from decod.protocol.flows.gwtf.annealing import TEMPERATURE, Annealing, cost_unit
from decod.protocol.flows.gwtf.building import BuildMessage, FlowBuild
from decod.protocol.flows.gwtf.changes import HopChanges
from decod.protocol.flows.gwtf.hop_search import HopSearch
from decod.protocol.flows.gwtf.hops import FlowHops
from decod.protocol.flows.position import Position

_REPEAT_TICKS = 4
_TRACE_TICKS = 10
"""A trace that has not come home after so long is sent again."""


class GwtfNegotiation:
    """One node's part, for one version of the view."""

    def __init__(
        self,
        position: Position,
        *,
        view_version: int,
        rng: Random,
        previous: "GwtfNegotiation | None" = None,
        temperature: float = TEMPERATURE,
    ) -> None:
        self.hops = FlowHops(position)
        if previous is not None:
            self.hops.carry_over(previous.hops)
        if position.data:
            self.hops.fill_slots()
        self.standing = _Standing(position, self.hops, view_version)
        self.build = FlowBuild(position, self.hops, view_version)
        self.annealing = Annealing(rng, cost_unit(position), temperature)
        self.changes = HopChanges(position, self.hops, self.build, self.annealing, view_version)
        self.search = HopSearch(
            position, self.hops, self.build, self.changes, self.annealing, view_version, rng
        )
        self.traces = _Traces(position, self.hops, view_version)

    @property
    def flows(self) -> dict[FlowId, tuple[NodeId, ...]]:
        """At a data node: the relays that each flow whose trace came home goes through."""
        return self.traces.flows

    def tick(self) -> list[Effect]:
        """Do what a node does once in each round."""
        effects = self.standing.tick()
        effects += self.changes.tick()
        self.build.active = not self.traces.held
        effects += self.build.tick()
        if not self.traces.held:
            effects += self.search.tick()
        return effects + self.traces.tick()

    def received(self, sender: NodeId, message: BuildMessage | GwtfMessage) -> list[Effect]:
        """Take in a peer's message of this view."""
        match message:
            case PeerQuery():
                return self.search.queried(sender)
            case PeerFlows():
                return self.search.replied(sender, message)
            case ExchangeHops() | RequestRedirect():
                return self.changes.requested(sender, message, refuse=self.traces.held)
            case HopsAnswer():
                return self.changes.answered(sender, message)
            case HopsDecision():
                return self.changes.decided(sender, message)
            case StandingHops():
                return self.standing.told(sender, message)
            case FlowTrace():
                return self.traces.passing(sender, message)
            case _:
                return self.build.received(sender, message)

    def settle(self, epoch: int) -> list[Effect]:
        """At a data node: end the search, find out the ways of the flows."""
        return self.traces.begin(epoch)


class _Standing:
    """What the view before has left: both ends of a link must still have it."""

    def __init__(self, position: Position, hops: FlowHops, view_version: int) -> None:
        self._hops = hops
        self._view_version = view_version
        self._neighbours = {*position.previous, *position.next}
        self._outward: dict[NodeId, set[int]] = {}
        self._inward: dict[NodeId, set[int]] = {}
        self._age = 0
        for hop in hops.hops.values():
            if hop.next is not None and hop.next.peer in self._neighbours:
                self._outward.setdefault(hop.next.peer, set()).add(hop.next.number)
            if hop.upstream in self._neighbours and hop.upstream is not None:
                self._inward.setdefault(hop.upstream, set()).add(hop.number)
        hops.unheard |= self._outward.keys() | self._inward.keys()

    def tick(self) -> list[Effect]:
        """Tell all that have not answered."""
        self._age += 1
        if self._age % _REPEAT_TICKS != 1:
            return []
        return [self._tell(peer, answer=False) for peer in sorted(self._hops.unheard)]

    def told(self, sender: NodeId, message: StandingHops) -> list[Effect]:
        if sender not in self._neighbours:
            return []
        if sender in self._hops.unheard:
            self._hops.unheard.discard(sender)
            self._compare(sender, message)
        return [] if message.answer else [self._tell(sender, answer=True)]

    def _tell(self, peer: NodeId, *, answer: bool) -> Effect:
        outward = tuple(sorted(self._outward.get(peer, ())))
        inward = tuple(sorted(self._inward.get(peer, ())))
        return Send(peer, StandingHops(self._view_version, outward, inward, answer))

    def _compare(self, sender: NodeId, message: StandingHops) -> None:
        """Drop the links that the other end has not. Nothing has changed them since the begin."""
        for number in self._outward.get(sender, set()) - {*message.inward}:
            hop = self._hops.with_next(sender, number)
            if hop is not None:
                self._hops.lose_next(hop)
        for number in self._inward.get(sender, set()) - {*message.outward}:
            hop = self._hops.hops.get(number)
            if hop is not None and hop.upstream == sender:
                self._hops.lose_upstream(hop)


@dataclass(slots=True)
class _Traces:
    """Traces of flows, at the data node that sends them and at those that they pass."""

    position: Position
    hops: FlowHops
    view_version: int
    held: bool = False
    """A trace has passed, or was sent: this node's hops stand still."""
    flows: dict[FlowId, tuple[NodeId, ...]] = field(default_factory=dict)
    epoch: int = 0
    _age: int = 0
    _begun: bool = False
    _waiting: dict[FlowId, FlowTrace] = field(default_factory=dict)

    def begin(self, epoch: int) -> list[Effect]:
        self._enter(epoch)
        self._begun = True
        return []

    def tick(self) -> list[Effect]:
        """Let traces go on where no change is under way; send those again that got lost."""
        effects: list[Effect] = []
        for flow_id, trace in list(self._waiting.items()):
            hop = self.hops.hops.get(trace.number)
            if hop is not None and not self.hops.free(hop):
                continue
            del self._waiting[flow_id]
            if hop is not None and hop.next is not None:
                path = trace.path if self.position.data else (*trace.path, self.position.node_id)
                effects.append(self._send(flow_id, hop.next.peer, hop.next.number, path))
        if self._begun:
            if self._age % _TRACE_TICKS == 0:
                self._wait_for_own()
            self._age += 1
        return effects

    def passing(self, sender: NodeId, trace: FlowTrace) -> list[Effect]:
        """Note a trace that has come along a hop; at home, note the flow's path."""
        if trace.epoch < self.epoch:
            return []
        if trace.epoch > self.epoch:
            self._enter(trace.epoch)
        hop = self.hops.hops.get(trace.number)
        if hop is None or hop.upstream != sender or hop.data_node != trace.flow_id.data_node:
            return []
        if self.position.data:
            self.flows[trace.flow_id] = trace.path
        elif len(trace.path) < HOPS_MAX and self.position.node_id not in trace.path:
            self._waiting[trace.flow_id] = trace
        return []

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        self.held = True
        self._begun = False
        self.flows.clear()
        self._waiting.clear()

    def _wait_for_own(self) -> None:
        """Begin a trace at each source whose flow is not home yet."""
        node_id = self.position.node_id
        for hop in self.hops.hops.values():
            flow_id = FlowId(node_id, hop.number)
            if hop.upstream == node_id and hop.next is not None and flow_id not in self.flows:
                self._waiting[flow_id] = FlowTrace(
                    self.view_version, self.epoch, flow_id, hop.number, ()
                )

    def _send(self, flow_id: FlowId, peer: NodeId, number: int, path: tuple[NodeId, ...]) -> Effect:
        return Send(peer, FlowTrace(self.view_version, self.epoch, flow_id, number, path))
