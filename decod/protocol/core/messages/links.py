"""What links cost."""

from dataclasses import dataclass

from decod.ids import NodeId
from decod.protocol.core.messages.scopes import OfRun, OfView


@dataclass(frozen=True, slots=True)
class LinkReport(OfView):
    """The sender's end of equation (1): to neighbours, when it has changed (GWTF IV).

    Values that were not measured are the sender's estimates. A later report replaces an earlier.
    """

    view_version: int
    latency_s: float
    """Half of a round trip between the two."""
    bandwidth_bytes_per_s: float
    """From the sender to the receiver."""
    compute_s: float
    """c_i: the sender's time for one pass of a microbatch."""
    byways: tuple[tuple[NodeId, float], ...] = ()
    """Data nodes by way of which a tensor can come to the sender, if the direct link is slow, and
    the bandwidth of its links with them in bytes per second, as far as it was measured."""


@dataclass(frozen=True, slots=True)
class LinkProbe(OfRun):
    """With a tensor that means nothing: its way is timed. No machine ever sees one."""
