"""From a join string to the run's leader, whoever the string names."""

import asyncio
import dataclasses
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.config.schema import Manifest
from decod.daemon.contact import Contact, find_leader, find_run, patiently
from decod.daemon.errors import TemporaryError
from decod.daemon.manifests import KEPT_MAX, KnownManifests
from decod.errors import ConfigError, DecodError, NetworkError, RejectedError
from decod.ids import NodeId, RunId
from decod.net.dht import Dht
from decod.net.dht_record import LEADER
from decod.net.failure import UnansweredError
from decod.net.join_string import JoinString
from decod.net.pace import UNLIMITED
from decod.net.server import HelloInfo, PeerHandler, PeerServer
from tests.unit.daemon.nodes import RUN_ID, make_manifest

LEADER_ID, OTHER, STRANGER = NodeId("l" * 52), NodeId("o" * 52), NodeId("s" * 52)
MANIFEST = make_manifest()
INFO = HelloInfo(
    run_id=RUN_ID,
    manifest_json=MANIFEST.to_json(),
    node_id=OTHER,
    leader=LEADER_ID,
    leader_address="127.0.0.1:99",
)


class Peer:
    """A node that answers Hello with `info`, and takes part in the DHT."""

    def __init__(self, info: HelloInfo | None, node_id: NodeId = OTHER) -> None:
        self._handler = SimpleNamespace(state=None, pace=UNLIMITED, tensor_failed=None)
        self.tell(info)
        self.server = PeerServer(node_id, RUN_ID, cast("PeerHandler", self._handler))
        self.dht = Dht(node_id, RUN_ID, wall_clock=time.time)  # noqa: TID251 - as the daemon does.
        self.address = ""

    def tell(self, info: HelloInfo | None) -> None:
        self._handler.hello = lambda _: info

    async def __aenter__(self) -> "Peer":
        port = await self.server.start("127.0.0.1", 0)
        await self.dht.start("127.0.0.1", port)
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.dht.close()
        await self.server.stop(0)


def join_string(*addresses: str, prefix: str = MANIFEST.sha256[:16]) -> str:
    return str(JoinString(run_id=RUN_ID, manifest_prefix=prefix, addresses=addresses))


async def find(
    *addresses: str, prefix: str = MANIFEST.sha256[:16], own: NodeId | None = None
) -> Contact:
    text = join_string(*addresses, prefix=prefix)
    return await find_run(text, KnownManifests(Path("/none")), own=own)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


def test_a_first_contact_that_does_not_lead_names_the_leader() -> None:
    async def test() -> None:
        async with Peer(INFO) as peer:
            contact = await find("127.0.0.1:1", peer.address)
            assert (contact.leader, contact.leader_address) == (LEADER_ID, "127.0.0.1:99")
            assert contact.manifest == MANIFEST
            assert contact.observed_address == "127.0.0.1"

    run(test())


def test_a_first_contact_that_does_not_know_the_leader_leads_there_through_the_dht() -> None:
    async def test() -> None:
        unknowing = dataclasses.replace(INFO, leader=None, leader_address="")
        async with Peer(unknowing) as peer, Peer(None, LEADER_ID) as leader:
            value = {"node_id": LEADER_ID, "address": leader.address, "term": 1}
            await leader.dht.bootstrap([peer.address])
            assert await leader.dht.publish(LEADER, value, ttl_s=60) == 1
            contact = await find(peer.address)
            assert (contact.leader, contact.leader_address) == (LEADER_ID, leader.address)

    run(test())


def test_nobody_who_knows_the_leader_is_an_error_in_time() -> None:
    async def test() -> None:
        unknowing = dataclasses.replace(INFO, leader=None, leader_address="")
        async with Peer(unknowing) as peer:
            with pytest.raises(NetworkError, match="does not know the run's leader"):
                await find(peer.address)
            assert await find_leader(RUN_ID, (peer.address,)) is None

    run(test())


def test_a_node_that_is_starting_is_told_from_one_that_is_not_there() -> None:
    async def test() -> None:
        async with Peer(None) as peer:
            with pytest.raises(NetworkError, match="E-NET-004"):
                await find(peer.address)
        with pytest.raises(NetworkError, match="E-NET-003"):
            await find("127.0.0.1:1")

    run(test())


def test_a_run_that_is_not_the_one_of_the_join_string_is_refused() -> None:
    async def test() -> None:
        async with Peer(INFO) as peer:
            with pytest.raises(RejectedError, match="E-REJ-005"):
                await find(peer.address, prefix="0" * 16)

    run(test())


def another(**changes: Any) -> Manifest:
    return dataclasses.replace(MANIFEST, run=dataclasses.replace(MANIFEST.run, **changes))


def test_where_another_run_has_got_an_address_the_next_one_is_asked() -> None:
    """A data node that has left may lead a run of its own, with the port that is the default."""

    async def test() -> None:
        other = dataclasses.replace(INFO, manifest_json=another(seed=5).to_json())
        async with Peer(INFO) as right, Peer(other) as wrong, Peer(None) as starting:
            contact = await find(wrong.address, right.address)
            assert contact.addresses == (wrong.address, right.address)
            for gone in (("127.0.0.1:1", wrong.address), (wrong.address, "127.0.0.1:1")):
                with pytest.raises(RejectedError, match="E-REJ-005"):
                    await find(*gone)
            with pytest.raises(NetworkError, match="E-NET-004"):
                await find(wrong.address, starting.address)

    run(test())


