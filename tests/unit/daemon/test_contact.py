"""From a join string to the run's leader, whoever the string names."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.clocks import wall_clock
from decod.config.schema import Manifest
from decod.daemon import contact as contact_module
from decod.daemon.contact import (
    Contact,
    about_join_string,
    find_leader,
    find_run,
    let_in,
    patiently,
)
from decod.daemon.node_errors import TemporaryError
from decod.daemon.waits import OpenWaits
from decod.errors import (
    ConfigError,
    DecodError,
    MalformedMessageError,
    NetworkError,
    RejectedError,
)
from decod.ids import RunId
from decod.membership.ban_list import BanBook
from decod.membership.papers import Membership
from decod.membership.statements import new_charter
from decod.net import dht_record
from decod.net.ask import HelloInfo
from decod.net.channel import UNANSWERED, ClosedError, UnansweredError
from decod.net.dht import Dht
from decod.net.enrolment import WaitingError
from decod.net.join_string import JoinString
from decod.net.rate_caps import UNLIMITED
from decod.net.server import PeerHandler, PeerServer
from tests.support.members import ban, data_node, host_key, new_data_node, unban, volunteer
from tests.unit.daemon.nodes import RUN_ID, make_manifest

ME, LEADER = data_node("me"), data_node("leader")
LEADER_ID, OTHER, STRANGER = (data_node(name).node_id for name in ("leader", "other", "stranger"))
MANIFEST = make_manifest()


def told(**changes: Any) -> HelloInfo:
    """Returns the answer of a member, with a charter that fits."""
    run_id, manifest_json = changes.get("run_id", RUN_ID), MANIFEST.to_json()
    manifest_json = changes.get("manifest_json", manifest_json)
    fields = {
        "run_id": run_id,
        "manifest_json": manifest_json,
        "charter": new_charter(LEADER, run_id, manifest_json),
        "node_id": OTHER,
        "leader": LEADER_ID,
        "leader_address": "127.0.0.1:99",
    }
    return HelloInfo(**{**fields, **changes})


INFO = told()


class Peer:
    """A node that answers Hello with `info`, and takes part in the DHT."""

    def __init__(
        self, info: HelloInfo | None, member: Membership | None = None, run_id: RunId = RUN_ID
    ) -> None:
        member = member or data_node("other")
        self._handler = SimpleNamespace(state=None, pace=UNLIMITED, intake=UNLIMITED)
        self.tell(info)
        self.server = PeerServer(member, run_id, cast("PeerHandler", self._handler))
        self.dht = Dht(member, RUN_ID)
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


async def find(*addresses: str, by: Membership = ME, avoid_own: bool = False) -> Contact:
    return await find_run(addresses, by, avoid_own=avoid_own)


async def test_a_first_contact_that_does_not_lead_names_the_leader() -> None:
    async with Peer(INFO) as peer:
        contact = await find("127.0.0.1:1", peer.address)
        assert (contact.leader, contact.leader_address) == (LEADER_ID, "127.0.0.1:99")
        assert contact.manifest == MANIFEST
        assert contact.observed_address == "127.0.0.1"


async def test_a_first_contact_that_does_not_know_the_leader_leads_there_through_the_dht() -> None:
    unknowing = dataclasses.replace(INFO, leader=None, leader_address="")
    async with Peer(unknowing) as peer, Peer(None, LEADER) as leader:
        value = {"address": leader.address, "term": 1}
        await leader.dht.bootstrap([peer.address])
        assert await leader.dht.publish(dht_record.LEADER, value, ttl_s=60) == 1
        contact = await find(peer.address)
        assert (contact.leader, contact.leader_address) == (LEADER_ID, leader.address)


async def test_nobody_who_knows_the_leader_is_an_error_in_time() -> None:
    unknowing = dataclasses.replace(INFO, leader=None, leader_address="")
    async with Peer(unknowing) as peer:
        with pytest.raises(NetworkError, match="does not know the run's leader"):
            await find(peer.address)
        assert await find_leader(ME, RUN_ID, (peer.address,), now_s=wall_clock()) is None


async def test_a_node_that_is_starting_is_told_from_one_that_is_not_there() -> None:
    async with Peer(None) as peer:
        with pytest.raises(NetworkError, match="E-NET-004"):
            await find(peer.address)
    with pytest.raises(NetworkError, match="E-NET-003"):
        await find("127.0.0.1:1")


async def test_what_belongs_to_another_root_is_refused() -> None:
    """Whatever it says: it can't show a certificate that follows from the join string."""
    async with Peer(INFO) as peer:
        foreign = data_node("me", host_key("another root"))
        with pytest.raises(RejectedError, match="E-REJ-005"):
            await find_run((peer.address,), foreign)


