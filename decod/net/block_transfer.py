"""Blocks of the prepared data, sent by one data node to another whose own copy is damaged.

The receiver compares each block with the hash in its own index, so a wrong block does no harm.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio

from decod.data.block import Block
from decod.data.index import BLOCK_MAX_BYTES, NUM_SHARDS_MAX, SHARD_MAX_BYTES
from decod.errors import NetworkError
from decod.ids import NodeId, RunId
from decod.membership.certificates import DATA_NAME, TlsIdentity
from decod.net import channel
from decod.net.channel import failed_call
from decod.net.door import Context, require_caller
from decod.net.net_limits import LIMITS, Limits
from decod.net.rate_caps import Lane, Pace
from decod.wire import codec, validate
from decod.wire.v1 import state_pb2

_BLOCK = f"/{channel.STATE_SERVICE}/ReadBlock"

_shard_index = validate.integer(0, NUM_SHARDS_MAX - 1)
_offset = validate.integer(0, SHARD_MAX_BYTES)
_size = validate.integer(1, BLOCK_MAX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """A request for a block of the run's data."""

    run_id: RunId
    sender: NodeId
    block: Block


BlockReader = Callable[[BlockRequest], Awaitable[bytes | str]]


class BlockGiver:
    """The serving side: reads blocks for peers.

    Args:
        run_id: Requests of other runs are refused.
        blame: Counts a peer's fault. Takes the counter's name, the call, and a reason for the log.
        limits: `blocks_read_max` bounds the blocks that are read at a time.
        pace: Caps the rate at which blocks leave.
        read: Returns a block, or the reason why there is none. None at a node without data.
    """

    def __init__(
        self,
        run_id: RunId,
        blame: Callable[[str, Context, str], None],
        limits: Limits,
        pace: Pace,
        read: BlockReader | None,
    ) -> None:
        self._run_id = run_id
        self._blame = blame
        self._limits = limits
        self._pace = pace
        self._num_reading = 0
        self._read = read

    async def give(self, data: bytes, context: Context) -> bytes:
        """Answer a ReadBlockRequest."""
        request = codec.parse(state_pb2.ReadBlockRequest, data)
        checked = BlockRequest(
            run_id=validate.run_id("run_id", request.run_id),
            sender=require_caller("sender_id", request.sender_id, context),
            block=Block(
                _shard_index("shard_index", request.shard_index),
                _offset("offset_bytes", request.offset_bytes),
                _size("size_bytes", request.size_bytes),
            ),
        )
        answer = await self._answer(checked, context)
        if isinstance(answer, bytes):
            return state_pb2.ReadBlockResponse(data=answer).SerializeToString()
        refusal = validate.clip_reason(answer) or "no reason given"
        return state_pb2.ReadBlockResponse(refusal=refusal).SerializeToString()

    async def _answer(self, request: BlockRequest, context: Context) -> bytes | str:
        if request.run_id != self._run_id:
            self._blame("message.foreign", context, f"run {request.run_id}")
            return "this node belongs to another run"
        if self._read is None:
            return "this node has no data"
        if self._num_reading >= self._limits.blocks_read_max:
            return "this node reads other blocks at present"
        self._num_reading += 1
        try:
            answer = await self._read(request)
            await self._pace.wait(len(answer), Lane.STATES)
            return answer
        finally:
            self._num_reading -= 1


async def fetch_block(
    address: str, request: BlockRequest, shown: TlsIdentity, *, limits: Limits = LIMITS
) -> bytes:
    """Return a block as the data node at `address` has it. The caller must check it.

    Raises:
        NetworkError: No answer came in time (E-NET-003), or the node refuses (E-NET-026).
        RejectedError: The node is in another run (E-REJ-003).
        MalformedMessageError: The answer is no ReadBlockResponse.
    """
    block = request.block
    wire_request = state_pb2.ReadBlockRequest(
        run_id=request.run_id,
        sender_id=request.sender,
        shard_index=block.shard_index,
        offset_bytes=block.offset,
        size_bytes=block.num_bytes,
    )
    async with channel.open_channel(address, limits, shown, DATA_NAME) as opened:
        call = opened.unary_unary(_BLOCK, channel.as_is, channel.as_is)
        try:
            timeout_s = limits.rate_grace_s + block.num_bytes / limits.rate_min_bytes_per_s
            data = await call(
                wire_request.SerializeToString(),
                metadata=channel.run_metadata(request.run_id),
                timeout=timeout_s,
            )
        except grpc.aio.AioRpcError as error:
            raise failed_call(address, error) from error
    response = codec.parse(state_pb2.ReadBlockResponse, data)
    if response.refusal:
        raise NetworkError(
            f"{address} does not give this block",
            why=validate.reason("refusal", response.refusal),
            fix="nothing: other data nodes are asked",
            code="E-NET-026",
        )
    return response.data
