"""GWTF's own search for flows (V-C), as one node takes part in it.

It begins with the first flows, which Request Flow has built (`building`). From then on each relay
looks for better hops among the nodes of its stage (`hop_search`), and changes them with the
consent of all concerned (`gwtf_changes`: Request Change, Request Redirect), sometimes for the worse
(`annealing`). Nobody knows a flow as a whole: each node has its hop (`hops`), of its own version,
and a request for another version is refused. What is found is settled like a draft of decod's own
search, except that it consists of flows already: nobody decides whose they become.

What a node has answered and decided it remembers as long as the view's version lasts. In a new view
the search begins anew, with the first flows of that view.

Deviations: those of the modules above, in their docstrings; and settling, for which the paper has
no need, because its microbatches find their way hop by hop.
"""

from random import Random
from typing import ClassVar, get_args

from decod.ids import FlowId, NodeId
from decod.protocol.core.effects import Effect
from decod.protocol.core.messages.routing_messages import (
    ExchangeHops,
    GwtfMessage,
    HopsAnswer,
    HopsDecision,
    PeerFlows,
    PeerQuery,
    RequestRedirect,
)
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.gwtf.annealing import TEMPERATURE, Annealing, cost_unit
from decod.protocol.flows.gwtf.gwtf_changes import HopChanges
from decod.protocol.flows.gwtf.hop_search import HopSearch
from decod.protocol.flows.gwtf.hops import FlowHops, build_ticks
from decod.protocol.flows.negotiation.settling import Settling, SettlingMessage
from decod.protocol.flows.position import Position


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

    def tick(self) -> list[Effect]:
        """Do what a node does once in each round."""
        self._ticks_left -= 1
        effects = self.changes.tick()
        if not self.hops.frozen and self._ticks_left < 0 and not self.hops.position.data:
            effects += self.search.tick()
        return effects + self.settling.tick()

    def received(self, sender: NodeId, message: GwtfMessage | SettlingMessage) -> list[Effect]:
        """Take in a peer's message of this view."""
        match message:
            case PeerQuery():
                return self.search.queried(sender)
            case PeerFlows():
                return self.search.replied(sender, message)
            case ExchangeHops() | RequestRedirect():
                return self.changes.requested(sender, message, refuse=self.hops.frozen)
            case HopsAnswer():
                return self.changes.answered(sender, message) + self.settling.go_on()
            case HopsDecision():
                return self.changes.decided(sender, message) + self.settling.go_on()
            case _:
                return self.settling.received(sender, message)

    def settle(self, epoch: int) -> list[Effect]:
        """At a data node: have the flows, as they are now, used from an opening on."""
        return self.settling.begin(epoch)
