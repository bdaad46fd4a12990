"""`decod top` on a real terminal (a pseudo-terminal), in front of a control socket that answers."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.cli.top_keys import TerminalKeys
from tests.support.fake_daemon import FakeDaemon, node, status_answer

TIMEOUT_S = 60.0

_ON_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'decod', *sys.argv[1:]])"
)
"""A program that takes its standard input as its controlling terminal, and becomes decod."""

LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


class Screen:
    """A terminal with `decod top` on it."""

    def __init__(self, state_dir: Path, *, width: int = 80, height: int = 24) -> None:
        self._master, self.slave = os.openpty()
        self.resize(width, height)
        self.settings = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, "top", "--state-dir", str(state_dir)],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "70", "LINES": "20"},
        )
        self.output = b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def until(self, text: str, *, since: int = 0) -> int:
        """Wait for a text among what was written after `since`; return where that output ends."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while text.encode() not in self.output[since:]:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, (text, self.output[-3000:])
            assert self._read(left_s), (text, self.output[-3000:])
        return len(self.output)

    def until_end(self) -> int:
        """Wait until the program ends; return its exit code, as `subprocess` does."""
        deadline_s = time.monotonic() + TIMEOUT_S
        # It can't end while nobody reads what it writes.
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        self.output += os.read(self._master, 1 << 16)
        return True


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    steps = [[i, 1e9 + 2 * i, 5.0 - i / 100, 1000.0] for i in range(1, 13)]
    fake.answers["history"] = {"generation": "a", "steps": steps}
    fake.answer = status_answer(num_iterations=100)
    yield fake
    fake.close()


@pytest.fixture
def screen(daemon: FakeDaemon, tmp_path: Path) -> Iterator[Screen]:
    shown = Screen(tmp_path)
    yield shown
    shown.close()


def assert_restored(screen: Screen) -> None:
    assert termios.tcgetattr(screen.slave) == screen.settings
    assert screen.output.index(LEAVE_SCREEN) > screen.output.index(b"run wiki")
    assert SHOW_CURSOR in screen.output


@pytest.mark.processes
def test_it_follows_the_run_and_the_terminals_size_and_quits(
    screen: Screen, daemon: FakeDaemon
) -> None:
    screen.until("iteration 12 of 100")
    assert not termios.tcgetattr(screen.slave)[3] & (termios.ECHO | termios.ICANON)
    daemon.answer = status_answer(num_iterations=100, iteration=13)
    seen = screen.until("about 2 min 54 s left")
    members = [node(f"relay-{i:03}") for i in range(199)]
    daemon.answer = status_answer(stages=[{"index": 1, "nodes": members}])
    seen = screen.until("of 199 members", since=seen)
    # Rich alone would go by COLUMNS and LINES.
    screen.resize(40, 12)
    seen = screen.until("1-4 of 199 members", since=seen)
    screen.press(b"\x1b[B\x1b[6~")
    seen = screen.until("6-9 of 199 members", since=seen)
    screen.press(b"s")
    seen = screen.until("NODE*", since=seen)
    screen.press(b"?")
    screen.until("scroll by a page", since=seen)
    screen.press(b"q")
    assert screen.until_end() == 0
    assert_restored(screen)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (b"\x03", 0),
        (signal.SIGINT, 0),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGHUP, -signal.SIGHUP),
    ],
)
def test_every_way_out_restores_the_terminal(screen: Screen, end: Any, code: int) -> None:
    screen.until("iteration 12")
    if isinstance(end, bytes):
        screen.press(end)
    else:
        screen.process.send_signal(end)
    assert screen.until_end() == code
    assert_restored(screen)


@pytest.mark.processes
def test_signals_end_it_though_nobody_reads_what_it_draws(screen: Screen) -> None:
    screen.until("iteration 12")
    screen.resize(1000, 500)
    deadline_s = time.monotonic() + TIMEOUT_S
    while screen.process.poll() is None:
        assert time.monotonic() < deadline_s
        screen.process.send_signal(signal.SIGTERM)
        select.select([], [], [], 0.1)
    assert screen.process.returncode == -signal.SIGTERM
    assert termios.tcgetattr(screen.slave) == screen.settings


@pytest.mark.processes
def test_a_stop_gives_the_terminal_back_until_it_goes_on(screen: Screen) -> None:
    seen = screen.until("iteration 12")
    screen.press(b"\x1a")
    pid, status = os.waitpid(screen.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(screen.slave) == screen.settings
    os.kill(pid, signal.SIGCONT)
    screen.until("iteration 12", since=seen)
    screen.press(b"q")
    assert screen.until_end() == 0


@pytest.mark.processes
def test_a_pause_is_sent_once_the_person_means_it(screen: Screen, daemon: FakeDaemon) -> None:
    seen = screen.until("p pause")
    screen.press(b"p")
    seen = screen.until("y/n", since=seen)
    assert {request["command"] for request in daemon.requests} == {"status", "history"}
    screen.press(b"y")
    seen = screen.until("the node has agreed to pause", since=seen)
    assert {"command": "pause"} in daemon.requests
    daemon.answer = status_answer(pausing={"by_person": True})
    daemon.answers["resume"] = {
        "error": {"code": "E-RUN-003", "what": "not now", "why": "busy", "fix": "", "exit_code": 3}
    }
    seen = screen.until("paused: you have paused it", since=seen)
    screen.press(b"p")
    screen.until("again? y/n", since=seen)
    screen.press(b"y")
    screen.until("not now: busy", since=seen)


@pytest.mark.processes
def test_a_node_that_is_gone_keeps_its_last_picture_until_it_is_back(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    screen = Screen(tmp_path)
    try:
        screen.until("iteration 12")
        daemon.close()
        seen = screen.until("the node does not answer, this picture is old")
        screen.resize(100, 20)
        seen = screen.until("iteration 12", since=seen)
        daemon = FakeDaemon(tmp_path)
        daemon.answer = status_answer(iteration=77)
        screen.until("iteration 77", since=seen)
        screen.until("q quit", since=seen)
        screen.press(b"q")
        assert screen.until_end() == 0
    finally:
        daemon.close()
        screen.close()


@pytest.mark.processes
def test_without_a_daemon_it_ends_at_once_and_draws_nothing(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    try:
        assert screen.until_end() == 7
        assert b"no daemon answers" in screen.output
        assert LEAVE_SCREEN not in screen.output
        assert termios.tcgetattr(screen.slave) == screen.settings
    finally:
        screen.close()


def test_without_a_terminal_one_line_names_what_needs_none(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--state-dir", str(tmp_path)]) == 3
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert "decod status" in error
    assert daemon.requests == []


def _fail_on(master: int, slave: int) -> None:
    with TerminalKeys(slave) as keys:
        assert not termios.tcgetattr(slave)[3] & termios.ECHO
        os.write(master, b"j\x1b[A")
        assert keys.wait(TIMEOUT_S) == ["j", "up"]
        keys.wake()
        assert keys.wait(TIMEOUT_S) == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert keys.wait(TIMEOUT_S) == []
        assert keys.signals == [signal.SIGTERM]
        raise ZeroDivisionError


def test_an_exception_restores_the_terminal() -> None:
    master, slave = os.openpty()
    before, handler = termios.tcgetattr(slave), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ZeroDivisionError):
            _fail_on(master, slave)
        assert termios.tcgetattr(slave) == before
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        os.close(master)
        os.close(slave)
