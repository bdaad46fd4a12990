"""First flows of one node, for tests of what goes along them."""

from random import Random

from decod.protocol.core.context import Context
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.registry import make_routing


def relay_flows(context: Context) -> RelayFlows:
    """Return a relay's, at the prices of the routing that its run names."""
    return RelayFlows(0.0, context, make_routing(context, Random(0)).price_s)


def data_flows(context: Context) -> DataFlows:
    """Return a data node's, likewise."""
    return DataFlows(0.0, context, make_routing(context, Random(0)).price_s)
