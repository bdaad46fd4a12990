"""What a node knows of the run's hosts and links, in the form of a file for `decod plan run`.

A leader is a data node. It times its own links, its peers tell it their ends, and claims of flows
bring the costs of links between relays. A cost joins latency and transfer: the latency is then
taken for the typical one, and the rest is the transfer. Nobody measures memory, and nobody knows
which relay is reliable, unless it is a server.

A link that nobody measured is not listed: the typical link stands for it. A relay without a speed
gets the median of the others'. The answer counts both.
"""

import itertools
from collections import Counter
from statistics import median
from typing import Any

from decod.config.run_work import layer_flops
from decod.config.schema import RunConfig, activation_size_bytes
from decod.errors import NotRunningError
from decod.ids import NodeId
from decod.model.config import stage_blocks
from decod.planner.cost import Link, sane_link
from decod.protocol.core.view import Duty, Member
from decod.protocol.facts import NodeFacts


def describe_hosts(run: RunConfig, facts: NodeFacts | None) -> dict[str, Any]:
    """Return the hosts, and how much of what is said about them was measured.

    Raises:
        NotRunningError: No relay's speed is known (E-RUN-047).
    """
    speeds = {} if facts is None else _speeds(run, facts)
    if facts is None or not speeds:
        raise NotRunningError(
            "no speed of a relay is known here",
            why="hosts are measured when they compute their first microbatches, and the data nodes"
            " hear of it",
            fix="ask again when the run has trained for some iterations, at the leader's folder",
            code="E-RUN-047",
        )
    members, names = facts.view.members, _names(facts)
    usual = median(speeds.values())
    hosts = [
        _describe(member, names[member.node_id], speeds.get(member.node_id, usual))
        for member in members
    ]
    found = _links(run, facts)
    typical = facts.links.typical_link()
    own_s = facts.links.compute_s if facts.own_stage == 0 else 0.0
    return {
        "hosts": {
            # A data node's time is the mean of two passes.
            "work": {"head_s": 2 * own_s},
            "hosts": hosts,
            "default_link": _values(typical),
            "links": [
                {"from": names[begin], "to": names[end], **_values(link)}
                for (begin, end), link in found.items()
            ],
        },
        "num_links": len(members) * (len(members) - 1),
        "num_links_measured": len(found),
        "speeds_unknown": [
            names[member.node_id]
            for member in members
            if member.stage_index and member.node_id not in speeds
        ],
    }


def _names(facts: NodeFacts) -> dict[NodeId, str]:
    """Return a name for each member that no other has."""
    counts = Counter(member.label for member in facts.view.members)
    return {
        member.node_id: member.label
        if counts[member.label] == 1
        else f"{member.label[:40]}-{member.node_id[:8]}"
        for member in facts.view.members
    }


def _speeds(run: RunConfig, facts: NodeFacts) -> dict[NodeId, float]:
    """Return the operations in a second of relays, in units of 10^12."""
    blocks, flops = stage_blocks(run.model, run.stages), layer_flops(run)
    found = {}
    for member in facts.view.members:
        pass_s = _pass_s(facts, member.node_id)
        if member.stage_index and pass_s:
            found[member.node_id] = len(blocks[member.stage_index]) * flops / (2 * pass_s) / 1e12
    return found


def _pass_s(facts: NodeFacts, node_id: NodeId) -> float | None:
    """Return a node's mean time for a pass, as far as it is known here."""
    if node_id == facts.node_id:
        return facts.links.compute_s
    told = facts.links.told_by(node_id)
    return told.compute_s if told is not None else facts.remote_links.compute_s(node_id)


def _describe(member: Member, name: str, tflops: float) -> dict[str, Any]:
    if not member.stage_index:
        return {"id": name, "kind": "data"}
    kind = "unreliable" if member.duty is Duty.NONE else "reliable"
    described: dict[str, Any] = {"id": name, "kind": kind, "tflops": tflops}
    return described | ({"capacity": member.capacity} if member.capacity else {})


def _links(run: RunConfig, facts: NodeFacts) -> dict[tuple[NodeId, NodeId], Link]:
    """Return the links that somebody has measured."""
    found: dict[tuple[NodeId, NodeId], Link] = {}
    ids = [member.node_id for member in facts.view.members]
    size = activation_size_bytes(run)
    for begin, end in itertools.permutations(ids, 2):
        link: Link | None
        if begin == facts.node_id:
            link = facts.links.measured_link(end)
        elif end == facts.node_id and (told := facts.links.told_by(begin)) is not None:
            link = told.link
        else:
            link = _remote(facts, begin, end, size)
        if link is not None:
            found[begin, end] = link
    return found


def _remote(facts: NodeFacts, begin: NodeId, end: NodeId, size: int) -> Link | None:
    """Return a link between two others, from the cost that was heard of it."""
    cost_s = facts.remote_links.cost_s(begin, end)
    passes = [_pass_s(facts, node_id) for node_id in (begin, end)]
    if cost_s is None or None in passes:
        return None
    wire_s = cost_s - sum(each for each in passes if each is not None) / 2
    if wire_s <= 0:
        return None
    latency_s = facts.links.typical_link().latency_s
    if latency_s >= wire_s:
        latency_s = wire_s / 2
    return sane_link(Link(latency_s, size / (wire_s - latency_s)))


def _values(link: Link) -> dict[str, float]:
    return {
        "latency_s": link.latency_s,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
    }
