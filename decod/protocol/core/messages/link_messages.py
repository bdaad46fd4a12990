"""What links cost."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from decod.ids import NodeId
from decod.limits import AtMost, Bandwidth, ComputeTime, Each, Latency, Ordinal, Unique
from decod.protocol.core.messages.scopes import OfRun, OfView, WithTensor

BYWAYS_MAX = 8
"""Data nodes that a node may choose from, beside the one that a microbatch belongs to."""


class Byway(NamedTuple):
    """A data node by way of which a tensor may come, and the link with it."""

    node_id: NodeId
    """The data node."""
    bandwidth_bytes_per_s: Bandwidth


@dataclass(frozen=True, slots=True)
class LinkReport(OfView):
    """The sender's end of equation (1): to neighbours, when it has changed (GWTF IV).

    Values that were not measured are the sender's estimates. A later report replaces an earlier.
    """

    view_version: Ordinal
    latency_s: Latency
    """Half of a round trip between the two."""
    bandwidth_bytes_per_s: Bandwidth
    """From the sender to the receiver."""
    compute_s: ComputeTime
    """c_i: the sender's time for one pass of a microbatch."""
    byways: Annotated[
        tuple[tuple[NodeId, float], ...], Each(Byway), AtMost(BYWAYS_MAX), Unique("node_id")
    ] = ()
    """Data nodes by way of which a tensor can come to the sender, if the direct link is slow, and
    the bandwidth of its links with them in bytes per second, as far as it was measured."""


@dataclass(frozen=True, slots=True)
class LinkProbe(OfRun, WithTensor):
    """With a tensor that means nothing: its way is timed. No machine ever sees one."""
