"""The first flows, built from the sinks backwards (GWTF V-C)."""

from dataclasses import dataclass
from typing import Annotated

from decod.ids import FlowId, NodeId
from decod.limits import STAGE_INDEX_MAX, AtMost, Cost, Duration, Number, NumFlows, Ordinal, Unique
from decod.protocol.core.messages.scopes import OfView


@dataclass(frozen=True, slots=True)
class FlowCost(OfView):
    """A node tells the previous stage what its unpaired outflows cost to the sink (GWTF V-C)."""

    view_version: Ordinal
    data_node: NodeId
    """The sink."""
    cost_s: Cost
    """Of its cheapest unpaired outflow to `data_node`; 0 at the sink itself."""
    num_unpaired: NumFlows
    """How many such outflows wait for an inflow. 0 withdraws the offer."""
    compute_s: Duration
    """The sender's time for one microbatch: c_j of equation (1)."""


@dataclass(frozen=True, slots=True)
class RequestFlow(OfView):
    """Asks a node of the next stage to pair one unpaired outflow with the sender."""

    view_version: Ordinal
    request_id: Number
    """Unique per sender within the view; a repeat gets the first answer again."""
    data_node: NodeId
    """The sink."""
    cost_s: Duration
    """What the sender believes that outflow costs. It is refused if it costs more by now."""


@dataclass(frozen=True, slots=True)
class FlowAnswer(OfView):
    """The answer to RequestFlow."""

    view_version: Ordinal
    request_id: Number
    """Of the request."""
    flow_id: FlowId | None
    """The flow that was given, or None: refused."""
    cost_s: Cost
    """Cost to the sink of the flow given; on refusal the current cost (infinite if none)."""
    num_unpaired: NumFlows
    """What the answering node has left to that data node."""
    path: Annotated[tuple[NodeId, ...], AtMost(STAGE_INDEX_MAX), Unique()] = ()
    """Relays that the given flow passes, the answering node first. None: it is the sink."""


@dataclass(frozen=True, slots=True)
class Withdraw(OfView):
    """The requester gave up waiting: if that request was granted, the outflow is unpaired again."""

    view_version: Ordinal
    request_id: Number
    """Of the request."""
