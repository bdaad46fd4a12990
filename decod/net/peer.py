"""Where a call came from."""

from typing import TypeAlias
from urllib.parse import unquote

import grpc.aio

from decod.net.address import Address
from decod.net.connections import plain_ip

# The stubs' class takes parameters, gRPC's own does not.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


def host_of(context: Context) -> str:
    """Returns the peer's address without its port, which is another for each connection."""
    return unquote(context.peer()).rpartition(":")[0]


def ip_of(context: Context) -> str:
    """Returns the peer's IP address in its plain form, or an empty text if it has none."""
    return plain_ip(host_of(context).partition(":")[2].strip("[]"))


def far_end_of(peer: str) -> Address | None:
    """Returns a peer's end of a connection, as `Context.peer` names it; None if it has no port."""
    host, _, port = unquote(peer).rpartition(":")
    return (plain_ip(host.partition(":")[2].strip("[]")), int(port)) if port.isdecimal() else None
