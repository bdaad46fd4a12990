"""A node's lives in its run: it comes back again and again, until the run is over or it leaves.

A life ends when a laptop sleeps, a link breaks, an address changes, a leader is replaced, or a
compute process dies. The next life has the same identity and state folder. It begins when the run
is found again, with a new compute process, at the address that this host has by then.
"""

import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from decod.daemon.backoff import Backoff
from decod.daemon.host import Host, Say
from decod.daemon.leaving import LeftEarlyError
from decod.daemon.node_errors import exit_code_of
from decod.daemon.run_facts import RunPart
from decod.daemon.suspended import SuspendedNode
from decod.driver.driver import CoreHandle
from decod.errors import HardwareError, NetworkError
from decod.protocol.core.effects import Stop, StopReason

T = TypeVar("T")

_COMES_BACK = (
    StopReason.REMOVED,
    StopReason.LEADER_LOST,
    StopReason.SUPERSEDED,
    StopReason.CRIPPLED,
)
"""Reasons of an end after which the run can be joined again."""

SETTLED_S = 60.0
"""A node that has been in the run for this long comes back soon. Others wait longer each time."""

FAILURES_MAX = 5
FAILURES_WINDOW_S = 3600.0
"""`FAILURES_MAX` compute processes may fail within this time. One more ends the daemon."""


class Life(Protocol):
    """A node from its start to its end."""

    @property
    def in_run_s(self) -> float:
        """Seconds since it entered the run; 0 if it has not."""

    @property
    def core(self) -> CoreHandle:
        """Its core, which may not have started."""

    @property
    def part(self) -> RunPart:
        """Its part in the run."""

    def local_status(self) -> dict[str, Any]:
        """Return the status of the run as it knows it."""


class Rejoining(Generic[T]):
    """The lives of one daemon's node.

    Args:
        host: The host, which outlives them.
        say: Takes lines for the operator's terminal.
        rejoins: Whether the node comes back by itself.
    """

    def __init__(self, host: Host, say: Say, *, rejoins: bool) -> None:
        self._host, self._leaving = host, host.leaving
        self.say = say
        self._rejoins = rejoins
        self._node: Life | None = None
        """The node of the latest life; None before it has begun and after its end."""
        self._away: SuspendedNode[T] | None = None
        self._backoff = Backoff()
        self._failures_s: list[float] = []
        """When compute processes failed, within the last window."""

    async def run(self, first: T, live: Callable[[T], Awaitable[Stop]]) -> int:
        """Run one life after another until the node does not come back; return the exit code.

        Args:
            first: The facts that are needed to join the run.
            live: Joins the run, and returns how that life ended. It must call `begins` when it has
                a node, and `ended` before it closes the node.

        Raises:
            DecodError: The first life could not begin, or a life ended in a way that needs a
                person.
        """
        found = first
        while True:
            self._node = None
            try:
                stop = await live(found)
            except (HardwareError, NetworkError) as error:
                if self._away is None or self._took_part():
                    raise
                self._failed(error)
                self._away.failed(f"{error.what}: {error.why}")
                await self._host.present(self._away)
            else:
                if not self._comes_back(stop):
                    return self._exit_code(stop)
                if stop.reason is StopReason.CRIPPLED:
                    self._failed(_broken(stop))
            assert self._away is not None
            # The objects of the last life refer to each other, and hold files open.
            self._node = None
            gc.collect()
            try:
                search = self._away.until_found(self._backoff)
                found = await self._leaving.unless_asked(search)
            except LeftEarlyError:
                self.say("left the run: it was out of it already")
                return 0

    @property
    def again(self) -> bool:
        """Whether the node was in the run before."""
        return self._away is not None

    def begins(self, node: Life) -> None:
        """Note that a life has begun: its node has started."""
        self._node = node

    async def ended(self, node: Life, stop: Stop, seek: Callable[[], Awaitable[T]]) -> None:
        """Note that a life has ended. Call it before the node is closed.

        Args:
            node: The node, which has stopped.
            stop: How it stopped.
            seek: Finds the run again.
        """
        if node.in_run_s >= SETTLED_S:
            self._backoff.reset()
        if self._comes_back(stop):
            self._away = SuspendedNode(
                node.local_status(),
                seek,
                stop,
                membership=node.part.membership,
                say=self.say,
                leaving=self._leaving.asked,
            )
            await self._host.present(self._away)
            if stop.reason is StopReason.PAUSED:
                self.say("paused, and the device is free: decod resume joins the run again")

    def _took_part(self) -> bool:
        """Whether the latest life has started its core."""
        return self._node is not None and self._node.core.started

    def _comes_back(self, stop: Stop) -> bool:
        if self._leaving.asked.is_set():
            return False
        rejoins = self._rejoins and stop.reason in _COMES_BACK
        return rejoins or stop.reason is StopReason.PAUSED

    def _exit_code(self, stop: Stop) -> int:
        if self._leaving.asked.is_set() and stop.reason in _COMES_BACK:
            # It was asked to leave after it had stopped.
            self.say(f"left the run: {stop.detail}")
            return 0
        return exit_code_of(stop)

    def _failed(self, error: HardwareError | NetworkError) -> None:
        """Count a life that ended by a fault of this host. Network errors do not count.

        Raises:
            HardwareError: There were too many.
        """
        if isinstance(error, NetworkError):
            return
        now_s = time.monotonic()
        recent = [then_s for then_s in self._failures_s if now_s - then_s < FAILURES_WINDOW_S]
        self._failures_s = [*recent, now_s]
        if len(self._failures_s) > FAILURES_MAX:
            raise error


def _broken(stop: Stop) -> HardwareError:
    return HardwareError(
        f"the compute process has failed {FAILURES_MAX + 1} times within an hour",
        why=stop.detail,
        fix="read compute.log in the state folder; most often it is memory: lower --capacity",
        code="E-HW-014",
    )
