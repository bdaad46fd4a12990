"""The DHT on real loopback sockets, against strangers and against members that lie."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import umsgpack
from kademlia.node import Node

from decod.membership.papers import Membership
from decod.net.dht import Dht
from decod.net.dht_datagram import (
    GREETING,
    GREETING_SIZE_BYTES,
    REPLY,
    REQUEST,
    WELCOME,
    kademlia_id_of,
    run_tag,
)
from decod.net.dht_record import LEADER, PEER, record_key
from decod.net.dht_table import BUCKET_SIZE, DhtLimits, network_of
from tests.support.dht import (
    BOUNDLESS,
    NOW_S,
    RUN,
    Clock,
    Liar,
    Raw,
    leads,
    liar,
    member,
    node_of,
    padding,
    peer,
    random_key,
    record_of,
    started,
    with_network,
)
from tests.support.members import data_node, host_key, new_volunteer, volunteer
from tests.waiting import wait_until

LEADER_KEY = record_key(RUN, LEADER)


def place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


# --- replies of members ---------------------------------------------------------------------

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
    async def test(nodes: list[Dht], _addresses: list[str], clock: Clock) -> None:
        async with liar(clock, lambda _: LIES[name]) as lying:
            await nodes[0].bootstrap([lying.address])
            assert await nodes[0].lookup(PEER, member(9).node_id) is None
            await nodes[0].publish(LEADER, leads(0), 60)
            assert lying.num_lies > 0
        assert await nodes[1].lookup(LEADER) is not None, "the socket still works"

    with_network(2, test)


FORGERIES: dict[str, tuple[Membership, str, dict[str, Any], dict[str, Any]]] = {
    "a leader's record by a volunteer": (volunteer("liar"), LEADER, leads(1, 99), {}),
    "one by another root's data node": (
        data_node("liar", host_key("another root")),
        LEADER,
        leads(1, 99),
        {},
    ),
    "one of another run": (data_node("liar"), LEADER, leads(1, 99), {"run_id": "x" * 26}),
    "one with an expired credential": (
        new_volunteer("liar", now_s=NOW_S - 25 * 3600),
        PEER,
        peer(1),
        {},
    ),
    "one that has expired": (data_node("liar"), LEADER, leads(1, 99), {"expires_s": NOW_S}),
    "one that would not expire": (
        data_node("liar"),
        LEADER,
        leads(1, 99),
        {"expires_s": NOW_S + 300},
    ),
    "one that is too long": (volunteer("liar"), PEER, {**peer(1), "x": "y" * 700}, {}),
}


@pytest.mark.parametrize("how", FORGERIES)
def test_forged_records_are_neither_stored_nor_read(how: str) -> None:
    by, name, value, times = FORGERIES[how]
    data = record_of(by, name, value, **times)
    owner = None if name == LEADER else by.node_id

    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        async with liar(clock, lambda _: {"value": data}) as lying:
            assert await lying.asks(addresses[0], "store", data) in (False, None)
            await wait_until(lambda: nodes[0].num_contacts == 3)
            assert await nodes[0].lookup(name, owner) is None
            assert lying.num_lies == 1
            assert len(nodes[0]._store) == 0
            # Others are found all the same.
            await nodes[1].publish(LEADER, leads(1), 60)
            found = await nodes[0].lookup(LEADER)
            assert found is not None
            assert found.owner == member(1).node_id

    with_network(3, test)


def test_a_peers_record_in_anothers_place_is_not_read() -> None:
    victim, mine = member(5).node_id, record_of(volunteer("liar"), PEER, peer(1))

    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        async with liar(clock, lambda _: {"value": mine}) as lying:
            assert await lying.asks(addresses[0], "store", mine) is True
            await wait_until(lambda: nodes[0].num_contacts == 1)
            assert await nodes[0].lookup(PEER, victim) is None
            found = await nodes[0].lookup(PEER, volunteer("liar").node_id)
            assert found is not None, "only in the place of its owner"

    with_network(1, test)


def test_who_says_two_things_under_one_number_is_counted() -> None:
    by = volunteer("liar")
    one, other = (record_of(by, PEER, peer(port)) for port in (1, 2))

    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        async with liar(clock, lambda _: {"value": other}, by) as lying:
            assert await lying.asks(addresses[0], "store", one) is True
            assert await lying.asks(addresses[0], "store", other) is False
            assert nodes[0].counters.by_peer("dht.equivocal") == {by.node_id: 1}
            await wait_until(lambda: nodes[0].num_contacts == 1)
            found = await nodes[0].lookup(PEER, by.node_id)
            assert found is not None
            assert found.value == peer(1), "the first one is kept"
            assert nodes[0].counters.by_peer("dht.equivocal") == {by.node_id: 2}

    with_network(1, test)


# --- requests of members --------------------------------------------------------------------

CALLS: dict[str, tuple[Any, ...]] = {
    "unknown method": ("stop", b""),
    "dunder": ("__init__", b""),
    "name is a list": (["ping"],),
    "name is a number": (1, 2, 3),
    "no name": (),
    "ping with more": ("ping", 1),
    "key too short": ("find_node", b"k", b""),
    "key is a str": ("find_value", "x" * 20, b""),
    "store of a str": ("store", "text"),
    "store of nothing": ("store",),
    "a map": (Raw(umsgpack.packb({"ping": 1})),),
    "not msgpack": (Raw(b"\xc1\xc1"),),
    "deeply nested": (Raw(b"\x91" * 1100),),
    "nothing": (Raw(b""),),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_of_a_member_is_counted_under_its_id(name: str) -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        async with liar(clock) as lying:
            node = await lying.meets(addresses[0])
            calls = CALLS[name] if name != "no name" else (Raw(umsgpack.packb([])),)
            asking = asyncio.ensure_future(lying.asks(addresses[0], *calls))
            counters = nodes[0].counters
            await wait_until(lambda: counters.by_peer("dht.malformed"))
            assert set(counters.by_peer("dht.malformed")) == {volunteer("liar").node_id}
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert isinstance(await lying.find(node, random_key(), value=False), list)

    with_network(2, test)


def test_an_answer_is_never_longer_than_its_call() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        await nodes[0].publish(LEADER, leads(0), 60)
        async with liar(clock) as lying:
            await lying.meets(addresses[0])
            whole = await lying.asks(addresses[0], "find_value", LEADER_KEY, padding())
            assert isinstance(whole, dict)
            asking = asyncio.ensure_future(
                lying.asks(addresses[0], "find_value", LEADER_KEY, b"short")
            )
            await wait_until(lambda: nodes[0].counters.total("dht.unpadded"))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    with_network(1, test)


def test_a_members_flood_is_cut_off_and_nobody_elses() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        async with liar(clock) as lying:
            await lying.meets(addresses[0])
            calls = [asyncio.ensure_future(lying.asks(addresses[0], "ping")) for _ in range(200)]
            await wait_until(lambda: nodes[0].counters.total("dht.flood"))
            assert set(nodes[0].counters.by_peer("dht.flood")) == {volunteer("liar").node_id}
            await nodes[1].publish(LEADER, leads(1), 60)
            assert await nodes[0].lookup(LEADER) is not None
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    with_network(2, test)


def test_a_member_that_does_not_answer_is_no_contact() -> None:
    class Mute(Liar):
        def _answer(self, *_: Any) -> None:
            pass

    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        async with liar(clock) as lying:
            lying.__class__ = Mute
            await lying.meets(addresses[0])
            assert await lying.asks(addresses[0], "ping") is True
            assert nodes[0].num_contacts == 0

    with_network(1, test)


# --- strangers ------------------------------------------------------------------------------


@contextmanager
def stranger() -> Iterator[socket.socket]:
    """A socket of nobody's."""
    with socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        yield udp


