"""What this host's network offers: addresses of its interfaces, and a router that maps a port."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, Self

import psutil

from decod.tasks import cancelled, in_thread
from decod.texts import clean_text

_NOWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses in documents, which belong to nobody. The way to them is the way to the internet."""

_VIRTUAL = ("br-", "cali", "cni", "docker", "flannel", "lxc", "podman", "veth", "virbr", "vmnet")
"""The beginnings of the names of interfaces that lead to this host's own containers and virtual
machines."""


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


# Asks a router to pass connections on to this host, by UPnP.
#
# Many routers of homes do, and take that back by themselves after a while. The request is
# therefore repeated, and withdrawn at the end. The library `miniupnpc` speaks with the router. It
# blocks, so it is called in threads. It is optional: a volunteer can do without being dialled.

LEASE_S = 3600
"""The time that a router keeps a mapping that is not renewed."""

_DISCOVERY_MS = 2000
_PROTOCOLS = ("TCP", "UDP")
_REASON_MAX_CHARACTERS = 100
_ANSWER_S = 15.0
"""The time that a router may take for one thing. The library itself may wait without end."""


class Router(Protocol):
    """A router of the home network, as `miniupnpc.UPnP` shows it. Its methods raise `Exception`."""

    lanaddr: str
    """This host's address in the home network."""

    def addportmapping(self, *args: Any) -> bool:
        """Map a port: outer port, protocol, host, inner port, name, remote host, lease."""

    def deleteportmapping(self, *args: Any) -> bool:
        """Remove a mapping: outer port, protocol."""


def find_router() -> Router | str:
    """Return the router of this network, or why there is none. Blocks for some seconds."""
    try:
        import miniupnpc
    except ImportError:
        return "decod was installed without the extra `nat`, which asks routers"
    found = miniupnpc.UPnP()
    found.discoverdelay = _DISCOVERY_MS
    try:
        found.discover()
        found.selectigd()
    except Exception:  # noqa: BLE001 - the library raises nothing more specific.
        return "no router answers to UPnP"
    router: Router = found
    return router


class PortMapper:
    """One mapped port. Leaving the `async with` block removes the mapping.

    Args:
        find: Finds the router.
    """

    def __init__(self, find: Callable[[], Router | str] = find_router) -> None:
        self._find = find
        self._port = 0
        self._router: Router | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._renewing is None:
            return
        await cancelled(self._renewing)
        with suppress(TimeoutError):  # The mapping ends by itself within the lease.
            async with asyncio.timeout(_ANSWER_S):
                await in_thread(self._remove)

    async def map(self, port: int) -> str:
        """Map a port, and keep it mapped; return why that can't be, or empty text.

        Args:
            port: Of this host and of the router, for TCP and UDP.
        """
        self._port = port
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await in_thread(self._find)
                if isinstance(found, str):
                    return found
                self._router = found
                refusal = await in_thread(self._request)
        except TimeoutError:
            return f"the router does not answer within {_ANSWER_S:.0f} s"
        if not refusal:
            self._renewing = asyncio.create_task(self._renew())
        return refusal

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 2)
            # A router that refuses now may have been restarted, and is asked again next time.
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await in_thread(self._request)

    def _request(self) -> str:
        """Ask the router for the mapping; return why it refuses, or empty text."""
        router = self._router
        port = self._port
        assert router is not None
        try:
            for protocol in _PROTOCOLS:
                asked = (port, protocol, router.lanaddr, port, "decod", "", LEASE_S)
                if not router.addportmapping(*asked):
                    return f"the router refuses port {port}"
        except Exception as error:  # noqa: BLE001 - the library raises nothing more specific.
            return _reason(error)
        return ""

    def _remove(self) -> None:
        assert self._router is not None
        for protocol in _PROTOCOLS:
            with suppress(Exception):  # It ends by itself within the lease.
                self._router.deleteportmapping(self._port, protocol)


def _reason(error: Exception) -> str:
    text = clean_text(str(error), limit=_REASON_MAX_CHARACTERS)
    return f"the router says: {text}"
