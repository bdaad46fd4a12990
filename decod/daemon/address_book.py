"""The other nodes that a node knows: members, candidates, and nodes that are getting ready to join.

Strangers can invent any number of nodes, so each kind has a limit.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection

from decod.daemon.dialling import Dialling
from decod.daemon.open_files import FileLimit
from decod.ids import NodeId
from decod.protocol.core.view import Member, Reach

FORGET_AFTER_S = 900.0
"""How long a node that left, or a silent candidate, can still be reached. A node that slept asks
what it missed, and must be answered. A candidate may be building a large stage."""

GONE_MAX = 256
"""Nodes that left and can still be reached, at a time. The first of them make room for others."""

CANDIDATES_MAX = 1024
"""Candidates that are known at a time. Offers of others are dropped. They repeat them."""

NEWCOMERS_MAX = 256
"""Most nodes that have introduced themselves and are still getting ready."""

_NAMES_MAX = 20_000


class AddressBook:
    """The other nodes, their names, and the addresses at which the client dials them.

    Args:
        own: This node.
        name: This node's name.
        dialling: Is given the addresses of members and candidates.
        files: The limit on open files. Candidates get the files that members leave free.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(
        self,
        own: NodeId,
        name: str,
        dialling: Dialling,
        files: FileLimit,
        note: Callable[..., None],
    ) -> None:
        self.members: frozenset[NodeId] = frozenset()
        """The members of the view."""
        self._addresses: dict[NodeId, str] = {}
        """What the members say of where they are."""
        self._own, self._dialling, self._files, self._note = own, dialling, files, note
        self._gone: dict[NodeId, asyncio.TimerHandle] = {}
        """Nodes that left, in this order, with the timers that forget them."""
        self._candidates: dict[NodeId, asyncio.TimerHandle] = {}
        """Candidates that are not members, with the timers that forget them."""
        self._names: dict[NodeId, str] = {own: name}
        self._newcomers: OrderedDict[NodeId, str] = OrderedDict()
        """Addresses of nodes that will offer themselves soon, the newest at the end."""

    def close(self) -> None:
        """Cancel the timers that forget nodes."""
        for timer in (*self._candidates.values(), *self._gone.values()):
            timer.cancel()

    # --- members ------------------------------------------------------------------------------

    def use_members(self, members: tuple[Member, ...]) -> None:
        """Dial the members of a new view. Nodes that left can be reached a while longer."""
        self._addresses = {member.node_id: member.address for member in members}
        now = frozenset(self._addresses)
        for member in members:
            self.remember_name(member.node_id, member.name)
            if member.node_id != self._own:
                self._dialling.set_address(member.node_id, member.address, member.reach)
        for gone in self.members - now:
            self._remember_gone(gone)
        self.members = now
        for node in now:
            self._drop_candidate(node)
            self._drop_gone(node)

    def address_of(self, node: NodeId) -> str:
        """Return where a member says that it is; empty if the node is none."""
        return self._addresses.get(node, "")

    def _remember_gone(self, node: NodeId) -> None:
        loop = asyncio.get_running_loop()
        self._gone[node] = loop.call_later(FORGET_AFTER_S, self._drop_gone, node)
        room = max(0, self._files.peers_max - len(self.members) - len(self._candidates))
        while len(self._gone) > min(GONE_MAX, room):
            self._drop_gone(next(iter(self._gone)))

    def _drop_gone(self, node: NodeId) -> None:
        timer = self._gone.pop(node, None)
        if timer is not None:
            timer.cancel()
            self._forget(node)

    def remember_leader(self, node: NodeId, address: str) -> None:
        """Take in the address of another leader, unless it is a member, whose address is known."""
        if node not in self.members and node != self._own:
            self._dialling.set_address(node, address)

    # --- candidates ---------------------------------------------------------------------------

    def take_in(
        self, node: NodeId, address: str, wanted: Collection[NodeId], reach: Reach = Reach.DIALLED
    ) -> bool:
        """Take in a candidate's address; return whether there is room for the candidate.

        Args:
            node: The candidate, or a member.
            address: Its address.
            wanted: The candidates that the leader knows. Others make room for new ones.
            reach: Whether it can be dialled there.
        """
        if node not in self._candidates and node not in self.members:
            if not self._has_room():
                for unwanted in self._candidates.keys() - wanted:
                    self._drop_candidate(unwanted)
            if not self._has_room():
                num_nodes = len(self.members) + len(self._candidates) + 1
                self._files.tell_if_few(num_nodes, self._note)
                return False
            self._remember_candidate(node)
        self._dialling.set_address(node, address, reach)
        return True

    def hear(self, node: NodeId) -> None:
        """Keep a candidate that has said something."""
        if node in self._candidates:
            self._remember_candidate(node)

    def _has_room(self) -> bool:
        """Whether there is room for another candidate and its connections."""
        num = len(self._candidates)
        return num < CANDIDATES_MAX and num + len(self.members) < self._files.peers_max

    def _remember_candidate(self, node: NodeId) -> None:
        if node in self._candidates:
            self._candidates[node].cancel()
        loop = asyncio.get_running_loop()
        self._candidates[node] = loop.call_later(FORGET_AFTER_S, self._drop_candidate, node)

    def _drop_candidate(self, node: NodeId) -> None:
        timer = self._candidates.pop(node, None)
        if timer is not None:
            timer.cancel()
            self._forget(node)

    def _forget(self, node: NodeId) -> None:
        kept = (self.members, self._candidates, self._gone)
        if not any(node in nodes for nodes in kept):
            self._dialling.forget(node)

    # --- newcomers ----------------------------------------------------------------------------

    def expect(self, node: NodeId, address: str) -> None:
        """Remember a node that is getting ready to join, to tell it if the run ends meanwhile."""
        if node != self._own:
            self._newcomers.pop(node, None)
            self._newcomers[node] = address
            if len(self._newcomers) > NEWCOMERS_MAX:
                self._newcomers.popitem(last=False)

    def newcomers(self) -> dict[NodeId, str]:
        """Return the addresses of the nodes that are still getting ready."""
        nodes = self._newcomers.keys() - self.members - self._candidates.keys()
        return {node: self._newcomers[node] for node in nodes}

    # --- names --------------------------------------------------------------------------------

    def remember_name(self, node: NodeId, name: str) -> None:
        """Remember a node's name for this node's log and status."""
        self._names.pop(node, None)
        self._names[node] = name
        if len(self._names) > _NAMES_MAX:
            del self._names[next(iter(self._names))]

    def name_of(self, node: str) -> str | None:
        """Return the name of a node that is or was a member or a candidate."""
        return self._names.get(NodeId(node))
