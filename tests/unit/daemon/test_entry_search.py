"""A host that starts a leader learns if the run goes on without it, and is not held up long."""

import asyncio
import dataclasses

import pytest

from decod.config.schema import Manifest
from decod.daemon import entry as module
from decod.daemon.entry import Elsewhere, seek_elsewhere
from decod.net.ask import HelloInfo
from tests.support.members import data_node
from tests.unit.daemon.test_contact import INFO, LEADER, LEADER_ID, MANIFEST, OTHER, Peer, told

ME = data_node("me")
OWN = ME.node_id
GONE = "127.0.0.1:1"


def of_several() -> Manifest:
    batch = dataclasses.replace(MANIFEST.run.batch, num_data_nodes=2)
    return dataclasses.replace(MANIFEST, run=dataclasses.replace(MANIFEST.run, batch=batch))


ELECTS = told(manifest_json=of_several().to_json())
"""The answer of a member whose run may elect another leader."""


async def found(
    *addresses: str, several: bool = False, patience_s: float = 0.0, silence_max_s: float = 0.0
) -> Elsewhere | None:
    return await seek_elsewhere(
        addresses,
        ME,
        several=several,
        patience_s=patience_s,
        silence_max_s=silence_max_s,
        pause_s=0.01,
    )


async def test_a_run_that_another_node_leads_is_found() -> None:
    """Whichever member is asked; members that are gone don't matter."""
    async with Peer(None, LEADER) as leader, Peer(None) as relay:
        info = dataclasses.replace(INFO, leader_address=leader.address)
        leader.tell(dataclasses.replace(info, node_id=LEADER_ID))
        relay.tell(info)
        for asked in (leader, relay):
            assert await found(GONE, asked.address) == Elsewhere(leader.address, answers=True)


async def test_a_leader_with_this_hosts_identity_is_found_where_it_was_copied_from() -> None:
    """The state folder was moved to this host, and the leader goes on at the old one."""
    async with Peer(None, ME) as old, Peer(None) as relay:
        info = dataclasses.replace(INFO, leader=OWN, leader_address=old.address)
        old.tell(dataclasses.replace(info, node_id=OWN))
        relay.tell(info)
        assert await found(relay.address) == Elsewhere(old.address, answers=True)


@pytest.mark.parametrize(
    "info",
    [
        None,
        dataclasses.replace(INFO, leader=None, leader_address=""),
        dataclasses.replace(INFO, leader=OWN, leader_address=GONE),
        dataclasses.replace(INFO, leader=OTHER, manifest_json="nonsense"),
    ],
    ids=["starting", "electing", "led by us", "nonsense"],
)
async def test_a_member_that_knows_no_other_leader_holds_nothing_up(info: HelloInfo | None) -> None:
    async with Peer(info) as member:
        assert await found(member.address, patience_s=1000.0) is None


async def test_a_leader_that_members_name_counts_even_if_it_does_not_answer_this_host() -> None:
    """Others may have a way to it that this host has not."""
    async with Peer(dataclasses.replace(INFO, leader_address=GONE)) as member:
        assert await found(member.address) == Elsewhere(GONE, answers=False)


async def test_hosts_that_do_not_answer_hold_nothing_up_unless_they_may_lead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
    accepted: list[bool] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(True)
        await ended.wait()
        writer.close()

    ended = asyncio.Event()
    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(20):
        assert await found(address, silence_max_s=1000.0) is None
        once = len(accepted)
        assert await found(address, several=True, silence_max_s=0.3) is None
    assert len(accepted) > once + 1, "it is asked again"
    ended.set()
    silent.close()


async def test_members_are_given_time_to_elect_another_leader() -> None:
    """A leader that was killed is back before the others have noticed."""
    async with Peer(None, LEADER) as leader, Peer(None) as relay:
        info = dataclasses.replace(ELECTS, leader_address=leader.address)
        leader.tell(dataclasses.replace(info, node_id=LEADER_ID))
        relay.tell(dataclasses.replace(info, leader=OWN, leader_address=GONE))
        search = found(GONE, relay.address, patience_s=1000.0)
        finding = asyncio.create_task(search)
        assert await found(relay.address) is None
        relay.tell(info)
        assert await finding == Elsewhere(leader.address, answers=True)


def test_nobody_is_waited_for_where_nobody_is() -> None:
    patient = {"patience_s": 1000.0, "silence_max_s": 1000.0}
    assert asyncio.run(found(GONE, several=True, **patient)) is None
