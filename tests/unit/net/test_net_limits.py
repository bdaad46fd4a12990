"""Limits of what a member may do to a node, on real sockets: see the table in docs/security.md."""

import asyncio
import logging
import ssl
import statistics
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from typing_extensions import override

from decod.membership.papers import Membership
from decod.net import channel
from decod.net.donor import StateBlob, StateRequest
from decod.net.net_limits import KIB, LIMITS, LINES_PER_MINUTE_MAX, MIB, Limits
from decod.net.tensor_stream import PIECE, RESULT
from decod.protocol.core import messages as m
from decod.run.protocol_config import ProtocolConfig
from decod.wire import codec
from decod.wire.v1 import control_pb2
from tests.support.flooding import KINDS, flood
from tests.support.members import volunteer
from tests.support.peers import (
    ALICE,
    BOB,
    CAROL,
    ITERATION,
    MEMBERS,
    OURS,
    RUN,
    Host,
    Pair,
    header,
    open_to,
    with_pair,
)
from tests.support.quick import first_of
from tests.support.wire_shapes import DELIVER, field
from tests.unit.net.test_download import BIG
from tests.waiting import wait_until

FETCH = f"/{channel.STATE_SERVICE}/Fetch"
DESCRIBE = f"/{channel.STATE_SERVICE}/Describe"
HELLO = f"/{channel.ENROLL_SERVICE}/Hello"

SETTINGS, PING, GOAWAY = 4, 6, 7
"""Kinds of frames in HTTP/2."""


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def pings(*nonces: int, by: Membership = MEMBERS[ALICE]) -> bytes:
    envelopes = [codec.encode(RUN, by.node_id, 1, nonce, m.Ping(nonce)) for nonce in nonces]
    return control_pb2.DeliverRequest(envelopes=envelopes).SerializeToString()


# --- sizes ------------------------------------------------------------------------------------


def test_long_metadata_are_refused_before_any_code_of_ours_runs() -> None:
    async def test(both: Pair) -> None:
        bold = Limits(metadata_size_max_bytes=1 << 20)
        async with open_to(both.address, bold) as opened:
            deliver = opened.unary_unary(DELIVER)
            long = (*OURS, ("decod-x", "x" * (20 * KIB)))
            assert await code_of(deliver(pings(1), metadata=long)) is not grpc.StatusCode.OK
            assert both.bob.delivered == []
            assert await code_of(deliver(pings(2), metadata=OURS)) is grpc.StatusCode.OK
        assert both.server.counters.totals() == {}

    with_pair(test)


def test_a_compressed_message_is_refused() -> None:
    """A few kilobytes can become gigabytes."""

    async def test(both: Pair) -> None:
        tls = MEMBERS[ALICE].tls
        credentials = grpc.ssl_channel_credentials(tls.anchors, tls.key, tls.chain)
        options = [("grpc.ssl_target_name_override", "peer.decod")]
        async with grpc.aio.secure_channel(
            both.address, credentials, options, compression=grpc.Compression.Gzip
        ) as opened:
            bomb = opened.unary_unary(DELIVER)(bytes(4 * MIB), metadata=OURS)
            assert await code_of(bomb) is grpc.StatusCode.UNIMPLEMENTED
        assert both.server.counters.totals() == {}

    with_pair(test)


