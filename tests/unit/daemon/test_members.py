"""Bans at the leader: whom it bans, how it finds the node that is meant, and how bans end."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decod.daemon import members as module
from decod.daemon.pipeline_node import PipelineNode
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.protocol.core.effects import ContestBans
from decod.protocol.core.events import BansMade
from decod.protocol.core.view import Member, Reach, Role, View
from decod.protocol.leadership.leader import LeaderState
from decod.tasks import beside
from tests.support.members import ban, host_key, new_data_node, unban
from tests.unit.daemon.nodes import give_driver, make_node
from tests.waiting import wait_until

HOSTS = {name: host_key(name) for name in ("liar", "honest", "newcomer")}
LIAR, HONEST, NEWCOMER = (host.node_id for host in HOSTS.values())


class Leading:
    """A leader's core: members, a candidate, and what it is told. It does as a real one with lists.

    Attributes:
        spare: Members that the run can do without now.
        lacking: Members that are gone, and without whom there is no quorum.
    """

    def __init__(self, node: PipelineNode) -> None:
        self._node, self.posted = node, list[BansMade]()
        self.spare, self.lacking = {LIAR, HONEST}, tuple[NodeId, ...]()
        names = {LIAR: "brave-otter", HONEST: "brave-otter"}
        relays = [Member(n, "h:1", Role.RELAY, 1, 2, name=names[n]) for n in names]
        own = Member(node.node_id, "h:2", Role.DATA, 0, 2, data_node_index=0, name="me")
        view = View.of([own, *relays], version=3, leader=node.node_id, term=4, num_stages=2)
        join = SimpleNamespace(
            name="calm-crane", role=Role.RELAY, address="h:3", reach=Reach.DIALLED
        )
        self.leading = SimpleNamespace(
            view=view,
            state=LeaderState.TRAINING,
            candidates={NEWCOMER: SimpleNamespace(join=join, stage_index=None)},
            loads={LIAR: SimpleNamespace(state="training", num_flows=2)},
            can_do_without=lambda nodes: {*nodes} <= self.spare,
        )
        self.facts = SimpleNamespace(view=view, electing=False, leading=self.leading)
        self.stopped: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        give_driver(node, self)

    def post(self, event: Any) -> None:
        self.posted.append(event)
        self._node._use_bans(event.bans)


def at_leader(folder: Path, test: Callable[[PipelineNode, Leading], Awaitable[None]]) -> None:
    async def run() -> None:
        with make_node(folder) as node:
            core = Leading(node)
            core.leading.lacking = ()
            async with asyncio.timeout(20):
                await test(node, core)

    asyncio.run(run())


async def shown(node: PipelineNode, text: str) -> dict[str, Any]:
    answer = await node.answer({"command": "node_show", "node": text})
    found: dict[str, Any] = answer["node"]
    return found


def test_a_ban_goes_to_the_core_with_the_term_and_the_evidence_to_the_log(tmp_path: Path) -> None:
    async def test(node: PipelineNode, core: Leading) -> None:
        made = await node.members.ban(
            LIAR, reason="it lies", life_s=60.0, evidence="sketch 3 of 7 differs"
        )
        (event,) = core.posted
        assert [*event.bans.banned] == [LIAR]
        assert event.bans.version & 1023 == 4, "the term of the leader"
        assert "it lies" in str(made)
        assert not node.part.membership.bans.allowed(LIAR)
        (told,) = [line for line in node.recent.describe(0.0, name="") if "banned" in line["text"]]
        assert "sketch 3 of 7 differs" in told["text"]
        await node.members.unban(LIAR)
        assert core.posted[-1].bans.banned == {}

    at_leader(tmp_path, test)


def test_the_node_that_is_meant_is_found_by_name_id_and_beginning(tmp_path: Path) -> None:
    async def test(node: PipelineNode, core: Leading) -> None:
        for text in (NEWCOMER, NEWCOMER[:4], "calm-crane"):
            found = await shown(node, text)
            assert (found["id"], found["state"], found["role"]) == (
                NEWCOMER,
                "candidate",
                "volunteer",
            )
        found = await shown(node, LIAR[:10])
        assert (found["stage_index"], found["address"], found["capacity"]) == (1, "h:1", 2)
        assert found["load"] == {"state": "training", "flows": 2}
        with pytest.raises(
            ConfigError, match=f"E-CFG-087 'brave-otter' names several .*{LIAR[:12]}"
        ):
            await shown(node, "brave-otter")
        listed = await node.answer({"command": "node_list"})
        states = {each["id"]: each["state"] for each in listed["nodes"]}
        assert states == {
            node.node_id: "leads",
            LIAR: "member",
            HONEST: "member",
            NEWCOMER: "candidate",
        }

    at_leader(tmp_path, test)


@pytest.mark.parametrize("lacking", [True, False])
def test_a_ban_that_leaves_no_quorum_is_refused(tmp_path: Path, lacking: bool) -> None:
    async def test(node: PipelineNode, core: Leading) -> None:
        core.spare = {LIAR} if lacking else {HONEST}
        core.leading.lacking = (HONEST,) if lacking else ()
        with pytest.raises(ConfigError, match="E-CFG-084"):
            await node.members.ban(LIAR, reason="", life_s=None)
        assert core.posted == []

    at_leader(tmp_path, test)


def test_the_leader_makes_another_list_when_a_ban_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RENEWAL_INTERVAL_S", 0.01)

    async def test(node: PipelineNode, core: Leading) -> None:
        ban(node.part.membership, HONEST)
        ban(node.part.membership, LIAR, life_s=0.0)
        async with beside(node.members.keep_current()):
            await wait_until(lambda: core.posted)
        assert [*core.posted[0].bans.banned] == [HONEST]

    at_leader(tmp_path, test)


def test_a_list_that_bans_the_leader_is_replaced(tmp_path: Path) -> None:
    async def test(node: PipelineNode, core: Leading) -> None:
        elsewhere = new_data_node("elsewhere")
        ban(elsewhere, LIAR)
        theirs = ban(elsewhere, node.node_id)
        node.members.carry_out(ContestBans(theirs))
        (event,) = core.posted
        assert [*event.bans.banned] == [LIAR]
        assert event.bans.version > theirs.version

    at_leader(tmp_path, test)


def test_bans_that_can_not_be_kept_are_told_and_used(tmp_path: Path) -> None:
    async def test(node: PipelineNode, core: Leading) -> None:
        folder = node.part.membership.folder
        assert folder is not None
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.write_text("in the way")
        with pytest.raises(ConfigError, match="E-CFG-081"):
            await node.members.ban(LIAR, reason="", life_s=60.0)
        assert not node.part.membership.bans.allowed(LIAR)
        await wait_until(lambda: "not on disk" in str(node.recent.describe(0.0, name="")))
        unban(node.part.membership, LIAR)

    at_leader(tmp_path, test)
