"""Terminals that take nothing for a while: nobody waits for them, and little is lost."""

import fcntl
import os
import pty
import termios
from collections.abc import Iterator

import pytest

from decod.journal.terminal import WAITING_MAX_BYTES, PatientTerminal

LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Returns the descriptors of both ends: the reader's, which does not wait, and the writer's."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    for end in (reader, writer):
        os.close(end)


def _put(descriptor: int, line: str) -> None:
    os.write(descriptor, f"{line}\n".encode())


def read_all(descriptor: int) -> str:
    parts = []
    while True:
        try:
            parts.append(os.read(descriptor, 1 << 16))
        except BlockingIOError:
            return b"".join(parts).decode()


def test_lines_are_there_at_once(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    terminal = PatientTerminal(writer)
    for line in ("one\n", "zw\N{LATIN SMALL LETTER O WITH DIAERESIS}lf\n", "\udc80\n"):
        terminal.write(line)
        assert read_all(reader) == line.encode("utf-8", "backslashreplace").decode()


def test_progress_stays_below_all_lines() -> None:
    """A line takes its place, and it follows again: nothing of it is left above."""
    master, descriptor = pty.openpty()
    try:
        terminal = PatientTerminal(descriptor)
        say = terminal.above(lambda line: _put(descriptor, line))
        terminal.show("10 %")
        terminal.write("a line of the log\n")
        terminal.show("20 %")
        say("a line on another stream")
        terminal.show("")
        terminal.write("the end\n")
        raw = _shown(master, b"the end\r\n").decode()
    finally:
        os.close(master)
        os.close(descriptor)
    # What a terminal shows: an erased line is gone.
    lines = [line.rpartition("\x1b[K")[2].strip() for line in raw.split("\n")]
    assert lines == ["a line of the log", "a line on another stream", "the end", ""]
    assert raw.count("20 %") == 2, "it was drawn again below the second line"


def test_progress_is_cut_at_the_edge_of_the_terminal() -> None:
    """It could not be erased if it took two rows."""
    master, descriptor = pty.openpty()
    try:
        termios.tcsetwinsize(descriptor, (24, 20))
        PatientTerminal(descriptor).show("x" * 100)
        assert os.read(master, 1 << 16) == b"\r\x1b[K" + b"x" * 19
    finally:
        os.close(master)
        os.close(descriptor)


def test_a_pipe_shows_no_progress(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    terminal = PatientTerminal(writer)
    terminal.show("10 %")
    terminal.write("a line\n")
    assert read_all(reader) == "a line\n"


def test_a_pipe_that_nobody_reads_makes_nobody_wait(pipe: tuple[int, int]) -> None:
    """What fits nowhere is left out; the rest comes when somebody reads."""
    reader, writer = pipe
    terminal = PatientTerminal(writer)
    num_lines = 1000
    for number in range(num_lines):
        terminal.write(f"{number:03}{LINE}")
    terminal.finish(0.01)
    assert 0 < terminal.num_lost < num_lines
    text = read_all(reader)
    terminal.write("last\n")
    while more := read_all(reader):
        text += more
        terminal.finish(0.1)
    lines = text.splitlines()
    assert lines[-1] == "last"
    assert [line[:3] for line in lines[:-1]] == [f"{n:03}" for n in range(len(lines) - 1)]
    assert len(lines) - 1 + terminal.num_lost == num_lines
    assert len(text) >= WAITING_MAX_BYTES
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK, "others share it"


def test_a_terminal_that_is_stopped_makes_nobody_wait() -> None:
    """As Ctrl-S does it; Ctrl-Q lets it go on."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    try:
        terminal = PatientTerminal(theirs)
        termios.tcflow(theirs, termios.TCOOFF)
        for number in range(3):
            terminal.write(f"line {number}\n")
        assert read_all(ours) == ""
        termios.tcflow(theirs, termios.TCOON)
        terminal.write("line 3\n")
        assert read_all(ours).split() == ["line", "0", "line", "1", "line", "2", "line", "3"]
    finally:
        os.close(theirs)
        os.close(ours)


def test_a_reader_that_has_gone_and_a_full_disk_are_no_errors() -> None:
    reader, other = os.pipe()
    terminal = PatientTerminal(other)
    os.close(reader)
    with open("/dev/full", "w", encoding="utf-8") as full:
        for gone in (terminal, PatientTerminal(other), PatientTerminal(full.fileno())):
            gone.write("anything\n")
            gone.finish(5.0)
    os.close(other)


def test_a_file_is_appended_to(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is not opened anew: what others have written to it stays."""
    path = tmp_path_factory.mktemp("files") / "out"
    with path.open("w", encoding="utf-8") as file:
        file.write("before\n")
        file.flush()
        PatientTerminal(file.fileno()).write("after\n")
    assert path.read_text() == "before\nafter\n"


def _shown(master: int, end: bytes) -> bytes:
    """Returns what a terminal shows, which comes in pieces."""
    said = b""
    while not said.endswith(end):
        said += os.read(master, 1 << 16)
    return said
