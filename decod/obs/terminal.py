"""A terminal that may take nothing for a while: stopped with Ctrl-S, say, or a pipe nobody reads.

Writing to it would wait, and a node that waits is taken for dead. So what does not fit now is kept
until the next line is written. Beyond a limit it is left out: the log file has it.
"""

import os
import select
import stat
import threading
import time

WAITING_MAX_BYTES = 64 * 1024
_PIECE_BYTES = 4096
"""Pipes and sockets that are ready take as much without waiting."""


class PatientTerminal:
    """Takes text at once, and writes as much of it as is taken. May be used by any thread.

    Args:
        descriptor: Of a terminal, pipe or file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = _never_waiting(descriptor)
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self.num_lost = 0
        """Texts that were left out."""

    def write(self, text: str) -> int:
        """Take a text, or leave it out if too much waits."""
        with self._lock:
            self._push()
            if len(self._waiting) < WAITING_MAX_BYTES:
                self._waiting += text.encode("utf-8", "backslashreplace")
                self._push()
            else:
                self.num_lost += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: whoever logs must not wait."""

    def finish(self, timeout_s: float) -> None:
        """Return when everything is written, or after `timeout_s`."""
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
            # Full, closed, or with nobody at its other end: that is no reason to stop.
            self._waiting.clear()


def _never_waiting(descriptor: int) -> int:
    """Return another descriptor of a terminal or pipe, which does not wait, or the same one.

    A shell shares the given one, so that stays as it is.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:
            # Not ours to open, or a pipe that nobody reads any more.
            return descriptor
    return descriptor


def _is_ready(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(1000 * timeout_s))
