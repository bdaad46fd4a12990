"""Refuses strangers' calls, counts peers' faults, and drops connections that keep sending garbage.

A call can be refused before its body is read: it does not name this run, or its host has too many
calls open already.

Each fault costs the sender's host a token, a large message costs more, and tokens come back slowly.
A fault without a token left costs its sender the connection. Other nodes behind the same address
keep theirs: they send nothing wrong.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from decod.ids import RunId
from decod.net.address import Address
from decod.net.channel import run_metadata
from decod.net.connections import shut_down
from decod.net.counters import Counters, PeerLog
from decod.net.limits import Limits
from decod.net.peer import Context, far_end_of, host_of
from decod.net.rate import RateLimiter

_log = logging.getLogger(__name__)


class Door:
    """The state of one server's callers.

    Args:
        run_id: Calls that name another are refused.
        counters: Counts by the peer's IP address.
    """

    def __init__(self, run_id: RunId, counters: Counters, limits: Limits) -> None:

        def clock() -> float:
            return asyncio.get_running_loop().time()

        self._run = run_metadata(run_id)[0]
        self._counters = counters
        self._limits = limits
        self._log = PeerLog(_log, clock)
        self._patience = RateLimiter(
            clock, rate_per_s=limits.faults_per_s, burst=float(limits.faults_burst)
        )
        self._num_open: Counter[str] = Counter()
        self._dropping: dict[Address, asyncio.Task[None]] = {}
        self.port = 0
        """On which the server listens."""

    def names_run(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Return whether a call's metadata name this run."""
        return self._run in metadata

    def enter(self, host: str) -> bool:
        """Open a call of a host, unless it has too many; `leave` closes it."""
        if self._num_open[host] >= self._limits.rpcs_per_host_max:
            return False
        self._num_open[host] += 1
        return True

    def leave(self, host: str) -> None:
        """Close a call that `enter` has opened."""
        self._num_open[host] -= 1
        if not self._num_open[host]:
            del self._num_open[host]

    def note(self, name: str, context: Context, reason: str) -> None:
        """Count and log something that the peer may not be able to help."""
        self._note(name, host_of(context), reason)

    def _note(self, name: str, host: str, reason: str) -> None:
        self._counters.add(name, host)
        self._log.warn(host, name, reason)

    def blame(self, name: str, context: Context, reason: str, *, size_bytes: int = 0) -> None:
        """Count and log what no node of this version and run sends.

        Args:
            name: Of the counter.
            context: Of the call.
            reason: For the log.
            size_bytes: How much of it there was to look at.
        """
        self.note(name, context, reason)
        cost = 1 + size_bytes // self._limits.fault_size_bytes
        if not self._patience.allow(host_of(context), cost):
            self._drop(context)

    def _drop(self, context: Context) -> None:
        """End the connection that a call came over."""
        far, host = far_end_of(context), host_of(context)
        if far is None or far in self._dropping:
            return

        async def drop() -> None:
            if await asyncio.to_thread(shut_down, self.port, far):
                self._note("peer.dropped", host, f"the connection from port {far[1]}: many faults")

        task = asyncio.get_running_loop().create_task(drop())
        self._dropping[far] = task
        task.add_done_callback(lambda _: self._dropping.pop(far))
