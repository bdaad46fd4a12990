"""`host:port`, the only form in which decod writes addresses. IPv6 hosts are in brackets."""

import ipaddress
import re

from decod.errors import NetworkError

Address = tuple[str, int]
"""Host and port, as sockets take them."""

LOCAL = "unix:"
"""The beginning of the address of a local socket that leads to a node which nobody can dial."""

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


def split_address(address: str) -> tuple[str, int]:
    """Return host (without brackets) and port.

    Raises:
        NetworkError: `address` has another form, or its port is not in 1 to 65535 (E-NET-011).
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535:
        if bracketed and _is_ip(bare, version=6):
            return bare, int(port)
        if not bracketed and (_is_ip(bare, version=4) or _is_name(bare)):
            return bare, int(port)
    raise NetworkError(
        f"address {address[:80]!r} can't be read",
        why="it must be host:port, with an IPv6 host in brackets and a port from 1 to 65535",
        fix="write it like 192.0.2.7:7700, gpu.example.org:7700 or [2001:db8::7]:7700",
        code="E-NET-011",
    )


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets where `host` is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ip(host: str, *, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _is_name(host: str) -> bool:
    labels = host.split(".")
    # A host whose last label is all digits is a mistyped IPv4 address, not a name.
    return (
        0 < len(host) <= 253
        and all(_LABEL.fullmatch(label) for label in labels)
        and not labels[-1].isdecimal()
    )
