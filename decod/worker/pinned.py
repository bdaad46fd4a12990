"""Pins the part of the arena that is in use, so that a CUDA device copies from and to it directly.

To and from memory that may be swapped out, the driver copies by way of its own buffers, at a
fraction of the speed, and the calling thread waits. Pinned pages take memory at once, and the
arena's size is only a bound. So no more is pinned than the arena's beginning, where the node
allocates first: twice as far as any tensor has reached.
"""

import logging
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger("decod.worker")

_FIRST_BYTES = 64 << 20
"""Pinned at first, so that small runs pin once."""


class PinnedPrefix:
    """The pinned beginning of a mapping.

    Args:
        max_bytes: Most bytes to pin.
        register: Pins memory from an address on, so many bytes. Returns 0, or the driver's error.
        unregister: Undoes that for the memory at an address.
    """

    def __init__(
        self,
        max_bytes: int,
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
    ) -> None:
        self._max_bytes, self._register, self._unregister = max_bytes, register, unregister
        self._address = self._num_bytes = 0
        self._works = True

    def cover(self, address: int, end: int, size_bytes: int) -> None:
        """Pin a mapping as far as a tensor in it reaches, unless that is too far.

        No copy may be under way.

        Args:
            address: Of the mapping.
            end: Where the tensor ends in it, in bytes.
            size_bytes: Of the mapping.
        """
        covered = address == self._address and end <= self._num_bytes
        if covered or end > self._max_bytes or not self._works:
            return
        if self._num_bytes:
            self._unregister(self._address)
        num_bytes = min(max(2 * end, _FIRST_BYTES), size_bytes, self._max_bytes)
        if error := self._register(address, num_bytes):
            logger.warning("compute.not_pinned CUDA error %d: copies take longer", error)
            self._address, self._num_bytes, self._works = 0, 0, False
            return
        self._address, self._num_bytes = address, num_bytes


def pinned_by_cuda(max_bytes: int) -> PinnedPrefix:
    """Return a prefix that CUDA pins for all its devices."""
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, num_bytes: int) -> int:
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error:
            # CUDA keeps an error until it is asked, and torch asks after its next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return error

    return PinnedPrefix(
        max_bytes, register, lambda address: int(runtime.cudaHostUnregister(address))
    )
