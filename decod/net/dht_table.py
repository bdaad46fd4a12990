"""The contacts of a node in the DHT: kademlia's routing table, with limits.

A member can choose keys until its place in the DHT is near to a record's. So without limits, one
host with many identities could be all of a node's contacts near that place, and withhold the
record. Hence only a few contacts of one network are kept in each bucket, and asked in each search.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from kademlia.node import Node
from kademlia.routing import KBucket, RoutingTable

from decod.net.address import Address


@lru_cache(4096)
def network_of(ip: str) -> str | None:
    """Return the network of which only a few contacts are kept, or None if there is no limit.

    A network is one IPv4 address, or 2^72 IPv6 addresses (/56): what one line gets. The members of
    a run at home or in a laboratory share private addresses, so those are not limited.
    """
    address = ipaddress.ip_address(ip)
    if not address.is_global:
        return None
    if address.version == 4:
        return ip
    return str(ipaddress.ip_network((int(address), 56), strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtLimits:
    """Limits on what others can have of this node over UDP. Tests change them."""

    greetings_per_s: float = 5.0
    """Introductions from one IP address. A private address may be that of many members: there, each
    port counts by itself."""
    greetings_burst: float = 20.0
    checks_per_s: float = 50.0
    """Introductions that are checked, from all addresses together. A check takes 0.5 ms."""
    requests_per_s: float = 50.0
    """Requests of one member."""
    requests_burst: float = 100.0
    contacts_per_network: int = 2
    """Contacts of one network in each bucket, and in each search."""
    network_of: Callable[[str], str | None] = network_of
    look_around_s: float = 25.0
    """Time between two searches for members that this node's contacts don't know."""


BUCKET_SIZE = 8
_LOST_MAX = 64


class ContactTable:
    """The members that have answered this node, by their place in the DHT.

    Args:
        kademlia_id: This node's place.
        ping: Asks a contact whether it still lives, and calls `lose` if it does not.
        limits: The limits.
    """

    def __init__(
        self, kademlia_id: bytes, ping: Callable[[Node], Awaitable[None]], limits: DhtLimits
    ) -> None:
        self._ping = ping
        self._limits = limits
        self.source = Node(kademlia_id)
        self._table = RoutingTable(self, BUCKET_SIZE, self.source)
        self._lost: OrderedDict[Address, None] = OrderedDict()

    async def call_ping(self, node: Node) -> None:
        """Ask the oldest contact of a full bucket. The routing table calls this."""
        await self._ping(node)

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._table.buckets)

    def contact(self, kademlia_id: bytes) -> Node | None:
        """Return the contact at a place, if there is one."""
        return self._bucket_of(kademlia_id).nodes.get(kademlia_id)

    def contacts(self) -> list[Node]:
        """Return all contacts."""
        return [node for bucket in self._table.buckets for node in bucket.get_nodes()]

    def nearest(self, key: bytes, *, without: bytes = b"") -> list[Node]:
        """Return contacts near a place, a bucket's worth at most.

        Args:
            key: The place.
            without: The place of a contact to leave out.
        """
        exact = self.contact(key) if key != without else None
        left_out = self.contact(without) if without else None
        nodes = self._table.find_neighbors(Node(key), BUCKET_SIZE, exclude=left_out)
        # The table leaves out a contact at the very place.
        return [*([] if exact is None else [exact]), *nodes][:BUCKET_SIZE]

    def spread(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the first nodes, a bucket's worth at most, and only a few of each network."""
        chosen: list[Node] = []
        numbers: dict[str, int] = {}
        for node in nodes:
            network = self._limits.network_of(node.ip)
            if network is not None:
                numbers[network] = numbers.get(network, 0) + 1
                if numbers[network] > self._limits.contacts_per_network:
                    continue
            chosen.append(node)
            if len(chosen) == BUCKET_SIZE:
                break
        return chosen

    def add(self, node: Node) -> None:
        """Put in a node that has answered, or update the address of its contact.

        A node whose network has its share of the bucket is left out.
        """
        if node.id == self.source.id:
            return
        self._lost.pop((node.ip, node.port), None)
        known = self.contact(node.id)
        if known is not None and known.same_home_as(node):
            return
        if self._is_crowded(node):
            return
        if known is None:
            self._table.add_contact(node)
        else:
            known.ip = node.ip
            known.port = node.port

    def lose(self, node: Node) -> bool:
        """Drop a contact that does not answer at its address; return whether it was one.

        Its address is remembered, since both may have been cut off from each other.
        """
        known = self.contact(node.id)
        if known is None or not known.same_home_as(node):
            return False
        self._table.remove_contact(node)
        self._lost[node.ip, node.port] = None
        if len(self._lost) > _LOST_MAX:
            self._lost.popitem(last=False)
        return True

    def lost(self) -> list[Address]:
        """Return the addresses of contacts that were lost and have not answered since."""
        return list(self._lost)

    def _bucket_of(self, kademlia_id: bytes) -> KBucket:
        return self._table.buckets[self._table.get_bucket_for(Node(kademlia_id))]

    def _is_crowded(self, node: Node) -> bool:
        network = self._limits.network_of(node.ip)
        if network is None:
            return False
        bucket = self._bucket_of(node.id)
        # Those that wait for a place in the bucket count too.
        others = (*bucket.nodes.values(), *bucket.replacement_nodes.values())
        same = [n for n in others if n.id != node.id and self._limits.network_of(n.ip) == network]
        return len(same) >= self._limits.contacts_per_network
