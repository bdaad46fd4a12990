"""The receiving side of connections for tensors: who may send what, and where it goes."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Protocol

from decod.errors import MalformedMessageError
from decod.ids import NodeId
from decod.membership.certificates import TlsIdentity
from decod.net import channel
from decod.net.calls import Calls
from decod.net.door import Door, TensorCaller, caller_in, host_of, proven_id
from decod.net.rate_caps import Lane, Pace, lane_of
from decod.net.reading import MessageReader
from decod.net.stream import BrokenTensors, IncomingRegion, IncomingTensor
from decod.net.tensor_stream import TensorReceiver
from decod.net.tls_pipe import TlsPipe, server_context
from decod.wire.codec import Decoded, Header, read_header
from decod.wire.v1 import tensor_pb2

_log = logging.getLogger(__name__)

_SERVICE = "tensors"
"""The name by which the door counts them."""


class TensorHandler(Protocol):
    """The driver as it takes tensors. All must return at once."""

    intake: Pace
    """Caps the rate at which tensors and messages are taken."""

    @property
    def stopped(self) -> bool:
        """Return whether this node has ended. Tensors that still come are refused without a
        warning."""

    def allocate(self, received: Decoded, size_bytes: int) -> IncomingRegion | None:
        """Return memory of exactly `size_bytes` for a tensor, or None to refuse it.

        The server owns it, until `tensor_arrived` or until it releases it.
        """

    def tensor_arrived(self, received: Decoded, region: IncomingRegion) -> None:
        """Take a whole tensor over, with its memory."""

    def tensor_late(self, sender: NodeId) -> None:
        """Note that a tensor of `sender` came too slowly and was given up."""


class TensorIntake:
    """Takes tensors over connections.

    Args:
        handler: Gives memory for tensors, and takes them.
        door: Counts faults, and tensors that come at a time.
        calls: Tells who may not send any.
        reader: Parses headers.
        shown: Returns what this node shows to senders, and whom it believes by then.
    """

    def __init__(
        self,
        handler: TensorHandler,
        door: Door,
        calls: Calls,
        reader: MessageReader,
        shown: Callable[[], TlsIdentity],
    ) -> None:
        self._handler = handler
        self._door = door
        self._calls = calls
        self._reader = reader
        self._shown = shown
        self._limits = reader.limits
        self._broken = BrokenTensors(reader.limits)
        self._tls: tuple[TlsIdentity, ssl.SSLContext] | None = None
        """What this node shows now, and the context that was made for it."""

    def close(self) -> None:
        """Give the memory of tensors back whose connection broke."""
        self._broken.close()

    async def serve(self, connection: socket.socket, peer: str) -> None:
        """Take tensors over a connection until it ends."""
        pipe = TlsPipe(connection, self._tls_context())
        caller = TensorCaller(peer)
        try:
            async with asyncio.timeout(self._limits.handshake_timeout_s):
                caller.certificate = await pipe.shake_hands()
            receiver = TensorReceiver(pipe, self._limits)
            while True:
                size = await receiver.head()
                if not await self._take_tensor(receiver, size, caller):
                    return
        except MalformedMessageError as error:
            self._door.blame("message.malformed", caller, error.what)
        except TimeoutError:
            if caller.certificate:
                self._door.note("rpc.failed", caller, "TimeoutError")
        finally:
            pipe.close()

    def _tls_context(self) -> ssl.SSLContext:
        shown = self._shown()
        if self._tls is None or self._tls[0] != shown:
            self._tls = shown, server_context(shown)
        return self._tls[1]

    async def _take_tensor(
        self, receiver: TensorReceiver, header_size: int, caller: TensorCaller
    ) -> bool:
        """Take a tensor; return whether the caller may send another one."""
        refusal = self._calls.refusal(caller)
        source = host_of(caller), proven_id(caller), _SERVICE
        if not refusal and not self._door.enter(*source):
            await receiver.refuse(channel.TOO_MANY)
            return False
        if refusal:
            await receiver.refuse(refusal)
            return False
        self._door.know(caller)
        try:
            head = await receiver.header(header_size)
            state = await self._receive_tensor(receiver, head, caller)
        except TimeoutError:
            if not receiver.probes and (who := caller_in(caller)) is not None:
                self._handler.tensor_late(who.node_id)
            raise
        finally:
            self._door.leave(*source)
        if state is not None:
            await receiver.result(state)
        return True

    async def _receive_tensor(
        self, receiver: TensorReceiver, head: bytes, caller: TensorCaller
    ) -> tensor_pb2.TensorResult | None:
        """Return how a tensor ended. None: its sender has been told already."""
        result = await self._reader.result(
            partial(read_header, receiver=self._reader.node_id), head
        )
        async with self._reader.turns:
            header = self._reader.checked(result, caller, len(head))
        if header is None or not self._reader.is_heard(header.decoded, caller, with_tensor=True):
            # Nobody knows how much follows.
            await receiver.result(tensor_pb2.TENSOR_RESULT_MALFORMED)
            raise ConnectionAbortedError("a tensor without a header that can be read")
        decoded = header.decoded
        tensor = self._begun(head, header)
        if tensor is None:
            reason = f"{type(decoded.message).__name__} of {header.size_bytes} bytes"
            if self._handler.stopped:
                host = host_of(caller)
                _log.debug("tensor.refused %s: %s, as this node has ended", host, reason)
            else:
                self._door.note("tensor.refused", caller, reason)
            await receiver.result(tensor_pb2.TENSOR_RESULT_REFUSED)
            intake, lane = self._handler.intake, lane_of(decoded.message)
            await receiver.skip(header.size_bytes, lambda num: intake.wait(num, lane))
            return None
        try:
            whole = await self._fill(receiver, tensor, lane_of(decoded.message))
        except (MalformedMessageError, TimeoutError):
            tensor.region.release()
            raise
        except BaseException:
            self._broken.keep(head, tensor)
            raise
        if not whole:
            self._broken.keep(head, tensor)
            return tensor_pb2.TENSOR_RESULT_MALFORMED
        if not tensor.intact:
            tensor.region.release()
            self._door.note("tensor.corrupted", caller, "its checksum does not hold")
            return tensor_pb2.TENSOR_RESULT_CORRUPTED
        self._handler.tensor_arrived(decoded, tensor.region)
        return tensor_pb2.TENSOR_RESULT_RECEIVED

    def _begun(self, head: bytes, header: Header) -> IncomingTensor | None:
        """Return the beginning of a tensor: what has arrived of it before, or memory for it."""
        if (broken := self._broken.take(head)) is not None:
            return broken
        if not 0 <= header.size_bytes <= self._limits.tensor_size_max_bytes:
            return None
        region = self._handler.allocate(header.decoded, header.size_bytes)
        if region is None:
            return None
        return IncomingTensor(
            region,
            size_bytes=header.size_bytes,
            crc32=header.crc32,
            watch=self._reader.watch,
        )

    async def _fill(self, receiver: TensorReceiver, tensor: IncomingTensor, lane: Lane) -> bool:
        """Receive the rest of a tensor, no faster than the node's download cap allows."""
        intake = self._handler.intake

        async def arrived(num_bytes: int) -> None:
            tensor.arrived(num_bytes)
            await intake.wait(num_bytes, lane)

        if not receiver.resumes:
            tensor.begin_again()
        async with asyncio.timeout(self._limits.stream_timeout_s(tensor.size_bytes)):
            return await receiver.fill(tensor.region.view, tensor.position, arrived)
