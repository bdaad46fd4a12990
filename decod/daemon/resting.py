"""A volunteer that is paused with its device free: out of the run's view, and ready to come back.

    (left the run, compute process ended) --resume, the run is found--> joins it again as a newcomer
                                          --drain, or a signal--> ends

Without its compute process a node can't keep its stage's weights in step, reduce or vote, so it is
no member meanwhile. Nothing listens for peers, and no memory of the device or for tensors is held;
what is left is the state folder with identity and kept states, and the operator's socket.
"""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from decod.daemon.contact import Contact
from decod.daemon.control import ControlServer
from decod.daemon.leaving import LeftEarlyError
from decod.daemon.succession import leader_of
from decod.errors import ConfigError, DecodError
from decod.net.ask import ask_status
from decod.protocol.identity import NodeState

if TYPE_CHECKING:
    from decod.daemon.host import Node

_STATUS_TIMEOUT_S = 0.3
_DETAIL = "it was paused, and in no run"
_FROM_LEADER = ("iteration", "loss", "tokens_per_s", "data", "leader", "stages", "candidates")


class Resting:
    """What a node leaves behind when its device is freed. Make it before the node is closed.

    Args:
        node: That was in the run.
        seek: Finds the run again.
    """

    def __init__(self, node: "Node", seek: Callable[[], Awaitable[Contact]]) -> None:
        self._seek = seek
        self._run_id, self._node_id = node.part.run_id, node.identity.node_id
        self._state_dir = node.config.state_dir
        self._leaving = node.leaving
        self._leader_address = leader_of(node).address
        self._known = _paused(node.local_status())
        self._ended: asyncio.Future[Contact | None]
        self._seeking = asyncio.Lock()
        self._commands: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "status": self._status,
            "pause": self._pause,
            "resume": self._resume,
            "drain": self._drain,
        }

    async def wait(self) -> Contact | None:
        """Return where the run is when the operator resumes; None if the node is to end."""
        self._ended = asyncio.get_running_loop().create_future()
        control = ControlServer(self._state_dir, self._answer)
        try:
            await control.start()
            return await self._leaving.unless_asked(self._ended)
        except LeftEarlyError:
            return None
        finally:
            await control.close()

    def _end(self, contact: Contact | None) -> None:
        if not self._ended.done():
            self._ended.set_result(contact)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        command = str(request.get("command"))
        if command not in self._commands:
            raise ConfigError(
                f"{command[:40]!r} is not answered while this node is paused with its device free",
                why="it is in no run, and has no compute process",
                fix="use `decod resume` first, or ask another node",
                code="E-RUN-008",
            )
        return await self._commands[command](request)

    async def _pause(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {"paused": True, "capacity": 0, "device_free": True}

    async def _resume(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        async with self._seeking:
            if not self._ended.done():
                self._end(await self._seek())
        return {"paused": False, "capacity": 0, "device_free": True}

    async def _drain(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        self._end(None)
        return {"draining": True, "reason": "drained", "detail": _DETAIL}

    async def _status(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return what was known when the node left, and of the run what its leader tells now."""
        status = copy.deepcopy(self._known)
        with suppress(DecodError, ValueError, RecursionError):
            text = await ask_status(
                self._leader_address, self._run_id, self._node_id, timeout_s=_STATUS_TIMEOUT_S
            )
            told = json.loads(text)
            if isinstance(told, dict) and told.get("schema_version") == status["schema_version"]:
                of_run = {key: told[key] for key in _FROM_LEADER if key in told}
                right = {k: v for k, v in of_run.items() if isinstance(v, type(status[k]))}
                status.update(right)
        return status


def _paused(status: dict[str, Any]) -> dict[str, Any]:
    paused = NodeState.PAUSED.value
    status["node"] |= {"state": paused, "capacity": 0, "stage_index": None, "device_free": True}
    message = "paused, and the device is free: `decod resume` joins the run again"
    return status | {
        "state": paused,
        "run_state": paused,
        "flows": [],
        "syncing": None,
        "message": message,
    }
