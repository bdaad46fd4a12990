"""What a host's operator and service manager talk to: a node, or its stand-in."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from decod.driver.driver import CoreHandle
from decod.errors import ConfigError

Command = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

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
        commands: Answer the requests, by name.
        status: Returns the status as this node knows it.
        core: The node's core.
    """

    def __init__(
        self,
        commands: Mapping[str, Command],
        status: Callable[[], dict[str, Any]],
        core: CoreHandle,
    ) -> None:
        self._commands, self._status, self._core = commands, status, core

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator's request.

        Raises:
            ConfigError: The request is of another release, or this node can't answer it
                (E-RUN-003).
        """
        command = str(request.get("command"))
        if command not in self._commands:
            raise unknown_request(command)
        return await self._commands[command](request)

    def describe(self) -> str:
        """Return one line on the node's state, stage, iteration and loss."""
        status = self._status()
        stage, known = status["node"]["stage_index"], status["loss"]
        where = "" if stage is None else f", stage {stage}"
        loss = "" if known is None else f", loss {known:.4f}"
        return f"{status['state']}{where}, iteration {status['iteration']}{loss}"

    @property
    def healthy(self) -> bool:
        """Whether the core is stepped in time."""
        facts, now_s = self._core.facts, asyncio.get_running_loop().time()
        if facts is None or not self._core.runs:
            return True
        deadline_s = facts.deadline_s
        return deadline_s is None or now_s - deadline_s < _OVERDUE_MAX_S


def unknown_request(command: str) -> ConfigError:
    """Return the error for a request that a daemon does not know."""
    return ConfigError(
        f"unknown request {command[:40]!r}",
        why="this daemon does not know it, or its node can't answer it",
        fix="use the decod command of the same version",
        code="E-RUN-003",
    )
