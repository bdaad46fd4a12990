"""How long the members of a group take to average: each reduces a part, and sends the mean to all.

All members send at once, each as fast as its uplink, its links and the receivers' downlinks allow.
The second half begins when the slowest member has sent its parts. A member with a slow access owns
a smaller part, if that helps: it then has less to send in the second half.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from decod.lab.planner.hosts import TrainingProblem


class ButterflyTime(NamedTuple):
    """The time of an average, and the member that it waits for."""

    time_s: float
    host: int | None
    """The member with the slowest access or link. None: there is nothing to exchange."""


def butterfly(problem: TrainingProblem, members: Sequence[int], size_bytes: float) -> ButterflyTime:
    """Return how long members take to average `size_bytes` each."""
    num = len(members)
    if num < 2 or size_bytes <= 0:
        return ButterflyTime(0.0, None)
    access = [
        min(problem.hosts[i].uplink_bytes_per_s, problem.hosts[i].downlink_bytes_per_s)
        for i in members
    ]
    usual = sorted(access)[num // 2]
    weights = [min(rate, usual) for rate in access]
    total = sum(weights)
    even = _with_parts(problem, members, [size_bytes / num] * num)
    if max(weights) == min(weights):
        return even
    uneven = _with_parts(problem, members, [size_bytes * weight / total for weight in weights])
    return min(even, uneven, key=lambda exchange: exchange.time_s)


def _with_parts(
    problem: TrainingProblem, members: Sequence[int], parts: Sequence[float]
) -> ButterflyTime:
    """Return the time if each member owns a part of the given size."""
    size, num = sum(parts), len(members)
    halves = [0.0, 0.0]
    slowest, most_s = members[0], 0.0
    for position, sender in enumerate(members):
        latencies, rates = problem.latencies_s[sender], problem.bandwidths_bytes_per_s[sender]
        own, far_s, links = parts[position], 0.0, [0.0, 0.0]
        for other, part in zip(members, parts, strict=True):
            if other == sender:
                continue
            if rates[other] <= 0:
                return ButterflyTime(math.inf, sender)
            far_s = max(far_s, latencies[other])
            links[0] = max(links[0], latencies[other] + part / rates[other])
            links[1] = max(links[1], latencies[other] + own / rates[other])
        host = problem.hosts[sender]
        access = min(host.uplink_bytes_per_s, host.downlink_bytes_per_s)
        # It sends and receives as much: all but its own part, and its own part to all others.
        loads = (size - own, own * (num - 1))
        times = [
            max(link_s, far_s + load / access) for link_s, load in zip(links, loads, strict=True)
        ]
        halves = [max(half_s, time_s) for half_s, time_s in zip(halves, times, strict=True)]
        if sum(times) > most_s:
            slowest, most_s = sender, sum(times)
    return ButterflyTime(sum(halves), slowest)
