"""A node that is out of its run for a while: what it answers, and how that ends."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from decod.daemon import life as module
from decod.daemon.control import ask
from decod.daemon.host import LeftEarlyError
from decod.daemon.life import Life
from decod.errors import ConfigError, DecodError, NetworkError, RejectedError
from decod.net.channel import banned
from decod.protocol.core.effects import Stop, StopReason
from decod.tasks import LONGEST_S, Backoff
from tests.unit.daemon.nodes import make_node

UNREACHABLE = NetworkError("no answer from h:1", why="refused", fix="wait")
REFUSED = RejectedError("h:1 belongs to another run", why="it was resumed", fix="ask")

Request = Callable[[str], Awaitable[dict[str, Any]]]


class AtOnce(Backoff):
    """Waits for nothing but other tasks."""

    def next_s(self) -> float:
        return 0.0


class Asleep(Backoff):
    """Looks for nothing while a test lasts."""

    def next_s(self) -> float:
        return 1000.0


def leave(
    folder: Path,
    test: Callable[[Request], Awaitable[None]],
    tries: list[DecodError | None],
    *,
    paused: bool = False,
    backoff: Backoff | None = None,
) -> tuple[str | None, list[str]]:
    """Returns what a node found again, None if it left, and what it said; a test asks it things.

    Args:
        tries: How each look for the run ends, first to last; None, and no more, finds it.
    """
    lines: list[str] = []

    async def seek() -> str:
        await asyncio.sleep(0)
        error = tries.pop(0) if tries else None
        if error is not None:
            raise error
        return "found"

    async def request(command: str) -> dict[str, Any]:
        question = {"command": command}
        return await asyncio.to_thread(ask, folder, question, timeout_s=10.0)

    async def within() -> str | None:
        with make_node(folder, leads=False) as node, node._leaving:
            life = Life(node._host, lines.append, rejoins=True)
            life._backoff = backoff or Asleep()
            reason = StopReason.PAUSED if paused else StopReason.REMOVED
            async with node._host.tended():
                await life.ended(node, Stop(reason, "its link was cut"), seek)
                lines.clear()
                waiting = asyncio.create_task(node._leaving.unless_asked(life.until_found()))
                await test(request)
                try:
                    return await waiting
                except LeftEarlyError:
                    return None

    return asyncio.run(within()), lines


async def nothing(_: Request) -> None:
    """Ask nothing."""


def test_it_says_that_it_is_paused_and_goes_back_when_the_run_is_found(tmp_path: Path) -> None:
    async def test(request: Request) -> None:
        status = await request("status")
        assert (status["state"], status["node"]["device_free"]) == ("paused", True)
        assert "decod resume" in status["message"]
        assert (await request("pause"))["device_free"] is True
        with pytest.raises(ConfigError, match=r"E-RUN-008 .* is paused with its device free"):
            await request("export")
        with pytest.raises(NetworkError, match="no answer"):
            await request("resume")
        assert (await request("status"))["state"] == "paused", "it goes on waiting"
        assert (await request("resume"))["paused"] is False

    assert leave(tmp_path, test, [UNREACHABLE], paused=True) == ("found", [])


def test_it_says_that_it_is_reconnecting_and_why(tmp_path: Path) -> None:
    async def test(request: Request) -> None:
        status = await request("status")
        assert status["state"] == status["run_state"] == status["node"]["state"] == "reconnecting"
        assert status["message"] == "out of the run: its link was cut"
        with pytest.raises(ConfigError, match=r"E-RUN-008 .* is reconnecting"):
            await request("export")
        assert (await request("resume"))["paused"] is False, "at once, and not in 1000 s"

    found, lines = leave(tmp_path, test, [])
    assert found == "found"
    assert lines == ["out of the run (its link was cut): looking for it in 1000 s"]


def test_a_node_that_is_banned_while_it_is_paused_shows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> str:
        raise banned("banned by calm-crane for ever: it lies")

    monkeypatch.setattr(module, "ask_status", refuse)

    async def test(request: Request) -> None:
        status = await request("status")
        assert status["state"] == "paused"
        assert "calm-crane for ever: it lies" in status["message"]
        await request("resume")

    leave(tmp_path, test, [], paused=True)


def test_it_can_be_paused_while_it_reconnects(tmp_path: Path) -> None:
    async def test(request: Request) -> None:
        await request("pause")
        assert (await request("status"))["state"] == "paused"
        await request("resume")

    assert leave(tmp_path, test, [])[0] == "found"


@pytest.mark.parametrize("how", ["drain", "signal"])
@pytest.mark.parametrize("paused", [True, False])
def test_it_ends_when_it_is_asked_to_leave(tmp_path: Path, how: str, *, paused: bool) -> None:
    async def test(request: Request) -> None:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            assert (await request("drain"))["draining"] is True

    assert leave(tmp_path, test, [], paused=paused)[0] is None
    assert not (tmp_path / "decod.sock").exists()


def test_it_looks_until_the_run_is_found_and_says_what_is_in_the_way(tmp_path: Path) -> None:
    tries: list[DecodError | None] = [UNREACHABLE, UNREACHABLE, REFUSED, UNREACHABLE]
    found, lines = leave(tmp_path, nothing, tries, backoff=AtOnce())
    assert (found, tries) == ("found", [])
    assert len(lines) == 5
    assert "no answer from h:1: refused" in lines[1]
    assert "belongs to another run: it was resumed" in lines[3]


def test_a_refusal_that_lasts_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_S", 0.0)
    with pytest.raises(RejectedError, match="another run"):
        leave(tmp_path, nothing, [UNREACHABLE, REFUSED], backoff=AtOnce())


def test_what_no_wait_can_mend_is_the_end(tmp_path: Path) -> None:
    copied = ConfigError("the leader has this node's identity", why="it was copied", fix="another")
    with pytest.raises(ConfigError, match="copied"):
        leave(tmp_path, nothing, [copied], backoff=AtOnce())


def test_pauses_grow_to_a_limit_and_differ_between_hosts() -> None:
    first, second = Backoff(random.Random(1)), Backoff(random.Random(2))
    lengths_s = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S, LONGEST_S]
    pauses = [(first.next_s(), second.next_s()) for _ in lengths_s]
    for length_s, both in zip(lengths_s, pauses, strict=True):
        assert all(length_s / 2 <= pause_s <= length_s for pause_s in both)
        assert both[0] != both[1]
    first.reset()
    assert first.next_s() <= 1.0
