"""Signals that ask a daemon to leave: what each of them does, and when."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from decod.daemon import host as module
from decod.daemon.host import Leaving, LeftEarlyError, run_until_left
from decod.process import LEAVE_SIGNALS
from tests.waiting import wait_until


class AtOnce(BaseException):
    """Stands in for the end of the process."""


def heed(
    test: Callable[[Leaving], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[int]]:
    """Returns what a daemon says, and the exit codes with which it ends at once."""
    lines, codes = list[str](), list[int]()
    monkeypatch.setattr(module.os, "_exit", codes.append)

    async def work() -> None:
        with Leaving(lines.append) as leaving:
            await test(leaving)

    asyncio.run(work())
    return lines, codes


@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_every_signal_asks_to_leave(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    async def test(leaving: Leaving) -> None:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            await leaving.asked.wait()

    lines, codes = heed(test, monkeypatch)
    assert lines == ["finishing what is in hand; press Ctrl-C again to stop at once"]
    assert codes == []


def test_only_a_second_urgent_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[bool] = []

    async def test(leaving: Leaving) -> None:
        leaving.kills(lambda: killed.append(True))
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            leaving._signalled(number)
        leaving._signalled(signal.SIGINT)
        assert not killed, "wrappers such as `timeout` may pass one signal on twice"
        monkeypatch.setattr(leaving, "_urgent_s", leaving._urgent_s - 0.5)
        os.kill(os.getpid(), signal.SIGINT)
        await wait_until(lambda: killed)

    lines, codes = heed(test, monkeypatch)
    assert lines[1:] == ["stopped at once"]
    assert codes == [130]


def test_under_nohup_a_closed_terminal_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(leaving: Leaving) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert not leaving.asked.is_set()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert heed(test, monkeypatch) == ([], [])


def test_work_is_given_up_when_there_is_nothing_to_leave_yet() -> None:
    cancelled, lines = list[bool](), list[str]()

    async def look() -> int:
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def command() -> int:
        with Leaving(lines.append) as leaving:
            assert await leaving.unless_asked(asyncio.to_thread(lambda: 7)) == 7
            with pytest.raises(ZeroDivisionError):
                await leaving.unless_asked(asyncio.to_thread(lambda: 1 // 0))
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(LeftEarlyError):
                await leaving.unless_asked(look())
            return await leaving.unless_asked(look())

    assert run_until_left(command(), lines.append) == 0
    assert cancelled == [True, True]
    assert lines[-1] == "left before anything had begun"


def test_a_signal_that_comes_late_changes_no_exit_code() -> None:
    async def ended() -> list[object]:
        with Leaving(print):
            pass
        return [signal.getsignal(number) for number in LEAVE_SIGNALS]

    assert asyncio.run(ended()) == [signal.SIG_IGN] * len(LEAVE_SIGNALS)
