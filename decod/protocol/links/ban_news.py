"""The list of bans on its way to all members.

The leader makes it. Each node that takes a later list in passes it on down the tree. That is
quick, but a node may miss it. So heartbeats say how far their sender is: of two neighbours on the
ring, one that has a later list gives it to the other. A list that does not come down the tree, from
a node that was cut off, also goes to the leader.

The leader can't be banned. A list that does so was made before it was elected, or by a leader that
did not know yet. Nobody uses it but the leader, who makes a later one from it without its own ban.
"""

import math

from decod.ids import NodeId
from decod.protocol.core.bans import BanList, ReadBans
from decod.protocol.core.context import Context
from decod.protocol.core.effects import ContestBans, UseBans
from decod.protocol.core.events import Received
from decod.protocol.core.messages import Bans, Heartbeat
from decod.protocol.core.view import orphans, tree_place

_AGAIN_S = 5.0
"""Pause before the same node is told again. A list may have a megabyte."""

_TOLD_MAX = 256
"""Nodes that are remembered as told; beyond that all are forgotten."""


class BanNews:
    """What one node knows of bans, and tells others.

    Args:
        context: The node's. It holds the latest list.
        read: Reads a list that has arrived, and checks its proof.
    """

    def __init__(self, context: Context, read: ReadBans) -> None:
        self._context = context
        self._out = context.out
        self._read = read
        self._told_s: dict[NodeId, float] = {}
        """When nodes that are behind, or ahead, were last told."""
        self._contested_s = -math.inf
        """When the leader was last told of a list that bans it."""

    def heard(self, now_s: float, sender: NodeId, beat: Heartbeat) -> None:
        """A neighbour says how far it is. If it is behind, it gets the list; if this node is, it
        asks by telling the same of itself.
        """
        known = self._context.bans
        waited_s = now_s - self._told_s.get(sender, -math.inf)
        if beat.bans == known.version or waited_s < _AGAIN_S:
            return
        if len(self._told_s) >= _TOLD_MAX:
            self._told_s.clear()
        self._told_s[sender] = now_s
        behind = beat.bans < known.version
        self._out.send(sender, word_of(known) if behind else self._context.heartbeat)

    def received(self, received: Received) -> BanList | None:
        """Read a list that has arrived; return None if it is no news or not believed."""
        word = received.message
        sender = received.sender
        assert isinstance(word, Bans)
        if word.version <= self._context.bans.version:
            return None
        found = self._read(word.statement)
        if isinstance(found, str) or found.version != word.version:
            reason = found if isinstance(found, str) else "it is of another version"
            self._out.note("bans.unproven", peer=sender, reason=reason)
            return None
        return found

    def contest(self, now_s: float, bans: BanList) -> None:
        """Have the leader replace a list that bans it."""
        if now_s - self._contested_s < _AGAIN_S:
            return
        self._contested_s = now_s
        leader = self._context.view.leader
        if leader == self._context.node_id:
            self._out.put(ContestBans(bans))
        else:
            self._out.send(leader, word_of(bans))

    def adopt(self, bans: BanList, teller: NodeId) -> None:
        """Use a later list from now on, and pass it on.

        Args:
            bans: The list.
            teller: Who has told this node; the node itself if its own host has made the list.
        """
        context = self._context
        view = self._context.view
        fresh = [node for node in bans.banned if node not in context.bans.banned]
        context.bans = bans
        self._told_s.clear()
        receivers = list[NodeId]()
        fanout = context.run.protocol.tree_fanout
        if context.node_id in view:
            place = tree_place(view, context.node_id, fanout=fanout)
            receivers += place.children
            if context.node_id == view.leader:
                # Whoever is banned need not pass it on.
                gone = [node for node in fresh if node in view]
                receivers += orphans(view, gone, fanout=fanout)
            elif teller != place.parent:
                receivers.append(view.leader)
        # The leader tells those that are banned, and takes them out of the view.
        told = (context.node_id, teller, *bans.banned)
        others = [node for node in dict.fromkeys(receivers) if node not in told]
        self._out.note("bans.changed", num_banned=len(bans.banned), version=bans.version)
        self._out.send_all(others, word_of(bans))
        self._out.put(UseBans(bans))


def word_of(bans: BanList) -> Bans:
    """Return the message that passes a list on."""
    return Bans(bans.version, bans.statement)
