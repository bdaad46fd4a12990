"""Cost of sending one microbatch over a link, after equation (1) of GWTF.

Every input is first clamped to the bounds below. A cost is therefore always finite, and no division
is by zero, whoever measured or reported the inputs.
"""

import math
from dataclasses import dataclass

LATENCY_MAX_S = 60.0
"""One-way latency. A geostationary satellite takes 0.3 s; a minute is a broken clock or a lie."""

BANDWIDTH_MIN_BYTES_PER_S = 1e3
"""8 kbit/s. No run can train over less, and the bound keeps divisions finite."""

BANDWIDTH_MAX_BYTES_PER_S = 1e12
"""8 Tbit/s: more than any link has."""

COMPUTE_MAX_S = 3600.0
"""One pass of one microbatch. A host that takes an hour is of no use."""

TRANSFER_SHARE_MIN = 0.1
"""Least share of a timed transfer that counts as time for its bytes; the rest is latency."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of the connection between two nodes."""

    latency_s: float
    bandwidth_bytes_per_s: float


def link_cost_s(
    *, compute_here_s: float, compute_there_s: float, forth: Link, back: Link, size_bytes: int
) -> float:
    """Return d(i, j), in seconds: the mean time that a microbatch takes from node i to node j.

    It contains half of each end's compute time, so that the hops of a path add up to the whole. To
    this it adds the mean latency and the mean transfer time of both directions: the forward pass
    uses one direction and the backward pass the other. The cost is symmetric, d(i, j) = d(j, i),
    because each term is a sum over both ends.

    Args:
        compute_here_s: c_i, node i's time for one microbatch.
        compute_there_s: c_j, node j's time.
        forth: The link from i to j.
        back: The link from j to i.
        size_bytes: Size of the activation. Its gradient has the same size.

    Source: GWTF, section IV, equation (1). Deviation: GWTF takes the transfer time at the mean
    bandwidth. Where one direction is much slower, as an uplink often is, the other would hide that.
    """
    forth = sane_link(forth)
    back = sane_link(back)
    return (
        (sane_compute_s(compute_here_s) + sane_compute_s(compute_there_s)) / 2
        + (forth.latency_s + back.latency_s) / 2
        + (size_bytes / forth.bandwidth_bytes_per_s + size_bytes / back.bandwidth_bytes_per_s) / 2
    )


def transfer_rate(
    size_bytes: int, *, duration_s: float, latency_s: float, share: float = 1.0
) -> float:
    """Return the bandwidth, in bytes per second, that a timed transfer shows.

    An acknowledged transfer takes `2 * latency + size / bandwidth`. On a fast link the transfer
    time without latency may be less than the clock's noise. The bytes are therefore given at least
    `TRANSFER_SHARE_MIN` of the whole time. The error is then at most a tenth of a short time.

    If two transfers overlap, the bytes of one fill the latency of the other, and the link is never
    idle. The less of the link a transfer had, the less latency is subtracted: none at half of the
    link.

    Args:
        size_bytes: Size of the transfer.
        duration_s: From the first byte to the receiver's acknowledgement.
        latency_s: Known one-way latency; 0 if unknown, which gives too low a rate.
        share: Mean share of the link beside other transfers to the same peer, (0, 1].
    """
    share = min(max(share, 1e-3), 1.0)
    idle_s = 2 * latency_s * max(0.0, 2 * share - 1)
    wire_s = max(duration_s * share - idle_s, TRANSFER_SHARE_MIN * duration_s * share)
    if wire_s <= size_bytes / BANDWIDTH_MAX_BYTES_PER_S:
        return BANDWIDTH_MAX_BYTES_PER_S
    return max(size_bytes / wire_s, BANDWIDTH_MIN_BYTES_PER_S)


def sane_link(link: Link) -> Link:
    """Return a link within the bounds of this module. NaN counts as the worst value."""
    latency_s = link.latency_s
    bandwidth = link.bandwidth_bytes_per_s
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
    """Return a compute time within the bounds of this module. NaN counts as the worst value."""
    return _within(compute_s, 0.0, COMPUTE_MAX_S, worst=COMPUTE_MAX_S)


def _within(value: float, low: float, high: float, *, worst: float) -> float:
    return worst if math.isnan(value) else min(max(value, low), high)
