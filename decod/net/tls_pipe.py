"""A TLS connection whose bytes are read straight into the memory where they stay.

It belongs to the event loop of one thread. Each TLS record has at most 16 KiB, so a slow link would
wake the loop for each. While much is still to come, a reader therefore lets bytes gather for up to
16 ms: TCP takes them in meanwhile.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from decod.membership.certificates import TlsIdentity
from decod.system import secret_file

T = TypeVar("T")

_RECORD_BYTES = 16 * 1024
"""The most that one read of a TLS connection returns."""

_TURN_BYTES = 256 * 1024
"""Read or written before other callbacks of the loop get their turn."""

_GATHER_MAX_S = 0.016
"""The longest time for which bytes gather."""

_GATHER_MIN_S = 0.001

_GATHER_MIN_BYTES = 64 * 1024
"""If less is to come, nothing gathers: somebody waits for the end."""

_GATHERED_BYTES = 4 * _RECORD_BYTES
"""If less has come at once, bytes gather for longer from then on; if more, for a shorter time."""

_UNSENT_BYTES = 256 * 1024
"""What the kernel keeps of a connection that is not on its way yet. More would only wait there."""


def server_context(shown: TlsIdentity) -> ssl.SSLContext:
    """Return how to answer callers, each of which must show a certificate."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, shown)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(shown: TlsIdentity) -> ssl.SSLContext:
    """Return how to call others, whose certificate must have the name that is meant."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, shown)


def _context(protocol: int, shown: TlsIdentity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=shown.anchors.decode())
    with secret_file(shown.key + shown.chain) as path:
        context.load_cert_chain(path)
    return context


class TlsPipe:
    """Both directions of one connection. Each has one user at a time.

    Args:
        connection: Connected, and non-blocking. The pipe owns it.
        context: Of `server_context` or `client_context`.
        name: Of a client: what the server's certificate must say.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, name: str | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = context.wrap_socket(
            connection,
            server_side=name is None,
            server_hostname=name,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=True,
        )
        self._waiting: set[asyncio.Future[None]] = set()
        self._gather_s = 0.0

    async def shake_hands(self) -> bytes:
        """Prove to each other who is there. Return the other end's certificate, as PEM.

        Raises:
            OSError: The other end does not prove it, or is gone.
        """
        await self._done(self._socket.do_handshake)
        found = self._socket.getpeercert(binary_form=True)
        assert found is not None, "both ends show a certificate"
        return ssl.DER_cert_to_PEM_cert(found).encode()

    async def read_some(self, view: memoryview, *, to_come: int = 0) -> int:
        """Fill the beginning of some memory; return how much, at least one byte.

        Args:
            view: Where the bytes go.
            to_come: Bytes that are still to come of the same thing, `view` included.

        Raises:
            OSError: The connection has broken, or the other end has closed it.
        """
        view = view[:_TURN_BYTES]
        num = 0
        while num < len(view):
            try:
                size = self._socket.recv_into(view[num : num + _RECORD_BYTES])
            except ssl.SSLWantReadError:
                if num:
                    if to_come - num >= _GATHER_MIN_BYTES:
                        await self._gather(num)
                    return num
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            if not size:
                raise ConnectionResetError("the other end has closed the connection")
            num += size
        await asyncio.sleep(0)
        return num

    async def _gather(self, num: int) -> None:
        """Let bytes gather, after so many have come at once."""
        longer_s = max(_GATHER_MIN_S, 2 * self._gather_s)
        wait_s = longer_s if num < _GATHERED_BYTES else self._gather_s / 2
        self._gather_s = min(wait_s, _GATHER_MAX_S) if wait_s >= _GATHER_MIN_S else 0.0
        await asyncio.sleep(self._gather_s)

    async def read(self, view: memoryview) -> None:
        """Fill some memory. Raises what `read_some` raises."""
        while view:
            view = view[await self.read_some(view, to_come=len(view)) :]

    async def write(self, data: memoryview | bytes) -> None:
        """Write all of some bytes, which must not change meanwhile.

        Raises:
            OSError: The connection has broken.
        """
        view = memoryview(data)
        for start in range(0, len(view), _TURN_BYTES):
            piece = view[start : start + _TURN_BYTES]
            while piece:
                piece = piece[await self._done(partial(self._socket.send, piece)) :]
            await asyncio.sleep(0)

    async def _done(self, action: Callable[[], T]) -> T:
        """Return what an action returns, once the connection is ready for it."""
        while True:
            try:
                return action()
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def _ready(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        """Wait until the connection can be read or written."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise ConnectionAbortedError("this end has closed the connection")
        waiting: asyncio.Future[None] = self._loop.create_future()
        add(descriptor, _wake, waiting)
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)
            if self._socket.fileno() == descriptor:
                remove(descriptor)

    def close(self) -> None:
        """End both directions. Those who wait for one get an OSError."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._socket.close()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(ConnectionAbortedError("this end has closed the connection"))


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)
