"""What a long operation shows on stderr: a bar on a terminal, and elsewhere a line now and then."""

import os
import sys
import threading
import time
from functools import partial

import pytest

from decod.cli import printing as module
from decod.cli.printing import LINE_INTERVAL_S, PATIENCE_S, progress, waiting

MIB = 1 << 20


class Stderr:
    """What has come on stderr."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.lines: list[str] = []

    def waits_for(self, line: str) -> None:
        deadline_s = time.monotonic() + 20
        while line not in self.lines:
            assert time.monotonic() < deadline_s, self.lines
            threading.Event().wait(0.001)
            self.lines += self._capfd.readouterr().err.splitlines()


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Stderr:
    """Lines come a thousand times as often as elsewhere."""
    monkeypatch.setattr(module, "PATIENCE_S", PATIENCE_S / 1000)
    monkeypatch.setattr(module, "LINE_INTERVAL_S", LINE_INTERVAL_S / 1000)
    return Stderr(capfd)


def test_elsewhere_a_line_comes_now_and_then(stderr: Stderr) -> None:
    with progress("reading text", 100 * MIB) as advance:
        stderr.waits_for("reading text: 0 s so far")
        advance(25 * MIB)
        stderr.waits_for("reading text: 25 % of 100.0 MiB, 0 s left")


def test_what_stands_still_is_told_all_the_same(stderr: Stderr) -> None:
    with waiting("asking the leader"):
        stderr.waits_for("asking the leader: 0 s so far")


def test_what_takes_no_time_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("reading text", 0) as advance, waiting("for the leader"):
        advance(5)
    assert capfd.readouterr() == ("", "")


def test_more_than_was_announced_is_no_error(stderr: Stderr) -> None:
    """A file may grow while it is read."""
    with progress("reading text", MIB) as advance:
        advance(4 * MIB)
        stderr.waits_for("reading text: 100 % of 4.0 MiB, 0 s left")


@pytest.mark.parametrize("colors", [True, False])
def test_on_a_terminal_there_is_a_bar_which_is_gone_at_the_end(
    colors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if colors:
        monkeypatch.delenv("NO_COLOR", raising=False)
    else:
        monkeypatch.setenv("NO_COLOR", "1")
    master, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress("reading text", 8 * MIB) as advance:
            advance(8 * MIB)
    said = b"".join(iter(partial(_read, master), b"")).decode()
    os.close(master)
    assert "reading text" in said
    assert "8.0/8.0 MiB" in said
    assert ("\x1b[3" in said) == colors
    assert said.rstrip().endswith("\x1b[2K"), "the line is cleared"


def _read(master: int) -> bytes:
    """Returns some of what was written to a terminal; nothing once it is closed and read."""
    try:
        return os.read(master, 1 << 16)
    except OSError:
        return b""
