"""The daemon's event loop counts only time in which this process ran."""

import asyncio
import socket
import time
from collections.abc import Callable

import pytest

from decod.driver.event_loop import LATE_MAX_S, WAIT_MAX_S, RunningClock, RunningLoop, run_loop


class Clock:
    """A monotonic clock that a test sets forward."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_clock_shows_time_as_it_passes_while_the_loop_turns() -> None:
    real = Clock()
    clock = RunningClock(real)
    assert clock() == 1000.0
    clock.grant(0.3)
    real.now_s += 0.3
    assert clock() == pytest.approx(1000.3)
    clock.grant(0.0)
    real.now_s += 0.02
    assert clock() == pytest.approx(1000.32)


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_what_goes_beyond_the_wait_that_was_asked_for_does_not_count(wait_s: float) -> None:
    real = Clock()
    clock = RunningClock(real)
    clock.grant(wait_s)
    real.now_s += 600.0
    assert clock() == pytest.approx(1000.0 + wait_s + LATE_MAX_S)
    real.now_s += 600.0
    assert clock() == pytest.approx(1000.0 + wait_s + LATE_MAX_S), "not twice in one turn"
    clock.grant(0.0)
    real.now_s += 0.05
    assert clock() == pytest.approx(1000.0 + wait_s + LATE_MAX_S + 0.05)


def test_many_short_looks_in_one_turn_count_no_more_than_one_long() -> None:
    real = Clock()
    clock = RunningClock(real)
    clock.grant(0.0)
    for _ in range(100):
        real.now_s += 0.01
        clock()
    assert clock() == pytest.approx(1000.0 + LATE_MAX_S)


def after(loop: asyncio.AbstractEventLoop, delay_s: float, seen: list[str], name: str) -> None:
    loop.call_later(delay_s, seen.append, name)


def test_a_blocked_loop_reads_what_has_come_before_its_timers_pass() -> None:
    """A timeout of a second, and an answer that came in the first moments of a stall of ten."""
    real, seen = Clock(), list[str]()
    loop = RunningLoop(real)
    try:
        here, there = _pipe(loop, lambda: seen.append("answer"))
        after(loop, 1.0, seen, "timeout")
        there.send(b"x")
        real.now_s += 10.0  # A callback that takes so long, or the process was stopped.
        _turn(loop)
        assert seen == ["answer"]
        for _ in range(int(1.0 / LATE_MAX_S) + 1):
            real.now_s += LATE_MAX_S
            _turn(loop)
        assert seen == ["answer", "timeout"]
        loop.remove_reader(here)
        here.close()
        there.close()
    finally:
        loop.close()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon(loop.stop)
    loop.run_forever()


def _pipe(
    loop: asyncio.AbstractEventLoop, read: Callable[[], None]
) -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair()

    def ready() -> None:
        here.recv(1)
        read()

    loop.add_reader(here, ready)
    return here, there


def test_timers_are_on_time_while_nothing_holds_the_loop_up() -> None:
    """Longer than the longest wait of one turn."""
    delay_s = 1.5 * WAIT_MAX_S

    async def wait() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        start_s, real_s = loop.time(), time.monotonic()
        passed = loop.create_future()
        loop.call_later(delay_s, passed.set_result, None)
        await passed
        return loop.time() - start_s, time.monotonic() - real_s

    shown_s, real_s = run_loop(wait())
    assert delay_s <= shown_s <= real_s + 1e-6


def test_a_coroutine_runs_in_it_as_in_any_loop() -> None:
    async def main() -> str:
        assert isinstance(asyncio.get_running_loop(), RunningLoop)
        process = await asyncio.create_subprocess_exec("true")
        return f"exit code {await process.wait()}"

    assert run_loop(main()) == "exit code 0"


def test_a_loop_knows_for_how_long_its_process_did_not_run() -> None:
    real = Clock()
    loop = RunningLoop(real)
    try:
        real.now_s += 0.05
        _turn(loop)
        assert loop.lost_s == pytest.approx(0.0)
        real.now_s += 20.0
        _turn(loop)
        assert loop.lost_s == pytest.approx(20.0, abs=2 * LATE_MAX_S)
    finally:
        loop.close()
