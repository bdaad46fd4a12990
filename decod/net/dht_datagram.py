"""Forms of the DHT's datagrams.

    greeting  0  id  tag of the run  length  introduction  zeros to 448 bytes
    welcome   1  id of the greeting  length  introduction  nonce  proof
    request   2  tag of the session  id, which is the nonce too  encrypted call
    reply     3  id of the request  nonce  encrypted answer

Two members introduce themselves with a greeting and a welcome, once (see `dht_session`). All else
is encrypted msgpack. Greetings and searches are padded: what they lead to is never longer than they
are.
"""

import hashlib
import ipaddress
from typing import Any

import umsgpack  # type: ignore[import-untyped]  # Comes with kademlia; has no types.
from kademlia.node import Node

from decod.ids import RunId
from decod.net.address import Address
from decod.net.dht_record import RECORD_SIZE_MAX_BYTES
from decod.net.dht_session import (
    KADEMLIA_ID_SIZE_BYTES,
    MAC_SIZE_BYTES,
    NONCE_SIZE_BYTES,
    SESSION_TAG_SIZE_BYTES,
)
from decod.net.dht_table import BUCKET_SIZE

DATAGRAM_SIZE_MAX_BYTES = 1200
GREETING_SIZE_BYTES = 448
RUN_TAG_SIZE_BYTES = 8
GREETING, WELCOME, REQUEST, REPLY = b"\x00", b"\x01", b"\x02", b"\x03"

ID_END = 1 + NONCE_SIZE_BYTES
"""Where the id ends, in all datagrams but requests."""
REQUEST_HEAD_SIZE_BYTES = 1 + SESSION_TAG_SIZE_BYTES
REQUEST_SIZE_LEAST_BYTES = REQUEST_HEAD_SIZE_BYTES + NONCE_SIZE_BYTES + MAC_SIZE_BYTES
REPLY_SIZE_LEAST_BYTES = ID_END + NONCE_SIZE_BYTES + MAC_SIZE_BYTES

PING = bytes(umsgpack.packb(["ping"]))
PING_SIZE_BYTES = REQUEST_SIZE_LEAST_BYTES + len(PING)

# The longest reply is a record, with at most 16 bytes round it. A ping may follow it.
_SEARCH_SIZE_BYTES = REPLY_SIZE_LEAST_BYTES + RECORD_SIZE_MAX_BYTES + 16 + PING_SIZE_BYTES
assert _SEARCH_SIZE_BYTES <= DATAGRAM_SIZE_MAX_BYTES

# All errors that the decoder raises on hostile bytes.
_UNPACK_ERRORS = (
    umsgpack.UnpackException,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    OSError,
)


def run_tag(run_id: RunId) -> bytes:
    """Return what names the run in a greeting, 8 bytes. It does not tell the run's id."""
    return hashlib.sha256(b"decod dht run\0" + run_id.encode()).digest()[:RUN_TAG_SIZE_BYTES]


def framed(introduction: bytes) -> bytes:
    """Return an introduction after its length."""
    return len(introduction).to_bytes(2, "big") + introduction


def unframed(data: bytes) -> tuple[bytes, bytes]:
    """Return the introduction at the beginning of some bytes, and what follows it."""
    end = 2 + int.from_bytes(data[:2], "big")
    return data[2:end], data[end:]


def search_call(name: str, key: bytes) -> bytes:
    """Return a call for what is near to a place, or there. It is as long as the longest answer."""
    plain_size_bytes = len(encoded([name, key, bytes(256)])) - 256
    room_bytes = _SEARCH_SIZE_BYTES - REQUEST_SIZE_LEAST_BYTES - plain_size_bytes
    return encoded([name, key, bytes(room_bytes)])


def encoded(value: object) -> bytes:
    """Return the bytes of a call or an answer."""
    return bytes(umsgpack.packb(value))


def decoded(data: bytes) -> object:
    """Return a peer's call or answer; `()`, which is neither, if it can't be read."""
    try:
        value: object = umsgpack.unpackb(data)
    except _UNPACK_ERRORS:
        # Not an exception: an unreadable answer must end its caller's wait too.
        return ()
    # None means "no answer", so what decodes to None becomes an invalid one.
    return () if value is None else value


def nodes_in(answer: list[Any]) -> list[Node] | None:
    """Return the nodes that a peer names in its answer; None if one of them is malformed."""
    if len(answer) > BUCKET_SIZE:
        return None
    nodes = []
    for entry in answer:
        match entry:
            case [bytes(place), str(ip), int(port)] if len(place) == KADEMLIA_ID_SIZE_BYTES:
                if not _can_be_sent_to(ip, port):
                    return None
                nodes.append(Node(place, ip, port))
            case _:
                return None
    return nodes


def source_of(addr: tuple[Any, ...]) -> Address:
    """Return host and port of a datagram's source, with an IPv4-mapped address as IPv4."""
    host, port = addr[:2]
    return host.removeprefix("::ffff:") if "." in host else host, port


def _can_be_sent_to(ip: str, port: int) -> bool:
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return False
    # Nodes write IPv4 addresses as such, and know nothing of others' network interfaces.
    odd = "%" in ip or (address.version == 6 and address.ipv4_mapped is not None)
    if odd or address.is_multicast or address.is_unspecified or isinstance(port, bool):
        return False
    return 1 <= port <= 65535
