"""The peer that made a call: who it is, and from where it calls."""

from typing import TypeAlias
from urllib.parse import unquote

import grpc.aio

from decod.errors import MalformedMessageError
from decod.ids import NodeId
from decod.membership.certificates import Caller, Purpose, caller_of
from decod.net.address import Address
from decod.net.connections import plain_ip
from decod.wire import validate

# Only the stubs' class takes parameters, so the alias is a string.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


def caller_in(context: Context) -> Caller | None:
    """Return the caller as its certificate proves it; None if that is no node's of decod."""
    found = list(context.auth_context().get("x509_pem_cert", ()))
    try:
        return caller_of(found[0]) if found else None
    except MalformedMessageError:
        return None


def proven_id(context: Context) -> str:
    """Return a caller's id. The holder of a join token has not proven its own yet: empty."""
    caller = caller_in(context)
    return "" if caller is None or caller.purpose is Purpose.JOINING else caller.node_id


def require_caller(field: str, value: str, context: Context) -> NodeId:
    """Check that a field with the sender's node id names the caller; return the id.

    Raises:
        MalformedMessageError: It names another node, or none.
    """
    caller = caller_in(context)
    if caller is None or caller.node_id != value:
        allowed = "that of a node" if caller is None else str(caller.node_id)
        raise validate.malformed(field, value, allowed=allowed)
    return caller.node_id


def host_of(context: Context) -> str:
    """Return the peer's address without its port, which differs for each connection."""
    return unquote(context.peer()).rpartition(":")[0]


def ip_of(context: Context) -> str:
    """Return the peer's IP address in canonical form, or an empty text if it has none."""
    return ip_in(host_of(context))


def ip_in(host: str) -> str:
    """Return the IP address in what `host_of` returns, in canonical form; empty if it has none."""
    return plain_ip(host.partition(":")[2].strip("[]"))


def far_end_of(peer: str) -> Address | None:
    """Return the far end of a connection that `Context.peer` names; None if it has no port."""
    host, _, port = unquote(peer).rpartition(":")
    return (ip_in(host), int(port)) if port.isdecimal() else None