async def test_a_run_whose_charter_is_not_for_it_is_refused() -> None:
    """A volunteer that lies about the run gains nothing, even if it is the first to be asked."""
    manifest_json = another(seed=5).to_json()
    foreign = new_charter(data_node("leader", host_key("another root")), RUN_ID, manifest_json)
    forged = volunteer("relay").state("run", INFO.charter.body)
    for lie in (
        dataclasses.replace(INFO, manifest_json=manifest_json),
        dataclasses.replace(INFO, manifest_json=manifest_json, charter=foreign),
        dataclasses.replace(INFO, charter=forged),
    ):
        async with Peer(lie) as liar, Peer(INFO) as honest:
            with pytest.raises(MalformedMessageError):
                await find(liar.address)
            assert (await find(liar.address, honest.address)).manifest == MANIFEST


def another(**changes: Any) -> Manifest:
    return dataclasses.replace(MANIFEST, run=dataclasses.replace(MANIFEST.run, **changes))


async def test_where_another_run_has_got_an_address_the_next_one_is_asked() -> None:
    """A data node that has left may lead a run of its own, with the port that is the default."""
    other = data_node("other", host_key("another root"))
    async with Peer(INFO) as right, Peer(INFO, other) as wrong, Peer(None) as starting:
        contact = await find(wrong.address, right.address)
        assert contact.addresses == (wrong.address, right.address)
        for gone in (("127.0.0.1:1", wrong.address), (wrong.address, "127.0.0.1:1")):
            with pytest.raises(RejectedError, match="E-REJ-005"):
                await find(*gone)
        with pytest.raises(NetworkError, match="E-NET-004"):
            await find(wrong.address, starting.address)


async def test_a_run_that_was_resumed_is_found_by_its_members() -> None:
    """It has another id and another manifest, but the same root."""
    resumed = dataclasses.replace(MANIFEST, initial_weights="a" * 64, start_iteration=40)
    info = told(run_id=RunId("b" * 26), manifest_json=resumed.to_json())
    async with Peer(info, run_id=info.run_id) as peer:
        contact = await find(peer.address)
        assert (contact.run_id, contact.manifest) == (info.run_id, resumed)


async def test_the_leaders_own_identity_can_not_join_it() -> None:
    """The state folder was copied: a process of that identity lives, and leads."""
    async with Peer(None, LEADER) as leader, Peer(None) as member:
        info = dataclasses.replace(INFO, leader_address=leader.address)
        member.tell(info)
        leader.tell(dataclasses.replace(info, node_id=LEADER_ID))
        for address in (leader.address, member.address):
            with pytest.raises(ConfigError, match="E-CFG-045"):
                await find(address, by=LEADER, avoid_own=True)


async def test_who_led_and_was_killed_comes_back_when_another_leads() -> None:
    """Until they have elected one the others name this node, which is not there any more."""
    said = list[str]()
    async with Peer(INFO) as member, Peer(INFO, data_node("stranger")) as other:
        # Nobody listens there, then it is somebody else who does.
        for address in ("127.0.0.1:1", other.address):
            info = dataclasses.replace(INFO, leader_address=address)
            member.tell(info)
            with pytest.raises(TemporaryError, match=f"E-RUN-011 .* from {address}"):
                await find("127.0.0.1:1", member.address, by=LEADER, avoid_own=True)

        def elected(text: str) -> None:
            said.append(text)
            member.tell(dataclasses.replace(INFO, leader=STRANGER))

        contact = await patiently(
            lambda: find(member.address, by=LEADER, avoid_own=True), elected, pause_s=0.001
        )
        assert contact.leader == STRANGER
        assert ["still take this node for their leader" in line for line in said] == [True]


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
        charter=INFO.charter,
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


