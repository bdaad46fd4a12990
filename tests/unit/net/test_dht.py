"""The DHT on real loopback sockets, among honest nodes."""

import asyncio

import pytest

from decod.errors import NetworkError
from decod.ids import NodeId, RunId
from decod.membership.papers import Membership
from decod.net.dht import Dht
from decod.net.dht_record import LEADER, PEER, Record
from decod.net.dht_table import DhtLimits
from tests.support.dht import (
    NOW_S,
    QUIET,
    Clock,
    leads,
    member,
    network,
    node_of,
    peer,
    started,
    with_network,
)
from tests.support.members import data_node, host_key, new_volunteer, volunteer
from tests.waiting import wait_until


def told(record: Record | None) -> tuple[NodeId, object] | None:
    """Returns what a record says, and who says it."""
    return None if record is None else (record.owner, record.value)


def test_what_one_publishes_all_find() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        assert await nodes[3].publish(LEADER, leads(3), 60) >= 3
        assert await nodes[5].publish(PEER, peer(1), 60) >= 3
        for node in nodes:
            assert told(await node.lookup(LEADER)) == (member(3).node_id, leads(3))
            assert told(await node.lookup(PEER, member(5).node_id)) == (member(5).node_id, peer(1))
            assert await node.lookup(PEER, member(6).node_id) is None

    with_network(12, test)


def test_a_record_ends_when_it_says() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], clock: Clock) -> None:
        await nodes[1].publish(LEADER, leads(1), 60)
        await nodes[1].retract(LEADER)
        clock.now_s += 59.9
        assert told(await nodes[2].lookup(LEADER)) == (member(1).node_id, leads(1))
        clock.now_s += 0.1
        for node in nodes:
            assert await node.lookup(LEADER) is None

    with_network(4, test)


def test_the_leader_of_the_higher_term_wins_whoever_published_last() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], clock: Clock) -> None:
        await nodes[1].publish(LEADER, leads(1, term=2), 60)
        clock.now_s += 10
        await nodes[2].publish(LEADER, leads(2, term=1), 60)
        assert told(await nodes[3].lookup(LEADER)) == (member(1).node_id, leads(1, term=2))
        await nodes[2].publish(LEADER, leads(2, term=3), 60)
        for node in nodes:
            assert told(await node.lookup(LEADER)) == (member(2).node_id, leads(2, term=3))

    with_network(5, test)


def test_a_newer_address_replaces_an_older() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        for port in (1, 2, 3):
            await nodes[1].publish(PEER, peer(port), 60)
        assert told(await nodes[2].lookup(PEER, member(1).node_id)) == (member(1).node_id, peer(3))

    with_network(3, test)


def test_a_lone_node_keeps_its_record_and_tells_those_who_come() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        assert await nodes[0].publish(LEADER, leads(0), 60) == 0
        assert told(await nodes[0].lookup(LEADER)) == (member(0).node_id, leads(0))
        late = node_of(member(9), clock)
        await started(late)
        assert await late.bootstrap(addresses) == 1
        assert told(await late.lookup(LEADER)) == (member(0).node_id, leads(0))
        await late.close()

    with_network(1, test)


def test_a_clock_that_is_set_back_stops_no_publication() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], clock: Clock) -> None:
        await nodes[1].publish(PEER, peer(1), 60)
        clock.now_s -= 3600
        await nodes[1].retract(PEER)
        for _ in range(2):
            assert await nodes[1].publish(PEER, peer(2), 60) >= 0
        clock.now_s += 30
        # Others may hold the earlier record, of a time to come, until the clock gets there.
        assert await nodes[2].lookup(PEER, member(1).node_id) is not None

    with_network(3, test)


@pytest.mark.parametrize(
    ("by", "run_id", "counted"),
    [
        (member(9), RunId("x" * 26), "dht.foreign"),
        (data_node("other", host_key("another root")), RunId("r" * 26), "dht.unproven"),
        (volunteer("other", host_key("another root")), RunId("r" * 26), "dht.unproven"),
        (new_volunteer("member 9", now_s=NOW_S - 25 * 3600), RunId("r" * 26), "dht.unproven"),
    ],
    ids=["of another run", "data node of another root", "volunteer of another root", "expired"],
)
def test_nobody_else_takes_part(by: Membership, run_id: RunId, counted: str) -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        await nodes[0].publish(LEADER, leads(0), 60)
        other = node_of(by, clock, run_id)
        await started(other)
        assert await other.bootstrap(addresses[:1]) == 0
        assert await other.lookup(LEADER) is None
        assert nodes[0].counters.total(counted) > 0
        assert nodes[0].num_contacts == 1
        await other.close()

    with_network(2, test)


