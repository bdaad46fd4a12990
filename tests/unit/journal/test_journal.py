"""All who follow a journal get its entries, and a disk never makes a node wait."""

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from decod.journal.journal import Journal, JournalEntry, Outage, Spool
from tests.waiting import wait_until


class Memory:
    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []

    def take(self, entry: JournalEntry) -> None:
        self.entries.append(entry)


def test_each_view_gets_each_record_in_order() -> None:
    first, second = Memory(), Memory()
    journal = Journal(first)
    journal.note("node.started", node_id="a")
    journal.follow(second)
    journal.note("step.committed", iteration="1.1")
    assert [entry.event for entry in first.entries] == ["node.started", "step.committed"]
    assert second.entries == first.entries[1:]
    assert first.entries[0].fields == {"node_id": "a"}
    assert first.entries[0].now_s <= first.entries[1].now_s


class Disk:
    """Takes numbers, unless it is full, or hangs."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.outages: list[Outage] = []
        self.is_full = self.is_closed = False
        self.free = threading.Event()
        self.free.set()

    def write(self, items: Sequence[int], outage: Outage) -> None:
        self.free.wait(30.0)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += items
        if outage:
            self.outages.append(outage)

    def close(self) -> None:
        self.is_closed = True

    def spool(self, waiting_max: int = 100) -> Spool[int]:
        return Spool(self.write, self.close, waiting_max=waiting_max, retry_s=0.01)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def test_what_comes_is_written_in_its_order_before_the_end() -> None:
    disk = Disk()

    async def test() -> None:
        spool = disk.spool()
        spool.add(0)
        async with spool:
            for number in range(1, 100):
                spool.add(number)

    run(test)
    assert disk.written == list(range(100))
    assert disk.is_closed
    assert not disk.outages


def test_a_full_disk_is_told_once_and_tried_again() -> None:
    """What comes meanwhile waits, and what there is no room for is counted."""
    disk, failed, restored = Disk(), list[Outage](), list[Outage]()

    async def test() -> None:
        spool = disk.spool(waiting_max=3)
        spool.on_failed.append(failed.append)
        spool.on_restored.append(restored.append)
        disk.is_full = True
        async with spool:
            for number in range(5):
                spool.add(number)
            await wait_until(lambda: failed)
            spool.add(5)
            disk.is_full = False
            await wait_until(lambda: restored)
            spool.add(6)
            await wait_until(lambda: not spool.num_waiting)

    run(test)
    assert disk.written == [0, 1, 2, 6]
    assert [outage.reason for outage in failed] == ["No space left on device"]
    assert [outage.num_lost for outage in restored] == [3]
    assert disk.outages == restored


def test_a_disk_that_hangs_holds_nobody_up() -> None:
    disk = Disk()

    async def test() -> None:
        disk.free.clear()
        spool = disk.spool(waiting_max=50)
        async with spool:
            for number in range(1000):
                spool.add(number)
                await asyncio.sleep(0)
            disk.free.set()

    run(test)
    assert disk.written == list(range(50))
    assert sum(outage.num_lost for outage in disk.outages) == 950


def test_a_disk_that_always_fails_does_not_keep_a_node_from_ending() -> None:
    disk = Disk()
    disk.is_full = True

    async def test() -> None:
        async with disk.spool() as spool:
            spool.add(1)

    run(test)
    assert not disk.written
