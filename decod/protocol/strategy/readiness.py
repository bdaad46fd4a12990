"""CAN TAKE: who may be sent microbatches of the iteration (GWTF V-E).

After a commit a node tells an upstream peer that it can take microbatches once every node behind
it, on the flows that come from that peer, has said so. The data nodes, at the sinks, begin.
"""

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Send
from decod.protocol.core.messages import CanTake
from decod.protocol.flows.building import DataFlows, RelayFlows


class Readiness:
    """One iteration's CAN TAKE, received and sent."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ready: set[NodeId] = set()
        self._told: set[NodeId] = set()

    def reset(self) -> None:
        """Another iteration has begun."""
        self._ready.clear()
        self._told.clear()

    def peer_ready(self, peer: NodeId) -> None:
        self._ready.add(peer)

    def awaited(self, flows: RelayFlows | DataFlows) -> set[NodeId]:
        """Return the next nodes of this node's flows that have not said CAN TAKE."""
        if isinstance(flows, RelayFlows):
            return {entry.downstream for entry in flows.entries.values()} - self._ready
        return {granted.peer for granted in flows.forwarding.values()} - self._ready

    def tell(self, flows: RelayFlows | DataFlows) -> list[Effect]:
        """Tell each upstream peer, once, when all that lies behind its flows is ready."""
        pairs = flows.outflows.paired
        entries = flows.entries if isinstance(flows, RelayFlows) else {}
        waiting = {
            upstream
            for flow_id, upstream in pairs.items()
            if flow_id in entries
            and entries[flow_id].downstream not in self._ready
            # Nobody waits for a node that was lost: others take its place.
            and entries[flow_id].downstream in self._context.view
        }
        tell = sorted(set(pairs.values()) - waiting - self._told)
        self._told.update(tell)
        return [Send(upstream, CanTake(self._context.iteration)) for upstream in tell]