def received(udp: socket.socket) -> list[bytes]:
    """Returns what has come to a socket so far."""
    datagrams = []
    try:
        while True:
            datagrams.append(udp.recv(2000))
    except BlockingIOError:
        return datagrams


def greeting(introduction: bytes = b"", tag: bytes | None = None) -> bytes:
    tag = run_tag(RUN) if tag is None else tag
    whole = GREETING + os.urandom(12) + tag + len(introduction).to_bytes(2, "big") + introduction
    return whole.ljust(GREETING_SIZE_BYTES, b"\0")


STRANGE: dict[str, bytes] = {
    "empty": b"",
    "short": GREETING * 10,
    "unknown kind": b"\x07" * 100,
    "too long": REQUEST * 1201,
    "greeting of another run": greeting(tag=b"otherrun"),
    "greeting of nobody": greeting(),
    "greeting with rubbish": greeting(os.urandom(300)),
    "greeting with a false length": greeting()[:21] + b"\xff\xff" + bytes(GREETING_SIZE_BYTES - 23),
    "greeting too short": greeting()[:-1],
    "greeting too long": greeting() + b"\0",
    "greeting of one who has expired": greeting(
        new_volunteer("late", now_s=NOW_S - 25 * 3600).state("dht introduction", ID).to_bytes()
    ),
    "greeting with a statement of another kind": greeting(
        volunteer("relay").state("run", bytes(32)).to_bytes()
    ),
    "unasked welcome": WELCOME + bytes(300),
    "unasked reply": REPLY + bytes(100),
    "request of no session": REQUEST + os.urandom(100),
    "request as it once was": b"\x00" + ID + umsgpack.packb(["ping", [ID, ID[:8]]]),
    "find as it once was": b"\x00" + ID + umsgpack.packb(["find_node", [ID, ID[:8], ID, ID]]),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_stranger_is_counted_and_gets_nothing(name: str) -> None:
    async def test(nodes: list[Dht], addresses: list[str], _clock: Clock) -> None:
        await nodes[0].publish(LEADER, leads(0), 60)
        with stranger() as udp:
            udp.sendto(STRANGE[name], place(addresses[0]))
            counters = nodes[0].counters
            await wait_until(lambda: counters.by_peer("dht." + counted_as(name)))
            assert await nodes[1].lookup(LEADER) is not None, "node 0 still answers"
            assert received(udp) == []
        assert nodes[0].num_contacts == 1

    with_network(2, test)


def counted_as(name: str) -> str:
    """Returns under which name a stranger's datagram is counted."""
    return {
        "greeting of another run": "foreign",
        "greeting of nobody": "unproven",
        "greeting with rubbish": "unproven",
        "greeting with a false length": "unproven",
        "greeting of one who has expired": "unproven",
        "greeting with a statement of another kind": "unproven",
        "unasked welcome": "unasked",
        "unasked reply": "unasked",
        "request of no session": "unknown",
    }.get(name, "malformed")


def test_strangers_have_few_introductions_checked() -> None:
    async def test(nodes: list[Dht], addresses: list[str], _clock: Clock) -> None:
        with stranger() as udp:
            for _ in range(40):
                udp.sendto(greeting(), place(addresses[0]))
            await wait_until(lambda: nodes[0].counters.total("dht.flood") > 15)
            assert nodes[0].counters.total("dht.unproven") < 25
            await nodes[1].publish(LEADER, leads(1), 60)
            assert await nodes[0].lookup(LEADER) is not None

    with_network(2, test)


def test_datagrams_repeated_by_a_stranger_bring_him_nothing_and_nobody_a_flood() -> None:
    """He has heard all that a member has sent, and sends it from another address."""

    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        await nodes[0].publish(LEADER, leads(0), 60)
        async with liar(clock) as lying:
            mine = record_of(volunteer("liar"), PEER, peer(1))
            for call in (
                ("ping",),
                ("store", mine),
                ("find_node", random_key(), padding()),
                ("find_value", LEADER_KEY, padding()),
            ):
                assert await lying.asks(addresses[0], *call) is not None
            await wait_until(lambda: nodes[0].num_contacts == 1)
            sent = list(lying.sent)
            assert {datagram[:1] for datagram in sent} >= {GREETING, REQUEST, REPLY}
            for datagram in sent:
                with stranger() as udp:
                    udp.sendto(datagram, place(addresses[0]))
                    assert await lying.asks(addresses[0], "ping") is True, "it was processed"
                    answers = received(udp)
                assert sum(map(len, answers)) <= len(datagram)
                told = b"".join(answers)
                assert b"127.0.0.1" not in told
                assert b"10.0.0.0" not in told
            assert nodes[0].addresses() == [lying.address]

    with_network(1, test)


@pytest.mark.parametrize("num_cut", [0, 1, 20, 28])
def test_a_welcome_that_is_not_the_senders_own_makes_no_contact(num_cut: int) -> None:
    """A stranger answers a greeting with the welcome that a member has once sent to another one."""

    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        async with liar(clock) as lying:
            await nodes[1].bootstrap([lying.address])
            old = next(datagram for datagram in lying.sent if datagram[:1] == WELCOME)
        with stranger() as udp:
            host, port = udp.getsockname()
            greeting = asyncio.ensure_future(nodes[0].bootstrap([f"{host}:{port}"]))
            came = list[bytes]()
            await wait_until(lambda: came.extend(received(udp)) or came)
            shown = old[13 : len(old) - num_cut]
            udp.sendto(WELCOME + came[0][1:13] + shown, place(addresses[0]))
            assert await greeting == 1
            assert nodes[0].addresses() == [addresses[1]]
            assert nodes[0].counters.total("dht.unproven") == 1

    with_network(2, test)


def test_a_stranger_between_two_members_reads_nothing() -> None:
    """He passes on their datagrams, so each takes his address for the other's. That is all."""

    class Between(asyncio.DatagramProtocol):
        def __init__(self, ends: list[tuple[str, int]]) -> None:
            self.ends, self.heard = ends, list[bytes]()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: Any = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            self.heard.append(data)
            self.transport.sendto(data, self.ends[addr == self.ends[0]])

    async def run() -> None:
        clock = Clock()
        nodes = [node_of(member(i), clock) for i in range(2)]
        ends = [place(await started(node)) for node in nodes]
        transport, between = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: Between(ends), local_addr=("127.0.0.1", 0)
        )
        host, port = transport.get_extra_info("sockname")
        assert await nodes[0].bootstrap([f"{host}:{port}"]) == 1
        assert await nodes[0].publish(LEADER, leads(0), 60) == 1
        assert await nodes[1].lookup(LEADER) is not None
        assert len(between.heard) > 6
        heard = b"".join(between.heard)
        for secret in (b"10.0.0", b"leader", b"find", b"127.0.0.1", RUN.encode()):
            assert secret not in heard
        transport.close()
        await asyncio.gather(*(node.close() for node in nodes))

    asyncio.run(run())


