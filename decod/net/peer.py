"""The address of the peer that made a call."""

from typing import TypeAlias
from urllib.parse import unquote

import grpc.aio

from decod.net.address import Address
from decod.net.connections import plain_ip

# Only the stubs' class takes parameters, so the alias is a string.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


def host_of(context: Context) -> str:
    """Return the peer's address without its port, which differs for each connection."""
    return unquote(context.peer()).rpartition(":")[0]


def ip_of(context: Context) -> str:
    """Return the peer's IP address in canonical form, or an empty text if it has none."""
    return plain_ip(host_of(context).partition(":")[2].strip("[]"))


def far_end_of(peer: str) -> Address | None:
    """Return the far end of a connection that `Context.peer` names; None if it has no port."""
    host, _, port = unquote(peer).rpartition(":")
    return (plain_ip(host.partition(":")[2].strip("[]")), int(port)) if port.isdecimal() else None
