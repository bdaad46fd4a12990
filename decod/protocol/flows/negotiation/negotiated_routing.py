"""The routing `flow`, decod's own: nodes build a draft, improve it, and settle it into flows.

The draft begins with what the view before has left of it, or with nothing; it is improved until it
is wanted, and is then settled into flows.
"""

from collections.abc import Mapping
from random import Random
from typing import ClassVar, get_args

from typing_extensions import override

from decod.ids import FlowId, NodeId
from decod.protocol.core.compute_queue import ComputeQueue
from decod.protocol.core.messages.routing_messages import (
    Claim,
    Claimed,
    Claims,
    Install,
    Installed,
    Routes,
    Settle,
)
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.negotiation.draft import Draft, DraftMessage
from decod.protocol.flows.negotiation.settling import Settling, SettlingMessage
from decod.protocol.flows.position import Position
from decod.protocol.flows.searching import Search, SearchingRouting


class Negotiation:
    """One node's part, for one version of the view."""

    BEGINS_WITH_FLOWS: ClassVar[bool] = False
    MESSAGES: ClassVar[tuple[type, ...]] = (*get_args(DraftMessage), *get_args(SettlingMessage))

    def __init__(
        self,
        position: Position,
        *,
        view_version: int,
        settler: NodeId,
        compute: ComputeQueue,
        rng: Random,
        previous: "Negotiation | None" = None,
    ) -> None:
        self.draft = Draft(position, view_version, rng)
        self.settling = Settling(position, self.draft, view_version, settler, compute)
        if previous is not None:
            self.draft.carry_over(previous.draft)

    @property
    def flows(self) -> Mapping[FlowId, tuple[NodeId, ...]]:
        """At a data node: the relays that each of its settled flows goes through, in order."""
        return {flow_id: flow.path for flow_id, flow in self.settling.decided.items()}

    def begin_with(self, flows: RelayFlows | DataFlows) -> None:
        """Leave the first flows as they are: the draft is built by itself (`DraftBuilding`)."""

    def end(self) -> None:
        """Wait for nothing any more: the view is over."""
        if self.settling.here is not None:
            self.settling.here.give_up()

    def tick(self) -> None:
        """Do what a node does once in each round."""
        self.draft.tick()
        self.settling.tick()

    def received(self, sender: NodeId, message: DraftMessage | SettlingMessage) -> None:
        """Take in a peer's message of this view."""
        match message:
            case Settle() | Claim() | Claimed() | Claims() | Routes() | Install() | Installed():
                self.settling.received(sender, message)
            case _:
                self.draft.received(sender, message)

    def settle(self, epoch: int) -> None:
        """At a data node: end the search, make flows of the draft."""
        self.settling.begin(epoch)


class FlowRouting(SearchingRouting):
    """Flows over which an iteration is short. A new view goes on with the draft of the last."""

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
    ) -> Negotiation:
        return Negotiation(
            position,
            view_version=view_version,
            settler=settler,
            compute=compute,
            rng=rng,
            previous=previous if isinstance(previous, Negotiation) else None,
        )
