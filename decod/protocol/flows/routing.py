"""How microbatches find their way: the one interface of all that a run file can name.

A routing belongs to one node for as long as that is in the run. `Pipeline` builds the first flows
of every view by Request Flow (`building`), whatever the routing; the routing says what an offered
flow costs there, may look for better flows beside training, and says at an opening which of these
are in use from then on. `registry` maps the names in the run file to the classes.
"""

from dataclasses import dataclass
from random import Random

from decod.ids import FlowId, NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.messages.routing_messages import RoutingMessage
from decod.protocol.flows.building import DataFlows, FlowOffer, Granted, RelayFlows


@dataclass(frozen=True, slots=True)
class KnownFlow:
    """What this node knows of a flow in use."""

    flow_id: FlowId
    path: tuple[NodeId, ...]
    """The whole way, from the data node and home again; or only the part that this node knows."""
    costs_s: tuple[float, ...]
    """d(i, j) of each hop of `path`, as it was when the flow was found."""


class Routing:
    """One node's routing. As it stands here, the first flows are of least cost, and stay.

    Args:
        context: The node's.
        rng: Source of all that a search draws.
    """

    def __init__(self, context: Context, rng: Random) -> None:
        self._context = context
        self._rng = rng
        self.deadline_s: float | None = None
        """When `overdue` has something to do."""
        self.epoch = 0
        """The settlement that is in use; 0: none."""

    @property
    def agreed_epoch(self) -> int:
        """At the leader: the settlement to use from the next opening on."""
        return self.epoch

    def price_s(self, peer: NodeId, offer: FlowOffer, num_uses: int) -> float:
        """Return what an offered flow costs from here, by which the cheapest is asked for.

        Args:
            peer: Who offers it.
            offer: What it says.
            num_uses: Flows that come from this peer already, or may still come.
        """
        links = self._context.links
        # Microbatches that share a link take turns on it.
        shared_s = num_uses * links.transfer_s(peer)
        return offer.cost_s + links.cost_s(peer, peer_compute_s=offer.compute_s) + shared_s

    def renew(self, now_s: float) -> None:
        """Begin anew in the context's view."""

    def overdue(self, now_s: float, flows: RelayFlows | DataFlows | None) -> None:
        """Do what is due, such as to take part in a search.

        Args:
            now_s: The instant.
            flows: In use at this node.
        """

    def received(self, sender: NodeId, message: RoutingMessage) -> None:
        """Take in a peer's message of the context's view."""

    def adopt(
        self,
        epoch: int,  # noqa: ARG002 - a search needs it.
        flows: RelayFlows | DataFlows,  # noqa: ARG002
    ) -> bool:
        """Use the flows of a settlement from now on. Returns whether that changes anything."""
        return False

    def carried(self) -> dict[FlowId, Granted]:
        """Return a data node's flows of an earlier view that it goes on with in this one."""
        return {}

    def known_flows(self, flows: RelayFlows | DataFlows) -> tuple[KnownFlow, ...]:
        """Return the flows in use: whole ones where they are known, else this node's hops."""
        node_id = self._context.node_id
        cost_s = self._context.links.cost_s
        if isinstance(flows, DataFlows):
            firsts = {flow_id: granted.peer for flow_id, granted in flows.complete.items()}
            return tuple(
                KnownFlow(flow_id, (node_id, first), (cost_s(first),))
                for flow_id, first in sorted(firsts.items())
            )
        return tuple(
            KnownFlow(
                flow_id,
                (upstream, node_id, flows.entries[flow_id].downstream),
                (cost_s(upstream), cost_s(flows.entries[flow_id].downstream)),
            )
            for flow_id, upstream in sorted(flows.outflows.paired.items())
            if flow_id in flows.entries
        )
