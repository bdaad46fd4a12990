"""Garbled requests on every method of a data node's server, beside an honest member's heartbeats.

Requests are made from the descriptors of their messages, and then altered, cut, doubled or left as
they are. The limits on faults and calls are lifted: otherwise the callers would be cut off first.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from decod.ids import NodeId
from decod.net import channel
from decod.net.client import PeerClient
from decod.net.net_limits import LIMITS
from decod.net.server import DataServices, PeerServer
from decod.net.stream import IncomingRegion
from decod.protocol.core import messages as m
from decod.wire import codec
from decod.wire.v1 import control_pb2, enroll_pb2, state_pb2, tensor_pb2
from tests.support.hostile import resident_bytes
from tests.support.members import registrar_of
from tests.support.messages import control_messages
from tests.support.peers import (
    ACTIVATION,
    ALICE,
    BOB,
    CAROL,
    MEMBERS,
    OURS,
    RUN,
    Host,
    no_receipts,
    open_to,
)
from tests.support.sending import sending_to, tensor_head, tensor_piece
from tests.support.wire_shapes import REQUESTS, TENSORS

METHODS: dict[str, Any] = {
    **REQUESTS,
    TENSORS: tensor_pb2.TensorHeader,
    f"/{channel.ENROLL_SERVICE}/Enroll": enroll_pb2.EnrollRequest,
    f"/{channel.STATE_SERVICE}/ReadBlock": state_pb2.ReadBlockRequest,
    f"/{channel.STATE_SERVICE}/ExchangeTokens": state_pb2.ExchangeTokensRequest,
    f"/{channel.STATE_SERVICE}/ReadReceipt": state_pb2.ReadReceiptRequest,
}
"""The request of each method."""

_PARALLEL = 4
_BATCH = 100
"""Envelopes in a call of `Deliver`."""
_BOUNDLESS = replace(
    LIMITS,
    faults_burst=1 << 40,
    connects_burst=1 << 40,
    calls_per_node_max=64,
    state_calls_per_node_max=64,
)
_BEAT_S = 0.05


@dataclass(slots=True)
class Siege:
    """What a server has suffered."""

    num_thrown: dict[str, int] = field(default_factory=dict)
    """By method."""
    errors: list[str] = field(default_factory=list)
    """Errors that reached the event loop, and answers that show a bug."""
    num_malformed: int = 0
    """Messages that the server has found so."""
    grown_bytes: int = 0
    """How much this process has grown, from a tenth of the requests on."""
    beats_s: list[float] = field(default_factory=list)
    """How long each heartbeat of an honest member took."""


class _Forgetful(Host):
    """A driver that keeps nothing."""

    def deliver(self, received: codec.Decoded) -> None:
        pass

    def tensor_arrived(self, received: codec.Decoded, region: IncomingRegion) -> None:
        pass


async def besiege(num: int, rng: random.Random, methods: Iterable[str] = METHODS) -> Siege:
    """Throw garbled requests at a server; return what came of it.

    Args:
        num: Messages for each method.
        rng: Chooses them.
        methods: Which.
    """
    siege, bob = Siege(), MEMBERS[BOB]
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: siege.errors.append(str(context)))
    services = DataServices(registrar_of(bob), _no_block, no_receipts)
    server = PeerServer(bob, RUN, _Forgetful(), limits=_BOUNDLESS, services=services)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    over = asyncio.Event()
    beating = asyncio.create_task(_beat(address, siege, over))
    try:
        for method in methods:
            await _throw(method, num, rng, address, siege)
    finally:
        siege.num_malformed = server.counters.total("message.malformed")
        over.set()
        await beating
        await server.stop(None)
        loop.set_exception_handler(None)
    return siege


async def _beat(address: str, siege: Siege, over: asyncio.Event) -> None:
    """Send heartbeats as another member does, and time them, until it is over."""
    host = Host()
    client = PeerClient(MEMBERS[CAROL], RUN, host)
    client.set_address(BOB, address)
    loop = asyncio.get_running_loop()
    try:
        while not over.is_set():
            start_s = loop.time()
            client.send(BOB, 1, m.Ping(1))
            await client.flush(timeout_s=10.0)
            siege.beats_s.append(loop.time() - start_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _BEAT_S)
    finally:
        await client.close()


async def _throw(method: str, num: int, rng: random.Random, address: str, siege: Siege) -> None:
    """Throw requests at one method."""
    per_call = _BATCH if method.endswith("/Deliver") else 1
    num_calls, before_bytes = -(-num // per_call), 0
    async with open_to(address, _BOUNDLESS) as opened:
        call = opened.stream_stream(method)

        def throw(body: list[bytes]) -> Coroutine[Any, Any, None]:
            if method == TENSORS:
                return _sent(body, address)
            return _once(call, body, method, siege)

        for first in range(0, num_calls, _PARALLEL):
            bodies = [_body(method, rng, per_call) for _ in range(_PARALLEL)]
            await asyncio.gather(*map(throw, bodies))
            siege.num_thrown[method] = siege.num_thrown.get(method, 0) + _PARALLEL * per_call
            if first // _PARALLEL == num_calls // _PARALLEL // 10:
                before_bytes = resident_bytes()
    siege.grown_bytes = max(siege.grown_bytes, resident_bytes() - before_bytes)


async def _sent(body: list[bytes], address: str) -> None:
    with suppress(OSError):
        async with sending_to(address, MEMBERS[ALICE].tls) as sending, asyncio.timeout(20.0):
            for each in body:
                await sending.raw(each)
            await sending.end()


async def _once(call: Any, body: list[bytes], method: str, siege: Siege) -> None:
    async def bodies() -> Any:
        for each in body:
            yield each

    try:
        async for _ in call(bodies(), metadata=OURS, timeout=20.0):
            pass
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNKNOWN or details.startswith("E-INT"):
            siege.errors.append(f"{method}: {error.code()} {details}")


async def _no_block(*_: object) -> bytes:
    return b""


# --- bodies ---------------------------------------------------------------------------------------


def _body(method: str, rng: random.Random, num: int) -> list[bytes]:
    """Return the messages of one call."""
    kind = method.rpartition("/")[2]
    if kind == "Deliver":
        envelopes = b"".join(_delimited(_garbled(_envelope(rng), rng)) for _ in range(num))
        return [envelopes if rng.random() < 0.9 else _garbled(envelopes, rng)]
    if method == TENSORS:
        header = tensor_pb2.TensorHeader(
            envelope=codec.encode(RUN, ALICE, 1, 1, ACTIVATION),
            size_bytes=rng.choice([0, 3, 3, 3, 100, -1]),
        )
        head = tensor_head(_garbled(header.SerializeToString(), rng), rng.randrange(4))
        pieces = [tensor_piece(b"abc") for _ in range(rng.randrange(3))]
        return [*(_garbled(each, rng) for each in (head, *pieces))]
    return [_garbled(_filled(METHODS[method], rng), rng)]


def _envelope(rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return _filled(control_pb2.Envelope, rng)
    message = rng.choice(_MESSAGES)
    return codec.encode(RUN, ALICE, rng.randrange(4), 1, message).SerializeToString()


_MESSAGES = control_messages()


def _delimited(content: bytes) -> bytes:
    request = control_pb2.DeliverRequest.DESCRIPTOR.fields_by_name["envelopes"]
    head, size = bytearray([request.number << 3 | 2]), len(content)
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + content


def _garbled(data: bytes, rng: random.Random) -> bytes:
    """Return some bytes, altered in one of several ways, or as they are."""
    place = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return data[:place]
        case 2:
            return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place:]
        case 3 | 4 if data:
            altered = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                altered[rng.randrange(len(altered))] ^= 1 << rng.randrange(8)
            return bytes(altered)
        case 5:
            return data[:place] + data[: rng.randrange(len(data) + 1)] + data[place:]
    return data


def _filled(cls: Any, rng: random.Random, depth: int = 0) -> bytes:
    """Return a message whose fields hold what a field may hold, or not."""
    message = cls()
    for each in cls.DESCRIPTOR.fields:
        if rng.random() < 0.3 or (each.message_type is not None and depth > 3):
            continue
        count = rng.randrange(4) if each.is_repeated else 1
        for _ in range(count):
            _set(message, each, rng, depth)
    data: bytes = message.SerializeToString()
    return data


def _set(message: Any, each: Any, rng: random.Random, depth: int) -> None:
    if each.message_type is not None:
        target = getattr(message, each.name)
        inner = target.add() if each.is_repeated else target
        inner.ParseFromString(_filled(type(inner), rng, depth + 1))
        return
    value = _value(each, rng)
    if each.is_repeated:
        getattr(message, each.name).append(value)
    else:
        setattr(message, each.name, value)


def _value(each: Any, rng: random.Random) -> Any:
    known: dict[str, Any] = {"run_id": RUN, "sender_id": ALICE, "state_id": "0" * 64}
    if each.name in known and rng.random() < 0.9:
        return known[each.name]
    match each.type:
        case each.TYPE_STRING:
            return rng.choice(
                ["", "x", str(NodeId(BOB)), "a" * 52, "../../etc/x", "\u202e\0é" * 20]
            )
        case each.TYPE_BYTES:
            return rng.randbytes(rng.choice([0, 1, 32, 64, 144, 500]))
        case each.TYPE_BOOL:
            return rng.random() < 0.5
        case each.TYPE_DOUBLE | each.TYPE_FLOAT:
            return rng.choice([0.0, -1.0, 1e308, float("nan"), float("inf"), rng.random()])
        case each.TYPE_UINT64 | each.TYPE_UINT32:
            return rng.choice([0, 1, 1 << 31, rng.randrange(1 << 20)])
        case each.TYPE_ENUM:
            return rng.randrange(8)
    return rng.choice([0, 1, -1, (1 << 31) - 1, rng.randrange(1 << 20)])
