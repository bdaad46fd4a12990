"""Those who have no business in a run, or more than they may, and who try all the same.

Each attempt has a test of its own below `tests/unit/net`, which looks at it closely. Here they come
together, at a run that trains.
"""

import asyncio
import random
import socket
from collections.abc import Awaitable
from dataclasses import dataclass, replace

import grpc
import grpc.aio

from decod.clocks import wall_clock
from decod.errors import DecodError
from decod.ids import NodeId, RunId
from decod.membership.certificates import MEMBER_NAME, TlsIdentity
from decod.membership.papers import Membership
from decod.membership.tokens import Token
from decod.net import channel
from decod.net.address import split_address
from decod.net.ask import ask_status
from decod.net.dht import Dht
from decod.net.dht_record import LEADER
from decod.net.enrolment import Enrollee, enroll
from decod.net.net_limits import LIMITS
from decod.protocol.core import messages as m
from decod.protocol.core.view import Role
from decod.wire import codec
from decod.wire.v1 import control_pb2
from tests.support.members import data_node, host_key

_HELLO = f"/{channel.ENROLL_SERVICE}/Hello"
_DELIVER = f"/{channel.CONTROL_SERVICE}/Deliver"
_READ_BLOCK = f"/{channel.STATE_SERVICE}/ReadBlock"
_NUM_DATAGRAMS = 300
_STRANGER = data_node("stranger", host_key("another root"))

REFUSALS = {
    "no certificate": "UNAVAILABLE",
    "another root": "UNAVAILABLE",
    "a token that nobody made": "E-REJ-011",
    "a revoked token": "E-REJ-010",
    "a data node's method": "PERMISSION_DENIED",
    "a message in the leader's name": "1 dropped",
    "a data node's message": "1 dropped",
    "another run": "E-REJ-003",
    "a stranger in the DHT": "finds nothing",
}
"""Each attempt, and what comes of it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A run's leader, and what its attackers have."""

    address: str
    run_id: RunId
    leader: NodeId
    volunteer: Membership
    """A member of the run, which may call it but has no part in training."""
    revoked: Token


async def attack(target: Target, rng: random.Random) -> dict[str, str]:
    """Make each attempt once; return what came of each, as in `REFUSALS`."""
    volunteer, root = target.volunteer, target.volunteer.root
    foreign = replace(_STRANGER.tls, anchors=volunteer.tls.anchors)
    unknown = Enrollee.with_token(root, host_key("a"), Token.new(Role.RELAY))
    revoked = Enrollee.with_token(root, host_key("b"), target.revoked)
    now_s = wall_clock()
    _throw_datagrams(target.address, rng)
    return {
        "no certificate": await _uncertified(target),
        "another root": await _code(target, _HELLO, foreign),
        "a token that nobody made": await _refusal(enroll(target.address, unknown, now_s=now_s)),
        "a revoked token": await _refusal(enroll(target.address, revoked, now_s=now_s)),
        "a data node's method": await _code(target, _READ_BLOCK, volunteer.tls),
        "a message in the leader's name": await _deliver(target, target.leader, m.Ping(1)),
        "a data node's message": await _deliver(
            target, volunteer.node_id, m.Refuse("you are not wanted")
        ),
        "another run": await _refusal(
            ask_status(target.address, RunId("q" * 26), volunteer, timeout_s=10.0)
        ),
        "a stranger in the DHT": await _seek(target),
    }


def _throw_datagrams(address: str, rng: random.Random) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as thrower:
        for _ in range(_NUM_DATAGRAMS):
            thrower.sendto(rng.randbytes(rng.randrange(1, 1200)), split_address(address))


async def _uncertified(target: Target) -> str:
    async with grpc.aio.insecure_channel(target.address) as opened:
        return (await opened.unary_unary(_HELLO)(b"", timeout=10.0).code()).name


async def _code(target: Target, method: str, tls: TlsIdentity) -> str:
    """Call a method, and return how that ended."""
    async with channel.open_channel(target.address, LIMITS, tls, MEMBER_NAME) as opened:
        metadata = channel.run_metadata(target.run_id)
        return (await opened.unary_unary(method)(b"x", metadata=metadata, timeout=10.0).code()).name


async def _deliver(target: Target, sender: NodeId, message: m.Message) -> str:
    """Send a message as the volunteer, with another's name maybe."""
    envelope = codec.encode(target.run_id, sender, 1, 1, message)
    request = control_pb2.DeliverRequest(envelopes=[envelope]).SerializeToString()
    tls = target.volunteer.tls
    async with channel.open_channel(target.address, LIMITS, tls, MEMBER_NAME) as opened:
        metadata = channel.run_metadata(target.run_id)
        call = opened.unary_unary(_DELIVER)(request, metadata=metadata, timeout=10.0)
        return f"{control_pb2.DeliverResponse.FromString(await call).num_dropped} dropped"


async def _refusal(attempt: Awaitable[object]) -> str:
    try:
        await attempt
    except DecodError as error:
        return error.code
    return "let in"


async def _seek(target: Target) -> str:
    dht = Dht(_STRANGER, target.run_id)
    await dht.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(30.0):
            await dht.bootstrap([target.address])
            return "finds nothing" if await dht.lookup(LEADER) is None else "finds the leader"
    finally:
        await dht.close()
