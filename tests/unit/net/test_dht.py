"""The DHT on real loopback sockets, among honest nodes and against liars."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import umsgpack
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import MalformedMessageError, NetworkError
from decod.ids import NodeId, RunId
from decod.net.counters import Counters
from decod.net.dht import Dht
from decod.net.dht_record import (
    LEADER,
    Record,
    RecordStore,
    parse_record,
    peer_name,
    record_key,
)
from tests.waiting import wait_until

RUN = RunId("r" * 26)
BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
NOW_S = 1_000_000.0


class Clock:
    """A wall clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def node_id(index: int) -> NodeId:
    return NodeId(BASE32[index % 32] * 52)


def leader(index: int, term: int = 1) -> dict[str, Any]:
    return {"node_id": node_id(index), "address": f"10.0.0.{index}:7700", "term": term}


@asynccontextmanager
async def network(
    num_nodes: int, clock: Clock, run_id: RunId = RUN
) -> AsyncIterator[tuple[list[Dht], list[str]]]:
    nodes = [Dht(node_id(i), run_id, wall_clock=clock) for i in range(num_nodes)]
    try:
        addresses = [f"127.0.0.1:{await node.start('127.0.0.1', 0)}" for node in nodes]
        for node in nodes[1:]:
            await node.bootstrap(addresses[:1])
        yield nodes, addresses
    finally:
        for node in nodes:
            await node.close()


def with_network(
    num_nodes: int, test: Callable[[list[Dht], list[str], Clock], Awaitable[None]]
) -> None:
    async def run() -> None:
        clock = Clock()
        async with network(num_nodes, clock) as (nodes, addresses):
            await test(nodes, addresses, clock)

    asyncio.run(run())


def test_what_one_publishes_all_find() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        assert await nodes[3].publish(LEADER, leader(3), 60) >= 3
        assert await nodes[5].publish(peer_name(node_id(5)), {"address": "h:1"}, 60) >= 3
        for node in nodes:
            assert await node.lookup(LEADER) == leader(3)
            assert await node.lookup(peer_name(node_id(5))) == {"address": "h:1"}
            assert await node.lookup(peer_name(node_id(6))) is None

    with_network(12, test)


def test_a_record_ends_when_it_says() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], clock: Clock) -> None:
        await nodes[1].publish(LEADER, leader(1), 60)
        await nodes[1].retract(LEADER)
        clock.now_s += 59.9
        assert await nodes[2].lookup(LEADER) == leader(1)
        clock.now_s += 0.1
        for node in nodes:
            assert await node.lookup(LEADER) is None

    with_network(4, test)


def test_the_leader_of_the_higher_term_wins_whoever_published_last() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], clock: Clock) -> None:
        await nodes[1].publish(LEADER, leader(1, term=2), 60)
        clock.now_s += 10
        await nodes[2].publish(LEADER, leader(2, term=1), 60)
        assert await nodes[3].lookup(LEADER) == leader(1, term=2)
        await nodes[2].publish(LEADER, leader(2, term=3), 60)
        for node in nodes:
            assert await node.lookup(LEADER) == leader(2, term=3)

    with_network(5, test)


def test_a_newer_address_replaces_an_older() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        for port in (1, 2, 3):
            await nodes[1].publish(peer_name(node_id(1)), {"address": f"h:{port}"}, 60)
        assert await nodes[2].lookup(peer_name(node_id(1))) == {"address": "h:3"}

    with_network(3, test)


def test_a_lone_node_keeps_its_record_and_tells_those_who_come() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        assert await nodes[0].publish(LEADER, leader(0), 60) == 0
        assert await nodes[0].lookup(LEADER) == leader(0)
        late = Dht(node_id(9), RUN, wall_clock=clock)
        await late.start("127.0.0.1", 0)
        assert await late.bootstrap(addresses) == 1
        assert await late.lookup(LEADER) == leader(0)
        await late.close()

    with_network(1, test)


def test_runs_do_not_mix() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        await nodes[0].publish(LEADER, leader(0), 60)
        other = Dht(node_id(9), RunId("x" * 26), wall_clock=clock)
        await other.start("127.0.0.1", 0)
        assert await other.bootstrap(addresses[:1]) == 0
        assert await other.lookup(LEADER) is None
        assert nodes[0].counters.total("dht.foreign") > 0
        await other.close()

    with_network(2, test)


def test_a_dead_contact_is_dropped_and_the_rest_still_answers() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        await nodes[1].publish(LEADER, leader(1), 60)
        await nodes[2].close()
        assert await nodes[3].lookup(LEADER) == leader(1)
        assert await nodes[3].publish(peer_name(node_id(3)), {"address": "h:1"}, 60) >= 2

    with_network(5, test)


def test_a_contact_that_moves_is_found_at_its_new_port() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        await nodes[1].close()
        again = Dht(node_id(1), RUN, wall_clock=clock)
        port = await again.start("127.0.0.1", 0)
        await again.bootstrap(addresses[:1])
        await wait_until(lambda: f"127.0.0.1:{port}" in nodes[0].addresses())
        assert addresses[1] not in nodes[0].addresses()
        await again.close()

    with_network(2, test)


