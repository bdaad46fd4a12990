"""How long the members of a group take to average: each reduces a part, and sends the mean to all.

All members send at once, each as fast as its uplink, its links and the receivers' downlinks allow.
Members own equal parts. The second half begins when the slowest member has sent its parts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from decod.planner.hosts import TrainingProblem


class Exchange(NamedTuple):
    """The time of an average, and the member that it waits for."""

    time_s: float
    host: int | None
    """The member with the slowest access or link. None: there is nothing to exchange."""


def butterfly(problem: TrainingProblem, members: Sequence[int], size_bytes: float) -> Exchange:
    """Return how long members take to average `size_bytes` each."""
    num = len(members)
    if num < 2 or size_bytes <= 0:
        return Exchange(0.0, None)
    part = size_bytes / num
    half_s, slowest = 0.0, members[0]
    for sender in members:
        latencies, rates = problem.latencies_s[sender], problem.bandwidths_bytes_per_s[sender]
        far_s = link_s = 0.0
        for other in members:
            if other != sender:
                if rates[other] <= 0:
                    return Exchange(float("inf"), sender)
                far_s = max(far_s, latencies[other])
                link_s = max(link_s, latencies[other] + part / rates[other])
        host = problem.hosts[sender]
        access = min(host.uplink_bytes_per_s, host.downlink_bytes_per_s)
        time_s = max(link_s, far_s + part * (num - 1) / access)
        if time_s > half_s:
            half_s, slowest = time_s, sender
    return Exchange(2 * half_s, slowest)
