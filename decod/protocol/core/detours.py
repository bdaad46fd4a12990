"""Round a slow link: an activation or gradient goes by way of a data node.

Where a stage has lost most of its relays, whoever is left is reached over whatever link there is,
and all microbatches take turns on it. Two good links by way of another host are quicker then. A
data node can be that host without another word: a tensor's message says the path, so it sees for
whom it is (`goal_of`); and since the iteration is repeated when a data node is lost, nothing can be
lost with it on the way that would not be done again anyway.

    path         r1 ------------- slow ------------> r2
    detour       r1 ----> a data node -----> r2         and COMPLETE from r2 to r1, as always

The sender chooses for each tensor, by what it knows of its own links and has under way on them, and
what the receiver has told of its links with data nodes (`LinkReport`): those whose direct link is
slow measure them, and tell each other. What nobody has told is taken to be like the first link.
Each COMPLETE for an activation that went this way tells what the second link takes if it is none
that the receiver knows. One that leads nowhere, since the data node can't reach the receiver or
can't be reached, is not taken again while both are members. A detour has to be much quicker,
because it uses two links instead of one, and one host's for many. Flows are still chosen by direct
links alone.

Deviation: in GWTF every transfer is direct.
"""

from collections.abc import Collection, Container
from dataclasses import dataclass, field

from decod.ids import NodeId, TensorId
from decod.planner.cost import Link, sane_link
from decod.protocol.core.durations import Recent
from decod.protocol.core.events import TensorSent
from decod.protocol.core.link_table import LinkTable
from decod.protocol.core.messages.routing_messages import BYWAYS_MAX as BYWAYS_MAX

WORTH_RATIO = 0.5
"""A detour is taken if it lasts at most this share of the direct way's time."""

DIRECT_MIN_S = 1.0
"""What lasts less goes the direct way: the clock's noise must not decide. So does what goes over a
link that nobody has measured: nothing says that it is slow."""

_MOVED_RATIO = 0.2
"""A bandwidth that is off by more than this share is told anew."""

Byways = tuple[tuple[NodeId, float], ...]
"""Data nodes, and the bandwidth of a link with each, in bytes a second."""


@dataclass(frozen=True, slots=True)
class Detour:
    """One tensor's."""

    by: NodeId
    first_s: float
    """How long a tensor takes to there, as expected."""


@dataclass(slots=True)
class Detours:
    """Which way each tensor of a microbatch goes from one node.

    Args:
        links: The node's.
    """

    links: LinkTable
    _under_way: set[tuple[NodeId, TensorId]] = field(default_factory=set)
    """Receivers and what they have not got yet."""
    _onward_s: dict[tuple[NodeId, NodeId], Recent] = field(default_factory=dict)
    """What the second link took: from a data node to a neighbour of this node."""
    _reported: dict[NodeId, dict[NodeId, float]] = field(default_factory=dict)
    """What neighbours have told of their links with data nodes: seconds for an activation."""
    _told: dict[NodeId, Byways] = field(default_factory=dict)
    """What peers have been told of this node's."""
    _avoided: set[tuple[NodeId, NodeId]] = field(default_factory=set)
    """Data nodes, and neighbours that they can't reach."""

    # --- what is known of second links --------------------------------------------------------

    def is_slow(self, peer: NodeId) -> bool:
        """Whether a detour round the link to a peer may be worth it."""
        return self.links.transfer_s(peer) >= DIRECT_MIN_S

    def news(self, peer: NodeId, byways: Collection[NodeId]) -> bool:
        """Whether a peer would reckon with a bandwidth that is notably off."""
        known = dict(self._measured(peer, byways))
        told = dict(self._told.get(peer, ()))
        return known.keys() != told.keys() or any(
            abs(known[by] - told[by]) > _MOVED_RATIO * told[by] for by in known
        )

    def tell(self, peer: NodeId, byways: Collection[NodeId]) -> Byways:
        """Return what to report to a peer; nothing if its link is quick."""
        told = self._told[peer] = self._measured(peer, byways)
        return told

    def _measured(self, peer: NodeId, byways: Collection[NodeId]) -> Byways:
        links = self.links
        if not self.is_slow(peer):
            return ()
        return tuple(
            (by, links.link(by).bandwidth_bytes_per_s)
            for by in byways
            if by != peer and links.bandwidth_measured(by)
        )

    def reported(self, peer: NodeId, byways: Byways) -> None:
        """Take in what a peer has told."""
        size_bytes = self.links.activation_size_bytes
        sane = ((by, sane_link(Link(0.0, rate)).bandwidth_bytes_per_s) for by, rate in byways)
        self._reported[peer] = {by: size_bytes / rate for by, rate in sane}

    def completed(self, now_s: float, to: NodeId, detour: Detour, took_s: float) -> None:
        """A detour has ended, and shown how long its second link takes."""
        onward_s = max(0.0, took_s - detour.first_s)
        self._onward_s.setdefault((detour.by, to), Recent()).add(now_s, onward_s)

    def avoid(self, by: NodeId, to: NodeId) -> None:
        """A data node can't pass on what is for a neighbour."""
        self._avoided.add((by, to))

    # --- the choice ---------------------------------------------------------------------------

    def choose(self, to: NodeId, byways: Collection[NodeId], tensor: TensorId) -> Detour | None:
        """Return the detour that a tensor for `to` takes; None if it goes there directly.

        It counts as under way from now on.
        """
        direct_s = self._arrives_s(to)
        slow = direct_s >= DIRECT_MIN_S and self.links.bandwidth_measured(to)
        detour = self._shortest(to, byways) if slow else None
        if detour is not None and self._lasts_s(detour, to) > WORTH_RATIO * direct_s:
            detour = None
        self.sends(to if detour is None else detour.by, tensor)
        return detour

    def sends(self, to: NodeId, tensor: TensorId) -> None:
        """A tensor is on its way to a node."""
        self._under_way.add((to, tensor))

    def sent(self, event: TensorSent) -> None:
        """A tensor has arrived where it was sent to."""
        self._under_way.discard((event.to, event.tensor))

    def reset(self) -> None:
        """Another iteration begins: what was under way matters to nobody."""
        self._under_way.clear()

    def forget_others(self, members: Container[NodeId]) -> None:
        """Forget all nodes but these, and what was told in another view."""
        known = self._onward_s.items()
        self._onward_s = {k: v for k, v in known if k[0] in members and k[1] in members}
        self._reported = {k: v for k, v in self._reported.items() if k in members}
        self._avoided = {k for k in self._avoided if k[0] in members and k[1] in members}
        self._told.clear()

    def _arrives_s(self, to: NodeId) -> float:
        """Return how long one more tensor takes to a node, after those under way to it."""
        before = sum(receiver == to for receiver, _ in self._under_way)
        return (before + 1) * self.links.transfer_s(to)

    def _shortest(self, to: NodeId, byways: Collection[NodeId]) -> Detour | None:
        forwarding = [
            Detour(by, self._arrives_s(by)) for by in byways if (by, to) not in self._avoided
        ]
        return min(forwarding, key=lambda way: (self._lasts_s(way, to), way.by), default=None)

    def _lasts_s(self, detour: Detour, to: NodeId) -> float:
        return detour.first_s + self._second_s(detour.by, to)

    def _second_s(self, by: NodeId, to: NodeId) -> float:
        """Return how long a tensor takes from a data node to its receiver."""
        reported_s = self._reported.get(to, {}).get(by)
        if reported_s is not None:
            return reported_s
        onward = self._onward_s.get((by, to))
        return onward.least if onward else self.links.transfer_s(by)
