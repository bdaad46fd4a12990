"""decod without TLS, to see what TLS costs. Nothing else may use it: callers prove nothing.

    python -m bench.plaintext leader run.toml ...

A caller shows its certificate as text, in a header that gRPC sends once for each connection. So
roles and ids are known as with TLS, and all other code is the same.
"""

import sys
from base64 import b64encode
from typing import Any

import grpc
import grpc.aio
from grpc.aio._server import Server

from decod.membership.certificates import Caller, first_of
from decod.net import door


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
    # Others have imported the function already.
    door.caller_in.__code__ = _caller_in.__code__


def _caller_in(context: Any) -> Caller | None:
    from base64 import b64decode

    from decod.membership.certificates import caller_of

    headers = dict(context.invocation_metadata())
    return caller_of(b64decode(headers["user-agent"].partition(" ")[0]))


if __name__ == "__main__":
    take_off_tls()
    from decod.cli.main import main

    sys.exit(main())
