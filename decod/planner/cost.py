"""What it costs to send one microbatch over a link: equation (1) of GWTF.

Whatever comes in is first brought into the bounds below, so that a cost is always finite and never
divides by nothing, whoever has measured or reported its parts.
"""

import math
from dataclasses import dataclass

LATENCY_MAX_S = 60.0
"""One way. Geostationary satellites take 0.3 s; a minute is a broken clock or a lie."""

BANDWIDTH_MIN_BYTES_PER_S = 1e3
"""8 kbit/s: nothing can be trained over less, and it keeps divisions finite."""

BANDWIDTH_MAX_BYTES_PER_S = 1e12
"""8 Tbit/s: more than any link has."""

COMPUTE_MAX_S = 3600.0
"""For one pass of one microbatch: an hour, on a host that is of no use to anybody."""

TRANSFER_SHARE_MIN = 0.1
"""Least share of a timed transfer that is put down to its bytes, the rest being latency."""


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
    backward pass the other. Symmetric: d(i, j) = d(j, i), since each term is a sum over both ends.

    Args:
        compute_here_s: c_i, node i's time for one microbatch.
        compute_there_s: c_j, node j's.
        forth: The link from i to j.
        back: The link from j to i.
        size_bytes: Of the activation; its gradient has the same size.

    Source: GWTF, section IV, equation (1).
    """
    forth, back = sane_link(forth), sane_link(back)
    return (
        (sane_compute_s(compute_here_s) + sane_compute_s(compute_there_s)) / 2
        + (forth.latency_s + back.latency_s) / 2
        + 2 * size_bytes / (forth.bandwidth_bytes_per_s + back.bandwidth_bytes_per_s)
    )


def transfer_rate(
    size_bytes: int, *, duration_s: float, latency_s: float, share: float = 1.0
) -> float:
    """Return the bandwidth, in bytes a second, that a timed transfer shows.

    A transfer that is acknowledged takes `2 * latency + size / bandwidth`. What is left when the
    latency is taken off may be next to nothing on a fast link, where the two differ by less than
    the clock's noise; at least `TRANSFER_SHARE_MIN` of the whole is counted as the bytes' time.
    The error that this can make is a tenth of a time that is short anyway.

    Of two transfers that overlap, one's bytes fill the other's latency: the link is never idle. So
    the less of the link a transfer had, the less latency is taken off, and nothing for half of it.

    Args:
        size_bytes: What was sent.
        duration_s: From the first byte to the receiver's acknowledgement.
        latency_s: One way, as known by then; 0 if unknown, which gives too low a rate.
        share: Mean share of the link that the transfer had beside others to the same peer, (0, 1].
    """
    share = min(max(share, 1e-3), 1.0)
    idle_s = 2 * latency_s * max(0.0, 2 * share - 1)
    wire_s = max(duration_s * share - idle_s, TRANSFER_SHARE_MIN * duration_s * share)
    if wire_s <= size_bytes / BANDWIDTH_MAX_BYTES_PER_S:
        return BANDWIDTH_MAX_BYTES_PER_S
    return max(size_bytes / wire_s, BANDWIDTH_MIN_BYTES_PER_S)


def sane_link(link: Link) -> Link:
    """Return a link within the bounds of this module; NaN counts as the worst."""
    latency_s, bandwidth = link.latency_s, link.bandwidth_bytes_per_s
    latency_sane = 0.0 <= latency_s <= LATENCY_MAX_S
    if latency_sane and BANDWIDTH_MIN_BYTES_PER_S <= bandwidth <= BANDWIDTH_MAX_BYTES_PER_S:
        return link
    return Link(
        _within(link.latency_s, 0.0, LATENCY_MAX_S, worst=LATENCY_MAX_S),
        _within(
            link.bandwidth_bytes_per_s,
            BANDWIDTH_MIN_BYTES_PER_S,
            BANDWIDTH_MAX_BYTES_PER_S,
            worst=BANDWIDTH_MIN_BYTES_PER_S,
        ),
    )


def sane_compute_s(compute_s: float) -> float:
    """Return a compute time within the bounds of this module; NaN counts as the worst."""
    return _within(compute_s, 0.0, COMPUTE_MAX_S, worst=COMPUTE_MAX_S)


def _within(value: float, low: float, high: float, *, worst: float) -> float:
    return worst if math.isnan(value) else min(max(value, low), high)
