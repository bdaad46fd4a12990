"""Two hosts with one identity, as a cloned virtual machine makes them: the later one is refused.

A node that wants to be let in says who and where it is, and names the start of its daemon. The node
that is asked looks where it knew that identity before. If another start answers there, with a
certificate of that node, there are two hosts: both and the operator are told. If none answers, the
newcomer counts as a restart. It may be wrong, if the first host is out of reach for a while. So
starts that take turns are two hosts as well.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from decod.ids import NodeId
from decod.membership.papers import Membership
from decod.net.ask import DialBack, Found, HelloRequest
from decod.net.net_limits import RateLimiter

_AGAIN_S = 1.0
"""A process that is about to end may answer once. Another host answers after so long, too."""

_TOLD_PER_S = 1 / 60
"""How often two hosts with one identity are reported."""

_STARTS_MAX = 8
_NODES_MAX = 1024


@dataclass(frozen=True, slots=True)
class _Known:
    """An identity, as its hosts have asked to be let in."""

    starts: tuple[int, ...]
    """Starts of the daemon that were let in, in this order. One after another is listed again."""
    address: str
    """Where the last one is."""
    reached: bool
    """It was dialled there."""

    def alternates_with(self, start: int) -> bool:
        """Whether a start takes turns with another: each has been let in since the other was."""
        returned = len(set(self.starts)) < len(self.starts)
        return returned and start in self.starts[:-1] and start != self.starts[-1]


class Twins:
    """The identities whose hosts this node has met.

    Args:
        own: This node's membership.
        own_address: Returns where this node tells others that it is.
        note: Takes the name of an event, and its fields as keywords.
        dial_back: Dials nodes.
        known_at: Returns where another node is dialled, and the address by which others know it,
            empty if that is not known; None if it is not dialled.
    """

    def __init__(
        self,
        own: Membership,
        own_address: Callable[[], str],
        note: Callable[..., None],
        dial_back: DialBack,
        known_at: Callable[[NodeId], tuple[str, str] | None],
    ) -> None:
        self._own, self._own_address, self._note = own, own_address, note
        self._dial_back, self._known_at = dial_back, known_at
        self._known: OrderedDict[NodeId, _Known] = OrderedDict()
        self._told = RateLimiter(
            lambda: asyncio.get_running_loop().time(), rate_per_s=_TOLD_PER_S, burst=1.0
        )

    def hear(self, request: HelloRequest) -> None:
        """Report that another host has this node's own identity, if a hello tells of one."""
        own = self._own
        if request.sender == own.node_id and request.start not in (0, own.host.start):
            where = request.sender_address or request.observed_address
            self._tell(own.node_id, self._own_address(), where)
        elif request.twin_address:
            self._tell(own.node_id, self._own_address(), request.twin_address)

    async def look(self, request: HelloRequest) -> Found:
        """Dial a node that wants to be let in, and look whether another host has its identity."""
        node, address, start = request.sender, request.sender_address, request.start
        assert node is not None
        if not start:
            dialled = await self._dial_back.dial(node, address)
            return Found("" if dialled is None else dialled.unreached)
        dialled, twin_address = await asyncio.gather(
            self._dial_back.dial(node, address, start), self.twin_of(node, address, start)
        )
        return Found("" if dialled is None else dialled.unreached, twin_address)

    async def twin_of(self, node: NodeId, address: str, start: int) -> str:
        """Return where another host with a node's identity is that was there before the node.

        Args:
            node: The node that wants to be let in.
            address: Where it says that it is.
            start: The start of its daemon.

        Returns:
            The other host's address. Empty if there is none as far as is known: the node is
            remembered then.
        """
        if node == self._own.node_id:
            return "" if start == self._own.host.start else self._own_address()
        known = self._known.get(node)
        if known is not None and (known.starts[-1], known.address) == (start, address):
            return ""
        reached, twin_address = await self._twin_answering(node, address, start)
        if not twin_address and known is not None and known.alternates_with(start):
            twin_address = known.address
        if twin_address:
            self._tell(node, twin_address, address)
            return twin_address
        if self._known.get(node) is not known:
            # Another start was let in meanwhile, as when two hosts boot at once.
            return await self.twin_of(node, address, start)
        starts = () if known is None else known.starts
        if starts[-1:] != (start,):
            starts = (*starts[1 - _STARTS_MAX :], start)
        self._known.pop(node, None)
        self._known[node] = _Known(starts, address, reached)
        if len(self._known) > _NODES_MAX:
            self._known.popitem(last=False)
        return ""

    async def _twin_answering(self, node: NodeId, address: str, start: int) -> tuple[bool, str]:
        """Dial a node, and look for other starts of its daemon.

        Returns:
            Whether the start that is meant answers, and where another one does, if one does.
        """
        places = self._places(node, address)
        dialled, *answers = await asyncio.gather(
            self._dial_back.dial(node, address, start),
            *(self._dial_back.dial_anew(node, place) for place in places),
        )
        found = dict(zip((address, *places), (dialled, *answers), strict=True))
        starts = {place: 0 if each is None else each.start for place, each in found.items()}
        others = [place for place, answered in starts.items() if answered not in (0, start)]
        if others:
            await asyncio.sleep(_AGAIN_S)
        for place in others:
            again = await self._dial_back.dial_anew(node, place, twin_address=address)
            if again is not None and again.start not in (0, start):
                return False, places.get(place, address)
        return starts[address] == start, ""

    def _places(self, node: NodeId, address: str) -> dict[str, str]:
        """Return where else a node may be, and the address by which others know each place.

        It was reached there before, so no member can have this node dial whom it likes.
        """
        known, way = self._known.get(node), self._known_at(node)
        places = {known.address: known.address} if known is not None and known.reached else {}
        if way is not None:
            places[way[0]] = way[1] or (address if known is None else known.address)
        places.pop(address, None)
        return places

    def _tell(self, node: NodeId, known_at: str, address: str) -> None:
        if self._told.allow(node):
            self._note("identity.shared", peer=node, known_at=known_at, address=address)
