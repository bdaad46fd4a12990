"""The daemon's present state, as its host's operator and service manager see it."""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from decod.errors import ConfigError

if TYPE_CHECKING:
    from decod.daemon.host import Node

_OVERDUE_MAX_S = 30.0
"""How late a healthy core may be stepped. Its timers are usually due within a second."""


class Frontend(Protocol):
    """A node, or its stand-in between two lives."""

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator's request."""

    def describe(self) -> str:
        """Return one line on its state."""

    @property
    def healthy(self) -> bool:
        """Whether it does its due work in time."""


class NodeFrontend:
    """A node in its run, or on its way there.

    Args:
        node: The node, which has started.
    """

    def __init__(self, node: "Node") -> None:
        self._node = node

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator's request.

        Raises:
            ConfigError: The request is of another release, or this node can't answer it
                (E-RUN-003).
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
        """Return one line on the node's state, stage, iteration and loss."""
        node, status = self._node, self._node.local_status()
        stage = status["node"]["stage_index"]
        where = "" if stage is None else f", stage {stage}"
        loss = "" if node.progress.loss is None else f", loss {node.progress.loss:.4f}"
        return f"{status['state']}{where}, iteration {node.progress.iteration}{loss}"

    @property
    def healthy(self) -> bool:
        """Whether the core is stepped in time."""
        driver = self._node.driver
        if driver is None or driver.stopped.done():
            return True
        deadline_s, now_s = driver.machine.deadline_s, asyncio.get_running_loop().time()
        return deadline_s is None or now_s - deadline_s < _OVERDUE_MAX_S
