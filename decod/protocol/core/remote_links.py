"""What a data node has heard of links that are not its own.

Claims that come home gather what the links on their ways cost, and how fast the relays there are
(`routing.settling`). That is kept beyond the view in which it was heard: whoever has to choose at
once who takes a lost relay's place knows then which of them has good links.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from decod.ids import NodeId
from decod.planner.graph import Link
from decod.protocol.core.messages.negotiation_messages import Hop


@dataclass(slots=True)
class RemoteLinks:
    """Costs of links by equation (1), as last heard, and how long nodes take for a pass."""

    _costs_s: dict[Link, float] = field(default_factory=dict)
    _compute_s: dict[NodeId, float] = field(default_factory=dict)

    def heard(self, hops: Iterable[Hop]) -> None:
        """Take in what a claim has gathered."""
        for hop in hops:
            self._compute_s[hop.node_id] = hop.compute_s
            self._costs_s.update({(hop.node_id, peer): cost for peer, cost in hop.costs})
            self._costs_s.update({(peer, hop.node_id): cost for peer, cost in hop.inward})

    def forget_others(self, members: Container[NodeId]) -> None:
        """Forget all links but those between these nodes."""
        costs_s = self._costs_s.items()
        self._costs_s = {(a, b): cost for (a, b), cost in costs_s if a in members and b in members}
        self._compute_s = {k: v for k, v in self._compute_s.items() if k in members}

    def cost_s(self, begin: NodeId, end: NodeId) -> float | None:
        """Return d(i, j); None: nothing was heard of that link."""
        return self._costs_s.get((begin, end))

    def compute_s(self, node_id: NodeId) -> float | None:
        """Return a node's mean time for a pass; None: nothing was heard of it."""
        return self._compute_s.get(node_id)
