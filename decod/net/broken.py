"""Tensors whose stream broke off. They are kept a while, since their senders go on with them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from decod.net.net_limits import Limits
from decod.net.stream import Filler


@dataclass(frozen=True, slots=True)
class BrokenTensor:
    """What has arrived of a tensor."""

    buffer: memoryview
    filler: Filler


class BrokenTensors:
    """The tensors that wait for their senders.

    Args:
        limits: How many are kept, and how long.
        give_back: Is called with the buffer of each tensor that nobody has gone on with.
    """

    def __init__(self, limits: Limits, give_back: Callable[[memoryview], None]) -> None:
        self._limits, self._give_back = limits, give_back
        self._kept: dict[bytes, tuple[BrokenTensor, asyncio.TimerHandle]] = {}

    def keep(self, header: bytes, tensor: BrokenTensor) -> None:
        """Keep a tensor. If there are too many, the one that was kept first makes room.

        Args:
            header: Bytes of the header, which a sender repeats. They name the sender and the
                message, and hold the checksum.
            tensor: What has arrived.
        """
        self._drop(header)
        while len(self._kept) >= self._limits.broken_max:
            self._drop(next(iter(self._kept)))
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.broken_kept_s, self._drop, header)
        self._kept[header] = (tensor, timer)

    def take(self, header: bytes) -> BrokenTensor | None:
        """Return what has arrived of a tensor that a sender goes on with, and forget it."""
        tensor, timer = self._kept.pop(header, (None, None))
        if timer is not None:
            timer.cancel()
        return tensor

    def _drop(self, header: bytes) -> None:
        tensor = self.take(header)
        if tensor is not None:
            self._give_back(tensor.buffer)

    def close(self) -> None:
        """Give all buffers back."""
        for header in list(self._kept):
            self._drop(header)
