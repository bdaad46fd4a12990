"""What a node knows of the run's hosts and links, for `decod lab plan run` and `decod status`.

A leader is a data node. It times its own links, its peers tell it their ends, and claims of flows
bring the costs of links between relays. A cost joins latency and transfer: the latency is then
taken for the typical one, and the rest is the transfer. Nobody measures memory, and nobody knows
which relay is reliable, unless it is a server.

A link that nobody measured is not listed: the typical link stands for it. A relay without a speed
gets the median of the others'. The answer counts both.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

from decod.config.needs import layer_flops
from decod.config.schema import activation_size_bytes
from decod.errors import NotRunningError
from decod.ids import NodeId
from decod.planner.cost import Link, sane_link
from decod.protocol.core.view import Duty, Member
from decod.protocol.facts import NodeFacts
from decod.run.run_config import RunConfig


def describe_hosts(run: RunConfig, facts: NodeFacts | None) -> dict[str, Any]:
    """Return the hosts, and how much of what is said about them was measured.

    Raises:
        NotRunningError: No relay's speed is known (E-RUN-047).
    """
    speeds = (
        {}
        if facts is None
        else {
            node: speed * layer_flops(run) / 1e12
            for node, speed in relay_speeds(run, facts).items()
        }
    )
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


def describe_links(run: RunConfig, facts: NodeFacts) -> list[dict[str, Any]]:
    """Return the links in use for `decod status --json`, as far as this node knows them.

    These are the hops of known flows, and this node's own links to the stages beside it. Latency
    and bandwidth are None if nobody measured them.
    """
    nothing: tuple[int, float | None] = (0, None)
    hops: dict[tuple[NodeId, NodeId], tuple[int, float | None]] = {}
    for flow in facts.flows:
        for hop, cost_s in zip(itertools.pairwise(flow.path), flow.costs_s, strict=False):
            hops[hop] = (hops.get(hop, nothing)[0] + 1, cost_s)
    for hop in _own_hops(facts):
        hops.setdefault(hop, nothing)
    size, described = activation_size_bytes(run), []
    unknown = {"latency_s": None, "bandwidth_bytes_per_s": None}
    for (begin, end), (num_flows, known_cost_s) in hops.items():
        link = _link(facts, begin, end, size)
        if link is None and not num_flows:
            continue
        described.append(
            {
                "from": begin,
                "to": end,
                "num_flows": num_flows,
                "cost_s": None if known_cost_s is None else round(known_cost_s, 6),
                **(unknown if link is None else _values(link)),
            }
        )
    return described


def _own_hops(facts: NodeFacts) -> Iterator[tuple[NodeId, NodeId]]:
    """Yield the ways between this member and the members of the next stage and of the one before.

    The stage after the last is stage 0: what the last relays compute goes home.
    """
    if not facts.in_view:
        return
    own, num_stages = facts.node_id, facts.view.num_stages
    for member in facts.view.members:
        if member.node_id != own and member.stage_index == (facts.own_stage + 1) % num_stages:
            yield own, member.node_id
        if member.node_id != own and facts.own_stage == (member.stage_index + 1) % num_stages:
            yield member.node_id, own


def _names(facts: NodeFacts) -> dict[NodeId, str]:
    """Return a name for each member that no other has."""
    counts = Counter(member.label for member in facts.view.members)
    return {
        member.node_id: member.label
        if counts[member.label] == 1
        else f"{member.label[:40]}-{member.node_id[:8]}"
        for member in facts.view.members
    }


def relay_speeds(run: RunConfig, facts: NodeFacts) -> dict[NodeId, float]:
    """Return how many blocks relays compute in a second, forward and backward, as far as known."""
    blocks = run.stage_blocks(facts.view.cut)
    found = {}
    for member in facts.view.members:
        pass_s = _pass_s(facts, member.node_id)
        if member.stage_index and pass_s:
            found[member.node_id] = len(blocks[member.stage_index]) / (2 * pass_s)
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
        if (link := _link(facts, begin, end, size)) is not None:
            found[begin, end] = link
    return found


def _link(facts: NodeFacts, begin: NodeId, end: NodeId, size: int) -> Link | None:
    """Return a link, if somebody has measured it."""
    if begin == facts.node_id:
        return facts.links.measured_link(end)
    if end == facts.node_id and (told := facts.links.told_by(begin)) is not None:
        return told.link
    return _remote(facts, begin, end, size)


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
