"""The routing `greedy`: each node takes the nearest, as GWTF describes SWARM's."""

from typing_extensions import override

from decod.ids import NodeId
from decod.protocol.flows.building import FlowOffer
from decod.protocol.flows.routing import Routing


class GreedyRouting(Routing):
    """Asks the nearest node of the next stage that has room; flows stay as they were built."""

    @override
    def price_s(self, peer: NodeId, offer: FlowOffer, num_uses: int) -> float:
        return self._context.links.cost_s(peer)
