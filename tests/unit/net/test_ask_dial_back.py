"""Dialling a node back: what is found, in words for its operator, and that few dials do."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from unittest.mock import AsyncMock, patch

import pytest

from decod.ids import NodeId, RunId
from decod.net import ask as module
from decod.net.ask import DialBack, Dialled
from decod.net.net_limits import Limits
from decod.net.server import PeerServer
from tests.support.peers import ALICE, BOB, MEMBERS, RUN, Host, Pair, with_pair
from tests.waiting import wait_until

BOBS = Dialled(start=MEMBERS[BOB].host.start)
LIMITS = Limits(dial_timeout_s=0.3, dials_max=2)


def with_dials(test: Callable[[Pair, DialBack], Awaitable[None]], limits: Limits = LIMITS) -> None:
    """Runs a test with Bob, who may be dialled, and Alice's means to do it."""

    async def run(both: Pair) -> None:
        dial_back = DialBack(RUN, MEMBERS[ALICE], limits)
        try:
            await test(both, dial_back)
        finally:
            await dial_back.close()

    with_pair(run)


def test_a_node_is_found_where_it_is() -> None:
    async def test(both: Pair, dial_back: DialBack) -> None:
        assert await dial_back.dial(BOB, both.address) == BOBS

    with_dials(test)


def test_another_node_is_told_from_the_one_that_is_meant() -> None:
    async def test(both: Pair, dial_back: DialBack) -> None:
        meant = NodeId("m" * 52)
        assert await dial_back.dial(meant, both.address) == Dialled("another node answers there")

    with_dials(test)


def test_a_node_of_another_run_is_told() -> None:
    async def test(both: Pair, dial_back: DialBack) -> None:
        other = PeerServer(MEMBERS[BOB], RunId("x" * 26), Host())
        port = await other.start("127.0.0.1", 0)
        found = await dial_back.dial(BOB, f"127.0.0.1:{port}")
        assert found == Dialled("a node of another run, or another release, answers there")
        await other.stop(None)

    with_dials(test)


def test_nobody_and_a_silent_listener_are_told() -> None:
    async def test(both: Pair, dial_back: DialBack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            silent = await dial_back.dial(BOB, f"127.0.0.1:{port}")
        assert silent is not None
        assert silent.unreached.startswith("no answer within 0.3 s, so a firewall")
        assert await dial_back.dial(ALICE, f"127.0.0.1:{port}") == Dialled("nobody listens there")

    with_dials(test)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (socket.gaierror(-2, "Name or service not known"), "that name is unknown"),
        (OSError(113, "No route to host"), "the system says: No route to host"),
    ],
)
def test_what_the_system_says_is_told(
    monkeypatch: pytest.MonkeyPatch, error: OSError, told: str
) -> None:
    async def connect(_address: str) -> None:
        raise error

    async def test(both: Pair, dial_back: DialBack) -> None:
        monkeypatch.setattr(module, "_connect", connect)
        assert await dial_back.dial(BOB, both.address) == Dialled(told)

    with_dials(test)


def test_who_was_found_is_not_dialled_again_for_a_while_and_who_was_not_is() -> None:
    async def test(both: Pair, dial_back: DialBack) -> None:
        for _ in range(3):
            assert await dial_back.dial(BOB, both.address) == BOBS
        assert len(both.bob.hellos) == 1
        connect = AsyncMock()
        with patch.object(module, "_connect", connect):
            for _ in range(3):
                assert await dial_back.dial(ALICE, both.address) == Dialled(
                    "another node answers there"
                )
        assert connect.await_count == 3

    with_dials(test)


def test_another_start_of_the_daemon_than_the_one_that_was_found_is_looked_for_at_once() -> None:
    async def test(both: Pair, dial_back: DialBack) -> None:
        for start, num_dials in ((0, 1), (BOBS.start, 1), (BOBS.start + 1, 2)):
            assert await dial_back.dial(BOB, both.address, start) == BOBS
            assert len(both.bob.hellos) == num_dials

    with_dials(test)


def test_who_was_found_is_dialled_anew_and_told_of_a_twin() -> None:
    async def test(both: Pair, dial_back: DialBack) -> None:
        await dial_back.dial(BOB, both.address)
        for told in ("", "h:2"):
            assert await dial_back.dial_anew(BOB, both.address, told) == BOBS
        assert [each.twin_address for each in both.bob.hellos] == ["", "", "h:2"]

    with_dials(test)


def test_who_asks_at_the_same_time_shares_a_dial_and_may_give_up() -> None:
    async def test(both: Pair, dial_back: DialBack) -> None:
        first, second = (asyncio.create_task(dial_back.dial(BOB, both.address)) for _ in "ab")
        await asyncio.sleep(0)
        first.cancel()
        assert await second == BOBS
        assert len(both.bob.hellos) == 1

    with_dials(test)


def test_the_oldest_dial_gives_way_to_another() -> None:
    """Or addresses that swallow everything would keep all others out."""

    async def test(both: Pair, dial_back: DialBack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            strangers = [
                asyncio.create_task(dial_back.dial(NodeId(letter * 52), address)) for letter in "xy"
            ]
            await wait_until(lambda: len(dial_back._dials) == 2)
            assert await dial_back.dial(BOB, both.address) == BOBS
            assert await strangers[0] is None
            assert not strangers[1].done()
            assert len(dial_back._dials) == 1

    with_dials(test, Limits(dial_timeout_s=10, dials_max=2))
