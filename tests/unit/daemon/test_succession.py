"""What a daemon tells of the leader, and what it hands out, before and after an election."""

import dataclasses
from pathlib import Path

from decod.daemon.leader_daemon import _Leading
from decod.ids import NodeId
from decod.net.ask import HelloRequest
from decod.net.join_string import JoinString
from decod.protocol.core.context import Promise
from decod.protocol.core.effects import Note
from decod.protocol.core.view import Member, Role, View
from tests.unit.daemon.nodes import STRANGER, make_node, tell
from tests.unit.daemon.test_leader_daemon import options
from tests.unit.daemon.test_status import give_core

OTHER = NodeId("c" * 52)


def member(node_id: NodeId, index: int) -> Member:
    role = Role.DATA if index >= 0 else Role.RELAY
    return Member(node_id, f"{node_id[0]}.example:1", role, int(index < 0), 1, index, name="x")


async def test_the_leader_is_who_the_view_says(tmp_path: Path) -> None:
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


async def test_a_join_string_names_this_node_and_the_data_nodes(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        node.address = "me.example:1"
        assert JoinString.parse(node.invitations.invite(Role.RELAY)).addresses == ("me.example:1",)
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


async def test_the_leader_shows_its_join_strings_again_when_a_data_node_enters(
    tmp_path: Path,
) -> None:
    """On the terminal, in the status and in the file. Their tokens are the same."""
    path = tmp_path / "join.txt"
    with make_node(tmp_path) as node:
        lines: list[str] = []
        node.say, node.address = lines.append, "me.example:1"
        leading = _Leading(node, options(tmp_path, join_path=path))
        leading.hand_out()
        (first,) = lines
        assert first == f"join string: {node.local_status()['join_string']}"
        machine = give_core(node)
        mine = dataclasses.replace(member(node.node_id, 0), address="me.example:1")
        versions = iter(range(1, 10))

        def enter(*others: Member) -> None:
            version = next(versions)
            members = [mine, *others, member(STRANGER, -1)]
            machine.context.adopt(
                View.of(members, version=version, leader=mine.node_id, term=1, num_stages=3)
            )
            fields = {"iteration": "1.1", "view_version": version, "num_members": len(members)}
            tell(node, Note("iteration.opened", tuple(fields.items())))

        enter()
        assert lines == [first], "the relay that has entered is in no join string"
        second = dataclasses.replace(member(OTHER, 1), name="data-1")
        enter(second)
        why, shown = lines[1:]
        assert why.startswith("data-1 has entered as a data node")
        join, before = (JoinString.parse(line.split()[-1]) for line in (shown, first))
        assert join.addresses == ("me.example:1", "c.example:1")
        assert join.token == before.token
        assert node.local_status()["join_string"] == shown.split()[-1] == path.read_text().strip()
        enter()
        enter(second)
        assert len(lines) == 3, "it was away, and its address is known"
        assert path.read_text().strip() == shown.split()[-1]


async def test_the_join_string_to_hand_out_is_the_newest_that_lets_most_in(tmp_path: Path) -> None:
    with make_node(tmp_path) as node:
        node.address = "me.example:1"
        invitations = node.invitations
        assert invitations.current(Role.RELAY) is None
        first = invitations.invite(Role.RELAY)
        assert invitations.current(Role.RELAY) == first
        assert invitations.current(Role.DATA) is None
        create = invitations.commands()["token_create"]
        for_one = (await create({"uses": 1}))["join_string"]
        assert invitations.current(Role.RELAY) == first, "that one is for somebody else"
        newest = (await create({}))["join_string"]
        assert invitations.current(Role.RELAY) == newest == node.local_status()["join_string"]
        revoke = invitations.commands()["token_revoke"]
        for text, left in ((newest, first), (first, for_one), (for_one, None)):
            token = JoinString.parse(text).token
            assert token is not None
            await revoke({"id": token.id})
            assert invitations.current(Role.RELAY) == left
