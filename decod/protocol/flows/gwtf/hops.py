"""What a node knows of the flows through it: one hop each, with where it comes from and goes on.

A hop without upstream is an *unpaired outflow* (GWTF V-C): it leads to its sink, and nobody sends
it anything. One without next is an *unpaired inflow*. A data node has two hops for each of its
slots: a source, which comes from itself, and a sink, which leads to itself; so it starts with as
many unpaired inflows and outflows, and they are paired like all others.

A hop's number is its link's name: the node before refers to the link by it. A hop that loses its
upstream gets a new number, so that nothing said of the old link can be taken for the new one.
"""

from dataclasses import dataclass, field

from decod.ids import NodeId
from decod.protocol.core.messages.gwtf import NextHop
from decod.protocol.flows.position import Position


@dataclass(slots=True)
class FlowHop:
    """One flow at one node."""

    number: int
    data_node: NodeId
    upstream: NodeId | None
    next: NextHop | None
    version: int = 0
    locked: bool = False
    """Promised to a change; no other may touch it."""
    num_ticks_stuck: int = 0
    """How long it has been an unpaired inflow."""

    @property
    def complete(self) -> bool:
        return self.upstream is not None and self.next is not None


@dataclass(slots=True)
class FlowHops:
    """All hops of one node. At a relay at most `position.capacity`."""

    position: Position
    hops: dict[int, FlowHop] = field(default_factory=dict)
    unheard: set[NodeId] = field(default_factory=set)
    """Neighbours that may not have the links which this node took over from the view before."""
    last_number: int = 0

    def new_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def add(
        self,
        data_node: NodeId,
        *,
        upstream: NodeId | None,
        next_hop: NextHop | None,
        number: int | None = None,
    ) -> FlowHop:
        number = self.new_number() if number is None else number
        hop = self.hops[number] = FlowHop(number, data_node, upstream, next_hop)
        return hop

    # --- which there are ----------------------------------------------------------------------

    @property
    def unpaired_outflows(self) -> list[FlowHop]:
        return [hop for hop in self.hops.values() if hop.upstream is None]

    @property
    def unpaired_inflows(self) -> list[FlowHop]:
        return [hop for hop in self.hops.values() if hop.next is None]

    def free(self, hop: FlowHop) -> bool:
        """Whether a hop may be changed: nothing is under way, and both its neighbours have it."""
        following = hop.next.peer if hop.next is not None else None
        return not hop.locked and hop.upstream not in self.unheard and following not in self.unheard

    def with_next(self, peer: NodeId, number: int) -> FlowHop | None:
        """Return the hop that goes on along a link."""
        for hop in self.hops.values():
            if hop.next is not None and (hop.next.peer, hop.next.number) == (peer, number):
                return hop
        return None

    def num_to(self, peer: NodeId) -> int:
        """Return f(i, j) of the link to a neighbour."""
        return sum(hop.next is not None and hop.next.peer == peer for hop in self.hops.values())

    def num_from(self, peer: NodeId) -> int:
        """Return f(i, j) of the link from a neighbour."""
        return sum(hop.upstream == peer for hop in self.hops.values())

    def cost(self, hop: FlowHop) -> float:
        """Return what a hop's flow costs from here to its sink, as far as this node has heard.

        Costs are told with offers, and not again when a later stage changes its part: only the
        costs of unpaired outflows decide anything.
        """
        assert hop.next is not None
        here = hop.next.peer == self.position.node_id
        return 0.0 if here else self.position.cost_to(hop.next.peer) + hop.next.cost

    # --- changes ------------------------------------------------------------------------------

    def remove(self, hop: FlowHop) -> None:
        del self.hops[hop.number]

    def relink(self, hop: FlowHop, upstream: NodeId, next_hop: NextHop) -> None:
        hop.upstream, hop.next = upstream, next_hop
        hop.version += 1
        hop.num_ticks_stuck = 0

    def lose_next(self, hop: FlowHop) -> None:
        """Make a hop an unpaired inflow; a source begins again, any other may be given back."""
        hop.next = None
        hop.version += 1
        if hop.upstream is None:
            self.remove(hop)

    def lose_upstream(self, hop: FlowHop) -> None:
        """Make a hop an unpaired outflow, under a new number."""
        self.remove(hop)
        if hop.next is not None:
            hop.upstream = None
            hop.number = self.new_number()
            hop.version += 1
            self.hops[hop.number] = hop

    def pair(self) -> None:
        """At a relay: let unpaired inflows go on with unpaired outflows to the same data node."""
        if self.position.data:
            return
        outflows = [hop for hop in self.unpaired_outflows if self.free(hop)]
        for inflow in self.unpaired_inflows:
            fitting = [hop for hop in outflows if hop.data_node == inflow.data_node]
            if not fitting or not self.free(inflow):
                continue
            outflow = min(fitting, key=lambda hop: (self.cost(hop), hop.number))
            assert inflow.upstream is not None
            assert outflow.next is not None
            outflows.remove(outflow)
            self.remove(outflow)
            self.relink(inflow, inflow.upstream, outflow.next)

    # --- from one view to the next ------------------------------------------------------------

    def carry_over(self, before: "FlowHops") -> None:
        """Take over what the view before has left, as far as its neighbours are still there."""
        position = self.position
        self.last_number = before.last_number
        here = {position.node_id} if position.data else set()
        preceding, following = {*position.previous} | here, {*position.next} | here
        for old in before.hops.values():
            hop = FlowHop(old.number, old.data_node, old.upstream, old.next, old.version)
            self.hops[hop.number] = hop
            if hop.next is not None and hop.next.peer not in following:
                self.lose_next(hop)
            if hop.number in self.hops and hop.upstream not in preceding:
                self.lose_upstream(hop)
        if not position.data:
            self._fit(list(self.hops.values()), position.capacity)

    def fill_slots(self) -> None:
        """At a data node: have as many sources and sinks as there are slots."""
        node_id, capacity = self.position.node_id, self.position.capacity
        sources = [hop for hop in self.hops.values() if hop.upstream == node_id]
        sinks = [hop for hop in self.hops.values() if hop.upstream != node_id]
        for hops in (sources, sinks):
            self._fit(hops, capacity)
        for _ in range(capacity - len(sources)):
            self.add(node_id, upstream=node_id, next_hop=None)
        for _ in range(capacity - len(sinks)):
            self.add(node_id, upstream=None, next_hop=NextHop(node_id, 0, 0.0))

    def _fit(self, hops: list[FlowHop], capacity: int) -> None:
        """Drop what there is no room for, unpaired ones first."""
        for hop in sorted(hops, key=lambda hop: hop.complete)[: max(0, len(hops) - capacity)]:
            self.remove(hop)
