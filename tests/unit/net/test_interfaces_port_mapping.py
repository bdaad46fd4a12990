"""A router is asked to map a port, again and again, and once more to remove it."""

import asyncio
import sys
import threading
from typing import Any

import pytest

from decod.net import interfaces
from decod.net.interfaces import LEASE_S, PortMapper, find_router
from tests.waiting import wait_until

PORT = 7700


class FakeRouter:
    """Maps every port, unless it has something to say against it."""

    def __init__(self, refusal: str | bool = "") -> None:
        self.lanaddr = "192.168.1.2"
        self.refusal = refusal
        self.asked: list[tuple[Any, ...]] = []
        self.removed: list[tuple[Any, ...]] = []

    def addportmapping(self, *args: Any) -> bool:
        if isinstance(self.refusal, str) and self.refusal:
            raise Exception(self.refusal)  # noqa: TRY002 - as the library does.
        self.asked.append(args)
        return not self.refusal

    def deleteportmapping(self, *args: Any) -> bool:
        self.removed.append(args)
        return True


def test_a_port_is_mapped_for_both_protocols_and_removed_at_the_end() -> None:
    router = FakeRouter()

    async def test() -> None:
        async with PortMapper(lambda: router) as mapper:
            assert await mapper.map(PORT) == ""
            assert not router.removed
        assert router.removed == [(PORT, "TCP"), (PORT, "UDP")]

    asyncio.run(test())
    assert router.asked == [
        (PORT, protocol, "192.168.1.2", PORT, "decod", "", LEASE_S) for protocol in ("TCP", "UDP")
    ]


def test_a_mapping_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    router = FakeRouter()
    monkeypatch.setattr(interfaces, "LEASE_S", 0.02)

    async def test() -> None:
        async with PortMapper(lambda: router) as mapper:
            await mapper.map(PORT)
            await wait_until(lambda: len(router.asked) >= 6)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("no router answers to UPnP", "no router answers to UPnP"),
        (FakeRouter("Conflict\x1b[31mInMapping"), "the router says: Conflict"),
        (FakeRouter(refusal=True), "the router refuses port 7700"),
    ],
)
def test_a_router_that_maps_nothing_is_told_of_and_left_alone(found: Any, reason: str) -> None:
    async def test() -> None:
        async with PortMapper(lambda: found) as mapper:
            told = await mapper.map(PORT)
            assert told.startswith(reason)
            assert "\x1b" not in told

    asyncio.run(test())
    assert not getattr(found, "removed", [])


def test_a_router_that_never_answers_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, ended = FakeRouter(), threading.Event()
    monkeypatch.setattr(interfaces, "_ANSWER_S", 0.1)

    async def test() -> None:
        async with PortMapper(lambda: router) as mapper:
            assert await mapper.map(PORT) == ""
            monkeypatch.setattr(router, "deleteportmapping", lambda *_: ended.wait(60.0))
        monkeypatch.setattr(router, "addportmapping", lambda *_: ended.wait(60.0))
        async with PortMapper(lambda: router) as mapper:
            assert "does not answer" in await mapper.map(PORT)

    try:
        asyncio.run(test())
    finally:
        ended.set()


def test_without_the_library_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "miniupnpc", None)
    assert "`nat`" in str(find_router())
