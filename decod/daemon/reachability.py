"""How others reach this node: where it listens, at which address, and a check that they do."""

import asyncio
import socket
from collections.abc import Callable, Iterable

from decod.config.node_config import EVERYWHERE, NodeConfig, parse_listen
from decod.errors import NetworkError, PeerError, RejectedError
from decod.ids import RunId
from decod.membership.papers import Membership
from decod.net.address import Address, join_address, split_address
from decod.net.ask import HelloRequest, hello
from decod.net.channel import SHARED
from decod.net.dht import Dht
from decod.net.interfaces import is_loopback, is_own, outward_addresses
from decod.net.server import PeerServer
from decod.tasks import in_thread

_PAUSES_S = (1.0, 3.0)
"""Waits before the node is asked to dial again: one attempt may fail on a busy host."""


async def why_unreached(
    membership: Membership, run_id: RunId, asked_address: str, own_address: str
) -> str:
    """Have another node dial this node at the address that this node gives for itself.

    If it can't be asked, nothing is known, and a leader dials in any case before it lets the node
    in.

    Args:
        membership: This node's.
        run_id: The run.
        asked_address: The other node's: of the leader, if there is one.
        own_address: This node's.

    Returns:
        Why it can't reach this node; empty if it can, or if nothing is known.

    Raises:
        RejectedError: Another host has this node's identity (E-REJ-022).
    """
    request = HelloRequest(
        run_id=run_id,
        sender=membership.node_id,
        sender_address=own_address,
        start=membership.host.start,
    )
    unreached = ""
    for pause_s in (0.0, *_PAUSES_S):
        await asyncio.sleep(pause_s)
        try:
            unreached = (await hello(asked_address, request, membership)).unreached
        except (NetworkError, PeerError, RejectedError) as error:
            if error.code == SHARED:
                raise
            return ""
        if not unreached:
            break
    return unreached


async def require_reachable(
    membership: Membership, run_id: RunId, asked_address: str, own_address: str
) -> None:
    """Check that another node reaches this node. For the arguments see `why_unreached`.

    Raises:
        NetworkError: It can't reach this node (E-NET-013).
        RejectedError: Another host has this node's identity (E-REJ-022).
    """
    unreached = await why_unreached(membership, run_id, asked_address, own_address)
    if unreached:
        raise not_reached(asked_address, own_address, unreached)


def not_reached(asked_address: str, own_address: str, why: str) -> NetworkError:
    """Return the error for a node that another one can't reach."""
    return NetworkError(
        f"the node at {asked_address} can't reach this node at {own_address}",
        why=why,
        fix=reach_advice(own_address, asked_address),
        code="E-NET-013",
    )


def reach_advice(own_address: str, asked_address: str) -> str:
    """Return what to do if a node can't reach this one.

    Args:
        own_address: This node's, at which it was dialled.
        asked_address: The other node's.
    """
    host, port = split_address(own_address)
    if is_loopback(host) and not is_loopback(split_address(asked_address)[0]):
        return (
            f"{host} means another host to every host: listen on all addresses, with --listen "
            f"0.0.0.0:{port}, or give --advertise HOST:PORT that others can dial"
        )
    return (
        f"open TCP and UDP port {port} in this host's firewall; behind a router, forward the port "
        "to this host, and say how others reach it with --advertise HOST:PORT"
    )


def own_server(config: NodeConfig, port: int) -> Address:
    """Return where this node's server listens, as seen from this host."""
    host = config.listen_host
    return ("127.0.0.1" if host in EVERYWHERE else host, port)


def advertised(config: NodeConfig, port: int, observed: str = "") -> str:
    """Return the address to tell others: the operator's choice, or one found on this host.

    Args:
        config: This host's choices.
        port: The port at which this node listens.
        observed: This host's IP address as a peer saw it; empty if it is not known.
    """
    host = config.listen_host
    if config.advertise is not None:
        host, port = parse_listen(config.advertise)
    elif host in EVERYWHERE:
        # A peer on the same host sees a loopback address, which is useless to others.
        useful = bool(observed) and not is_loopback(observed)
        host = observed if useful else _outward(host)
    return join_address(host, port)


def _outward(host: str) -> str:
    found = outward_addresses(host)
    return found[0] if found else "::1" if ":" in host else "127.0.0.1"