def test_a_host_that_knew_the_run_says_what_has_changed(tmp_path: Path) -> None:
    before = another(seed=MANIFEST.run.seed + 1)
    known = KnownManifests(tmp_path)
    known.keep(before)

    async def test() -> None:
        async with Peer(INFO) as peer:
            text = join_string(peer.address, prefix=before.sha256[:16])
            with pytest.raises(RejectedError, match=r"E-REJ-005.*run\.seed is 1 here and 0 there"):
                await find_run(text, known)
            other_run = JoinString.parse(text)
            text = str(dataclasses.replace(other_run, run_id=RunId("b" * 26)))
            with pytest.raises(RejectedError, match=r"E-REJ-003.*run\.seed is 1 here and 0 there"):
                await find_run(text, known)

    run(test())


def test_a_run_that_was_resumed_is_told_from_one_that_was_changed(tmp_path: Path) -> None:
    """Its volunteers ask where their leader was."""
    known = KnownManifests(tmp_path)
    known.keep(MANIFEST)
    resumed = dataclasses.replace(MANIFEST, initial_weights="a" * 64, start_iteration=40)

    async def test() -> None:
        expected = r"E-REJ-003.* started again with --resume, from iteration 40: that is another"
        async with Peer(dataclasses.replace(INFO, manifest_json=resumed.to_json())) as peer:
            before = JoinString.parse(join_string(peer.address))
            text = str(dataclasses.replace(before, run_id=RunId("b" * 26)))
            with pytest.raises(RejectedError, match=expected):
                await find_run(text, known)

    run(test())


def test_a_run_that_was_started_anew_is_told_from_one_that_was_changed() -> None:
    async def test() -> None:
        async with Peer(INFO) as peer:
            same = JoinString.parse(join_string(peer.address))
            text = str(dataclasses.replace(same, run_id=RunId("b" * 26)))
            with pytest.raises(RejectedError, match="started anew with the same settings"):
                await find_run(text, KnownManifests(Path("/none")))

    run(test())


def test_a_bounded_number_of_manifests_is_kept_and_damaged_ones_are_ignored(tmp_path: Path) -> None:
    known = KnownManifests(tmp_path / "none")
    known.keep(MANIFEST)
    assert known.find(MANIFEST.sha256[:16]) is None, "a state folder is not made for this"
    known = KnownManifests(tmp_path)
    manifests = [another(seed=seed) for seed in range(KEPT_MAX + 3)]
    for manifest in manifests:
        known.keep(manifest)
    assert len(list(tmp_path.rglob("*.json"))) == KEPT_MAX
    prefix = manifests[-1].sha256[:16]
    assert known.find(prefix) == manifests[-1]
    for damaged in (b"", b"\xff", b"{}", MANIFEST.to_json().encode()):
        (tmp_path / "manifests" / f"{prefix}.json").write_bytes(damaged)
        assert known.find(prefix) is None


def test_the_leaders_own_identity_can_not_join_it() -> None:
    """The state folder was copied: a process of that identity lives, and leads."""

    async def test() -> None:
        async with Peer(None, LEADER_ID) as leader, Peer(None) as member:
            told = dataclasses.replace(INFO, leader_address=leader.address)
            member.tell(told)
            leader.tell(dataclasses.replace(told, node_id=LEADER_ID))
            for address in (leader.address, member.address):
                with pytest.raises(ConfigError, match="E-CFG-045"):
                    await find(address, own=LEADER_ID)

    run(test())


def test_who_led_and_was_killed_comes_back_when_another_leads() -> None:
    """Until they have elected one the others name this node, which is not there any more."""

    async def test() -> None:
        said = list[str]()
        async with Peer(INFO) as member, Peer(INFO, STRANGER) as other:
            # Nobody listens there, then it is somebody else who does.
            for address in ("127.0.0.1:1", other.address):
                info = dataclasses.replace(INFO, leader_address=address)
                member.tell(info)
                with pytest.raises(TemporaryError, match=f"E-RUN-011 .* from {address}"):
                    await find("127.0.0.1:1", member.address, own=LEADER_ID)

            def elected(text: str) -> None:
                said.append(text)
                member.tell(dataclasses.replace(INFO, leader=STRANGER))

            contact = await patiently(
                lambda: find(member.address, own=LEADER_ID), elected, pause_s=0.001
            )
            assert contact.leader == STRANGER
            assert ["still take this node for their leader" in line for line in said] == [True]

    run(test())


@pytest.mark.parametrize(
    ("error", "num_calls"),
    [
        (UnansweredError("no answer from h:1", why="deadline_exceeded", fix="wait"), 3),
        (NetworkError("it can't say", why="it is starting", fix="wait", code="E-NET-004"), 3),
        (NetworkError("no answer from h:1", why="refused", fix="start it", code="E-NET-003"), 1),
        (RejectedError("another run", why="it is", fix="ask", code="E-REJ-003"), 1),
    ],
)
def test_who_does_not_answer_in_time_is_asked_again(error: DecodError, num_calls: int) -> None:
    """Where nobody listens, or another run does, waiting does not help."""
    calls, said = list[int](), list[str]()
    found = Contact(
        run_id=RUN_ID,
        manifest=MANIFEST,
        leader=LEADER_ID,
        leader_address="h:1",
        observed_address="",
        addresses=("h:1",),
    )

    async def find() -> Contact:
        calls.append(1)
        if len(calls) < 3:
            raise error
        return found

    async def look() -> Contact:
        return await patiently(find, said.append, patience_s=1.0, pause_s=0.001)

    if num_calls == 3:
        assert asyncio.run(look()) is found
        assert len(said) == 2
        assert all(error.what in line for line in said)
    else:
        with pytest.raises(type(error)):
            asyncio.run(look())
    assert len(calls) == num_calls


def test_patience_has_an_end() -> None:
    async def find() -> Contact:
        raise UnansweredError("no answer from h:1", why="deadline_exceeded", fix="wait")

    with pytest.raises(UnansweredError):
        asyncio.run(patiently(find, lambda _: None, patience_s=0.01, pause_s=0.001))
