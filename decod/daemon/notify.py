"""What a service manager hears of this daemon, by systemd's notify protocol.

The protocol is a datagram of lines such as `READY=1`, to a socket that the manager names in the
environment (sd_notify(3)). Without a manager nothing is said. A manager that wants to be told again
and again that the daemon is well ends it when it hears nothing: it is told only while the event
loop turns and the core is stepped when that is due.
"""

import asyncio
import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decod.daemon.host import Host

_INTERVAL_S = 10.0
"""Longest pause between two messages."""

_TOLD_PER_TIMEOUT = 3
"""Messages may come late on a busy host."""

_STATUS_MAX_CHARACTERS = 200


class Notifier:
    """Tells the service manager of one process.

    Args:
        environment: Names the socket; those names are taken out of it, for they are not meant for
            other processes.
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
        """Say, once, that the daemon has started: it answers its operator."""
        if not self._is_ready:
            self._is_ready = True
            self._tell("READY=1")

    async def keep_telling(self, host: "Host") -> None:
        """Say again and again how the daemon is, and that it is well if it is."""
        if not self._address:
            return
        leaving = host.leaving.asked
        while True:
            lines = [f"STATUS={host.describe()[:_STATUS_MAX_CHARACTERS]}"]
            if leaving.is_set():
                lines.append("STOPPING=1")
            if host.healthy:
                lines.append("WATCHDOG=1")
            self._tell(*lines)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval_s):
                    await (asyncio.Event() if leaving.is_set() else leaving).wait()

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        # An abstract socket's name begins with a zero byte, which no environment holds.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        # A manager that does not listen is no reason to end.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # noqa: FBT003 - the standard library's signature.
            sender.sendto("\n".join(lines).encode(), address)