def test_a_port_in_use_is_told() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        with pytest.raises(NetworkError, match="E-NET-002"):
            await Dht(node_id(9), RUN, wall_clock=clock).start(
                "127.0.0.1", int(addresses[0].rpartition(":")[2])
            )

    with_network(1, test)


# --- liars ----------------------------------------------------------------------------------


class Liar(asyncio.DatagramProtocol):
    """A peer that answers pings as it should, and all else with what the test says."""

    def __init__(self, lie: Any) -> None:
        self.lie = lie
        self.id = os.urandom(20)
        self.num_lies = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if data[:1] != b"\x00":
            return
        name, _args = umsgpack.unpackb(data[21:])
        self.num_lies += name != "ping"
        body = self.id if name == "ping" else self.lie
        packed = body.raw if isinstance(body, Raw) else umsgpack.packb(body)
        self.transport.sendto(b"\x01" + data[1:21] + packed, addr)


class Raw:
    """Bytes that are sent as they are."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


ID = bytes(20)
LIES: dict[str, Any] = {
    "list of ints": [1, 2, 3],
    "str": "nodes",
    "int": 7,
    "nil": None,
    "true": True,
    "40-byte id": [[bytes(40), "127.0.0.1", 1]],
    "str id": [["x" * 20, "127.0.0.1", 1]],
    "no value": {},
    "value is a list": {"value": [1]},
    "value is a dict": {"value": {"a": 1}},
    "value is rubbish": {"value": b"rubbish"},
    "value is huge": {"value": bytes(1100)},
    "value and more": {"value": b"{}", "more": 1},
    "port is a str": [[ID, "127.0.0.1", "7700"]],
    "port is 0": [[ID, "127.0.0.1", 0]],
    "port is 70000": [[ID, "127.0.0.1", 70000]],
    "ip is a name": [[ID, "example.org", 1]],
    "ip is multicast": [[ID, "224.0.0.1", 1]],
    "ip is nil": [[ID, None, None]],
    "ip is IPv6": [[ID, "2001:db8::1", 1]],
    "entries too short": [[ID]],
    "too many entries": [[ID, "127.0.0.1", 1]] * 9,
    "not msgpack": Raw(b"\xc1\xc1"),
    "truncated": Raw(b"\x93\x01"),
    "deeply nested": Raw(b"\x91" * 1100),
    "unhashable key": Raw(b"\x81\x90\x01"),
    "bad utf-8": Raw(b"\xa2\xff\xfe"),
    "nothing": Raw(b""),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_reply_harms_neither_caller_nor_socket(name: str) -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        transport, liar = await loop.create_datagram_endpoint(
            lambda: Liar(LIES[name]), local_addr=("127.0.0.1", 0)
        )
        port = transport.get_extra_info("sockname")[1]
        await nodes[0].bootstrap([f"127.0.0.1:{port}"])
        assert await nodes[0].lookup(peer_name(node_id(9))) is None
        await nodes[0].publish(LEADER, leader(0), 60)
        assert liar.num_lies > 0
        transport.close()
        assert await nodes[1].lookup(LEADER) == leader(0), "the socket still works"

    with_network(2, test)


def exchange(address: str, datagrams: list[bytes]) -> None:
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for datagram in datagrams:
            udp.sendto(datagram, (host, int(port)))


def request(*body: Any) -> bytes:
    return b"\x00" + os.urandom(20) + umsgpack.packb(list(body))


REQUESTS: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x00" * 10,
    "no body": b"\x00" + ID,
    "unknown kind": b"\x07" + ID + b"\x90",
    "too long": b"\x00" * 1201,
    "unasked reply": b"\x01" + ID + b"\x90",
    "not a pair": request(1, 2, 3),
    "unknown method": request("stop", [ID, ID[:8]]),
    "dunder": request("__init__", [ID, ID[:8]]),
    "name is a list": request(["ping"], [ID, ID[:8]]),
    "id too short": request("ping", [ID[:19], ID[:8]]),
    "id is a str": request("ping", ["x" * 20, ID[:8]]),
    "no args": request("ping", []),
    "args is a map": request("ping", {"a": 1}),
    "key too short": request("find_node", [ID, ID[:8], b"k", b""]),
    "store of a str": request("store", [ID, ID[:8], "text"]),
    "another run": request("ping", [ID, b"otherrun"]),
    "deeply nested": b"\x00" + ID + b"\x91" * 1100,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_bad_request_is_counted_and_dropped(name: str) -> None:
    async def test(nodes: list[Dht], addresses: list[str], _clock: Clock) -> None:
        exchange(addresses[0], [REQUESTS[name]])
        counters = nodes[0].counters
        names = ("dht.malformed", "dht.foreign", "dht.unasked")
        await wait_until(lambda: any(counters.total(n) for n in names))
        assert await nodes[1].lookup(LEADER) is None
        assert nodes[1].num_contacts == 1, "node 0 still answers"

    with_network(2, test)


def test_random_datagrams_and_a_flood_leave_a_node_working() -> None:
    async def test(nodes: list[Dht], addresses: list[str], _clock: Clock) -> None:
        exchange(addresses[0], [os.urandom(1 + i) for i in range(180)])
        await wait_until(lambda: nodes[0].counters.total("dht.flood"))
        await nodes[1].publish(LEADER, leader(1), 60)
        assert await nodes[0].lookup(LEADER) == leader(1)

    with_network(2, test)


def test_a_reply_is_never_longer_than_its_request() -> None:
    async def test(nodes: list[Dht], addresses: list[str], _clock: Clock) -> None:
        await nodes[0].publish(LEADER, leader(0), 60)
        tag = nodes[0]._run_tag
        key = record_key(RUN, LEADER)
        exchange(addresses[0], [request("find_value", [ID, tag, key, b""])])
        await wait_until(lambda: nodes[0].counters.total("dht.unpadded"))

    with_network(1, test)


def test_those_who_only_ask_are_no_contacts() -> None:
    """Two hundred made-up ids from a socket that does not answer fill no table."""

    async def test(nodes: list[Dht], addresses: list[str], _clock: Clock) -> None:
        tag = nodes[0]._run_tag
        exchange(addresses[0], [request("ping", [os.urandom(20), tag]) for _ in range(90)])
        exchange(addresses[0], [b"end"])
        await wait_until(lambda: nodes[0].counters.total("dht.malformed"))
        assert nodes[0].num_contacts == 0

    with_network(1, test)


def test_cancelling_a_call_leaves_nothing_behind() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        protocol = nodes[0]._protocol
        assert protocol is not None
        call = asyncio.ensure_future(protocol.ping(("127.0.0.1", 9)))
        await wait_until(lambda: protocol._outstanding)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not protocol._outstanding

    with_network(1, test)


def test_a_socket_that_dies_is_opened_again() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        dead = nodes[1]._protocol
        assert dead is not None
        assert dead._transport is not None
        dead._transport.abort()
        await wait_until(lambda: nodes[1]._protocol not in (None, dead))
        await wait_until(lambda: nodes[1].num_contacts == 1)
        await nodes[0].publish(LEADER, leader(0), 60)
        assert await nodes[1].lookup(LEADER) == leader(0)

    with_network(2, test)


# --- records --------------------------------------------------------------------------------


def record(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        "name": LEADER,
        "owner": node_id(1),
        "sequence": 1,
        "expires_s": NOW_S + 60,
        "value": leader(1),
    }
    return Record(**{**fields, **changes})


def test_a_record_survives_its_text() -> None:
    assert parse_record(record().to_bytes(), now_s=NOW_S) == record()


@pytest.mark.parametrize(
    "data",
    [
        record(expires_s=NOW_S).to_bytes(),
        record(expires_s=NOW_S + 10_000).to_bytes(),
        record(sequence=2**60).to_bytes(),
        record(sequence=-1).to_bytes(),
        record(sequence=True).to_bytes(),
        record(owner=NodeId("short")).to_bytes(),
        record(owner=node_id(2)).to_bytes(),
        record(name="anything").to_bytes(),
        record(name=peer_name(node_id(2))).to_bytes(),
        record(value={**leader(1), "address": "nowhere"}).to_bytes(),
        record(value={**leader(1), "address": 5}).to_bytes(),
        record(value={**leader(1), "term": True}).to_bytes(),
        record(value={**leader(1), "term": -1}).to_bytes(),
        record(value={}).to_bytes(),
        record(value={**leader(1), "x": "y" * 1000}).to_bytes(),
        record().to_bytes().replace(b'"term":1', b'"term":NaN'),
        record().to_bytes().replace(b'"term":1', b'"x":NaN,"term":1'),
        record().to_bytes() + b" ",
        record().to_bytes()[:-1],
        b"[" * 1000,
        b"[]",
        "text",
        None,
        17,
    ],
)
def test_bad_records_are_malformed(data: object) -> None:
    with pytest.raises(MalformedMessageError):
        parse_record(data, now_s=NOW_S)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        parse_record(data, now_s=NOW_S)


def test_an_old_record_never_replaces_a_newer() -> None:
    store = RecordStore(RUN, Clock(), Counters())
    assert store.put(record(sequence=5).to_bytes(), source="x")
    assert store.put(record(sequence=4).to_bytes(), source="x")
    held = store.get(record_key(RUN, LEADER))
    assert held is not None
    assert held.sequence == 5


def test_a_full_store_takes_no_more_until_something_ends() -> None:
    clock, counters = Clock(), Counters()
    store = RecordStore(RUN, clock, counters, records_max=2)

    def put(index: int) -> bool:
        name = peer_name(node_id(index))
        value = {"address": "h:1"}
        new = record(name=name, owner=node_id(index), value=value, expires_s=clock.now_s + 60)
        return store.put(new.to_bytes(), source="x")

    assert [put(1), put(2), put(3)] == [True, True, False]
    assert counters.total("dht.full") == 1
    clock.now_s += 60
    assert put(3)
    assert len(store) == 1
