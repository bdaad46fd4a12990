"""The upload cap of a node: what it sends to all peers together stays below a rate."""

import asyncio
import math
from contextlib import AbstractAsyncContextManager, nullcontext

from decod.net.limits import KIB, LIMITS, Limits

_OVERHEAD = 1.04
"""Bytes on the wire for each byte of a tensor: headers of IP and TCP in packets of 1,500 bytes."""

_PIECE_S = 0.25
"""Bytes leave in pieces, so that a cap holds over any few pieces and not only in the mean."""

_PIECE_MIN_BYTES = 16 * KIB


class Pace:
    """Lets pieces leave in the order in which they ask, each as long after the last as it takes.

    Control messages leave at once, since a late one stops a pipeline. Later pieces make up for
    them. Datagrams of the DHT are not counted.

    Args:
        rate_max_bytes_per_s: The cap. None: there is none.
    """

    def __init__(self, rate_max_bytes_per_s: float | None = None) -> None:
        self._rate_max = rate_max_bytes_per_s
        self._free_s = -math.inf
        self._tensors: asyncio.Semaphore | None = None
        self._piece_bytes: int | None = None
        if rate_max_bytes_per_s is not None:
            self._piece_bytes = max(_PIECE_MIN_BYTES, int(rate_max_bytes_per_s * _PIECE_S))
            # More tensors at a time would each be slower than a receiver puts up with.
            fast_enough = int(rate_max_bytes_per_s / (2 * LIMITS.rate_min_bytes_per_s))
            self._tensors = asyncio.Semaphore(max(1, fast_enough))

    def frame_bytes(self, limits: Limits) -> int:
        """Return how many bytes to send at once."""
        return min(self._piece_bytes or limits.frame_size_bytes, limits.frame_size_bytes)

    def tensor(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which a tensor may be sent. Entering waits for its turn."""
        return self._tensors or nullcontext()

    def charge(self, size_bytes: int) -> float:
        """Count bytes that leave; return how long those before them still take, in seconds."""
        if self._rate_max is None:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._free_s)
        self._free_s = start_s + size_bytes * _OVERHEAD / self._rate_max
        return start_s - now_s

    async def wait(self, size_bytes: int) -> None:
        """Wait until so many bytes may leave, which must be sent at once then."""
        delay_s = self.charge(size_bytes)
        if delay_s > 0:
            await asyncio.sleep(delay_s)


UNLIMITED = Pace()
