"""The caps of a node: what it sends to all peers together, and what it takes, stay below rates.

What is taken is capped by its receiver alone. It has arrived when it is counted, but the call that
brought it is answered, or its next frame read, only when its turn comes. Meanwhile the sender
waits, and TCP stops the link.
"""

import asyncio
import math
from collections import deque
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

from decod.net.net_limits import KIB, LIMITS, Limits
from decod.protocol.core.messages import PASSES, LinkProbe, Message

_OVERHEAD = 1.04
"""Bytes on the wire for each byte of a tensor: headers of IP and TCP in packets of 1,500 bytes."""

_PIECE_S = 0.25
"""Bytes leave in pieces, so that a cap holds over any few pieces and not only in the mean."""

_PIECE_MIN_BYTES = 16 * KIB


class Lane(Enum):
    """The transfers that wait together. The lanes take turns, so none keeps another waiting for
    long."""

    ACTIVATIONS = "activations"
    """And their gradients, and probes."""
    AVERAGES = "averages"
    STATES = "states"
    """And blocks of data."""


_URGENT = (*PASSES, LinkProbe)
"""Messages whose tensors a pipeline waits for."""


def lane_of(message: Message) -> Lane:
    """Return where a message's tensor waits if the rate is capped."""
    return Lane.ACTIVATIONS if isinstance(message, _URGENT) else Lane.AVERAGES


class Pace:
    """Lets pieces leave one after another, each as long after the last as it takes.

    Control messages leave at once, since a late one stops a pipeline. Later pieces make up for
    them. Datagrams of the DHT are not counted.

    Args:
        rate_max_bytes_per_s: The cap. None: there is none.
    """

    def __init__(self, rate_max_bytes_per_s: float | None = None) -> None:
        self._rate_max: float | None = None
        self._free_s = -math.inf
        """The instant when all that has left before is on the wire, on the loop's clock."""
        self._waiting: dict[Lane, deque[tuple[int, asyncio.Future[None]]]] = {
            lane: deque() for lane in Lane
        }
        """Pieces in their order, by lane. The lane whose turn it is comes first."""
        self._timer: asyncio.TimerHandle | None = None
        self._averages: asyncio.Semaphore | None = None
        self._piece_bytes: int | None = None
        self.cap(rate_max_bytes_per_s)

    def cap(self, rate_max_bytes_per_s: float | None) -> None:
        """Change the cap from now on, also for pieces that wait. None: there is none."""
        old = self._rate_max
        self._rate_max = rate_max_bytes_per_s
        self._piece_bytes = self._averages = None
        if rate_max_bytes_per_s is not None:
            self._piece_bytes = max(_PIECE_MIN_BYTES, int(rate_max_bytes_per_s * _PIECE_S))
            # More parts at a time would each be slower than a receiver puts up with.
            fast_enough = int(rate_max_bytes_per_s / (4 * LIMITS.rate_min_bytes_per_s))
            self._averages = asyncio.Semaphore(max(1, fast_enough))
        if old is not None and math.isfinite(self._free_s):
            now_s = asyncio.get_running_loop().time()
            left_bytes = max(0.0, self._free_s - now_s) * old
            left_s = 0.0 if rate_max_bytes_per_s is None else left_bytes / rate_max_bytes_per_s
            self._free_s = now_s + left_s
        if self._timer is not None:
            self._timer.cancel()
            self._serve()

    def frame_bytes(self, limits: Limits) -> int:
        """Return how many bytes to send at once."""
        return min(self._piece_bytes or limits.frame_size_bytes, limits.frame_size_bytes)

    def tensor(self, lane: Lane) -> AbstractAsyncContextManager[None]:
        """Return a context in which a tensor may be sent. Entering waits for its turn."""
        return self._averages if self._averages and lane is Lane.AVERAGES else nullcontext()

    def charge(self, size_bytes: int) -> None:
        """Count bytes that leave."""
        if self._rate_max is not None:
            start_s = max(asyncio.get_running_loop().time(), self._free_s)
            self._free_s = start_s + size_bytes * _OVERHEAD / self._rate_max

    async def wait(self, size_bytes: int, lane: Lane) -> None:
        """Wait until so many bytes may leave, which must be sent at once then."""
        if self._rate_max is None:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[lane].append((size_bytes, turn))
        if self._timer is None:
            self._serve()
        await turn

    def _serve(self) -> None:
        """Let pieces leave until the link is busy, and go on once it is free."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while lane := next((each for each, queue in self._waiting.items() if queue), None):
            if self._free_s > loop.time():
                self._timer = loop.call_at(self._free_s, self._serve)
                return
            queue = self._waiting.pop(lane)
            self._waiting[lane] = queue
            size_bytes, turn = queue.popleft()
            if not turn.done():  # Its sender may have given up.
                self.charge(size_bytes)
                turn.set_result(None)


UNLIMITED = Pace()


@dataclass(frozen=True, slots=True)
class Paces:
    """The caps of a node's link."""

    upload: Pace = UNLIMITED
    download: Pace = UNLIMITED


# --- shares of a link ----------------------------------------------------------------------------
# The share of a link that each of several overlapping transfers gets.
#
# With it, the rate of each transfer can be computed as if it had had the link to itself.


@dataclass(slots=True)
class LinkShare:
    """A clock that runs at 1/n of real time while n transfers are on their way to one peer.

    Between a transfer's start and end, the clock advances by the time that the transfer would have
    taken alone. This assumes that overlapping transfers get equal parts of the link.
    """

    num: int = 0
    """Transfers on their way."""
    _shown_s: float = 0.0
    _looked_s: float = 0.0

    def enter(self, now_s: float) -> float:
        """Begin a transfer; return the clock's time, to be passed to `leave`."""
        self._advance(now_s)
        self.num += 1
        return self._shown_s

    def leave(self, now_s: float, entered_s: float) -> float:
        """End a transfer; return the time that it would have taken alone, in seconds."""
        self._advance(now_s)
        self.num -= 1
        return self._shown_s - entered_s

    def _advance(self, now_s: float) -> None:
        if self.num:
            self._shown_s += (now_s - self._looked_s) / self.num
        self._looked_s = now_s