def test_a_node_whose_papers_have_expired_is_let_in_again_with_new_ones() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        late = new_volunteer("late", now_s=NOW_S)
        node = node_of(late, clock)
        await started(node)
        assert await node.bootstrap(addresses) > 0
        assert await node.publish(PEER, peer(1), 60) > 0
        clock.now_s += 25 * 3600
        assert await node.publish(PEER, peer(2), 60) == 0
        assert await nodes[0].lookup(PEER, late.node_id) is None
        late.adopt(new_volunteer("late", now_s=clock.now_s).papers)
        await node.bootstrap(())
        assert await node.publish(PEER, peer(3), 60) > 0
        assert told(await nodes[0].lookup(PEER, late.node_id)) == (late.node_id, peer(3))
        await node.close()

    with_network(3, test)


def test_a_banned_node_is_heard_no_more() -> None:
    async def run() -> None:
        clock, banned = Clock(), set[NodeId]()
        nodes = [
            node_of(member(i), clock, allowed=lambda each: each not in banned) for i in range(4)
        ]
        addresses = [await started(node) for node in nodes]
        for node in nodes:
            await node.bootstrap(addresses[:1])
        await nodes[1].publish(LEADER, leads(1), 60)
        assert await nodes[0].lookup(LEADER) is not None
        banned.add(member(1).node_id)
        for node in (nodes[0], nodes[2], nodes[3]):
            assert await node.lookup(LEADER) is None
            assert await node.lookup(PEER, member(1).node_id) is None
        assert await nodes[1].publish(PEER, peer(1), 60) == 0
        for node in nodes:
            await node.close()

    asyncio.run(run())


def test_a_dead_contact_is_dropped_and_the_rest_still_answers() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        await nodes[1].publish(LEADER, leads(1), 60)
        await nodes[2].close()
        assert told(await nodes[3].lookup(LEADER)) == (member(1).node_id, leads(1))
        assert await nodes[3].publish(PEER, peer(1), 60) >= 2

    with_network(5, test)


def test_a_node_that_nobody_can_dial_finds_records_and_is_no_contact() -> None:
    """A router lets the pings of those through that it has asked. It answers none of them."""

    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        await nodes[1].publish(LEADER, leads(1), 60)
        quiet = node_of(member(7), clock)
        quiet.answer_nobody()
        address = await started(quiet)
        assert await quiet.bootstrap(addresses) == len(nodes)
        assert told(await quiet.lookup(LEADER)) == (member(1).node_id, leads(1))
        # Those that were asked ping it in return: wait until they have given up.
        await wait_until(lambda: not any(node._protocol._meetings for node in nodes))  # type: ignore[union-attr]
        for node in nodes:
            await node.look_around()
            assert address not in node.addresses()
        assert await nodes[0]._greet(address) is None
        await quiet.close()

    with_network(4, test)


def test_a_contact_that_moves_is_found_at_its_new_port() -> None:
    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        await nodes[1].close()
        again = node_of(member(1), clock)
        address = await started(again)
        await again.bootstrap(addresses[:1])
        await wait_until(lambda: address in nodes[0].addresses())
        assert addresses[1] not in nodes[0].addresses()
        await again.publish(PEER, peer(1), 60)
        assert await nodes[0].lookup(PEER, member(1).node_id) is not None
        await again.close()

    with_network(2, test)


