"""decod without TLS, to see what TLS costs. Nothing else may use it: callers prove nothing.

    python -m bench.plaintext leader run.toml ...

A caller shows its certificate as text: in a header that gRPC sends once for each connection, and at
the beginning of connections for tensors. So roles and ids are known as with TLS, and all other code
is the same.
"""

import socket
import ssl
import sys
from base64 import b64encode
from typing import Any

import grpc
import grpc.aio
from grpc.aio._server import Server
from typing_extensions import override

from decod.membership.certificates import Caller, first_of
from decod.net import door, front_door, tensor_intake, tensor_stream
from decod.net.tls_pipe import TlsPipe


def take_off_tls() -> None:
    """Make all further connections of this process without TLS, in place."""
    anything: Any = grpc
    server_of: Any = Server

    def chain_of(anchors: bytes, key: bytes, chain: bytes) -> bytes:  # noqa: ARG001
        return chain

    def open_plain(address: str, chain: bytes, options: Any) -> grpc.aio.Channel:
        shown = ("grpc.primary_user_agent", b64encode(first_of(chain)).decode())
        return grpc.aio.insecure_channel(address, options=[*options, shown])

    def listen(server: Any, address: str, credentials: object) -> int:  # noqa: ARG001
        return int(server.add_insecure_port(address))

    anything.ssl_channel_credentials = chain_of
    anything.aio.secure_channel = open_plain
    server_of.add_secure_port = listen
    # HTTP/2 begins with PRI.
    front_door._CALLS = b"P"
    sender: Any = tensor_stream
    receiver: Any = tensor_intake
    sender.TlsPipe = receiver.TlsPipe = _Pipe
    sender.client_context = lambda shown: _Shown(first_of(shown.chain))
    receiver.server_context = lambda _: _Shown(b"")
    # Others have imported the function already.
    door.caller_in.__code__ = _caller_in.__code__


class _Shown:
    """Stands for TLS in a pipe."""

    def __init__(self, certificate: bytes) -> None:
        self.certificate = certificate

    def wrap_socket(self, connection: socket.socket, **_: object) -> "_Socket":
        return _Socket(connection, self.certificate)


class _Socket:
    """A socket that says in TLS's words that it is not ready."""

    def __init__(self, connection: socket.socket, certificate: bytes) -> None:
        self.certificate = certificate
        self.fileno, self.close = connection.fileno, connection.close
        self._connection = connection

    def recv_into(self, view: memoryview) -> int:
        try:
            return self._connection.recv_into(view)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None

    def send(self, view: memoryview) -> int:
        try:
            return self._connection.send(view)
        except BlockingIOError:
            raise ssl.SSLWantWriteError from None


class _Pipe(TlsPipe):
    @override
    async def shake_hands(self) -> bytes:
        shown: Any = self._socket
        size = memoryview(bytearray(2))
        if shown.certificate:
            await self.write(len(shown.certificate).to_bytes(2) + shown.certificate)
            return b""
        await self.read(size)
        found = memoryview(bytearray(int.from_bytes(size)))
        await self.read(found)
        return bytes(found)


def _caller_in(context: Any) -> Caller | None:
    from base64 import b64decode

    from decod.membership.certificates import caller_of

    if not hasattr(context, "invocation_metadata"):
        return caller_of(context.certificate)
    headers = dict(context.invocation_metadata())
    return caller_of(b64decode(headers["user-agent"].partition(" ")[0]))


if __name__ == "__main__":
    take_off_tls()
    from decod.cli.main import main

    sys.exit(main())