def address_doubt(config: NodeConfig, address: str, others: Iterable[str] = ()) -> str:
    """Return why others may fail to reach this node, and how to choose; empty if nothing is known.

    Args:
        config: This host's choices.
        address: What this node tells others.
        others: Addresses of nodes that it knows already. If one is this host's own, so are all.
    """
    host, port = split_address(address)
    if is_loopback(host):
        if any(is_loopback(split_address(each)[0]) for each in others):
            return ""
        everywhere = config.listen_host in EVERYWHERE
        listen = "" if everywhere else f"listen on all addresses, with --listen 0.0.0.0:{port}, or "
        return (
            f"nodes of other hosts can't reach this one at {address}: for them, {listen}"
            "give --advertise HOST:PORT that they can dial"
        )
    if config.advertise is not None or config.listen_host not in EVERYWHERE:
        return ""
    found = outward_addresses(config.listen_host)
    if host not in found or len(found) == 1:
        return ""
    also = ", ".join(each for each in found if each != host)
    return (
        f"this host has no default route and several addresses; others are told {host}, and not "
        f"{also}: to choose, give --advertise HOST:PORT"
    )


class AddressDoubts:
    """Tells the operator, once of each kind, why others may fail to reach this node.

    Args:
        config: This host's choices.
        note: Takes the name of an event, and its fields as keywords.
    """

    def __init__(self, config: NodeConfig, note: Callable[..., None]) -> None:
        self._config, self._note = config, note
        self._has_misled = False

    def begin(self, address: str, others: Iterable[str]) -> None:
        """Look at what this node will tell others. The arguments are those of `address_doubt`."""
        if doubt := address_doubt(self._config, address, others):
            self._note("address.doubtful", reason=doubt)

    def asked(self, address: str, asker: str) -> None:
        """Look at a node that asks this one. The arguments are those of `misleads`."""
        if not self._has_misled and (line := misleads(address, asker)):
            self._has_misled = True
            self._note("address.doubtful", reason=line)


def misleads(own_address: str, asker: str) -> str:
    """Return the line on an asker of another host that this node leads astray; empty if not.

    Args:
        own_address: What this node tells others.
        asker: The IP address that it was asked from.
    """
    if not is_loopback(split_address(own_address)[0]) or not asker or is_own(asker):
        return ""
    return (
        f"a node at {asker} asks this one, which tells others {own_address}, where each host finds "
        "itself: start this node with --advertise HOST:PORT, at which that host reaches it"
    )


async def useless_here(told_address: str, asked_address: str) -> NetworkError | None:
    """Return the error if what a node says of its run's leader can't mean that leader here.

    Args:
        told_address: Of the leader, as the node says.
        asked_address: Of the node that has answered.

    Returns:
        The address told is this host's own, and the node that tells it is on another host
        (E-NET-037). None if nothing is wrong with it.
    """
    if not is_loopback(split_address(told_address)[0]):
        return None
    host, port = split_address(asked_address)
    try:
        found = await in_thread(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError:
        return None  # It has answered a moment ago: nothing is known.
    if all(is_own(str(each[4][0])) for each in found):
        return None
    return NetworkError(
        f"the run's leader tells others that it is at {told_address}",
        why=f"there each host finds itself, and the node that says so is at {asked_address}",
        fix="ask the organiser to start the leader with --advertise HOST:PORT, at which others "
        "reach it",
        code="E-NET-037",
    )


# --- listening -----------------------------------------------------------------------------------
# Listening for peers: on TCP for calls, and on UDP of the same port for the DHT.


MORE_PORTS = 15
"""Ports behind the wanted one that are tried if it is in use, and the operator chose none."""

_NUM_PORTS_TRIED = 16
"""Attempts if the system chooses the port, since it must be free for both."""


async def listen(
    server: PeerServer, dht: Dht, config: NodeConfig, say: Callable[[str], None] | None = None
) -> int:
    """Start both at the configured address, and return the port.

    Args:
        server: Takes calls.
        dht: Takes datagrams.
        config: Says where, and whether one of the next `MORE_PORTS` ports is as good.
        say: Takes a line for the operator's terminal, if it is another port.

    Raises:
        NetworkError: The port is in use, or the address is not this host's (E-NET-002).
    """
    host, port = config.listen_host, config.listen_port
    tried = [0] * _NUM_PORTS_TRIED if port == 0 else [port]
    if port and config.moves_port:
        tried += range(port + 1, min(port + MORE_PORTS, 65_535) + 1)
    for number, candidate in enumerate(tried, start=1):
        try:
            found = await _listen_on(server, dht, host, candidate)
        except NetworkError:
            if number == len(tried):
                raise
        else:
            if port not in (0, found) and say is not None:
                say(f"port {port} is in use: this node listens on port {found}")
            return found
    raise AssertionError("at least one port is tried")


async def _listen_on(server: PeerServer, dht: Dht, host: str, port: int) -> int:
    found = await server.start(host, port)
    try:
        await dht.start(host, found)
    except NetworkError:
        await server.stop(0)
        raise
    return found
