"""A node's lives in its run: it comes back again and again, until the run is over or it leaves.

A life ends when a laptop sleeps, a link breaks, an address changes, a leader is replaced, or a
compute process dies. The next life has the same identity and state folder. It begins when the run
is found again, with a new compute process, at the address that this host has by then.
"""

import asyncio
import copy
import gc
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from decod.daemon.host import Host, Say
from decod.daemon.leaving import LeftEarlyError
from decod.daemon.node_errors import TemporaryError, exit_code_of
from decod.daemon.run_facts import RunPart
from decod.daemon.status import RECONNECTING
from decod.driver.driver import CoreHandle
from decod.errors import (
    ConfigError,
    DecodError,
    HardwareError,
    NetworkError,
    PeerError,
    RejectedError,
)
from decod.journal.logs import log_note
from decod.journal.step_metrics import STEP_METRIC_NAMES
from decod.membership.papers import Membership
from decod.net.ask import ask_status
from decod.net.channel import BANNED, REFUSED
from decod.protocol.core.context import NodeState
from decod.protocol.core.effects import Stop, StopReason
from decod.tasks import Backoff, cancelled

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


# --- out of the run ------------------------------------------------------------------------------
# A node that is out of its run for a while: it looks for the run, or waits to be resumed.
#
# RECONNECTING --the run is found--> the node joins it again as a newcomer
#              --pause--> PAUSED
#              --refused for a while--> the daemon ends with that error
# PAUSED       --resume, and the run is found--> the node joins it again as a newcomer
# either       --drain, or a signal--> the daemon ends
#
# PAUSED frees the device for its operator. Without its compute process a node can't keep its
# stage's weights up to date, reduce or vote, so it is no member meanwhile. In both states the
# daemon does not listen for peers, and holds no memory of the device or for tensors. It keeps
# only the state folder, with identity and kept states, and the operator's socket.


_log = logging.getLogger("decod")

REFUSED_S = 30.0
"""How long a run must refuse a former member until the daemon gives up. Until then, its nodes may
have lost their leader, or a stranger may answer at the address of a node that is restarting."""

REFUSED_PAUSE_S = 10.0
"""The longest pause between two looks while the run's port refuses at once: such a look costs
little, and its leader may be about to start again."""

_STATUS_TIMEOUT_S = 0.3
_FROM_LEADER = (
    "iteration",
    "loss",
    *STEP_METRIC_NAMES,
    "tokens_per_s",
    "data",
    "leader",
    "stages",
    "candidates",
)
_PAUSED_TEXT = "paused, and the device is free: `decod resume` joins the run again"