def test_a_piece_of_a_tensor_has_a_mebibyte_at_most() -> None:
    async def test(both: Pair) -> None:
        async with both.sending() as sending:
            await sending.head(header(size_bytes=2 * MIB))
            await sending.raw(PIECE.pack(MIB + 1))
            with pytest.raises(ConnectionError):
                await sending.answer()
        assert both.bob.num_given_back == both.bob.num_allocated == 1

    with_pair(test)


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "most", "other"),
    [
        (DELIVER, LIMITS.calls_per_node_max, HELLO),
        (HELLO, LIMITS.calls_per_node_max, DELIVER),
        (DESCRIBE, LIMITS.state_calls_per_node_max, DELIVER),
        (FETCH, LIMITS.state_calls_per_node_max, DELIVER),
    ],
)
def test_a_member_has_few_calls_open_to_each_service(method: str, most: int, other: str) -> None:
    """However many connections it has. Other members, and its calls to others, have room."""

    async def test(both: Pair) -> None:
        door = both.server._door
        async with (
            open_to(both.address) as one,
            open_to(both.address) as two,
            open_to(both.address, by=MEMBERS[CAROL]) as carols,
        ):
            for number in range(most):
                (one, two)[number % 2].stream_unary(method)(metadata=OURS, timeout=20.0)
            await wait_until(lambda: door._num_open.total() == most)
            refused = two.stream_unary(method)(metadata=OURS, timeout=20.0)
            assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
            for opened, path in ((carols, method), (two, other)):
                opened.stream_unary(path)(metadata=OURS, timeout=20.0)
            await wait_until(lambda: door._num_open.total() == most + 2)
        await wait_until(lambda: not door._num_open and not door._num_of)

    with_pair(test)


def test_a_connection_carries_few_calls_at_a_time() -> None:
    limits = Limits(streams_per_connection_max=3)

    async def test(both: Pair) -> None:
        door = both.server._door
        async with open_to(both.address, limits) as opened, open_to(both.address) as another:
            calls = [opened.stream_unary(HELLO)(timeout=20.0) for _ in range(5)]
            await wait_until(lambda: door._num_open.total() == 3)
            assert await code_of(another.unary_unary(DELIVER)(pings(1), metadata=OURS)) is (
                grpc.StatusCode.OK
            )
            assert door._num_open.total() == 3, "the others wait at the caller"
            calls[0].cancel()
            calls[1].cancel()
            await wait_until(lambda: door._num_open.total() == 3)

    with_pair(test, limits)


def test_a_member_has_few_connections() -> None:
    """Of more, the one that was silent longest is ended. Others lose none."""

    async def test(both: Pair) -> None:
        async with open_to(both.address, by=MEMBERS[CAROL]) as carols:
            await carols.unary_unary(DELIVER)(pings(0, by=MEMBERS[CAROL]), metadata=OURS)
            channels = [open_to(both.address) for _ in range(5)]
            for number, opened in enumerate(channels):
                await opened.unary_unary(DELIVER)(pings(number), metadata=OURS)
            dropped = both.server.counters.total
            await wait_until(lambda: dropped("peer.dropped") == 2)
            ready = grpc.ChannelConnectivity.READY
            await wait_until(
                lambda: (
                    [each.get_state() is ready for each in channels]
                    == [False, False, True, True, True]
                )
            )
            assert carols.get_state() is ready
            for opened in channels:
                await opened.close()

    with_pair(test, Limits(connections_per_node_max=3))


def test_a_member_has_few_connections_for_tensors() -> None:
    async def test(both: Pair) -> None:
        envelope = codec.encode(RUN, ALICE, 1, 1, m.LinkProbe())
        empty = header(envelope=envelope, size_bytes=0, crc32=0)
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(both.sending()) for _ in range(4)]
            for each in opened:
                await each.head(empty)
                assert (await each.answer())[0] == RESULT
            assert both.server.counters.totals() == {"peer.dropped": 1}
            with pytest.raises(ConnectionError):
                await opened[0].answer()
            for each in opened[1:]:
                await each.head(empty)
                assert (await each.answer())[0] == RESULT

    with_pair(test, Limits(connections_per_node_max=3))


def test_a_member_may_come_again_and_again() -> None:
    """Connections that are closed do not count."""

    async def test(both: Pair) -> None:
        for number in range(12):
            async with open_to(both.address) as opened:
                await opened.unary_unary(DELIVER)(pings(number), metadata=OURS)
        assert len(both.bob.delivered) == 12
        assert both.server.counters.totals() == {}

    with_pair(test, Limits(connections_per_node_max=3))


# --- time -------------------------------------------------------------------------------------


def test_a_connection_that_says_nothing_is_closed() -> None:
    async def test(both: Pair) -> None:
        port = int(both.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10.0):
            assert await reader.read() == b""
        writer.close()

    with_pair(test, Limits(handshake_timeout_s=0.3))


