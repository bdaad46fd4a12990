"""Hostile datagrams for a node of the DHT: strangers', altered true ones, and a lying member's."""

import asyncio
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import umsgpack

from decod.net.dht import Dht
from decod.net.dht_datagram import (
    GREETING,
    GREETING_SIZE_BYTES,
    REPLY,
    REQUEST,
    WELCOME,
    kademlia_id_of,
)
from decod.net.dht_record import LEADER, PEER
from decod.net.net_limits import PEERS_MAX
from tests.support.dht import (
    BOUNDLESS,
    Clock,
    Liar,
    Raw,
    leads,
    liar,
    member,
    node_of,
    padding,
    peer,
    record_of,
    started,
)
from tests.support.members import volunteer

_KINDS = (GREETING, WELCOME, REQUEST, REPLY)
_BATCH = 50
"""Datagrams that fit into a socket's buffer."""
_NUM_REMEMBERED = 64


@dataclass(slots=True)
class Damage:
    """What a node has suffered."""

    num_thrown: int = 0
    errors: list[str] = field(default_factory=list)
    """Errors that reached the event loop."""
    grown_bytes: int = 0
    """How much this process has grown, from a tenth of the datagrams on."""
    num_kept: int = 0
    """Sessions, contacts, records, counters, open calls and tasks that the node is left with."""
    works: bool = False
    """Whether another node still finds the leader through it."""


async def bombard(num: int, rng: random.Random) -> Damage:
    """Throw datagrams at a node, from a stranger and from a member; return the damage.

    Args:
        num: How many.
        rng: Chooses them.
    """
    damage, clock = Damage(), Clock()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: damage.errors.append(str(context)))
    target, other = (node_of(member(i), clock, limits=BOUNDLESS) for i in range(2))
    address = await started(target)
    await started(other)
    try:
        async with liar(clock, lambda _: _lie(rng)) as lying:
            await other.bootstrap([address])
            await other.publish(LEADER, leads(1), 60)
            with socket.socket(type=socket.SOCK_DGRAM) as stranger:
                await _throw(num, rng, (lying, stranger, target, address), damage)
        await other.bootstrap(())
        await target.retract(LEADER)
        damage.works = await target.lookup(LEADER) is not None
        damage.num_kept = _kept(target)
    finally:
        await asyncio.gather(target.close(), other.close())
        loop.set_exception_handler(None)
    return damage


async def _throw(
    num: int, rng: random.Random, scene: tuple[Liar, socket.socket, Dht, str], damage: Damage
) -> None:
    lying, stranger, target, address = scene
    host, _, port = address.rpartition(":")
    before_bytes = 0
    for batch in range(num // _BATCH):
        if batch % 20 == 0:
            await _converse(lying, target, address, rng)
            shapes = _shapes(rng, lying.sent[-_NUM_REMEMBERED:])
        if batch == num // _BATCH // 10:
            before_bytes = resident_bytes()
        for _ in range(_BATCH // 2):
            stranger.sendto(next(shapes), (host, int(port)))
            _call_something(lying, (host, int(port)), rng)
        damage.num_thrown += _BATCH // 2 * 2
        # The answer shows that the node has got through what came before.
        await lying.asks(address, "ping")
        del lying.sent[:-_NUM_REMEMBERED], lying.heard[:]
    damage.grown_bytes = resident_bytes() - before_bytes


async def _converse(lying: Liar, target: Dht, address: str, rng: random.Random) -> None:
    """Let the member say true things, of which others are made, and answer with lies."""
    record = record_of(volunteer("liar"), PEER, peer(1 + rng.randrange(9999)))
    await lying.asks(address, "store", record)
    await lying.asks(address, "find_node", rng.randbytes(20), padding())
    await target.lookup(PEER, member(9).node_id)
    # The target has dropped it by now, so both introduce themselves again.
    lying.distort = lambda datagram: _altered_behind(rng.choice((13, -30)), datagram, rng)
    for _ in range(20):
        await target.bootstrap([lying.address])
    lying.distort = bytes


def _lie(rng: random.Random) -> Any:
    """Return an answer to the node's calls."""
    return Raw(rng.randbytes(rng.randrange(1100))) if rng.random() < 0.3 else _value(rng, 0)


def _call_something(lying: Liar, to: tuple[str, int], rng: random.Random) -> None:
    """Send a text of any form as a call."""
    session = lying.sessions.of(kademlia_id_of(member(0).node_id))
    if session is None:
        return
    texts: tuple[Callable[[], bytes], ...] = (
        lambda: rng.randbytes(rng.randrange(1160)),
        lambda: bytes(umsgpack.packb(_value(rng, 0)))[:1160],
        lambda: _altered(umsgpack.packb(["find_value", rng.randbytes(20), padding()]), rng),
        lambda: _altered(umsgpack.packb(["store", rng.randbytes(rng.randrange(900))]), rng),
    )
    nonce, text = rng.randbytes(12), rng.choice(texts)()
    head = REQUEST + lying.sessions.tag
    lying._send(head + nonce + session.encrypt(nonce, text, head), to)


def _shapes(rng: random.Random, true: list[bytes]) -> Iterator[bytes]:
    """Yield what a stranger may send who has heard some true datagrams."""
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: rng.randbytes(rng.randrange(1400)),
        lambda: rng.choice(_KINDS) + rng.randbytes(rng.randrange(1300)),
        lambda: (GREETING + rng.randbytes(GREETING_SIZE_BYTES))[:GREETING_SIZE_BYTES],
        lambda: rng.choice(true),
        lambda: _altered(rng.choice(true), rng),
        lambda: rng.choice(_KINDS) + rng.choice(true)[1:],
    )
    while True:
        yield rng.choice(makers)()


def _altered_behind(position: int, data: bytes, rng: random.Random) -> bytes:
    return data[:position] + _altered(data[position:], rng)


def _altered(data: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(data)), rng.randrange(1, 9)
    how = rng.randrange(4)
    if how == 0:
        return data[:at]
    if how == 1:
        return data + rng.randbytes(length)
    skipped = 0 if how == 2 else length
    return data[:at] + rng.randbytes(length) + data[at + skipped :]


def _value(rng: random.Random, depth: int) -> Any:
    """Return any value that can be sent."""
    kind = rng.randrange(6 if depth > 2 else 8)
    if kind == 6:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == 7:
        return {rng.choice(("value", "x", 1)): _value(rng, depth + 1) for _ in range(3)}
    plain = (None, rng.random() < 0.5, rng.randrange(-(1 << 63), 1 << 63), rng.random())
    return (*plain, "ä" * rng.randrange(40), rng.randbytes(rng.choice((0, 8, 20, 200))))[kind]


def _kept(node: Dht) -> int:
    protocol = node._protocol
    assert protocol is not None
    assert len(node.counters._counts) <= PEERS_MAX + 20
    kept = (node._sessions, node._table, node._store, protocol._calls, protocol._meetings)
    return sum(map(len, kept)) + len(node.counters._counts)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096
