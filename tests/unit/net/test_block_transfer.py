"""Blocks of data between data nodes: given whole, and refused with a reason."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from decod.data.block import Block
from decod.data.index import BLOCK_MAX_BYTES
from decod.errors import NetworkError, RejectedError
from decod.ids import RunId
from decod.net import channel
from decod.net.block_transfer import BlockGiver, BlockRequest, fetch_block
from decod.net.net_limits import LIMITS, Limits
from decod.net.server import PeerServer
from decod.wire.v1 import state_pb2
from tests.support.peers import ALICE, BOB, MEMBERS, Host, open_to
from tests.waiting import wait_until

RUN = RunId("r" * 26)
BLOCK = Block(3, 2 * BLOCK_MAX_BYTES, BLOCK_MAX_BYTES)
REQUEST = BlockRequest(run_id=RUN, sender=ALICE, block=BLOCK)

Test = Callable[[BlockGiver, str], Awaitable[None]]


def with_giver(test: Test, limits: Limits = LIMITS) -> None:
    async def run() -> None:
        server = PeerServer(MEMBERS[BOB], RUN, Host(), limits=limits)
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        try:
            await test(server._blocks, address)
        finally:
            await server.stop(0)

    asyncio.run(run())


def test_a_block_arrives_bit_for_bit() -> None:
    async def test(giver: BlockGiver, address: str) -> None:
        content, asked = os.urandom(BLOCK_MAX_BYTES), list[BlockRequest]()

        async def read(request: BlockRequest) -> bytes:
            asked.append(request)
            return content

        giver._read = read
        assert await fetch_block(address, REQUEST, MEMBERS[ALICE].tls) == content
        assert asked == [REQUEST]

    with_giver(test)


def test_a_refusal_is_told_and_cleaned() -> None:
    async def test(giver: BlockGiver, address: str) -> None:
        with pytest.raises(NetworkError, match="this node has no data"):
            await fetch_block(address, REQUEST, MEMBERS[ALICE].tls)

        async def refuse(_: BlockRequest) -> str:
            return "own copy\x1b[2J is bad " + "x" * 500

        giver._read = refuse
        with pytest.raises(NetworkError, match=r"E-NET-026 .*own copy \[2J is bad x+\.\.\.\. Try"):
            await fetch_block(address, REQUEST, MEMBERS[ALICE].tls)

    with_giver(test)


def test_another_run_is_given_nothing() -> None:
    async def test(giver: BlockGiver, address: str) -> None:
        async def read(_: BlockRequest) -> bytes:
            raise AssertionError("asked for another run's data")

        giver._read = read
        with pytest.raises(RejectedError, match="another run"):
            await fetch_block(address, replace(REQUEST, run_id=RunId("x" * 26)), MEMBERS[ALICE].tls)

    with_giver(test)


def test_few_blocks_are_read_at_a_time() -> None:
    """Each takes memory, and the disk is the data node's own first."""

    async def test(giver: BlockGiver, address: str) -> None:
        go, num_reading = asyncio.Event(), 0

        async def read(_: BlockRequest) -> bytes:
            nonlocal num_reading
            num_reading += 1
            await go.wait()
            return b"block"

        giver._read = read
        tls = MEMBERS[ALICE].tls
        waiting = [asyncio.create_task(fetch_block(address, REQUEST, tls)) for _ in range(2)]
        await wait_until(lambda: num_reading == 2)
        with pytest.raises(NetworkError, match="reads other blocks"):
            await fetch_block(address, REQUEST, MEMBERS[ALICE].tls)
        go.set()
        assert await asyncio.gather(*waiting) == [b"block", b"block"]
        assert await fetch_block(address, REQUEST, MEMBERS[ALICE].tls) == b"block"

    with_giver(test, Limits(blocks_read_max=2))


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "x"},
        {"sender_id": ""},
        {"shard_index": -1},
        {"shard_index": 100_000},
        {"offset_bytes": -1},
        {"offset_bytes": 2**42 + 1},
        {"size_bytes": 0},
        {"size_bytes": BLOCK_MAX_BYTES + 1},
    ],
)
def test_a_request_that_makes_no_sense_is_malformed(change: dict[str, Any]) -> None:
    async def test(giver: BlockGiver, address: str) -> None:
        fields: dict[str, Any] = {
            "run_id": RUN,
            "sender_id": ALICE,
            "shard_index": 0,
            "size_bytes": 1,
        } | change
        request = state_pb2.ReadBlockRequest(**fields)
        async with open_to(address) as opened:
            path = f"/{channel.STATE_SERVICE}/ReadBlock"
            call = opened.unary_unary(path, channel.as_is, channel.as_is)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(
                    request.SerializeToString(), metadata=channel.run_metadata(RUN), timeout=5
                )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with_giver(test)


def test_a_node_that_does_not_answer_is_told_with_its_address() -> None:
    async def test(giver: BlockGiver, address: str) -> None:
        async def read(_: BlockRequest) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError("never set")

        giver._read = read
        impatient = Limits(rate_grace_s=0.2, rate_min_bytes_per_s=1e9)
        with pytest.raises(NetworkError, match=f"E-NET-003 no answer from {address}"):
            await fetch_block(address, REQUEST, MEMBERS[ALICE].tls, limits=impatient)

    with_giver(test)
