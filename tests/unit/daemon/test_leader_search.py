"""A leader that resumes is told if its run goes on without it, and is not held up for long."""

import asyncio
import dataclasses

import pytest

from decod.daemon.leader_search import await_leader, warn_of_leader
from decod.net.join_string import JoinString
from decod.net.server import HelloInfo
from tests.support.members import data_node
from tests.unit.daemon.nodes import RUN_ID
from tests.unit.daemon.test_contact import INFO, LEADER, LEADER_ID, OTHER, Peer

ME = data_node("me")
OWN = ME.node_id
GONE = "127.0.0.1:1"


async def told(*addresses: str, timeout_s: float = 30.0) -> list[str]:
    said: list[str] = []
    await warn_of_leader(addresses, ME, said.append, timeout_s=timeout_s)
    return said


def test_a_run_that_another_node_leads_is_told_with_its_join_string() -> None:
    """Whichever member is asked; members that are gone don't matter."""

    async def test() -> None:
        async with Peer(None, LEADER) as leader, Peer(None) as relay:
            info = dataclasses.replace(INFO, leader_address=leader.address)
            leader.tell(dataclasses.replace(info, node_id=LEADER_ID))
            relay.tell(info)
            for asked in (leader, relay):
                (line,) = await told(GONE, asked.address)
                assert f"run {RUN_ID} goes on at {leader.address}" in line
                join = JoinString.parse(line.rsplit("--join ", 1)[1])
                assert join.addresses == (leader.address,)
                assert (join.root, join.token) == (ME.root, None)

    asyncio.run(test())


@pytest.mark.parametrize(
    "info",
    [
        None,
        dataclasses.replace(INFO, leader=None, leader_address=""),
        dataclasses.replace(INFO, leader=OWN),
        dataclasses.replace(INFO, leader_address=GONE),
        dataclasses.replace(INFO, run_id="s" * 26),
        dataclasses.replace(INFO, leader=OTHER, manifest_json="nonsense"),
    ],
    ids=["starting", "electing", "led by us", "leader gone", "another run", "nonsense"],
)
def test_a_member_that_knows_no_living_leader_is_no_reason_to_warn(info: HelloInfo | None) -> None:
    async def test() -> None:
        async with Peer(info) as member:
            assert await told(member.address) == []

    asyncio.run(test())


def test_hosts_that_do_not_answer_hold_nothing_up() -> None:
    async def test() -> None:
        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await ended.wait()
            writer.close()

        ended = asyncio.Event()
        silent = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        async with asyncio.timeout(20):
            assert await told(f"127.0.0.1:{port}", timeout_s=0.2) == []
        ended.set()
        silent.close()

    asyncio.run(test())


def test_members_are_given_time_to_elect_another_leader() -> None:
    """A leader that was killed is back before the others have noticed."""

    async def test() -> None:
        async with Peer(None, LEADER) as leader, Peer(None) as relay:
            info = dataclasses.replace(INFO, leader_address=leader.address)
            leader.tell(dataclasses.replace(info, node_id=LEADER_ID))
            relay.tell(dataclasses.replace(info, leader=OWN, leader_address=GONE))
            search = await_leader((GONE, relay.address), ME, pause_s=0.01)
            finding = asyncio.create_task(search)
            assert await await_leader((relay.address,), ME, patience_s=0.0) is None
            relay.tell(info)
            assert await finding == leader.address

    asyncio.run(test())


def test_nobody_is_waited_for_where_nobody_is() -> None:
    assert asyncio.run(await_leader((GONE,), ME, patience_s=1000.0)) is None