def test_a_contact_that_begins_anew_at_its_port_is_asked_with_success() -> None:
    """It has lost the session; those who ask introduce themselves again."""

    async def test(nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        await nodes[1].close()
        again = node_of(member(1), clock)
        await started(again, port=int(addresses[1].rpartition(":")[2]))
        assert await nodes[0].publish(LEADER, leads(0), 60) == 1
        assert await again.lookup(LEADER) is not None
        await again.close()

    with_network(2, test)


def test_a_node_may_have_contacts_over_both_protocols() -> None:
    """It names each only to those who can send there."""

    async def run() -> None:
        clock = Clock()
        nodes = [node_of(member(i), clock) for i in range(3)]
        port = await nodes[0].start("::", 0)
        four, six = await started(nodes[1]), f"[::1]:{await nodes[2].start('::1', 0)}"
        assert await nodes[1].bootstrap([f"127.0.0.1:{port}"]) == 1
        assert await nodes[2].bootstrap([f"[::1]:{port}"]) == 1
        assert set(nodes[0].addresses()) == {four, six}
        assert nodes[1].addresses() == [f"127.0.0.1:{port}"]
        await nodes[1].publish(PEER, peer(1), 60)
        assert await nodes[2].lookup(PEER, member(1).node_id) is not None
        await asyncio.gather(*(node.close() for node in nodes))

    asyncio.run(run())


def test_a_port_in_use_is_told() -> None:
    async def test(_nodes: list[Dht], addresses: list[str], clock: Clock) -> None:
        with pytest.raises(NetworkError, match="E-NET-002"):
            await started(node_of(member(9), clock), port=int(addresses[0].rpartition(":")[2]))

    with_network(1, test)


def test_a_socket_that_dies_is_opened_again() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        dead = nodes[1]._protocol
        assert dead is not None
        assert dead._transport is not None
        dead._transport.abort()
        await wait_until(lambda: nodes[1]._protocol not in (None, dead))
        await nodes[0].publish(LEADER, leads(0), 60)
        assert await nodes[1].lookup(LEADER) is not None

    with_network(2, test)


def test_cancelling_a_call_leaves_nothing_behind() -> None:
    async def test(nodes: list[Dht], _addresses: list[str], _clock: Clock) -> None:
        protocol = nodes[0]._protocol
        assert protocol is not None
        call = asyncio.ensure_future(protocol.greet(("127.0.0.1", 9)))
        await wait_until(lambda: protocol._calls)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not protocol._calls

    with_network(1, test)


# --- islands --------------------------------------------------------------------------------

ROUNDS_MAX = 2
"""Rounds in which islands must have merged: they take less than a minute."""


def test_nodes_look_around_often_enough() -> None:
    assert (ROUNDS_MAX + 0.2) * DhtLimits().look_around_s < 60


async def merged(one: list[Dht], other: list[Dht]) -> bool:
    """Whether each node finds what two nodes of the other half publish."""
    pairs = zip((*one, *other), (*other, *one), strict=True)
    found = [
        await node.lookup(PEER, owner._membership.node_id) is not None
        for node, paired in pairs
        for owner in (paired, other[0] if node in one else one[0])
    ]
    return all(found)


async def look_around(nodes: list[Dht]) -> None:
    """Every node looks around for as long as the islands may last."""
    for _ in range(ROUNDS_MAX):
        await asyncio.gather(*(node.look_around() for node in nodes))


async def publish_all(nodes: list[Dht]) -> None:
    for i, node in enumerate(nodes):
        await node.publish(PEER, peer(1 + i), 300)


def test_halves_that_have_lost_each_other_merge_again() -> None:
    """Their addresses to begin with are their own half's, and nobody knows a leader."""

    async def run() -> None:
        clock, is_cut = Clock(), False
        halves = [{member(i).node_id for i in range(k, 16, 2)} for k in range(2)]

        def allowed_at(index: int) -> object:
            return lambda other: not is_cut or other in halves[index % 2]

        nodes = [node_of(member(i), clock, allowed=allowed_at(i)) for i in range(16)]
        addresses = [await started(node) for node in nodes]
        for i, node in enumerate(nodes):
            await node.bootstrap(addresses[i % 2 :: 2][:2])
        # Both halves meet, and nobody remembers how.
        await nodes[1]._greet(addresses[0])
        await nodes[1]._crawl(nodes[1]._place)
        await look_around(nodes)
        await publish_all(nodes)
        assert await merged(nodes[::2], nodes[1::2])

        is_cut = True
        pairs = [(node, each) for node in nodes for each in node._table.contacts()]
        await asyncio.gather(*(node._ping(each) for node, each in pairs))
        for i, node in enumerate(nodes):
            assert 0 < node.num_contacts < 8
            assert await node.lookup(PEER, member(i ^ 1).node_id) is None

        is_cut = False
        await look_around(nodes)
        assert await merged(nodes[::2], nodes[1::2])
        await asyncio.gather(*(node.close() for node in nodes))

    asyncio.run(run())


@pytest.mark.parametrize("how", ["the leader is known", "a remembered address"])
def test_halves_that_have_never_met_merge(how: str) -> None:
    """One half's nodes know the leader's address from elsewhere, or one of them another node's."""

    async def run() -> None:
        clock = Clock()
        async with network(8, clock) as (ours, addresses):
            known = addresses[:1] if how == "the leader is known" else []
            theirs = [node_of(member(8 + i), clock, known=lambda: known) for i in range(8)]
            gates = [await started(node) for node in theirs]
            for node in theirs:
                await node.bootstrap(gates[:1])
            if not known:
                theirs[3]._bootstrap[addresses[5]] = None
            await publish_all(ours)
            await publish_all(theirs)
            assert all(node.num_contacts == 7 for node in (*ours, *theirs))
            await look_around([*ours, *theirs])
            assert await merged(ours, theirs)
            await asyncio.gather(*(node.close() for node in theirs))

    asyncio.run(run())


def test_who_meets_nobody_new_does_nothing_more() -> None:
    async def run() -> None:
        clock = Clock()
        async with network(8, clock) as (nodes, addresses):
            node = node_of(member(9), clock, known=lambda: addresses[:1])
            await started(node)
            assert await node.look_around(), "it meets them all"
            assert node.num_contacts == 8
            assert not await node.look_around()
            await node.close()
            assert not await nodes[0].look_around()

    asyncio.run(run())


def test_nodes_look_around_by_themselves() -> None:
    async def run() -> None:
        clock = Clock()
        async with network(2, clock) as (_, addresses):
            limits = DhtLimits(look_around_s=0.05)
            node = node_of(member(9), clock, limits=limits, known=lambda: addresses[:1])
            await started(node)
            await wait_until(lambda: node.num_contacts == 2)
            await node.close()
        assert QUIET.look_around_s > 1000

    asyncio.run(run())
