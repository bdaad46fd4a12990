"""What it costs to send one microbatch over a link: equation (1) of GWTF."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of the connection between two nodes."""

    latency_s: float
    bandwidth_bytes_per_s: float


def link_cost_s(
    *, compute_here_s: float, compute_there_s: float, forth: Link, back: Link, size_bytes: int
) -> float:
    """Return d(i, j): the mean time that a microbatch takes from node i to node j.

    Half of each end's compute time, so that the hops of a path add up to its whole, plus latency
    and transfer time averaged over both directions, since the forward pass uses one and the
    backward pass the other.

    Args:
        compute_here_s: c_i, node i's time for one microbatch.
        compute_there_s: c_j, node j's.
        forth: The link from i to j.
        back: The link from j to i.
        size_bytes: Of the activation; its gradient has the same size.

    Source: GWTF, section IV, equation (1).
    """
    return (
        (compute_here_s + compute_there_s) / 2
        + (forth.latency_s + back.latency_s) / 2
        + 2 * size_bytes / (forth.bandwidth_bytes_per_s + back.bandwidth_bytes_per_s)
    )
