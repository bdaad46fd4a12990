"""What a long operation shows on stderr: a bar on a terminal, and elsewhere a line now and then."""

import os
import sys
from functools import partial

import pytest

from decod.cli import printing as module
from decod.cli.printing import LINE_INTERVAL_S, progress, waiting

MIB = 1 << 20


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    box = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: box[0])
    return box


def test_elsewhere_a_line_comes_every_half_minute(
    now_s: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    with progress("reading text", 100 * MIB) as advance:
        for _ in range(10):
            now_s[0] += LINE_INTERVAL_S / 5
            advance(5 * MIB)
    assert capfd.readouterr().err == (
        "reading text: 25 % of 100.0 MiB, 90 s left\nreading text: 50 % of 100.0 MiB, 60 s left\n"
    )


def test_what_takes_no_time_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("reading text", 0) as advance, waiting("for the leader"):
        advance(5)
    assert capfd.readouterr() == ("", "")


def test_more_than_was_announced_is_no_error(
    now_s: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    """A file may grow while it is read."""
    with progress("reading text", MIB) as advance:
        now_s[0] += LINE_INTERVAL_S
        advance(4 * MIB)
    assert capfd.readouterr().err == "reading text: 100 % of 4.0 MiB, 0 s left\n"


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
