"""What a service manager hears: a stand-in speaks its side of the protocol."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from decod.daemon.frontend import Notifier
from tests.support.systems import linux_alone
from tests.unit.daemon.nodes import give_driver, make_node
from tests.waiting import wait_until

RUNS_WATCHED = {"WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.setblocking(False)
        yield listener


def heard(listener: socket.socket) -> list[list[str]]:
    """Returns all messages that have come, each as its lines."""
    messages = []
    while True:
        try:
            messages.append(listener.recv(4096).decode().split("\n"))
        except BlockingIOError:
            return messages


class Daemon:
    """What is told of a daemon."""

    def __init__(self) -> None:
        self.leaving = asyncio.Event()
        self.healthy = True

    def describe(self) -> str:
        return "training, stage 1, iteration 12"


async def tell(
    environment: dict[str, str], daemon: Daemon, num_messages: int, listener: socket.socket
) -> list[list[str]]:
    """Returns what the manager hears until there are so many messages."""
    telling = asyncio.create_task(
        Notifier(environment).keep_telling(daemon.describe, lambda: daemon.healthy, daemon.leaving)
    )
    messages = list[list[str]]()

    def enough() -> bool:
        messages.extend(heard(listener))
        return len(messages) >= num_messages

    await wait_until(enough)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    return messages


@pytest.mark.parametrize("abstract", [pytest.param(True, marks=linux_alone), False])
def test_a_manager_hears_that_the_daemon_is_ready_once(tmp_path: Path, *, abstract: bool) -> None:
    name = f"@decod-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": name, "OTHER": "stays"}
    with manager("\0" + name[1:] if abstract else name) as listener:
        notifier = Notifier(environment)
        notifier.ready()
        notifier.ready()
        assert heard(listener) == [["READY=1"]]
    assert environment == {"OTHER": "stays"}, "it is not for the compute process"
    notifier.ready()


async def test_a_daemon_is_said_to_be_well_only_while_it_is(tmp_path: Path) -> None:
    name = str(tmp_path / "notify")
    daemon = Daemon()
    with manager(name) as listener:
        well = await tell({"NOTIFY_SOCKET": name, **RUNS_WATCHED}, daemon, 3, listener)
        status = "STATUS=training, stage 1, iteration 12"
        assert well == [[status, "WATCHDOG=1"]] * len(well)
        daemon.healthy = False
        ill = await tell({"NOTIFY_SOCKET": name, **RUNS_WATCHED}, daemon, 3, listener)
        assert ill == [[status]] * len(ill)
        daemon.leaving.set()
        leaves = await tell({"NOTIFY_SOCKET": name, **RUNS_WATCHED}, daemon, 2, listener)
        assert leaves[0] == [status, "STOPPING=1"]


@pytest.mark.parametrize(
    ("environment", "interval_s"),
    [
        ({}, 10.0),
        ({"WATCHDOG_USEC": "6000000"}, 2.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
        ({"WATCHDOG_USEC": "6000000", "WATCHDOG_PID": "1"}, 10.0),
        ({"WATCHDOG_USEC": "soon"}, 10.0),
    ],
)
def test_the_manager_says_how_often_it_wants_to_hear(
    environment: dict[str, str], interval_s: float
) -> None:
    assert Notifier(environment).interval_s == interval_s
    assert environment == {}


def test_without_a_manager_nothing_is_said() -> None:
    notifier = Notifier({})
    notifier.ready()
    asyncio.run(notifier.keep_telling(lambda: "", lambda: True, asyncio.Event()))


async def test_a_node_whose_core_is_not_stepped_is_not_well(tmp_path: Path) -> None:
    with make_node(tmp_path, leads=False) as node:
        assert node.healthy, "it has no core yet"
        assert node.describe() == "starting, iteration 0"
        now_s = asyncio.get_running_loop().time()
        facts = SimpleNamespace(deadline_s=now_s - 1.0)
        stopped = asyncio.get_running_loop().create_future()
        give_driver(node, SimpleNamespace(facts=facts, stopped=stopped))
        assert node.healthy, "a busy host is late"
        facts.deadline_s = now_s - 60.0
        assert not node.healthy
        stopped.set_result(None)
        assert node.healthy, "there is nothing to do"
