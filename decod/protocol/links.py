"""What this node knows of its links and of its own speed; smoothed, guessed where unmeasured."""

from decod.ids import NodeId
from decod.planner.cost import Link, link_cost_s

_SMOOTHING = 0.3
"""Weight of the newest measurement: three of them outweigh what was believed before."""

_UNMEASURED = Link(latency_s=0.05, bandwidth_bytes_per_s=12.5e6)
"""A link of the internet nobody has timed yet: 50 ms and 100 Mbit/s."""


class LinkTable:
    """Costs of this node's links by equation (1)."""

    def __init__(self, *, activation_size_bytes: int, compute_s: float) -> None:
        self.compute_s = compute_s
        """c_i: this node's time for one microbatch, half of forward plus backward."""
        self._activation_size_bytes = activation_size_bytes
        self._links: dict[NodeId, Link] = {}

    def link(self, peer: NodeId) -> Link:
        return self._links.get(peer, _UNMEASURED)

    def measured(
        self, peer: NodeId, *, latency_s: float | None, bandwidth_bytes_per_s: float | None
    ) -> None:
        """Take in what a timed exchange with `peer` said; None leaves a part as it is."""
        known = self._links.get(peer)
        base = known or _UNMEASURED
        weight = _SMOOTHING if known else 1.0
        self._links[peer] = Link(
            _smooth(base.latency_s, latency_s, weight),
            _smooth(base.bandwidth_bytes_per_s, bandwidth_bytes_per_s, weight),
        )

    def computed(self, duration_s: float) -> None:
        """Take in how long this node's device took for a forward or backward pass."""
        self.compute_s = _smooth(self.compute_s, duration_s, _SMOOTHING)

    def cost_s(self, peer: NodeId, *, peer_compute_s: float) -> float:
        """Return d(i, j) to a peer.

        The way back is taken to be like the way there: what the peer measured of it is not
        exchanged yet.
        """
        link = self.link(peer)
        return link_cost_s(
            compute_here_s=self.compute_s,
            compute_there_s=peer_compute_s,
            forth=link,
            back=link,
            size_bytes=self._activation_size_bytes,
        )


def _smooth(old: float, new: float | None, weight: float) -> float:
    return old if new is None else old + weight * (new - old)
