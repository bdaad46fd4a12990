"""The other nodes that a node knows: members, candidates, and nodes that are getting ready to join.

Strangers can invent any number of nodes, so each kind has a limit.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from decod.daemon.open_files import FileLimit
from decod.ids import NodeId, RunId
from decod.membership.papers import Membership
from decod.net.address import LOCAL, Address
from decod.net.client import PeerClient
from decod.net.reverse_dialer import ReverseDialer
from decod.net.reverse_holder import ReverseHolder
from decod.net.reverse_keeper import ReverseKeeper
from decod.protocol.core.view import Member, Reach, hosts_between

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
        dialling: "Dialling",
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


# --- who dials whom ------------------------------------------------------------------------------
# How this node and the others connect: who dials whom, and who keeps a call open instead.
#
# Members dial each other at their addresses. A member that nobody can dial dials everybody, and
# keeps calls open over which others reach it (`net/reverse_holder.py`, `net/reverse_dialer.py`).
# It keeps one to every member with which it deals, so that their connections need no third host.
# It also keeps one to each of a few hosts in between. These serve members that can't be dialled
# either, and members that it does not know of yet.


class Dialling:
    """The connections of one node, in both directions.

    Args:
        membership: This node's.
        run_id: The run.
        client: Sends to all peers.
        leader: Returns the leader; None while this node's core has not begun.
    """

    def __init__(
        self,
        membership: Membership,
        run_id: RunId,
        client: PeerClient,
        leader: Callable[[], NodeId | None],
    ) -> None:
        self._own, self._client, self._leader = membership.node_id, client, leader
        self._dialer = ReverseDialer(membership, run_id, self._hosts_between)
        self._holder = ReverseHolder(membership, run_id, self._dialled_at)
        self._keeper: ReverseKeeper | None = None
        self._members: tuple[Member, ...] = ()
        self._server: Address | None = None
        self.reach = Reach.DIALLED
        """How others reach this node."""
        self.known = asyncio.Event()
        """It has been found out."""

    def listen(self, keeper: ReverseKeeper, server: Address) -> None:
        """Take in what listens here.

        Args:
            keeper: Keeps the open calls of others to this node.
            server: Where this node's server listens, as seen from this host.
        """
        self._keeper, self._server = keeper, server

    def use(self, reach: Reach) -> None:
        """Connect as befits how others can reach this node, which has been found out."""
        assert self._keeper is not None
        assert self._server is not None
        self.reach = reach
        self.known.set()
        if reach is Reach.OUTBOUND:
            self._holder.start(self._server)
            return
        self._keeper.start(passes_on=reach is Reach.PASSES_ON, on_held=self._held)
        self._dialer.start(self._keeper)

    def holds(self, node: NodeId) -> bool:
        """Return whether a member that nobody can dial keeps a call open to this node."""
        return self._keeper is not None and self._keeper.holds(node)

    def describe(self) -> dict[str, int]:
        """Return the status of the connections to members that nobody can dial."""
        keeper = self._keeper
        return {
            "calls_kept": self._holder.num_held,
            "calls_taken": 0 if keeper is None else keeper.num_holds,
            "passed_bytes": 0 if keeper is None else keeper.num_passed_bytes,
        }

    def set_address(self, node: NodeId, address: str, reach: Reach = Reach.DIALLED) -> None:
        """Set how a node is reached: at its address, unless nobody can dial it."""
        if reach is Reach.OUTBOUND:
            address = self._dialer.address_of(node)
        self._client.set_address(node, address)

    def forget(self, node: NodeId) -> None:
        """Close the connections to a node."""
        self._client.forget(node)
        self._dialer.forget(node)

    def cut(self, node: NodeId) -> None:
        """Close all connections with a node that has been banned, whoever has opened them."""
        self.forget(node)
        if self._keeper is not None:
            self._keeper.cut(node)

    def meet(self, node: NodeId) -> None:
        """This node deals with another: that one reaches it without a third host from now on."""
        self._holder.meet(node)

    async def await_held(self, node: NodeId, timeout_s: float) -> bool:
        """Keep a call open to a node; return whether that one knows of it in time."""
        return await self._holder.held(node, timeout_s)

    def use_members(self, members: tuple[Member, ...]) -> None:
        """Take in a new view's members; keep calls open to hosts in between, if need be."""
        self._members = members
        if self._holder.active:
            for node, _ in self._hosts_between(self._own):
                self._holder.meet(node)

    def redial(self) -> None:
        """Make all connections anew, since this node shows other papers from now on."""
        self._client.redial()
        self._dialer.renew()
        self._holder.renew()

    async def close(self) -> None:
        """Close all connections that this node has opened."""
        await self._client.close()
        await self._holder.close()
        await self._dialer.close()

    def _held(self, node: NodeId) -> None:
        """A member that nobody can dial has opened a call: no third host is needed any more."""
        if self._dialer.goes_round(node):
            self._client.redial(node)

    def _dialled_at(self, node: NodeId) -> str | None:
        address = self._client.address_of(node)
        return None if address is None or address.startswith(LOCAL) else address

    def _hosts_between(self, goal: NodeId) -> Sequence[tuple[NodeId, str]]:
        leader = self._leader()
        if leader is None:
            return ()
        hosts = [(m.node_id, m.address) for m in hosts_between(self._members, leader, goal)]
        if not hosts and (address := self._dialled_at(leader)) is not None:
            # A candidate knows no other member yet.
            hosts = [(leader, address)]
        return [host for host in hosts if host[0] != self._own]
