"""What a daemon tells of the leader, and what it hands out, before and after an election."""

import asyncio
import dataclasses
from pathlib import Path

from decod.ids import NodeId
from decod.net.join_string import JoinString
from decod.net.server import HelloRequest
from decod.protocol.core.identity import Promise
from decod.protocol.core.view import Member, Role, View
from tests.unit.daemon.nodes import STRANGER, make_node
from tests.unit.daemon.test_status import give_core

OTHER = NodeId("c" * 52)


def member(node_id: NodeId, index: int) -> Member:
    role = Role.DATA if index >= 0 else Role.RELAY
    return Member(node_id, f"{node_id[0]}.example:1", role, int(index < 0), 1, index, name="x")


def test_the_leader_is_who_the_view_says(tmp_path: Path) -> None:
    async def test() -> None:
        with make_node(tmp_path, leads=False) as node:
            node.address = "me.example:1"
            told = node.contacts.leader()
            assert (told.id, told.address) == (STRANGER, "127.0.0.1:1")
            machine = give_core(node)
            me = node.node_id
            members = [member(OTHER, 0), member(STRANGER, 1), member(me, -1)]
            view = View.of(members, version=2, leader=OTHER, term=3, num_stages=3)
            machine.context.adopt(view)
            told = node.contacts.leader()
            assert (told.id, told.address, told.term) == (OTHER, "c.example:1", 3)
            assert not told.electing
            info = node._hello(HelloRequest())
            assert info is not None
            assert (info.leader, info.leader_address) == (OTHER, "c.example:1")
            machine.leadership.election.voter.promise = Promise(4, STRANGER)
            assert node.contacts.leader().electing
            info = node._hello(HelloRequest())
            assert info is not None
            assert info.leader is None, "who asks looks further"
            assert "another is being elected" in node.local_status()["message"]

    asyncio.run(test())


def test_a_join_string_names_this_node_and_the_data_nodes(tmp_path: Path) -> None:
    async def test() -> None:
        with make_node(tmp_path) as node:
            node.address = "me.example:1"
            assert JoinString.parse(node.invitations.invite(Role.RELAY)).addresses == (
                "me.example:1",
            )
            machine = give_core(node)
            mine = dataclasses.replace(member(node.node_id, 0), address="me.example:1")
            members = [mine, member(OTHER, 1), member(STRANGER, -1)]
            view = View.of(members, version=1, leader=mine.node_id, term=1, num_stages=3)
            machine.context.adopt(view)
            both = ("me.example:1", "c.example:1")
            for role in (Role.DATA, Role.RELAY):
                join = JoinString.parse(node.invitations.invite(role))
                assert join.addresses == both
                assert join.token is not None
                assert join.token.role is role
            back = JoinString.parse(node.contacts.member_string())
            assert (back.addresses, back.token) == (both[1:], None)
            assert node.contacts.admitting() == both[1:], "who can renew this node's papers"

    asyncio.run(test())