@asynccontextmanager
async def http2(
    address: str, membership: Membership, folder: Path
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a connection by hand: TLS as a member, then HTTP/2 up to the settings."""
    tls, names = membership.tls, ("key", "chain", "anchors")
    for name in names:
        (folder / name).write_bytes(getattr(tls, name))
    context = ssl.create_default_context(cafile=str(folder / "anchors"))
    # From Python 3.13 on it wants extensions that only authorities of the web need.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.load_cert_chain(folder / "chain", folder / "key")
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname="peer.decod"
    )
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(SETTINGS, b""))
        yield reader, writer
    finally:
        writer.close()


def http2_frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, 0, 0) + payload


async def frames_from(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Yields kind and payload of each frame, until the other side ends the connection."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        async with asyncio.timeout(10.0):
            while True:
                start = await reader.readexactly(9)
                yield start[3], await reader.readexactly(int.from_bytes(start[:3], "big"))


def test_a_flood_of_pings_costs_the_connection(tmp_path: Path) -> None:
    """Each ping of HTTP/2 must be answered, which no limit on calls prevents."""

    async def test(both: Pair) -> None:
        async with http2(both.address, MEMBERS[ALICE], tmp_path) as (reader, writer):
            frames = frames_from(reader)
            for number in range(2):
                ping = struct.pack(">Q", number)
                writer.write(http2_frame(PING, ping))
                answers = (payload async for kind, payload in frames if kind == PING)
                assert await anext(answers) == ping
            writer.write(b"".join(http2_frame(PING, bytes(8)) for _ in range(20)))
            # The end of the connection comes. It may overtake what was said before.
            reasons = [payload async for kind, payload in frames if kind == GOAWAY]
            assert all(b"too_many_pings" in reason for reason in reasons)
        both.client.send(BOB, 1, m.Ping(1))
        await wait_until(lambda: both.bob.delivered)

    with_pair(test)


# --- floods -----------------------------------------------------------------------------------


class Busy(Host):
    """Keeps only what Alice sends."""

    @override
    def deliver(self, received: codec.Decoded) -> None:
        if received.sender == ALICE:
            super().deliver(received)

    @override
    async def state(self, request: StateRequest) -> StateBlob | str:
        async def read(offset: int, num_bytes: int) -> bytes:
            return bytes(BIG.blob[offset : offset + num_bytes])

        return StateBlob(manifest=BIG.text, read=read, release=lambda: None)


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_a_flood_of_one_member_does_not_delay_the_heartbeats_of_others(
    tmp_path: Path, kind: str
) -> None:
    """Whatever it floods: messages that are dear to parse, small ones, tensors, or states."""

    async def test(both: Pair) -> None:
        delays_s = []
        async with flood(kind, both.address, RUN, volunteer("mallory"), tmp_path, "mallory"):
            for number in range(1, 31):
                start_s = time.monotonic()
                both.client.send(BOB, 1, m.Heartbeat(ITERATION))
                await wait_until(lambda n=number: len(both.bob.delivered) == n)
                delays_s.append(time.monotonic() - start_s)
        assert both.alice.failed == []
        # The flood takes processor time from the test too. So one heartbeat may be late by chance.
        assert statistics.median(delays_s) < ProtocolConfig().heartbeat_interval_s
        assert max(delays_s) < ProtocolConfig().heartbeat_timeout_s

    with_pair(test, bob=Busy())


# --- the log ----------------------------------------------------------------------------------


def test_a_peer_gets_few_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(both: Pair) -> None:
        async with open_to(both.address) as opened:
            for _ in range(3):
                garbage = field(1, b"\xff") * 40
                await opened.unary_unary(DELIVER)(garbage, metadata=OURS)
        assert both.server.counters.total("message.malformed") == 120

    with caplog.at_level(logging.WARNING):
        with_pair(test, Limits(faults_burst=1000))
    lines = [each for each in caplog.records if "message.malformed" in each.getMessage()]
    assert len(lines) == LINES_PER_MINUTE_MAX
