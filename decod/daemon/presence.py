"""What this daemon is at present, for those on its host: the operator and the service manager."""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from decod.errors import ConfigError

if TYPE_CHECKING:
    from decod.daemon.host import Node

_OVERDUE_MAX_S = 30.0
"""How late the core may be stepped: its timers are due within a second, as a rule."""


class Presence(Protocol):
    """A node, or what it has left behind between two lives."""

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator's request."""

    def describe(self) -> str:
        """Return one line on how it is."""

    @property
    def healthy(self) -> bool:
        """Whether it does what is due."""


class NodePresence:
    """A node in its run, or on its way there.

    Args:
        node: That has started.
    """

    def __init__(self, node: "Node") -> None:
        self._node = node

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator's request.

        Raises:
            ConfigError: It is of another release, or this node can't answer it.
        """
        command = request.get("command")
        handler = self._node.commands.get(str(command))
        if handler is None:
            raise ConfigError(
                f"unknown request {str(command)[:40]!r}",
                why="this daemon does not know it, or its node can't answer it",
                fix="use the decod command of the same version",
                code="E-RUN-003",
            )
        return await handler(request)

    def describe(self) -> str:
        """Return how the node takes part."""
        node, status = self._node, self._node.local_status()
        stage = status["node"]["stage_index"]
        where = "" if stage is None else f", stage {stage}"
        loss = "" if node.progress.loss is None else f", loss {node.progress.loss:.4f}"
        return f"{status['state']}{where}, iteration {node.progress.iteration}{loss}"

    @property
    def healthy(self) -> bool:
        """Whether the core is stepped when it is due."""
        driver = self._node.driver
        if driver is None or driver.stopped.done():
            return True
        deadline_s, now_s = driver.machine.deadline_s, asyncio.get_running_loop().time()
        return deadline_s is None or now_s - deadline_s < _OVERDUE_MAX_S
