"""Round a slow link: an activation or gradient goes by way of its microbatch's data node.

Where a stage has lost most of its relays, whoever is left is reached over whatever link there is,
and all microbatches take turns on it. Two good links by way of another host are quicker then. The
data node that a microbatch belongs to can be that host without another word: it knows the path, so
it sees from the sender's stage for whom a tensor is; and since the round is repeated when it is
lost, nothing can be lost with it on the way that would not be done again anyway.

    path         r1 ------------- slow ------------> r2
    detour       r1 ----> its data node ----> r2         and COMPLETE from r2 to r1, as always

The sender chooses for each tensor, by what it knows of its own links and has under way on them. Of
the second link it knows nothing at first, and takes it to be like the first; each COMPLETE for an
activation that went this way tells more. A detour has to be much quicker, because it uses two links
instead of one, and one host's for many. Flows are still chosen by direct links alone.

Deviation: in GWTF every transfer is direct.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from decod.ids import NodeId, TensorId
from decod.protocol.estimate import Recent
from decod.protocol.events import TensorSent
from decod.protocol.links import LinkTable

WORTH_RATIO = 0.5
"""A detour is taken if it lasts at most this share of the direct way's time."""

DIRECT_MIN_S = 1.0
"""What lasts less goes the direct way: the clock's noise must not decide. So does what goes over a
link that nobody has measured: nothing says that it is slow."""


@dataclass(slots=True)
class Detours:
    """Which way each tensor of a microbatch goes from one relay.

    Args:
        links: The relay's.
    """

    links: LinkTable
    _under_way: set[tuple[NodeId, TensorId]] = field(default_factory=set)
    """Receivers and what they have not got yet."""
    _onward_s: dict[tuple[NodeId, NodeId], Recent] = field(default_factory=dict)
    """What the second link takes: from a data node to a neighbour of this relay."""

    def choose(self, to: NodeId, home: NodeId, tensor: TensorId) -> tuple[NodeId, float | None]:
        """Return to whom a tensor for `to` is sent, and if that is `home`, how long it takes there.

        It counts as under way from now on.
        """
        receiver, first_s = to, None
        direct_s, home_s = self._arrives_s(to), self._arrives_s(home)
        onward = self._onward_s.get((home, to))
        onward_s = onward.least if onward else self.links.transfer_s(home)
        slow = direct_s >= DIRECT_MIN_S and self.links.bandwidth_measured(to)
        if to != home and slow and home_s + onward_s <= WORTH_RATIO * direct_s:
            receiver, first_s = home, home_s
        self._under_way.add((receiver, tensor))
        return receiver, first_s

    def sent(self, event: TensorSent) -> None:
        """A tensor has arrived where it was sent to."""
        self._under_way.discard((event.to, event.tensor))

    def completed(self, now_s: float, to: NodeId, home: NodeId, onward_s: float) -> None:
        """A detour has ended, and shown how long its second link takes."""
        self._onward_s.setdefault((home, to), Recent()).add(now_s, max(0.0, onward_s))

    def reset(self) -> None:
        """Another round begins: what was under way matters to nobody."""
        self._under_way.clear()

    def forget_others(self, members: Container[NodeId]) -> None:
        """Forget all nodes but these."""
        known = self._onward_s.items()
        self._onward_s = {k: v for k, v in known if k[0] in members and k[1] in members}

    def _arrives_s(self, to: NodeId) -> float:
        """Return how long one more tensor takes to a node, after those under way to it."""
        before = sum(receiver == to for receiver, _ in self._under_way)
        return (before + 1) * self.links.transfer_s(to)
