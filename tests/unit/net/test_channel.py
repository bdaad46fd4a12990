"""Why a call failed, in words for people, whatever gRPC says."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from decod.errors import NetworkError
from decod.net import channel
from decod.net.ask import HelloRequest, hello
from decod.net.channel import failed_call, reason_of
from decod.net.client import PeerClient
from decod.protocol.core.messages import Ping
from tests.support.peers import ALICE, BOB, MEMBERS, RUN, Host, open_to
from tests.waiting import wait_until

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def speak_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()
    writer.close()


async def failure_at(address: str, *, timeout_s: float = 5.0) -> grpc.aio.AioRpcError:
    async with open_to(address) as opened:
        call = opened.unary_unary("/decod/Nothing", channel.as_is, channel.as_is)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=timeout_s)
    return caught.value


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (hang_up, "the connection broke"),
        (reset, "the connection broke"),
        (speak_http, "what listens there is no decod node"),
    ],
)
def test_a_peer_that_breaks_off_is_told_in_a_few_words(peer: Peer, expected: str) -> None:
    async def main() -> None:
        async with await asyncio.start_server(peer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            error = await failure_at(f"127.0.0.1:{port}", timeout_s=2.0)
        assert reason_of(error) == expected

    asyncio.run(main())


@pytest.mark.parametrize(
    ("listens", "expected"), [(False, "nobody listens there"), (True, "no answer in time")]
)
def test_a_peer_that_is_not_there_is_told_from_one_that_is_silent(
    listens: bool, expected: str
) -> None:
    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            if listens:
                other.listen()
            address = f"127.0.0.1:{other.getsockname()[1]}"
            assert reason_of(await failure_at(address, timeout_s=1.0)) == expected

    asyncio.run(main())


def test_a_node_of_another_release_is_told_apart() -> None:
    async def main() -> None:
        server = grpc.aio.server()
        credentials = channel.server_credentials(lambda: MEMBERS[BOB].tls)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        error = await failure_at(f"127.0.0.1:{port}")
        await server.stop(0)
        assert reason_of(error) == "what listens there is no decod node, or of another release"

    asyncio.run(main())


def error_with(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=details)


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (
            "errors resolving h:1: [field:hostname lookup error:address lookup failed for h:1: "
            "Domain name not found]",
            "its host name is not known",
        ),
        (
            "failed to connect to all addresses; last error: FAILED_PRECONDITION: "
            "ipv4:1.2.3.4:7700: connect failed: Network is unreachable",
            "there is no way to it from here",
        ),
        ("GOAWAY received", "the connection broke"),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:54931: "
            "Handshake read failed (Endpoint closing)",
            "no answer in time",
        ),
        ("", "unavailable"),
    ],
)
def test_other_reasons_are_in_words_too(details: str, expected: str) -> None:
    assert reason_of(error_with(grpc.StatusCode.UNAVAILABLE, details)) == expected


def test_a_reason_that_nobody_has_thought_of_is_not_cut_within_a_word() -> None:
    details = "failed to connect to all addresses; last error: " + "gremlins in the wire " * 20
    text = reason_of(error_with(grpc.StatusCode.INTERNAL, details))
    assert text.startswith("internal: gremlins in the wire")
    assert len(text) <= 120
    words = text.removesuffix("...").split()
    assert words[-1] in ("gremlins", "in", "the", "wire")
    error = failed_call("h:1", error_with(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    assert error.why == "no answer in time"


def test_who_sends_and_who_asks_hear_the_same_words() -> None:
    async def main() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(NetworkError, match=f"no answer from {address}: nobody listens there"):
            await hello(address, HelloRequest(), MEMBERS[ALICE])
        alice = Host()
        client = PeerClient(MEMBERS[ALICE], RUN, alice)
        client.set_address(BOB, address)
        client.send(BOB, 1, Ping(1))
        await wait_until(lambda: bool(alice.failed))
        assert alice.failed[0][3] == "nobody listens there"
        await client.close()

    asyncio.run(main())
