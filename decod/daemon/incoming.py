"""The tensors that peers push to this node, and the memory that it takes for them."""

from dataclasses import dataclass

from decod.daemon.address_book import AddressBook
from decod.driver.driver import NodeDriver
from decod.ids import NodeId
from decod.protocol.core.messages import (
    AuditedTensor,
    BackwardGradient,
    ForwardActivation,
    LinkProbe,
    StageActivation,
    StageGradient,
    Unusable,
)
from decod.protocol.links.measuring import PROBE_SIZE_MAX_BYTES
from decod.wire.codec import Decoded

_OF_MICROBATCHES = (
    ForwardActivation,
    BackwardGradient,
    StageActivation,
    StageGradient,
    AuditedTensor,
    Unusable,
)
"""Messages with an activation, or the gradient of one."""

_PROBES_MAX = 16
"""Probes of peers that are received at a time, of 1 MiB each at most. Others are refused."""

_FROM_STRANGERS_MAX = 4
"""Tensors that nodes unknown to this member may push at a time. Such nodes may have entered a
moment ago, or be strangers, which must not use up the memory of the members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """The sizes of tensors that a run allows."""

    activation_bytes: int
    """Exact size of an activation or its gradient."""
    model_bytes: int
    """Size of the gradients of all stages together, and so an upper bound for any part of them."""
    state_bytes: int = 0
    """Size of the state of the largest stage."""
    rounded: bool = False
    """Parameters travel rounded, where they go without the optimizer's state."""
    proven: bool = False
    """What travels from stage to stage has proofs, since work is audited."""


class IncomingTensors:
    """The tensors that are being read. A tensor's size is checked before it gets memory.

    Args:
        own: This node.
        sizes: Sizes of the run's tensors.
        book: Knows the members.
    """

    def __init__(self, own: NodeId, sizes: TensorSizes, book: AddressBook) -> None:
        self._own, self._sizes, self._book = own, sizes, book
        self._probes: dict[int, memoryview] = {}
        """Buffers into which probes of peers are being read."""
        self._from_strangers = set[int]()
        """Buffers into which tensors of unknown nodes are being read."""

    def allocate(self, driver: NodeDriver, received: Decoded, size_bytes: int) -> memoryview | None:
        """Return memory for a tensor, or None if the tensor is refused."""
        message, way = received.message, received.way
        if isinstance(message, LinkProbe):
            return self._allocate_probe(size_bytes)
        if isinstance(message, _OF_MICROBATCHES):
            expected = size_bytes == self._sizes.activation_bytes
        elif way is not None and way.goal != self._own:
            expected = size_bytes <= self._sizes.model_bytes
        else:
            expected = size_bytes <= driver.part_bytes_max
        members = self._book.members
        stranger = self._own in members and received.sender not in members
        if not expected or (stranger and len(self._from_strangers) >= _FROM_STRANGERS_MAX):
            return None
        buffer = driver.allocate(size_bytes)
        if stranger and buffer is not None:
            self._from_strangers.add(id(buffer))
        return buffer

    def forget(self, buffer: memoryview) -> bool:
        """Forget a buffer that is no longer being read into; return whether it was a probe's."""
        self._from_strangers.discard(id(buffer))
        return self._probes.pop(id(buffer), None) is not None

    def _allocate_probe(self, size_bytes: int) -> memoryview | None:
        """Return ordinary memory, since the arena is for tensors."""
        if size_bytes > PROBE_SIZE_MAX_BYTES or len(self._probes) >= _PROBES_MAX:
            return None
        buffer = memoryview(bytearray(size_bytes))
        self._probes[id(buffer)] = buffer
        return buffer
