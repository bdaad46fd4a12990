"""Banned nodes at the door, over real sockets: on old connections and new ones, with every call."""

import grpc
import pytest

from decod.clocks import wall_clock
from decod.errors import RejectedError
from decod.membership.registrar import EnrollRequest, Refusal
from decod.net import channel
from decod.net.ask import HelloRequest, ask_status, hello
from decod.net.enrolment import Enrollee, enroll
from decod.net.net_limits import LIMITS
from decod.net.tensor_stream import REFUSAL
from decod.protocol.core import messages as m
from decod.protocol.core.bans import BanList
from decod.wire import codec
from decod.wire.v1 import control_pb2
from tests.support.members import (
    as_caller,
    ban,
    data_node,
    host_key,
    new_data_node,
    registrar_of,
    unban,
    volunteer,
)
from tests.support.peers import RUN
from tests.support.wire_shapes import REQUESTS
from tests.unit.net.test_enrolment import DELIVER, ENROLL, Door, at_door

RELAY = volunteer("relay")
DENIED = grpc.StatusCode.PERMISSION_DENIED


def test_a_ban_counts_at_once_on_connections_that_exist() -> None:
    here = new_data_node("leader")

    async def test(door: Door) -> None:
        envelope = codec.encode(RUN, RELAY.node_id, 1, 1, m.Ping(1))
        request = control_pb2.DeliverRequest(envelopes=[envelope]).SerializeToString()
        opened = channel.open_channel(door.address, LIMITS, RELAY.tls, "peer.decod")
        async with opened:

            async def deliver() -> tuple[grpc.StatusCode, str]:
                metadata = channel.run_metadata(RUN)
                call = opened.unary_unary(DELIVER)(request, metadata=metadata, timeout=5.0)
                return await call.code(), await call.details() or ""

            assert (await deliver())[0] is grpc.StatusCode.OK
            ban(here, RELAY.node_id, reason="it lies")
            code, details = await deliver()
            assert code is DENIED
            assert details.startswith("E-REJ-020 banned by ")
            assert details.endswith(": it lies")
            assert len(door.host.delivered) == 1
            unban(here, RELAY.node_id)
            assert (await deliver())[0] is grpc.StatusCode.OK
        assert door.server.counters.totals() == {"caller.refused": 1}

    at_door(test, here)


def test_every_call_of_a_banned_member_is_refused() -> None:
    """Many in a row do not cost it the connection, over which it is to hear why."""
    here, other = new_data_node("leader"), data_node("other")
    ban(here, other.node_id)

    async def test(door: Door) -> None:
        for method in [*REQUESTS.keys() - {ENROLL}] * 5:
            code, details = await door.call(method, other.tls, b"x")
            assert code is DENIED, method
            assert details.startswith(channel.BANNED), method
        assert await door.send_tensor(other.tls) == REFUSAL
        assert "peer.dropped" not in door.server.counters.totals()

    at_door(test, here)


def test_a_banned_node_hears_why_and_until_when_however_it_asks() -> None:
    here = new_data_node("leader")
    ban(here, RELAY.node_id, reason="its gradients are noise")

    async def test(door: Door) -> None:
        told = r"E-REJ-020 .*banned by [a-z]+-[a-z]+ until .* UTC: its gradients are noise"
        with pytest.raises(RejectedError, match=told):
            await hello(door.address, HelloRequest(), RELAY)
        with pytest.raises(RejectedError, match=told):
            await ask_status(door.address, RUN, RELAY, timeout_s=5.0)
        for shown in (RELAY.tls, RELAY.renewal_tls):
            with pytest.raises(RejectedError, match=told):
                await enroll(door.address, Enrollee.renewing(RELAY, shown), now_s=wall_clock())

    at_door(test, here)


def test_a_token_does_not_let_a_banned_node_in_and_is_not_used_up() -> None:
    here, newcomer = new_data_node("leader"), host_key("newcomer")
    ban(here, newcomer.node_id)

    async def test(door: Door) -> None:
        token = door.token()
        with pytest.raises(RejectedError, match="E-REJ-020"):
            await door.enroll(token, newcomer)
        assert door.registrar.tokens.all()[0].used_by == ()
        await door.enroll(token, host_key("somebody else"))

    at_door(test, here)


def test_the_registrar_itself_renews_no_banned_member() -> None:
    here = new_data_node("leader")
    registrar = registrar_of(here)
    ban(here, RELAY.node_id)
    request = Enrollee.renewing(RELAY, RELAY.tls).request()
    asked = EnrollRequest(public=request.public_key, signature=request.signature)
    assert registrar.enroll(as_caller(RELAY), asked) is Refusal.BANNED


def test_whoever_asks_about_the_run_gets_a_later_list_of_bans() -> None:
    here = new_data_node("leader")
    made = ban(here, host_key("liar").node_id)

    async def test(door: Door) -> None:
        info = await hello(door.address, HelloRequest(bans=0), RELAY)
        found = new_data_node("other").bans.read(info.bans)
        assert isinstance(found, BanList)
        assert found == made
        for known in (None, made.version):
            info = await hello(door.address, HelloRequest(bans=known), RELAY)
            assert info.bans == b""

    at_door(test, here)


def test_reasons_can_be_long_and_in_any_language() -> None:
    here, reason = new_data_node("leader"), "\N{HANGUL SYLLABLE GAG}" * 200
    ban(here, RELAY.node_id, reason=reason, life_s=None)

    async def test(door: Door) -> None:
        with pytest.raises(RejectedError, match=f"for ever: {reason}"):
            await hello(door.address, HelloRequest(), RELAY)

    at_door(test, here)
