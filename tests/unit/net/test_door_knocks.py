"""Connections of strangers are counted, and those of members are not."""

import socket
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from decod.cli.status_view import refusal_lines
from decod.net.door import Knocks
from decod.net.net_limits import Limits
from decod.protocol.core import messages as m
from decod.tasks import in_thread
from tests.support.peers import BOB, Pair, with_pair
from tests.waiting import wait_until

PATIENCE_S = 10.0


@dataclass
class Bench:
    now_s: float = 100.0
    refused: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.knocks = Knocks(lambda: self.now_s, PATIENCE_S, self.refused.append)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_connection_without_a_call_counts_when_its_time_is_over(bench: Bench) -> None:
    bench.knocks.begin()
    bench.knocks.begin()
    bench.now_s += PATIENCE_S - 1
    bench.knocks.settle()
    assert bench.refused == []
    bench.knocks.begin()
    bench.now_s += 1
    bench.knocks.settle()
    assert bench.refused == [2]
    bench.now_s += PATIENCE_S
    bench.knocks.settle()
    assert bench.refused == [2, 1]


def test_one_connection_is_heard_of_once_however_often_it_calls(bench: Bench) -> None:
    bench.knocks.begin()
    bench.knocks.begin()
    for _ in range(5):
        bench.knocks.hear("ipv4:10.0.0.9:5000")
    bench.now_s += PATIENCE_S
    bench.knocks.settle()
    assert bench.refused == [1]
    # A long time later, another connection may have the same port.
    bench.knocks.begin()
    bench.now_s += 61.0 - PATIENCE_S
    bench.knocks.hear("ipv4:10.0.0.9:5000")
    bench.now_s += PATIENCE_S
    bench.knocks.settle()
    assert bench.refused == [1]


def test_a_flood_takes_no_memory_without_end(bench: Bench) -> None:
    for _ in range(25_000):
        bench.knocks.begin()
    bench.knocks.settle()
    assert sum(bench.refused) == 15_000


def test_a_server_counts_those_who_do_not_prove_who_they_are() -> None:
    limits = Limits(handshake_timeout_s=1.0, room_interval_s=0.1)

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

    with_pair(test, limits)


def test_the_line_names_both_kinds_and_is_absent_without_them() -> None:
    assert refusal_lines({}) == []
    assert refusal_lines({"connection.refused": 0, "message.malformed": 3}) == []
    (line,) = refusal_lines({"connection.refused": 1, "caller.refused": 2_000})
    assert line.plain == (
        "somebody knocks; refused since this node began: 1 connection without a certificate of "
        "this run, 2,000 calls that its caller may not make"
    )
