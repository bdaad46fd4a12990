"""The port of a node: it takes all connections, and tells apart what they are for.

Calls are gRPC's, which listens on a port of this host alone. Tensors have connections of their own,
which begin with a few bytes in plain text. So a node has one port for all, and whoever is behind a
router forwards one.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address
from typing import Any

from typing_extensions import override

from decod.net.address import join_address
from decod.net.door import Connection, Door, passed_on
from decod.net.net_limits import Limits

PREAMBLE = b"decod tensors 1\n"
"""What a connection for tensors begins with. One for calls begins with TLS."""

_CALLS = b"\x16"
"""What TLS begins with."""

_ALL = (str(IPv4Address(0)), "::")
_BACKLOG = 512
_ACCEPTED_AT_ONCE = 8
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1
_LINGER_S = 1.0
_STALL_MAX_S = 30.0
"""A caller that takes nothing for so long is gone. gRPC can't know: all that it sends leaves it."""
_STRANGE_BYTES = 64 * 1024
_HERE = "127.0.0.1"


class FrontDoor:
    """One listening port.

    Args:
        limits: How long a connection may take to say what it is for.
        door: Admits connections.
        tensors: Serves a connection for tensors. It is told where it comes from, and owns it.
    """

    def __init__(
        self,
        limits: Limits,
        door: Door,
        tensors: Callable[[socket.socket, str], Awaitable[None]],
    ) -> None:
        self._limits = limits
        self._door = door
        self._tensors = tensors
        self._calls_port = 0
        self._listening: socket.socket | None = None
        self._tasks = set[asyncio.Task[None]]()

    def start(self, host: str, port: int, calls_port: int) -> int:
        """Listen; return the port.

        Args:
            host: An address of this host, or one for all of them.
            port: 0: the system chooses one.
            calls_port: Where gRPC listens.

        Raises:
            OSError: The port is in use, or the address is not this host's.
        """
        both = host in _ALL and socket.has_dualstack_ipv6()
        self._listening = listening = socket.create_server(
            ("::" if both else host, port),
            family=socket.AF_INET6 if both or ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=both,
        )
        listening.settimeout(0.0)
        self._calls_port = calls_port
        self._watch()
        return int(listening.getsockname()[1])

    async def stop(self) -> None:
        """Listen no more, and end all connections."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Transports close their sockets in the next turn of the loop.
        await asyncio.sleep(0)

    def _watch(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept, self._listening)

    def _accept(self, listening: socket.socket) -> None:
        """Take a few connections. Others come in the next turns of the loop."""
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except OSError as error:
                if error.errno in _SCARCE:
                    loop.remove_reader(listening)
                    loop.call_later(_PAUSE_S, self._watch)
                # Otherwise nobody is there, or the caller is gone already.
                return
            connection.settimeout(0.0)
            known = Connection(_peer_text(address), loop.time())
            if not self._door.admit(known):
                _read_past(connection)
                connection.close()
                continue
            known.task = task = loop.create_task(self._welcome(connection, known.peer))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, connection, known))

    def _ended(
        self, connection: socket.socket, known: Connection, task: "asyncio.Task[None]"
    ) -> None:
        connection.close()
        self._door.forget(known)
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "bug in a connection", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    async def _welcome(self, connection: socket.socket, peer: str) -> None:
        """Serve one connection."""
        with suppress(OSError):
            async with asyncio.timeout(self._limits.handshake_timeout_s):
                first = await _first_bytes(connection)
            if first == _CALLS:
                await self._pass_on(connection, peer)
            elif first == PREAMBLE:
                await self._tensors(connection, peer)
            else:
                _read_past(connection)

    async def _pass_on(self, connection: socket.socket, peer: str) -> None:
        """Pass bytes on between a caller and gRPC until one of them ends."""
        loop = asyncio.get_running_loop()
        near, far = _End(), _End()
        near.other, far.other = far, near
        inner, _ = await loop.create_connection(lambda: far, _HERE, self._calls_port)
        try:
            with passed_on(_peer_text(inner.get_extra_info("sockname")), peer):
                await loop.connect_accepted_socket(lambda: near, connection)
                # The end of one closes the other, behind what is still on its way.
                await far.ended
            await near.ended
        finally:
            near.abort()
            far.abort()


class _End(asyncio.Protocol):
    """One of two connections, each of which gets what comes over the other."""

    def __init__(self) -> None:
        self.other: _End
        self.ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._full: asyncio.TimerHandle | None = None
        """Set while more has come than has left."""
        self._is_last = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(0)
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self.other.send(data)

    def send(self, data: bytes) -> None:
        """Pass bytes on."""
        if self._transport is not None:
            self._transport.write(data)

    # What comes faster than it leaves is not read.

    @override
    def pause_writing(self) -> None:
        self._full = asyncio.get_running_loop().call_later(_STALL_MAX_S, self.abort)
        self.other.read(going_on=False)

    @override
    def resume_writing(self) -> None:
        self._no_longer_full()
        self.other.read(going_on=True)
        if self._is_last:
            self._say_end()

    def _no_longer_full(self) -> None:
        if self._full is not None:
            self._full.cancel()
            self._full = None

    def read(self, *, going_on: bool) -> None:
        """Go on with reading, or stop."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if going_on:
            transport.resume_reading()
        else:
            transport.pause_reading()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._no_longer_full()
        self.other.close()
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """End the connection once all that was passed on is on its way.

        What still comes is read, and forgotten: otherwise TCP would tell of a reset.
        """
        self._is_last = True
        if self._transport is not None:
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)
            if self._full is None:
                self._say_end()

    def _say_end(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            with suppress(OSError):
                self._transport.write_eof()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()


async def _first_bytes(connection: socket.socket) -> bytes:
    """Return what a connection is for: `_CALLS`, which stays there, or as much as is `PREAMBLE`.

    Raises:
        OSError: The connection has broken.
    """
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, come.set)
    try:
        await come.wait()
    finally:
        loop.remove_reader(connection)
    found = connection.recv(len(_CALLS), socket.MSG_PEEK)
    if found == _CALLS:
        return found
    found = b""
    while len(found) < len(PREAMBLE) and PREAMBLE.startswith(found):
        more = await loop.sock_recv(connection, len(PREAMBLE) - len(found))
        if not more:
            break
        found += more
    return found


def _read_past(connection: socket.socket) -> None:
    """Read what has come, so that the other end sees the end of a connection, and no reset."""
    with suppress(OSError):
        connection.recv(_STRANGE_BYTES)


def _peer_text(address: Any) -> str:
    """Return an address as gRPC writes it."""
    host, port = address[:2]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"{'ipv6' if ':' in host else 'ipv4'}:{join_address(host, port)}"
