"""Join tokens that data nodes tell each other, over real sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from decod.clocks import wall_clock
from decod.errors import NetworkError, RejectedError
from decod.ids import NodeId, RunId
from decod.membership.papers import Membership
from decod.membership.registrar import Registrar
from decod.membership.tokens import Tokens
from decod.net import channel
from decod.net.enrolment import exchange_tokens
from decod.protocol.core.view import Role
from decod.wire.v1 import state_pb2
from tests.support.members import data_node, registrar_of, volunteer
from tests.support.peers import RUN
from tests.unit.net.test_enrolment import Door, at_door

EXCHANGE = f"/{channel.STATE_SERVICE}/ExchangeTokens"
A, B = (NodeId(letter * 52) for letter in "ab")
OTHER = data_node("other")


def without_root(member: Membership) -> Membership:
    """Returns a data node's membership as it is at another host than the organiser's."""
    return Membership(member.root, member.host, member.papers)


def both(test: Callable[[Door, Registrar], Awaitable[None]]) -> None:
    """Runs a test with a leader that listens, and another data node that asks it."""
    other = registrar_of(without_root(OTHER))

    async def within(door: Door) -> None:
        await test(door, other)

    at_door(within)


def created(registrar: Registrar, role: Role = Role.RELAY, *, uses: int = 3) -> str:
    return registrar.tokens.create(role, now_s=wall_clock(), life_s=600.0, uses=uses).id


def test_two_data_nodes_know_the_same_after_an_exchange() -> None:
    async def test(door: Door, other: Registrar) -> None:
        theirs, ours = created(door.registrar), created(other)
        data, shared = created(door.registrar, Role.DATA), created(door.registrar)
        await exchange_tokens(door.address, RUN, other)
        assert other.tokens.digests() == door.registrar.tokens.digests()
        assert other.tokens.digests().keys() == {theirs, ours, data, shared}
        other.tokens.use(shared, A, wall_clock())
        door.registrar.tokens.use(shared, B, wall_clock())
        other.tokens.revoke(theirs)
        door.registrar.tokens.revoke(ours)
        await exchange_tokens(door.address, RUN, other)
        assert other.tokens.digests() == door.registrar.tokens.digests()
        for tokens in (other.tokens, door.registrar.tokens):
            found = tokens.find(shared)
            assert found is not None
            assert {*found.used_by} == {A, B}
            assert {each.id for each in tokens.all() if each.revoked} == {theirs, ours}

    both(test)


def test_where_nothing_has_changed_one_small_call_is_enough() -> None:
    async def test(door: Door, other: Registrar) -> None:
        for _ in range(20):
            created(door.registrar)
        await exchange_tokens(door.address, RUN, other)
        calls = list[int]()
        merge = door.registrar.tokens.merge
        door.registrar.tokens.merge = lambda *a, **k: calls.append(1) or merge(*a, **k)  # type: ignore[method-assign, func-returns-value]
        await exchange_tokens(door.address, RUN, other)
        assert len(calls) == 1

    both(test)


def test_many_used_tokens_take_several_calls() -> None:
    async def test(door: Door, other: Registrar) -> None:
        nodes = [f"{k:052d}".translate(str.maketrans("0189", "abcd")) for k in range(900)]
        for _ in range(30):
            token, tokens = created(other, uses=1000), other.tokens
            for node in nodes:
                assert tokens.use(token, NodeId(node), wall_clock()) == ""
        await exchange_tokens(door.address, RUN, other)
        assert door.registrar.tokens.digests() == other.tokens.digests()

    both(test)


def test_the_organisers_host_takes_no_invitations_of_data_nodes_from_others() -> None:
    async def test(door: Door, other: Registrar) -> None:
        token = created(other, Role.DATA)
        async with asyncio.timeout(5):
            await exchange_tokens(door.address, RUN, other)
        assert door.registrar.tokens.find(token) is None

    both(test)


def test_only_data_nodes_of_the_run_exchange_tokens() -> None:
    async def test(door: Door, other: Registrar) -> None:
        created(door.registrar)
        code, details = await door.call(EXCHANGE, volunteer("relay").tls, b"x")
        assert (code, details) == (grpc.StatusCode.PERMISSION_DENIED, channel.NOT_ALLOWED)
        with pytest.raises(RejectedError, match="E-REJ-003"):
            await exchange_tokens(door.address, RunId("q" * 26), other)
        for changes in (
            {"sender_id": A},
            {"records": b"[7]"},
            {"known": [state_pb2.TokenDigest(id="?", digest="0" * 16)]},
            {"known": [state_pb2.TokenDigest(id="a" * 8, digest="?")]},
            {"known": [state_pb2.TokenDigest(id="a" * 8, digest="0" * 16)] * 257},
        ):
            fields = {"run_id": RUN, "sender_id": OTHER.node_id, **changes}
            data = state_pb2.ExchangeTokensRequest(**fields).SerializeToString()
            code, _ = await door.call(EXCHANGE, OTHER.tls, data)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, changes

    both(test)


def test_nobody_there_is_an_error(tmp_path: Path) -> None:
    registrar = registrar_of(OTHER)
    registrar.tokens = Tokens(tmp_path)
    with pytest.raises(NetworkError, match="E-NET-003"):
        asyncio.run(exchange_tokens("127.0.0.1:1", RUN, registrar))
