"""Connections of strangers are counted, and those of members are not."""

import socket
from contextlib import suppress

from decod.cli.status_view import refusal_lines
from decod.protocol.core import messages as m
from decod.tasks import in_thread
from tests.support.peers import BOB, Pair, with_pair
from tests.waiting import wait_until


def test_a_server_counts_those_who_do_not_prove_who_they_are() -> None:
    def knock(address: str) -> None:
        host, _, port = address.rpartition(":")
        for text in (b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01" + b"x" * 60, b""):
            with suppress(OSError), socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(text)

    async def test(both: Pair) -> None:
        both.client.send(BOB, 1, m.Ping(1))
        await wait_until(lambda: both.bob.received)
        await in_thread(lambda: knock(both.address))
        counters = both.server.counters
        await wait_until(lambda: counters.total("connection.refused") == 3)
        (line,) = refusal_lines(counters.totals())
        assert "somebody knocks" in line.plain
        assert "3 connections without a certificate of this run" in line.plain

    with_pair(test)


def test_the_line_names_both_kinds_and_is_absent_without_them() -> None:
    assert refusal_lines({}) == []
    assert refusal_lines({"connection.refused": 0, "message.malformed": 3}) == []
    (line,) = refusal_lines({"connection.refused": 1, "caller.refused": 2_000})
    assert line.plain == (
        "somebody knocks; refused since this node began: 1 connection without a certificate of "
        "this run, 2,000 calls that its caller may not make"
    )
