"""What a node knows of the flows through it: one hop each, with where it comes from and goes on.

The hops begin as the first flows, which Request Flow has built (`building`), and are changed from
then on without a thought of these. A hop's name is its link's: the node before refers to the link
by it. A first flow has the same name at all nodes; a node that takes over a hop gives it a new one.
At a data node each flow has two hops: a source, which comes from itself, and a sink, which leads
to itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from decod.ids import FlowId, NodeId
from decod.protocol.core.messages.routing_messages import NextHop
from decod.protocol.flows.building import DataFlows, RelayFlows
from decod.protocol.flows.position import Position

_NEW_NUMBERS = 1 << 20
"""Numbers from here on are of hops that were taken over: above the slots of all first flows."""

_SOURCES = 1 << 30
"""Numbers from here on are of sources. They are no links' names, so nobody is told of them."""


_BUILD_TICKS_PER_STAGE = 4
"""How long Request Flow takes to build the first flows, beyond two rounds."""


def build_ticks(position: Position) -> int:
    """Return how long the first flows are left alone."""
    return _BUILD_TICKS_PER_STAGE * position.num_stages + 2


@dataclass(slots=True)
class FlowHop:
    """One flow at one node."""

    data_node: NodeId
    number: int
    upstream: NodeId
    next: NextHop
    version: int = 0
    locked: bool = False
    """Promised to a change; no other may touch it."""

    @property
    def name(self) -> FlowId:
        return FlowId(self.data_node, self.number)


@dataclass(slots=True)
class FlowHops:
    """All hops of one node. At a relay at most `position.capacity`."""

    position: Position
    hops: dict[FlowId, FlowHop] = field(default_factory=dict)
    num_reserved: int = 0
    """Hops that a redirect under way may bring: room for them is kept."""
    frozen: bool = False
    """A claim has passed: the hops stand still."""
    num_building: int = 0
    """At a relay: first flows that may yet become whole: room for them is kept too."""
    _first: set[FlowId] = field(default_factory=set)
    """Names of first flows' hops that were taken up."""
    _open: set[FlowId] = field(default_factory=set)
    """At a relay: first flows that were not whole when it last looked."""
    _num_quiet_ticks: int = 0
    """Since when these are the same."""
    _last_number: int = _NEW_NUMBERS

    def __iter__(self) -> Iterator[FlowHop]:
        return iter(self.hops.values())

    def new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def add(self, name: FlowId, upstream: NodeId, next_hop: NextHop) -> FlowHop:
        hop = self.hops[name] = FlowHop(name.data_node, name.slot, upstream, next_hop)
        return hop

    def get(self, data_node: NodeId, number: int) -> FlowHop | None:
        return self.hops.get(FlowId(data_node, number))

    # --- first flows --------------------------------------------------------------------------

    def begin_with(self, flows: RelayFlows | DataFlows) -> None:
        """Take up first flows that have become whole at this node; let go of those that broke."""
        found = _first_hops(self.position.node_id, flows)
        for name in self._first - found.keys():
            hop = self.hops.get(name)
            if hop is not None and not hop.version and not hop.locked and not self.frozen:
                self._first.discard(name)
                del self.hops[name]
        for name in sorted(found.keys() - self._first):
            if not self.frozen and (self.position.data or len(self.hops) < self.position.capacity):
                self._first.add(name)
                self.add(name, *found[name])
        if isinstance(flows, RelayFlows):
            self._keep_room(flows)

    def _keep_room(self, flows: RelayFlows) -> None:
        """Count first flows that may yet become whole, as long as any of them still moves."""
        unfinished = flows.entries.keys() - self._first
        self._num_quiet_ticks = 0 if unfinished != self._open else self._num_quiet_ticks + 1
        self._open = unfinished
        quiet = self._num_quiet_ticks > build_ticks(self.position) and not flows.growing
        self.num_building = flows.num_pending + (0 if quiet else len(unfinished))

    # --- which there are ----------------------------------------------------------------------

    @property
    def room(self) -> int:
        """At a relay: flows more that it could carry."""
        return self.position.capacity - len(self.hops) - self.num_reserved - self.num_building

    def with_next(self, data_node: NodeId, peer: NodeId, number: int) -> FlowHop | None:
        """Return the hop that goes on along a link."""
        for hop in self:
            if hop.data_node == data_node and (hop.next.peer, hop.next.number) == (peer, number):
                return hop
        return None

    def num_to(self, peer: NodeId) -> int:
        """Return f(i, j) of the link to a neighbour."""
        return sum(hop.next.peer == peer for hop in self)

    def num_from(self, peer: NodeId) -> int:
        """Return f(i, j) of the link from a neighbour."""
        return sum(hop.upstream == peer for hop in self)

    # --- what settling asks -------------------------------------------------------------------

    @property
    def passable(self) -> bool:
        """Whether no change is under way here."""
        return not self.num_reserved and not any(hop.locked for hop in self)

    def beginning(self) -> list[NodeId]:
        """At a data node: where each flow that begins here goes on."""
        return [hop.next.peer for hop in self if hop.upstream == self.position.node_id]

    def onward(
        self, data_node: NodeId, upstream: NodeId, taken: Iterable[tuple[NodeId, NodeId, NodeId]]
    ) -> NodeId | None:
        """Return where a flow of a data node goes on that no other claim has taken.

        Flows of one data node that come along one link are as good as each other.
        """
        used = [onward for *link, onward in taken if link == [data_node, upstream]]
        for hop in self:
            if (hop.data_node, hop.upstream) != (data_node, upstream):
                continue
            if hop.next.peer not in used:
                return hop.next.peer
            used.remove(hop.next.peer)
        return None

    # --- changes ------------------------------------------------------------------------------

    def remove(self, hop: FlowHop) -> None:
        del self.hops[hop.name]

    def relink(self, hop: FlowHop, upstream: NodeId, next_hop: NextHop) -> None:
        hop.upstream, hop.next = upstream, next_hop
        hop.version += 1


def _first_hops(
    node_id: NodeId, flows: RelayFlows | DataFlows
) -> dict[FlowId, tuple[NodeId, NextHop]]:
    """Return where each first flow at a node comes from and goes on to, by its hop's name."""
    paired = flows.outflows.paired
    if isinstance(flows, RelayFlows):
        return {
            flow_id: (paired[flow_id], NextHop(entry.downstream, flow_id.slot))
            for flow_id, entry in flows.entries.items()
            if flow_id in paired
        }
    found = {
        FlowId(node_id, _SOURCES + flow_id.slot): (node_id, NextHop(granted.peer, flow_id.slot))
        for flow_id, granted in flows.complete.items()
    }
    sinks = {flow_id: (peer, NextHop(node_id, 0)) for flow_id, peer in paired.items()}
    return found | sinks
