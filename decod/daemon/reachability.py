"""The address at which others can reach this node, and a check that they do."""

import asyncio
import ipaddress
import socket

from decod.config.node import NodeConfig, parse_listen
from decod.errors import NetworkError, PeerError, RejectedError
from decod.ids import RunId
from decod.membership.papers import Membership
from decod.net.address import Address, split_address
from decod.net.ask import hello
from decod.net.server import HelloRequest

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104

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
    """
    request = HelloRequest(run_id=run_id, sender=membership.node_id, sender_address=own_address)
    unreached = ""
    for pause_s in (0.0, *_PAUSES_S):
        await asyncio.sleep(pause_s)
        try:
            unreached = (await hello(asked_address, request, membership)).unreached
        except (NetworkError, PeerError, RejectedError):
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
    if _is_loopback(host) and not _is_loopback(split_address(asked_address)[0]):
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
    return ("127.0.0.1" if host in _EVERYWHERE else host, port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
    elif host in _EVERYWHERE:
        # A peer on the same host sees a loopback address, which is useless to others.
        useful = bool(observed) and not _is_loopback(observed)
        host = observed if useful else _outgoing(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _outgoing(host: str) -> str:
    """Return the address from which this host reaches others, of the same kind as `host`."""
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    target = "2001:db8::1" if host == "::" else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # This only chooses the outgoing interface. Nothing is sent.
            probe.connect((target, 9))
            found: str = probe.getsockname()[0]
        except OSError:
            found = "::1" if host == "::" else "127.0.0.1"
    return found
