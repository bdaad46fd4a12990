"""The addresses of this host's network interfaces, and which of them others may reach."""

import ipaddress
import socket

import psutil

_NOWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses in documents, which belong to nobody. The way to them is the way to the internet."""

_VIRTUAL = ("br-", "cali", "cni", "docker", "flannel", "lxc", "podman", "veth", "virbr", "vmnet")
"""How interfaces begin that lead to this host's own containers and virtual machines."""


def own_addresses() -> frozenset[str]:
    """Return the IP addresses of this host's interfaces. Those of IPv6 may have a zone."""
    return frozenset(address for _, address in _interfaces())


def is_loopback(host: str) -> bool:
    """Return whether a name or an IP address means every host itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


def is_own(host: str) -> bool:
    """Return whether an IP address is one of this host's."""
    bare = host.partition("%")[0]
    return is_loopback(bare) or any(bare == own.partition("%")[0] for own in own_addresses())


def outward_addresses(host: str) -> list[str]:
    """Return the addresses at which others may reach this host, the likeliest first.

    If packets to the internet have a way, the address that they leave from is the only one. Without
    a default route, as in a LAN of its own, these are the addresses of the interfaces.

    Args:
        host: Where a node listens: on all addresses of IPv4, or of both kinds.
    """
    kinds = (socket.AF_INET6, socket.AF_INET) if ":" in host else (socket.AF_INET,)
    leaving = list(filter(None, map(_leaving, kinds)))
    return leaving[:1] or [address for kind in kinds for address in _reachable(kind)]


def _leaving(kind: socket.AddressFamily) -> str | None:
    """Return the address from which this host reaches the internet; None if it has no way."""
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        try:
            # This only chooses the interface. Nothing is sent.
            probe.connect((_NOWHERE[kind], 9))
            found = str(probe.getsockname()[0])
        except OSError:
            return None
    return None if is_loopback(found) else found


def _reachable(kind: socket.AddressFamily) -> list[str]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    version = 6 if kind == socket.AF_INET6 else 4
    found = list[tuple[bool, bool, str]]()
    for name, address in _interfaces():
        if name not in up or "%" in address or is_loopback(address):
            continue  # An address with a zone means nothing to another host.
        parsed = ipaddress.ip_address(address)
        if parsed.version == version and not (version == 6 and parsed.is_link_local):
            found.append((parsed.is_link_local, name.startswith(_VIRTUAL), address))
    # Sorting is stable: the system's order decides among equals.
    return [address for *_, address in sorted(found, key=lambda each: each[:2])]


def _interfaces() -> list[tuple[str, str]]:
    """Return each IP address of this host, behind the name of its interface."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in kinds
    ]