async def test_whoever_finds_the_run_goes_by_its_list_of_bans_from_then_on(tmp_path: Path) -> None:
    other, me = new_data_node("other"), new_data_node("me")
    me.bans = BanBook(me.root, tmp_path)
    ban(other, STRANGER)
    async with Peer(INFO, other) as peer:
        await find(peer.address, by=me)
    assert not me.bans.allowed(STRANGER)
    assert not BanBook(me.root, tmp_path).allowed(STRANGER), "it is kept"


async def test_a_list_from_before_an_election_does_not_keep_a_node_from_the_leader() -> None:
    """Its own list is replaced by what the others have, and a list that bans the leader is not."""
    other, me = new_data_node("other"), new_data_node("me")
    ban(me, LEADER_ID)
    other.bans.use(me.bans.present)
    unban(other, LEADER_ID, by="other")
    async with Peer(INFO, other) as peer:
        assert (await find(peer.address, by=me)).leader == LEADER_ID
    assert me.bans.allowed(LEADER_ID)
    again = new_data_node("me")
    ban(other, LEADER_ID)
    async with Peer(INFO, other) as peer:
        assert (await find(peer.address, by=again)).leader == LEADER_ID
    assert again.bans.version == 0


async def test_a_run_whose_leader_is_banned_is_not_joined() -> None:
    me = new_data_node("me")
    ban(me, LEADER_ID, reason="it lies")
    async with Peer(INFO) as peer:
        with pytest.raises(RejectedError, match=r"E-REJ-021 .* is banned by .*: it lies"):
            await find(peer.address, by=me)


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        (
            ("h:1",),
            r"nobody answers at h:1, the only address in this join string: refused, so that",
        ),
        (("h:1", "i:2"), r"nobody answers at the 2 addresses in this join string: h:1 and others"),
    ],
)
def test_a_join_string_whose_hosts_are_gone_is_named_as_the_cause(
    addresses: tuple[str, ...], said: str
) -> None:
    """A newcomer can't know that the run goes on elsewhere, but the organiser can."""
    join = JoinString(root=ME.root, addresses=addresses)
    found = UnansweredError("no answer from h:1", why="refused", fix="wait", code=UNANSWERED)

    async def find() -> Contact:
        raise found

    with pytest.raises(UnansweredError, match=f"E-NET-003 {said}.* gone or .*newer join string"):
        asyncio.run(patiently(find, lambda _: None, join=join, patience_s=0.01, pause_s=0.001))
    closed = ClosedError("no answer from h:1", why="too many", fix="wait", code="E-NET-003")
    assert about_join_string(closed, join) is closed, "somebody is there"


async def test_who_waits_for_the_organiser_waits_for_a_leader_that_is_gone_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contact_module, "_ASK_AGAIN_S", 0.001)
    why: dict[str, Any] = {"why": "x", "fix": "y"}
    waiting, gone = WaitingError("it waits", **why), UnansweredError("nobody answers", **why)
    elects = TemporaryError("no leader", **why)
    answers = iter([waiting, waiting, gone, gone, elects, waiting, gone, "in"])
    said, noticed = list[str](), list[str]()
    waits = OpenWaits(lambda *_, **__: None)

    async def find() -> str:
        answer = next(answers)
        noticed.extend(one["what"] for one in waits.describe())
        if isinstance(answer, str):
            return answer
        raise answer

    ready = list[bool]()
    join = JoinString(root=ME.root, addresses=("127.0.0.1:1",))
    host: Any = SimpleNamespace(waits=waits, ready=lambda: ready.append(True))
    found = await let_in(find, said.append, join=join, host=host)
    assert (found, ready) == ("in", [True])
    assert [line.partition(":")[0] for line in said] == [
        "X",
        "nobody answers (x)",
        "nobody answers (x)",
    ], "it tells once that the leader is gone"
    assert set(noticed[1:]) == {"the organiser to let this host in"}


async def test_who_is_sent_away_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact_module, "_ASK_AGAIN_S", 0.001)
    why: dict[str, Any] = {"why": "x", "fix": "y"}
    answers = iter([WaitingError("it waits", **why), RejectedError("sent away", **why)])

    async def find() -> None:
        raise next(answers)

    join = JoinString(root=ME.root, addresses=("127.0.0.1:1",))
    host: Any = SimpleNamespace(waits=OpenWaits(lambda *_, **__: None), ready=lambda: None)
    with pytest.raises(RejectedError, match="sent away"):
        await let_in(find, lambda _: None, join=join, host=host)
