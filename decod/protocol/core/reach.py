"""Which hosts pass on connections to a member that nobody can dial.

Members dial each other, and a member that nobody can dial dials all others. So a host in between is
needed only between two members that nobody can dial, or where the one that can be dialled begins.
Both ends find the same hosts from the view, without a message.
"""

import hashlib
from collections.abc import Iterable

from decod.ids import NodeId
from decod.protocol.core.view import Member, Reach, View

HOSTS_BETWEEN = 4
"""Hosts at which a member that nobody can dial keeps a call open for others, beside the leader. If
one is lost, the next takes over."""


def hosts_between(members: Iterable[Member], leader: NodeId, goal: NodeId) -> list[Member]:
    """Return the members that pass on connections to another one, the first choice first.

    Each goal has other hosts, so that the traffic spreads. The leader comes last, because each
    candidate keeps a call open there, too, and a candidate may know no other member yet.

    Args:
        members: Those that the node that asks knows of: its view's.
        leader: The leader.
        goal: A member, or a candidate.
    """
    able = [m for m in members if m.reach is Reach.PASSES_ON and m.node_id != goal]
    ranked = sorted(able, key=lambda m: hashlib.sha256(f"{goal}/{m.node_id}".encode()).digest())
    chosen = [m for m in ranked if m.node_id != leader][:HOSTS_BETWEEN]
    return [*chosen, *(m for m in able if m.node_id == leader)]


def passed_peers(view: View, node: NodeId) -> frozenset[NodeId]:
    """Return the members whose traffic with a member passes through another host."""
    own = view.by_id.get(node)
    if own is None or not own.outbound:
        return frozenset()
    return frozenset(m.node_id for m in view.members if m.outbound and m.node_id != node)
