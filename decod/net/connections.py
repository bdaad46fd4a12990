"""Counts and ends connections that gRPC has accepted: its Python interface can't.

Connections are found among this process's open files, by the address of their far end. To gRPC, a
connection that is shut down here has ended like any other.
"""

import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from decod.net.address import Address

_OPEN_FILES = Path("/dev/fd")
"""Names the files of the process that looks, on Linux and macOS."""


def plain_ip(host: str) -> str:
    """Return an IP address in its one form: IPv4 where IPv6 only wraps it; empty if it is none."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def num_open_files() -> int:
    """Return how many files this process has open."""
    return len(os.listdir(_OPEN_FILES))


def shut_down(local_port: int, is_meant: Callable[[Address], bool]) -> set[Address]:
    """End TCP connections to a port of this host; return the far ends of those.

    Looks at all open files, so call it in a thread.

    Args:
        local_port: Of the connections.
        is_meant: Tells from the far end of a connection whether it is to end.
    """
    ended = set()
    for connection in _sockets():
        with connection, suppress(OSError):
            near_end, far_end = connection.getsockname(), connection.getpeername()
            far = (plain_ip(far_end[0]), far_end[1])
            if near_end[1] == local_port and is_meant(far):
                connection.shutdown(socket.SHUT_RDWR)
                ended.add(far)
    return ended


def _sockets() -> Iterator[socket.socket]:
    """Yield copies of this process's sockets. A copy stays what it is when gRPC closes its own."""
    for name in os.listdir(_OPEN_FILES):
        copy = -1
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                copy = os.dup(int(name))
                found = socket.socket(fileno=copy)
                copy = -1
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
                else:
                    found.close()
        if copy >= 0:
            os.close(copy)
