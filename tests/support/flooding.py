"""A member that floods a node with calls of one kind, over several connections at once.

    python -m tests.support.flooding KIND HOST:PORT RUN_ID STATE_DIR NAME

KIND is a key of `KINDS`. The member's papers are in STATE_DIR, and its key is `host_key(NAME)`. It
prints `flooding` once calls have been answered or refused, and goes on until standard input ends.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio

from decod.daemon.member_admission import known_membership
from decod.ids import NodeId, RunId
from decod.membership.certificates import MEMBER_NAME
from decod.membership.papers import Membership, keep_papers, membership_folder
from decod.net import channel
from decod.net.net_limits import LIMITS
from decod.protocol.core import messages as m
from decod.texts import from_base32
from decod.wire import codec
from decod.wire.v1 import control_pb2, state_pb2, tensor_pb2
from tests.support.cluster import child_environment
from tests.support.members import host_key
from tests.support.sending import sending_to

_NUM_CHANNELS = 12
_CALLS_PER_CHANNEL = 8
_NUM_ANSWERED_FIRST = 50
_TENSORS_PER_CONNECTION = 8


class _Flooded(NamedTuple):
    """A node, as a flood reaches it."""

    address: str
    opened: grpc.aio.Channel


Call = Callable[[_Flooded, Membership, RunId], Coroutine[Any, Any, None]]


async def _control(to: _Flooded, by: Membership, run_id: RunId) -> None:
    """Delivers as many messages as fit into a call, each as large as is parsed at once."""
    nodes = tuple(NodeId(a + b + "a" * 50) for a in "abcdef" for b in "abcdefghijklmnopqrstuvwxyz")
    envelope = codec.encode(run_id, by.node_id, 1, 1, m.Differs(1, nodes[:140]))
    num = LIMITS.batch_size_max_bytes // (envelope.ByteSize() + 6)
    request = control_pb2.DeliverRequest(envelopes=[envelope] * min(num, LIMITS.batch_length_max))
    deliver = to.opened.unary_unary(f"/{channel.CONTROL_SERVICE}/Deliver")
    metadata = channel.run_metadata(run_id)
    await deliver(request.SerializeToString(), metadata=metadata, timeout=20.0)


async def _small(to: _Flooded, by: Membership, run_id: RunId) -> None:
    """Delivers one small message."""
    envelope = codec.encode(run_id, by.node_id, 1, 1, m.Ping(1))
    request = control_pb2.DeliverRequest(envelopes=[envelope]).SerializeToString()
    deliver = to.opened.unary_unary(f"/{channel.CONTROL_SERVICE}/Deliver")
    await deliver(request, metadata=channel.run_metadata(run_id), timeout=20.0)


async def _tensors(to: _Flooded, by: Membership, run_id: RunId) -> None:
    """Sends tensors of 1 MiB that anybody may send, and that fail their checksum."""
    data = bytes(LIMITS.frame_size_bytes)
    envelope = codec.encode(run_id, by.node_id, 1, 1, m.LinkProbe())
    header = tensor_pb2.TensorHeader(envelope=envelope, size_bytes=len(data), crc32=1)
    async with sending_to(to.address, by.tls) as sending:
        for _ in range(_TENSORS_PER_CONNECTION):
            await sending.head(header.SerializeToString())
            await sending.piece(data)
            await sending.answer()


async def _states(to: _Flooded, by: Membership, run_id: RunId) -> None:
    """Asks for a state, again and again."""
    request = state_pb2.DescribeRequest(
        run_id=run_id, sender_id=by.node_id, stage_index=1, iteration=1, with_optimizer=True
    )
    describe = to.opened.unary_unary(f"/{channel.STATE_SERVICE}/Describe")
    metadata = channel.run_metadata(run_id)
    answer = await describe(request.SerializeToString(), metadata=metadata, timeout=20.0)
    described = state_pb2.DescribeResponse.FromString(answer)
    if described.refusal:
        return
    from decod.train.checkpoint.description import parse_description

    description = parse_description(described.description)
    fetch_request = state_pb2.FetchRequest(
        run_id=run_id,
        sender_id=by.node_id,
        state_id=description.id,
        num_chunks=len(description.chunks),
    )
    fetch = to.opened.unary_stream(f"/{channel.STATE_SERVICE}/Fetch")
    async for _ in fetch(fetch_request.SerializeToString(), metadata=metadata, timeout=20.0):
        pass


KINDS: dict[str, Call] = {
    "control": _control,
    "small": _small,
    "tensors": _tensors,
    "states": _states,
}


@asynccontextmanager
async def flood(
    kind: str, address: str, run_id: RunId, member: Membership, folder: Path, name: str
) -> AsyncIterator[None]:
    """Floods a node from a process of its own while the context lasts.

    Args:
        kind: A key of `KINDS`.
        address: `host:port` of the node.
        run_id: The run.
        member: Who floods. Its key is `host_key(name)`.
        folder: Where its papers can be put.
        name: See there.
    """
    keep_papers(membership_folder(folder, member.root), member.papers)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.flooding"),
        *(kind, address, run_id, str(folder), name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60.0):
            assert await process.stdout.readline() == b"flooding\n"
        yield
        assert process.returncode is None, "it has flooded all the time"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _main(kind: str, address: str, run_id: RunId, state_dir: Path, name: str) -> None:
    (folder,) = (state_dir / "memberships").iterdir()
    member = known_membership(state_dir, host_key(name), from_base32(folder.name))
    assert member is not None
    call, num_ended = KINDS[kind], 0

    async def again(opened: grpc.aio.Channel) -> None:
        nonlocal num_ended
        while True:
            try:
                await call(_Flooded(address, opened), member, run_id)
            except (grpc.aio.AioRpcError, OSError):
                await asyncio.sleep(0)
            num_ended += 1
            if num_ended == _NUM_ANSWERED_FIRST:
                print("flooding", flush=True)

    channels = [
        channel.open_channel(address, LIMITS, member.tls, MEMBER_NAME) for _ in range(_NUM_CHANNELS)
    ]
    async with asyncio.TaskGroup() as tasks:
        for opened in channels * _CALLS_PER_CHANNEL:
            tasks.create_task(again(opened))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], RunId(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]))
