"""What a host's operator talks to, a node or its stand-in; and what the service manager hears."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Protocol

from decod.errors import ConfigError

Command = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Frontend(Protocol):
    """A node, or its stand-in between two lives."""

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator's request."""

    def describe(self) -> str:
        """Return one line on its state."""

    @property
    def healthy(self) -> bool:
        """Whether it does its due work in time."""


def unknown_request(command: str) -> ConfigError:
    """Return the error for a request that a daemon does not know."""
    return ConfigError(
        f"unknown request {command[:40]!r}",
        why="this daemon does not know it, or its node can't answer it",
        fix="use the decod command of the same version",
        code="E-RUN-003",
    )


# --- the service manager -------------------------------------------------------------------------
# Messages of this daemon to a service manager, in systemd's notify protocol.
#
# A message is a datagram of lines like `READY=1`, to a socket that the manager names in the
# environment (sd_notify(3)). Without a manager nothing is sent. A manager with a watchdog kills a
# daemon from which it hears nothing. So `WATCHDOG=1` is sent only while the event loop turns and
# the core is stepped in time.


_INTERVAL_S = 10.0
"""Longest time between two messages."""

_TOLD_PER_TIMEOUT = 3
"""Messages within one watchdog timeout, since they may come late on a busy host."""

_STATUS_MAX_CHARACTERS = 200


class Notifier:
    """The sender of messages to the service manager.

    Args:
        environment: Names the socket; by default the process's. Its entries for the manager are
            removed, since they are not meant for child processes.
    """

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._address = environment.pop("NOTIFY_SOCKET", "")
        timeout = environment.pop("WATCHDOG_USEC", "")
        ours = environment.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        timeout_s = int(timeout) / 1e6 if timeout.isdecimal() and ours else 0.0
        self.interval_s = min(_INTERVAL_S, timeout_s / _TOLD_PER_TIMEOUT or _INTERVAL_S)
        self._is_ready = False

    def ready(self) -> None:
        """Say, only once, that the daemon has started, so that it answers its operator."""
        if not self._is_ready:
            self._is_ready = True
            self._tell("READY=1")

    async def keep_telling(
        self, describe: Callable[[], str], healthy: Callable[[], bool], leaving: asyncio.Event
    ) -> None:
        """Send the daemon's state again and again, and `WATCHDOG=1` if it is healthy.

        Args:
            describe: Returns one line on the daemon's state.
            healthy: Whether the daemon does its due work in time.
            leaving: Set once it is to leave.
        """
        if not self._address:
            return
        while True:
            lines = [f"STATUS={describe()[:_STATUS_MAX_CHARACTERS]}"]
            if leaving.is_set():
                lines.append("STOPPING=1")
            if healthy():
                lines.append("WATCHDOG=1")
            self._tell(*lines)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval_s):
                    await (asyncio.Event() if leaving.is_set() else leaving).wait()

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        # The name of an abstract socket begins with a zero byte. The environment has @ instead.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        # A manager that does not listen is no reason to fail.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # noqa: FBT003 - the standard library's signature.
            sender.sendto("\n".join(lines).encode(), address)
