"""Count and end connections that gRPC has accepted. gRPC's Python interface can't do that.

This module finds connections among the process's open files, by the address of their far end. To
gRPC, a connection that is shut down here looks closed by the peer.
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
"""Lists the open files of the process that reads it, on Linux and macOS."""


def plain_ip(host: str) -> str:
    """Return an IP address in canonical form, IPv4-mapped as IPv4; empty if `host` is none."""
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
    """End the TCP connections to a local port that `is_meant` selects; return their far ends.

    Looks at all open files, so call it in a thread.

    Args:
        local_port: The port of this host's end.
        is_meant: Decides from the address of the far end whether a connection is ended.
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
    """Yield duplicates of this process's IP sockets. gRPC may close its own meanwhile.

    The number of a closed file can be reused for another one at once. A duplicate can't change.
    """
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
