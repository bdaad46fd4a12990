"""The keys of a terminal, one by one, and the signals that concern a program which draws on it.

The terminal gets its settings back on every way out: the end of the block, an exception, and the
signals that end a program or stop it.
"""

import os
import select
import signal
import termios
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from decod.cli.top_state import keys_of

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (*_ENDING, signal.SIGTSTP, signal.SIGWINCH)

_READ_BYTES = 1024

_IFLAG, _LFLAG, _CC = 0, 3, 6
"""Places in the list of a terminal's settings."""


def end_by(number: int) -> None:
    """End this process by a signal, so that its parent sees which one."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class TerminalKeys:
    """A terminal that tells each key at once, and does not show it. Use it in `with`, also again.

    In the block, signals are noted and take no effect of their own. A second one of those that end
    a program ends it on the spot: drawing hangs while nobody reads what a terminal shows.

    Args:
        descriptor: The terminal.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.signals: list[int] = []
        """Signals that have come in the block and ask for its end, the oldest first."""
        self._settings: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        # Both ends stay open for as long as the process: a thread may wake it at any time.
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        self._settings = termios.tcgetattr(self._descriptor)
        self._wakeup_before = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        changed = termios.tcgetattr(self._descriptor)
        changed[_LFLAG] &= ~(termios.ECHO | termios.ICANON)
        # Ctrl-S would block drawing, and then no signal could end this program.
        changed[_IFLAG] &= ~termios.IXON
        changed[_CC][termios.VMIN], changed[_CC][termios.VTIME] = 1, 0
        # Not after the output has drained: that may take forever.
        termios.tcsetattr(self._descriptor, termios.TCSANOW, changed)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._restore()
        self.signals.clear()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _restore(self) -> None:
        with suppress(termios.error):  # The terminal itself may be gone.
            termios.tcsetattr(self._descriptor, termios.TCSANOW, self._settings)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if number in _ENDING and number in self.signals:
            self._restore()
            end_by(number)
        if number != signal.SIGWINCH:  # That has ended `wait`, which is all.
            self.signals.append(number)

    def wake(self) -> None:
        """End the present `wait`, or the next. Any thread may call this."""
        with suppress(BlockingIOError):  # Full: it will wake anyway.
            os.write(self._woken, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for keys, a signal, `wake`, or the timeout; return the keys.

        Raises:
            EOFError: The terminal has gone.
        """
        ready, _, _ = select.select([self._descriptor, self._wake], [], [], timeout_s)
        if self._wake in ready:
            with suppress(BlockingIOError):
                os.read(self._wake, _READ_BYTES)
        if self._descriptor not in ready:
            return []
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        return keys_of(data)
