"""Checks of this host's way to others: node, names, MTU, port, run, reachability, routers.

Each is a pure function of facts. Those of this host's network are gathered here, and those that
others tell in `doctor_asking`.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import psutil

from decod.daemon.reachability import reach_advice
from decod.exit_codes import ExitCode
from decod.insight.host_checks import Diagnosis, doubtful, failed, fine
from decod.installation import install_hint
from decod.net.address import join_address, split_address
from decod.system import path_mtu_bytes
from decod.tasks import in_thread
from decod.texts import why_of

MTU_MIN_BYTES = 1280
"""IPv6 needs this much, and datagrams of the DHT with their headers fit into it."""

MTU_INTERNET_BYTES = 1500
"""Most that links of the internet carry."""

_PACKET_MAX_BYTES = 65_535
"""Largest packet of IP. The loopback of Linux would carry one byte more."""

_REMEDY_OF_PORT = {
    errno.EADDRINUSE: "give a free port with --listen HOST:PORT; `ss -lntup` shows those in use",
    errno.EADDRNOTAVAIL: "give an address of this host with --listen HOST:PORT",
    errno.EACCES: "give a port above 1023 with --listen HOST:PORT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """The node that uses the state folder, as it describes itself."""

    name: str
    state: str
    run_name: str
    run_id: str
    address: str
    """Where it says that others reach it."""
    device: str = ""
    """The device in use; empty if it does not say."""
    release: str | None = None
    """Its release of decod; None if it does not say."""
    message: str = ""
    """What is going on in the run."""
    others: tuple[str, ...] = ()
    """Addresses of other members, the leader's first."""
    suspended: bool = False
    """It is out of its run for a while: nobody listens at its address, and its device is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedName:
    """A host name, and what the system's resolver says about it."""

    name: str
    addresses: tuple[str, ...] = ()
    problem: str = ""
    """Why there are none."""
    absent: bool = False
    """A name server has answered that there is no such name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """The way by which packets leave this host."""

    target: str
    """The IP address to which it leads."""
    interface: str
    mtu_bytes: int
    """Of the interface."""
    path_mtu_bytes: int | None = None
    """What the kernel has learnt of the whole way; None if it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPort:
    """An attempt to listen."""

    host: str
    port: int
    """0: any free one was wanted, and there is one."""
    error: int = 0
    """The system's number of the error; 0 if there was none."""
    problem: str = ""
    """The same in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeen:
    """A run, as one of its nodes has described it to this host."""

    asked: str
    """Address of that node."""
    name: str
    """The run's name; its id if it has none."""
    duration_s: float
    """How long the answer took."""
    observed: str
    """This host's IP address as that node saw it. Empty: it did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedReach:
    """Whether another node reaches this host."""

    asked: str
    """Address of that node."""
    own: str
    """Address at which it was to reach this host."""
    unreached: str | None
    """Why it did not; empty if it did. None: it was not asked to try."""


def check_node(node: RunningNode | None, *, in_use: bool) -> Diagnosis:
    """Check the node that uses the state folder, if one does.

    Args:
        node: That node; None if none answers.
        in_use: Whether a daemon has locked the folder.
    """
    if node is None and in_use:
        return doubtful(
            "node",
            "a daemon uses the state folder, and does not answer",
            "wait until it has found its run, and look at node.log in that folder",
        )
    if node is None:
        return fine("node", "none runs with this state folder")
    found = f"{node.name} is in run {node.run_name}: {node.state}"
    if node.state == "reconnecting":
        found += f"; {node.message}" if node.message else ""
        return doubtful("node", found, "wait: the node looks for its run by itself")
    return fine("node", found)


def check_names(names: Sequence[ResolvedName], *, has_addresses: bool, own: bool) -> Diagnosis:
    """Check that host names lead to addresses.

    Args:
        names: The names in the join string, or this host's own if that has none.
        has_addresses: Whether the join string also holds IP addresses, which need no resolver.
        own: Whether the name is this host's.
    """
    bad = [name for name in names if name.problem]
    if not bad:
        found = "; ".join(f"{name.name} is {name.addresses[0]}" for name in names)
        return fine("dns", found or "no name to resolve")
    found = "; ".join(f"{name.name}: {name.problem}" for name in bad)
    if own:
        return doubtful("dns", found, "add this host's name to /etc/hosts")
    if all(name.absent for name in bad):
        remedy = "ask the organiser for a join string with the right names"
    else:
        remedy = "check /etc/resolv.conf, which lists the name servers"
    if has_addresses or len(bad) < len(names):
        return doubtful("dns", found, remedy)
    return failed("dns", found, remedy, ExitCode.NETWORK)


def check_mtu(route: WayOut | None) -> Diagnosis:
    """Check that packets as decod sends them pass the way out of this host."""
    if route is None:
        return doubtful("mtu", "no network interface leads out", "connect this host to a network")
    found = f"{route.mtu_bytes} bytes at {route.interface}"
    path_bytes = min(route.mtu_bytes, route.path_mtu_bytes or route.mtu_bytes)
    if path_bytes < min(route.mtu_bytes, _PACKET_MAX_BYTES):
        found += f", {path_bytes} bytes on the way to {route.target}"
    if path_bytes < MTU_MIN_BYTES:
        return doubtful(
            "mtu",
            f"{found}: below {MTU_MIN_BYTES}, packets may vanish",
            f"set the MTU of the interface or its tunnel to {MTU_MIN_BYTES} or more",
        )
    if path_bytes > MTU_INTERNET_BYTES and ipaddress.ip_address(route.target).is_global:
        return doubtful(
            "mtu",
            f"{found}: the internet carries {MTU_INTERNET_BYTES}, so large packets may vanish",
            f"`ip link set dev {route.interface} mtu {MTU_INTERNET_BYTES}`",
        )
    return fine("mtu", found)


def check_port(tried: TriedPort) -> Diagnosis:
    """Check that a node could listen, on TCP and UDP."""
    address = join_address(tried.host, tried.port)
    if tried.error:
        remedy = _REMEDY_OF_PORT.get(tried.error, "give another --listen HOST:PORT")
        found = f"can't listen on {address}: {tried.problem}"
        return failed("port", found, remedy, ExitCode.NETWORK)
    if not tried.port:
        return fine("port", f"a free port of {tried.host} is there for TCP and UDP")
    return fine("port", f"{address} is free for TCP and UDP")


def check_port_of(node: RunningNode) -> Diagnosis:
    """Say where the node of this host listens: its port is not tried."""
    return fine("port", f"the node has its own, and gives {node.address} to others")


def check_run(seen: RunSeen | None, node: RunningNode | None) -> Diagnosis:
    """Say whether a node of the run has answered. For an error in its stead, see `failed_by`.

    Args:
        seen: The run; None if nobody was asked.
        node: The node of this host, if one runs.
    """
    if seen is not None:
        return fine("run", f"{seen.name}: {seen.asked} answered in {seen.duration_s:.2f} s")
    if node is not None:
        return doubtful(
            "run",
            "no other member is known, so nobody was asked about this host",
            "run the command again when others have joined",
        )
    return doubtful(
        "run",
        "not asked, so nobody can tell whether others reach this host",
        "give the join string: `decod doctor JOINSTRING`",
    )


def check_reach(reach: TriedReach) -> Diagnosis:
    """Check that another node reaches this host, over TCP."""
    if reach.unreached is None:
        port = split_address(reach.own)[1]
        return doubtful(
            "reach",
            f"not tried at {reach.own}: only members are dialled, and this host is none yet",
            f"open TCP and UDP port {port}, and join: the leader tries it before it lets you in",
        )
    if reach.unreached:
        return doubtful(
            "reach",
            f"the node at {reach.asked} can't reach this host at {reach.own}: {reach.unreached}. "
            "A volunteer trains all the same, and a data node is not let in",
            reach_advice(reach.own, reach.asked),
        )
    return fine("reach", f"the node at {reach.asked} reaches this host at {reach.own}")


def check_nat(seen: RunSeen, own: Collection[str], reach: TriedReach | None) -> Diagnosis:
    """Say whether a router translates this host's address.

    Args:
        seen: What another node saw.
        own: The IP addresses of this host's interfaces.
        reach: Whether that node reaches this host, if that was tried.
    """
    observed = _address_in(seen.observed)
    if observed is None or observed.is_loopback:
        why = "does not say whom it sees" if observed is None else "is on this host"
        return doubtful(
            "nat",
            f"unknown: the node at {seen.asked} {why}",
            "give the join string of a run on another host",
        )
    if observed in {_address_in(each) for each in own}:
        return fine(
            "nat", f"none: the node at {seen.asked} sees this host's own address, {observed}"
        )
    found = f"behind a router: the node at {seen.asked} sees {observed}, which is not this host's"
    if reach is not None and reach.unreached == "":
        return fine("nat", f"{found}, and which passes connections on")
    port = "PORT" if reach is None else split_address(reach.own)[1]
    shown = f"[{observed}]" if observed.version == 6 else f"{observed}"
    return doubtful(
        "nat",
        found,
        f"forward TCP and UDP port {port} of the router to this host, and join with "
        f"--advertise {shown}:{port}; or install miniupnpc, which asks the router by UPnP: "
        f"{install_hint('nat')}",
    )


def _address_in(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an IP address, without its zone; None if the text is none."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


RESOLVE_TIMEOUT_S = 5.0
"""Longest that a name may take. The system's resolver would try for longer."""

_SOMEWHERE = "192.0.2.1"
"""An address of nobody, for which the way out of this host is chosen. Nothing is sent."""
_PORT = 9
_ABSENT = (socket.EAI_NONAME, socket.EAI_NODATA)


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
        mtu_bytes = path_mtu_bytes(probe)
    interface = _interface_of(address)
    stats = psutil.net_if_stats().get(interface or "")
    if interface is None or stats is None:
        return None
    return WayOut(
        target=target,
        interface=interface,
        mtu_bytes=stats.mtu,
        path_mtu_bytes=mtu_bytes,
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
