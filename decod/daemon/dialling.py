"""How this node and the others connect: who dials whom, and who keeps a call open instead.

Members dial each other at their addresses. A member that nobody can dial dials everybody, and keeps
calls open over which others reach it (`net/reverse_holder.py`, `net/reverse_dialer.py`). It keeps
one to every member with which it deals, so that their connections need no third host. It also keeps
one to each of a few hosts in between. These serve members that can't be dialled either, and members
that it does not know of yet.
"""

import asyncio
from collections.abc import Callable, Sequence

from decod.ids import NodeId, RunId
from decod.membership.papers import Membership
from decod.net.address import LOCAL, Address
from decod.net.client import PeerClient
from decod.net.reverse_dialer import ReverseDialer
from decod.net.reverse_holder import ReverseHolder
from decod.net.reverse_keeper import ReverseKeeper
from decod.protocol.core.view import Member, Reach, hosts_between


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
