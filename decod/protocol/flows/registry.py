"""All routings that a run file can name. Another one is a class, and a line here."""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType

from typing_extensions import override

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.flows.building import FlowOffer
from decod.protocol.flows.gwtf.gwtf_routing import GwtfRouting
from decod.protocol.flows.negotiation.negotiated_routing import FlowRouting
from decod.protocol.flows.routing import Routing


class GreedyRouting(Routing):
    """Asks the nearest node of the next stage that has room; flows stay as they were built."""

    @override
    def price_s(self, peer: NodeId, offer: FlowOffer, num_uses: int) -> float:
        return self._context.links.cost_s(peer)


ROUTINGS: Mapping[str, type[Routing]] = MappingProxyType(
    {
        "flow": FlowRouting,
        "gwtf": GwtfRouting,
        "greedy": GreedyRouting,
    }
)
"""By the name that `protocol.routing` has in a run file. The first is the default."""


def make_routing(context: Context, rng: Random) -> Routing:
    """Return a node's routing, as the run's protocol names it."""
    return ROUTINGS[context.run.protocol.routing](context, rng)
