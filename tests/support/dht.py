"""Networks of the DHT on loopback sockets, and members that lie in them."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import umsgpack
from kademlia.node import Node

from decod.ids import RunId
from decod.membership.papers import Membership
from decod.membership.statements import Authors
from decod.net.dht import Dht, DhtPorts
from decod.net.dht_datagram import REPLY, WELCOME, Session, Sessions, new_nonce, run_tag
from decod.net.dht_protocol import DhtProtocol
from decod.net.dht_record import RecordReader, RecordStore, record_body, record_statement
from decod.net.dht_table import ContactTable, DhtLimits
from decod.net.net_limits import Counters
from tests.support.members import data_node, volunteer

RUN = RunId("r" * 26)
NOW_S = 1_000_000
NEVER_S = 1e9

QUIET = DhtLimits(look_around_s=NEVER_S)
"""The limits of most tests: a node looks around only if it is told to."""

BOUNDLESS = DhtLimits(
    look_around_s=NEVER_S,
    greetings_per_s=1e6,
    greetings_burst=1e6,
    checks_per_s=1e6,
    requests_per_s=1e6,
    requests_burst=1e6,
)
"""No limits of rates, so that all that is thrown at a node is read."""


class Clock:
    """A wall clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s: float = NOW_S

    def __call__(self) -> float:
        return self.now_s


@cache
def member(index: int) -> Membership:
    """Returns a member of the tests' run. The first four are data nodes."""
    name = f"member {index}"
    return data_node(name) if index < 4 else volunteer(name)


def leads(index: int, term: int = 1) -> dict[str, Any]:
    """Returns what a leader publishes."""
    return {"address": f"10.0.0.{index}:7700", "term": term}


def peer(port: int) -> dict[str, Any]:
    """Returns what a node publishes of itself."""
    return {"address": f"h:{port}"}


def node_of(
    by: Membership, clock: Clock, run_id: RunId = RUN, limits: DhtLimits = QUIET, **ports: Any
) -> Dht:
    """Returns a node that has not started."""
    return Dht(by, run_id, DhtPorts(clock=clock, **ports), limits)


async def started(node: Dht, host: str = "127.0.0.1", port: int = 0) -> str:
    """Starts a node; returns its address."""
    return f"{host}:{await node.start(host, port)}"


@asynccontextmanager
async def network(num_nodes: int, clock: Clock) -> AsyncIterator[tuple[list[Dht], list[str]]]:
    """Runs nodes that have all been started with the first one's address."""
    nodes = [node_of(member(i), clock) for i in range(num_nodes)]
    try:
        addresses = [await started(node) for node in nodes]
        for node in nodes[1:]:
            await node.bootstrap(addresses[:1])
        yield nodes, addresses
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


Test = Callable[[list[Dht], list[str], Clock], Awaitable[None]]


def with_network(num_nodes: int, test: Test) -> None:
    """Runs a test in a network."""

    async def run() -> None:
        clock = Clock()
        async with network(num_nodes, clock) as (nodes, addresses):
            await test(nodes, addresses, clock)

    asyncio.run(run())


def record_of(by: Membership, name: str, value: Any, *, run_id: RunId = RUN, **times: Any) -> bytes:
    """Returns a record that somebody has signed, whatever it says."""
    fields = {"sequence": NOW_S * 1000, "expires_s": NOW_S + 60} | times
    return record_statement(record_body(run_id, name, value, **fields), by.state)


class Raw:
    """Bytes that are sent as they are."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


Lie = Callable[[list[Any]], Any]
"""Returns what is answered to a call."""


class Liar(DhtProtocol):
    """A member that introduces itself and answers pings as it should, and all else with lies."""

    def __init__(
        self,
        by: Membership,
        lie: Lie,
        clock: Callable[[], float],
        run_id: RunId = RUN,
        sessions: Sessions | None = None,
    ) -> None:
        authors, counters = Authors(by.root, clock), Counters()
        self.sessions = sessions or Sessions(by, run_id, clock, authors)
        self.contacts = ContactTable(self.sessions.kademlia_id, self.ping, BOUNDLESS)
        store = RecordStore(RecordReader(run_id, clock, authors), counters)
        parts = (self.sessions, self.contacts, store, counters, BOUNDLESS)
        super().__init__(run_tag(run_id), *parts)
        self.lie, self.num_lies, self.port = lie, 0, 0
        self.distort: Callable[[bytes], bytes] = bytes
        """What becomes of its welcomes on the way."""
        self.heard: list[bytes] = []
        """All datagrams that came."""
        self.sent: list[bytes] = []
        """All that left."""

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self.heard.append(data)
        super().datagram_received(data, addr)

    def _send(self, datagram: bytes, address: tuple[str, int]) -> None:
        self.sent.append(datagram)
        super()._send(self.distort(datagram) if datagram[:1] == WELCOME else datagram, address)

    def _answer(
        self, session: Session, message_id: bytes, body: bytes, source: tuple[str, int]
    ) -> None:
        call = umsgpack.unpackb(body)
        if call == ["ping"]:
            super()._answer(session, message_id, body, source)
            return
        self.num_lies += 1
        reply, nonce, head = self.lie(call), new_nonce(), REPLY + message_id
        text = reply.raw if isinstance(reply, Raw) else umsgpack.packb(reply)
        self._send(head + nonce + session.encrypt(nonce, text, head), source)

    async def asks(self, address: str, *call: Any) -> object:
        """Sends a call of any form; returns the answer, None if there is none."""
        node = await self.meets(address)
        body = call[0].raw if isinstance(call[0], Raw) else umsgpack.packb(list(call))
        return await self._call(node, body)

    async def meets(self, address: str) -> Node:
        """Introduces itself, if need be."""
        host, _, port = address.rpartition(":")
        for known in self.contacts.contacts():
            if (known.ip, known.port) == (host, int(port)):
                return known
        node = await self.greet((host, int(port)))
        assert node is not None, "nobody answers"
        return node

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def nothing(_: list[Any]) -> Any:
    """The lie of one who knows nobody, and stores nothing."""
    return []


@asynccontextmanager
async def liar(
    clock: Callable[[], float], lie: Lie = nothing, by: Membership | None = None, **how: Any
) -> AsyncIterator[Liar]:
    """Runs a member that lies."""
    host = how.pop("host", "127.0.0.1")
    _, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Liar(by or volunteer("liar"), lie, clock, **how), local_addr=(host, 0)
    )
    assert protocol._transport is not None
    protocol.port = protocol._transport.get_extra_info("sockname")[1]
    try:
        yield protocol
    finally:
        await protocol.close()


def padding() -> bytes:
    """Returns what makes a call as long as its answer may be."""
    return bytes(1000)


def random_key() -> bytes:
    """Returns a place in the DHT."""
    return os.urandom(20)
