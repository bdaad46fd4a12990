"""Output to a terminal that may be blocked: stopped with Ctrl-S, or a pipe that nobody reads.

A blocking write would make the node wait, and its peers would take it for dead. So text that does
not fit now is kept until the next line is written. Beyond a limit it is dropped from the terminal.
The log file has it.
"""

import os
import select
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from decod.system import opened_again

WAITING_MAX_BYTES = 64 * 1024
_PIECE_BYTES = select.PIPE_BUF
"""A pipe that is ready takes this much without blocking."""
_COLUMNS = 80
_ERASE = b"\r\x1b[K"
"""Clears the line in which the cursor stands."""


class PatientTerminal:
    """A terminal whose `write` never blocks. Any thread may use it.

    Args:
        descriptor: The descriptor of a terminal, pipe or file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = _never_waiting(descriptor)
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._shown = b""
        """The text below all lines, which has no end of line."""
        self.redraws = os.isatty(descriptor)
        """Whether `show` has an effect: a log file or a pipe can't take a line back."""
        self.num_lost = 0
        """How many texts were dropped."""

    def write(self, text: str) -> int:
        """Write as much of a text as fits, and keep the rest. Drop it if too much is kept."""
        with self._lock:
            self._push()
            if len(self._waiting) < WAITING_MAX_BYTES:
                content = text.encode("utf-8", "backslashreplace")
                # The text below gives way, and follows again.
                self._waiting += _ERASE + content + self._shown if self._shown else content
                self._push()
            else:
                self.num_lost += 1
        return len(text)

    def show(self, text: str) -> None:
        """Show a text below all lines until the next call, such as a progress bar.

        Args:
            text: Cut at the edge of the terminal. Empty: nothing is shown any more.
        """
        with self._lock:
            self._push()
            # A terminal that is stopped gets no progress that would be old when it goes on.
            if not self.redraws or self._waiting:
                return
            with suppress(OSError):
                # A terminal that does not know its width says 0.
                columns = os.get_terminal_size(self._descriptor).columns or _COLUMNS
                text = text[: columns - 1]
            self._shown = text.encode("utf-8", "backslashreplace")
            self._waiting += _ERASE + self._shown
            self._push()

    def above(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that says a line above the text of `show`, by another descriptor."""

        def said(line: str) -> None:
            shown = self._shown.decode()
            if not shown:
                say(line)
                return
            self.show("")
            say(line)
            self.show(shown)

        return said

    def flush(self) -> None:
        """Do nothing: a caller that logs must not wait."""

    def finish(self, timeout_s: float) -> None:
        """Write all kept text, for at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while self._waiting and (left_s := deadline_s - time.monotonic()) > 0:
                self._push(left_s)

    def _push(self, timeout_s: float = 0.0) -> None:
        try:
            while self._waiting and _is_ready(self._descriptor, timeout_s):
                num_bytes = os.write(self._descriptor, self._waiting[:_PIECE_BYTES])
                del self._waiting[:num_bytes]
        except BlockingIOError:
            pass
        except OSError:
            # The disk is full, or the terminal closed. Neither is a reason to stop the node.
            self._waiting.clear()


def _never_waiting(descriptor: int) -> int:
    """Return a non-blocking descriptor of the same terminal or pipe; else the given one.

    The given descriptor is not changed, because a shell may share it.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return opened_again(descriptor, flags)
        except OSError:
            # Opening is not permitted, or not possible, or the pipe has lost its reader.
            return descriptor
    return descriptor


def _is_ready(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(1000 * timeout_s))
