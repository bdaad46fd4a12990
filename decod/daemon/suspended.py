"""A node that is out of its run for a while: it looks for the run, or waits to be resumed.

    RECONNECTING --the run is found--> the node joins it again as a newcomer
                 --pause--> PAUSED
                 --refused for a while--> the daemon ends with that error
    PAUSED       --resume, and the run is found--> the node joins it again as a newcomer
    either       --drain, or a signal--> the daemon ends

PAUSED frees the device for its operator. Without its compute process a node can't keep its stage's
weights up to date, reduce or vote, so it is no member meanwhile. In both states the daemon does not
listen for peers, and holds no memory of the device or for tensors. It keeps only the state folder,
with identity and kept states, and the operator's socket.
"""

import asyncio
import copy
import json
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from decod.daemon.backoff import Backoff
from decod.daemon.node_errors import TemporaryError
from decod.daemon.status import RECONNECTING
from decod.errors import ConfigError, DecodError, NetworkError, PeerError, RejectedError
from decod.journal.logs import log_note
from decod.journal.step_metrics import STEP_METRIC_NAMES
from decod.membership.papers import Membership
from decod.net.ask import ask_status
from decod.net.channel import BANNED, REFUSED
from decod.protocol.core.context import NodeState
from decod.protocol.core.effects import Stop, StopReason
from decod.tasks import cancelled

T = TypeVar("T")

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