# --- many identities of one host ------------------------------------------------------------

NUM_SYBILS = 200


def sybils() -> list[Membership]:
    """Returns the volunteers with the places nearest to the leader's record, of 3,000."""
    keys = [host_key(f"sybil {i}") for i in range(3000)]
    target = Node(LEADER_KEY)
    keys.sort(key=lambda key: target.distance_to(Node(kademlia_id_of(key.node_id))))
    names = {host_key(f"sybil {i}").node_id: f"sybil {i}" for i in range(3000)}
    return [new_volunteer(names[key.node_id]) for key in keys[:NUM_SYBILS]]


@pytest.mark.parametrize("are_limited", [True, False])
def test_many_identities_of_one_address_get_hold_of_a_record_only_without_a_limit(
    are_limited: bool,
) -> None:
    """They are nearest to its place, name each other when asked, and keep nothing."""
    limits = replace(BOUNDLESS, network_of=str) if are_limited else BOUNDLESS

    async def run() -> None:
        clock = Clock()
        nodes = [node_of(member(i), clock, limits=limits) for i in range(8)]
        addresses = [await started(node, f"127.0.0.{10 + i}") for i, node in enumerate(nodes)]
        for node in nodes:
            await node.bootstrap(addresses[:1])
        others: list[list[Any]] = []

        def each_other(call: list[Any]) -> Any:
            return True if call[0] == "store" else others[:BUCKET_SIZE]

        async with AsyncExitStack() as stack:
            for by in sybils():
                lying = await stack.enter_async_context(
                    liar(clock, each_other, by, host="127.0.0.66")
                )
                others.append([lying.sessions.kademlia_id, "127.0.0.66", lying.port])
                for address in addresses:
                    await lying.meets(address)
            await wait_until(lambda: all(n._protocol and not n._protocol._meetings for n in nodes))
            theirs = [
                sum(each.ip == "127.0.0.66" for each in bucket.nodes.values())
                for node in nodes
                for bucket in node._table._table.buckets
            ]
            assert (max(theirs) <= DhtLimits().contacts_per_network) == are_limited
            await nodes[3].publish(LEADER, leads(3), 60)
            num_holders = sum(node._store.get(LEADER_KEY) is not None for node in nodes)
            num_readers = len([node for node in nodes if await node.lookup(LEADER)])
            assert (num_holders >= 4) == are_limited, num_holders
            assert (num_readers == 8) == are_limited, num_readers
        await asyncio.gather(*(node.close() for node in nodes))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("ip", "network"),
    [
        ("127.0.0.1", None),
        ("192.168.7.7", None),
        ("10.1.2.3", None),
        ("100.64.0.1", None),
        ("169.254.1.1", None),
        ("fd00::1", None),
        ("fe80::1", None),
        ("8.8.8.8", "8.8.8.8"),
        ("2a00:1450:4001:81ab::1", "2a00:1450:4001:8100::/56"),
        ("2a00:1450:4001:81ff::2", "2a00:1450:4001:8100::/56"),
    ],
)
def test_what_counts_as_one_network(ip: str, network: str | None) -> None:
    assert network_of(ip) == network
