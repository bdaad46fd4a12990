"""Facts of this host's network: names, interfaces, the way out, and the port to listen on."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import psutil

from decod.doctor.network_checks import ResolvedName, TriedPort, WayOut
from decod.tasks import in_thread
from decod.texts import why_of

RESOLVE_TIMEOUT_S = 5.0
"""Longest that a name may take. The system's resolver would try for longer."""

_SOMEWHERE = "192.0.2.1"
"""An address of nobody, for which the way out of this host is chosen. Nothing is sent."""
_PORT = 9
_ABSENT = (socket.EAI_NONAME, socket.EAI_NODATA)

# From the kernel's in.h and in6.h. Python has no names for them.
_IP_MTU = 14
_IPV6_MTU = 24


async def resolve(names: Sequence[str]) -> tuple[ResolvedName, ...]:
    """Return what the system's resolver says about names, in their order."""
    return tuple(await asyncio.gather(*map(_resolve, names)))


async def _resolve(name: str) -> ResolvedName:
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await in_thread(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        return ResolvedName(name=name, problem=f"no answer within {RESOLVE_TIMEOUT_S:g} s")
    except (OSError, UnicodeError) as error:
        absent = isinstance(error, socket.gaierror) and error.errno in _ABSENT
        return ResolvedName(name=name, problem=why_of(error), absent=absent)
    return ResolvedName(name=name, addresses=tuple(str(entry[4][0]) for entry in found))


def is_address(host: str) -> bool:
    """Return whether a host is written as an IP address, which no resolver needs to know."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def way_to(target: str | None) -> WayOut | None:
    """Return the way by which packets leave this host; None if there is none.

    Args:
        target: The IP address to which they go; None for any outside.
    """
    target = target or _SOMEWHERE
    six = ":" in target
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _PORT))
            address = str(probe.getsockname()[0])
        except OSError:
            return None
        path_mtu_bytes = None
        with suppress(OSError):
            level, option = (
                (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
            )
            path_mtu_bytes = probe.getsockopt(level, option)
    interface = _interface_of(address)
    stats = psutil.net_if_stats().get(interface or "")
    if interface is None or stats is None:
        return None
    return WayOut(
        target=target,
        interface=interface,
        mtu_bytes=stats.mtu,
        path_mtu_bytes=path_mtu_bytes,
    )


def _interface_of(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return None


@dataclass(slots=True)
class HeldPort:
    """A port that is held as a node would hold it, or the error in its stead."""

    tried: TriedPort
    port: int = 0
    """The port that is held; 0 if none is."""
    dialled: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody has connected to it, over TCP."""

    def take(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note that somebody has connected, and close the connection."""
        self.dialled.set()
        writer.close()


@asynccontextmanager
async def held_port(host: str, port: int) -> AsyncIterator[HeldPort]:
    """Hold a port for TCP and UDP while the context lasts.

    Args:
        host: The local address.
        port: 0: the system chooses a free one.
    """
    tried = TriedPort(host=host, port=port)
    async with AsyncExitStack() as stack:
        try:
            stream, datagrams = await in_thread(lambda: _bound(host, port))
        except OSError as error:
            number = error.errno or errno.EIO
            held = HeldPort(replace(tried, error=number, problem=why_of(error)))
        else:
            stack.enter_context(datagrams)
            held = HeldPort(tried, stream.getsockname()[1])
            server = await asyncio.start_server(held.take, sock=stream)
            stack.callback(server.close)
        yield held


def _bound(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """Return a listening TCP socket, and a UDP socket of the same port.

    Raises:
        OSError: The system refuses.
    """
    family, _, _, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with ExitStack() as opened:
        stream = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stream.bind(place)
        stream.listen()
        datagrams = opened.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        datagrams.bind((place[0], stream.getsockname()[1], *place[2:]))
        opened.pop_all()
    return stream, datagrams