class SuspendedNode(Generic[T]):
    """The stand-in for a node that is out of its run.

    Args:
        known: The node's last status.
        seek: Finds the run; returns the facts that are needed to join it.
        stop: How the node's last life ended. If it is paused, the operator has freed the device,
            and will resume the node.
        membership: The node's.
        say: Takes lines for the operator's terminal.
        leaving: Set once this daemon is to leave.
    """

    def __init__(
        self,
        known: dict[str, Any],
        seek: Callable[[], Awaitable[T]],
        stop: Stop,
        *,
        membership: Membership,
        say: Callable[[str], None],
        leaving: asyncio.Event,
    ) -> None:
        self._known, self._seek, self._say, self._leaving = known, seek, say, leaving
        self._seeking = asyncio.Lock()
        self._found: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._looking: asyncio.Task[T] | None = None
        self._membership = membership
        self._paused = stop.reason is StopReason.PAUSED
        self._why = stop.detail
        self._commands: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "status": self._status,
            "pause": self._pause,
            "resume": self._resume,
            "drain": self._drain,
        }

    async def until_found(self, backoff: Backoff) -> T:
        """Wait until the run is found and the node may join it; return the result of `seek`.

        Args:
            backoff: Gives the wait before each look.

        Raises:
            DecodError: The run does not take this node, or this host can't join it.
        """
        if not self._paused:
            self._looking = asyncio.create_task(self._look(backoff))
        try:
            while self._looking is not None:
                ends = {self._looking, self._found}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self._found.done():
                    break
                if not self._looking.cancelled():
                    return self._looking.result()
                self._looking = None
            return await self._found
        finally:
            self._found = asyncio.get_running_loop().create_future()
            if self._looking is not None:
                await cancelled(self._looking)

    def failed(self, why: str) -> None:
        """Note why the run could not be joined although it was found."""
        self._why = why

    async def _look(self, backoff: Backoff) -> T:
        """Look for the run until it is found."""
        refused_s: float | None = None
        longest_s = math.inf
        now_s = asyncio.get_running_loop().time
        while True:
            pause_s = min(backoff.next_s(), longest_s)
            self._say(f"out of the run ({self._why}): looking for it in {pause_s:.0f} s")
            log_note(_log, "node.reconnecting", {"reason": self._why, "pause_s": round(pause_s, 1)})
            await asyncio.sleep(pause_s)
            try:
                async with self._seeking:
                    return await self._seek()
            except RejectedError as error:
                refused_s = now_s() if refused_s is None else refused_s
                if now_s() - refused_s >= REFUSED_S:
                    raise
                self._why = f"{error.what}: {error.why}"
            except (NetworkError, PeerError, TemporaryError) as error:
                refused_s = None
                longest_s = REFUSED_PAUSE_S if error.why == REFUSED else math.inf
                self._why = f"{error.what}: {error.why}"

    # --- commands -----------------------------------------------------------------------------

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the operator."""
        command = str(request.get("command"))
        if command not in self._commands:
            state = "paused with its device free" if self._paused else RECONNECTING
            raise ConfigError(
                f"{command[:40]!r} is not answered while this node is {state}",
                why="it is in no run, and has no compute process",
                fix="use `decod resume` first, or ask another node",
                code="E-RUN-008",
            )
        return await self._commands[command]()

    def describe(self) -> str:
        """Return one line on the node's state."""
        return NodeState.PAUSED.value if self._paused else f"{RECONNECTING}: {self._why}"

    @property
    def healthy(self) -> bool:
        """Always True: there is no core that could be late."""
        return True

    async def _pause(self) -> dict[str, Any]:
        self._paused = True
        if self._looking is not None:
            self._looking.cancel()
        return {"paused": True, "capacity": 0, "device_free": True}

    async def _resume(self) -> dict[str, Any]:
        async with self._seeking:
            if not self._found.done():
                found = await self._seek()
                if not self._found.done():
                    self._found.set_result(found)
        return {"paused": False, "capacity": 0, "device_free": True}

    async def _drain(self) -> dict[str, Any]:
        self._leaving.set()
        how = "paused, and in no run" if self._paused else "out of the run already"
        return {"draining": True, "reason": "drained", "detail": f"it was {how}"}

    async def _status(self) -> dict[str, Any]:
        """Return the node's last status, with the leader's view of the run if it answers."""
        status = copy.deepcopy(self._known)
        message = _PAUSED_TEXT if self._paused else f"out of the run: {self._why}"
        with suppress(DecodError, ValueError, RecursionError):
            address, run_id = status["leader"]["address"], status["run_id"]
            try:
                text = await ask_status(
                    address, run_id, self._membership, timeout_s=_STATUS_TIMEOUT_S
                )
            except RejectedError as error:
                if error.code == BANNED:
                    message = f"{error.what}: {error.why}"
                raise
            told = json.loads(text)
            if isinstance(told, dict) and told.get("schema_version") == status["schema_version"]:
                of_run = {key: told[key] for key in _FROM_LEADER if key in told}
                right = {k: v for k, v in of_run.items() if isinstance(v, type(status[k]))}
                status.update(right)
        state = NodeState.PAUSED.value if self._paused else RECONNECTING
        status["node"] |= {"state": state, "capacity": 0, "stage_index": None, "device_free": True}
        return status | {
            "state": state,
            "run_state": state,
            "flows": [],
            "syncing": None,
            "message": message,
        }
