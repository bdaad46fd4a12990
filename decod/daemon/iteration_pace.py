"""Who holds an iteration up, by what the members say that it has cost them.

All members of a run commit together, so their iterations are equally long. One that is busy for
most of it while the others mostly wait makes it longer: it computes or sends too slowly for its
part. Only shares of each member's own time are compared, and none exceeds 1. A liar can look slow,
or not slow, and can change nothing for the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from decod.ids import NodeId
from decod.protocol.core.durations import IterationTimes
from decod.protocol.core.messages import NodeLoad
from decod.protocol.core.view import Member

BUSY_SHARE = 0.5
"""A member that is busy for less of the time waits for others, and not they for it."""

STANDS_OUT_RATIO = 1.5
"""A member stands out if it is busy for so many times as long as others usually are."""

NAMED_MAX = 3

_LINK_RATIO = 0.5
"""A slow sender's links hold it up that take at least this part of what its worst one takes."""

COMPUTING, SENDING = "computing", "sending"


@dataclass(frozen=True, slots=True)
class SlowMember:
    """A member that makes iterations longer."""

    member: Member
    by: str
    """`COMPUTING` or `SENDING`."""
    share: float
    """Of the time, for which it does that."""
    usual_share: float
    """For which the others usually compute or send."""


def slow_members(
    members: Iterable[Member], loads: Mapping[NodeId, NodeLoad]
) -> Sequence[SlowMember]:
    """Return the members that hold the iterations up, the worst first."""
    found: dict[NodeId, tuple[Member, float, str]] = {}
    for member in members:
        load = loads.get(member.node_id)
        share, by = (0.0, "") if load is None or load.times is None else busiest(load.times)
        if by:
            found[member.node_id] = member, share, by
    slow = []
    for node, (member, share, by) in found.items():
        others = [other for each, (_, other, _) in found.items() if each != node]
        if not others or share < BUSY_SHARE:
            continue
        usual = median(others)
        if share >= STANDS_OUT_RATIO * usual:
            slow.append(SlowMember(member, by, share, usual))
    return sorted(slow, key=lambda each: (-each.share, each.member.node_id))[:NAMED_MAX]


def busiest(times: IterationTimes) -> tuple[float, str]:
    """Return the share of the time for which a member computes or sends, and which of them.

    Empty if nothing is known.
    """
    whole_s = times.computing_s + times.waiting_s
    if whole_s <= 0:
        return 0.0, ""
    return max(
        (min(1.0, times.computing_s / whole_s), COMPUTING),
        (min(1.0, times.sending_s / whole_s), SENDING),
    )


def describe_slow(slow: Sequence[SlowMember]) -> list[dict[str, Any]]:
    """Return the field `slow` of `decod status`."""
    return [
        {
            "id": each.member.node_id,
            "name": each.member.name,
            "stage_index": each.member.stage_index,
            "by": each.by,
            "share": round(each.share, 3),
            "usual_share": round(each.usual_share, 3),
        }
        for each in slow
    ]


def mark_links(
    links: Sequence[dict[str, Any]], slow: Sequence[SlowMember], tensor_size_bytes: int
) -> None:
    """Set `holds_up` of each link: whether it makes iterations longer.

    Such a link carries flows from a member whose sends hold the others up, and no other link of
    that member takes much longer for what it carries.

    Args:
        links: As `describe_links` returns them.
        slow: The members that hold the iterations up.
        tensor_size_bytes: Of an activation.
    """
    senders = {each.member.node_id for each in slow if each.by == SENDING}
    times_s = [_carrying_s(link, tensor_size_bytes) for link in links]
    worst_s: dict[object, float] = {}
    for link, time_s in zip(links, times_s, strict=True):
        worst_s[link["from"]] = max(time_s, worst_s.get(link["from"], 0.0))
    for link, time_s in zip(links, times_s, strict=True):
        begin = link["from"]
        is_worst = time_s > 0 and time_s >= _LINK_RATIO * worst_s[begin]
        link["holds_up"] = begin in senders and is_worst


def _carrying_s(link: Mapping[str, Any], size_bytes: int) -> float:
    """Return how long a link takes for the microbatches of its flows, one after another."""
    bandwidth, latency_s = link["bandwidth_bytes_per_s"], link["latency_s"]
    if bandwidth:
        return float(link["num_flows"] * ((latency_s or 0.0) + size_bytes / bandwidth))
    return float(link["num_flows"] * (link["cost_s"] or 0.0))
