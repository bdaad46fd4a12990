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


def far_end_of(context: Context) -> Address | None:
    """Returns the peer's end of the connection, or None if it has no port."""
    port = context.peer().rpartition(":")[2]
    return (ip_of(context), int(port)) if port.isdecimal() else None
