"""Limits on what others can have of a node of the DHT."""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache


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
