"""Settings of this process: its standard streams, its signals, its heap and its garbage collector.

This module imports nothing slow, because it runs before anything else is loaded, and a signal may
come during the other imports.
"""

import ctypes
import gc
import os
import select
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

# Signals that ask a node to leave, and their effect before the node can handle them.

LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; the system or a service manager; a closed terminal or lost connection to it."""

URGENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A second one of these means: at once. SIGHUP never does: a closed terminal sends it more than
once, and the end of a login session sends SIGTERM along with it."""

_PR_SET_PDEATHSIG = 1
"""The option of Linux's `prctl` for the signal that a process gets when its parent ends."""


def die_with_parent() -> None:
    """Have the kernel kill this process once its parent has ended, whatever it waits for then.

    Even a stopped process ends so, and gives its device's memory back. Only Linux does that. The
    parent is the thread that has started this process. If it has ended before, nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that a node heeds. Under `nohup`, SIGHUP is not one of them."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return URGENT_SIGNALS
    return LEAVE_SIGNALS


def leave_early() -> None:
    """Let these signals end the process in order, with exit code 0: there is nothing to leave yet.

    This holds until the event loop handles the signals.
    """
    for number in heeded_signals():
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    with suppress(OSError):  # The terminal itself may be gone.
        os.write(2, b"left before anything had begun\n")
    raise SystemExit(0)


# Standard streams that are closed when decod starts, or accept nothing more when it ends.

_STANDARD = (0, 1, 2)


def open_closed() -> None:
    """Redirect closed standard streams to nowhere.

    Otherwise the next file or socket would get their number, and a library's output would go into
    it.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            # This opens the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
    # Python has no objects for closed streams. These live as long as the process.
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def let_go() -> None:
    """Drop unwritable output, so that the interpreter does not end with its own exit code."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            os.close(nothing)


def takes_a_line(stream: TextIO) -> bool:
    """Return whether a short line can be written without waiting for a reader."""
    poll = select.poll()
    try:
        poll.register(stream, select.POLLOUT)
    except (OSError, ValueError):
        return True  # It is no file of this system, as in tests.
    return bool(poll.poll(0))


# Pauses of Python itself.

_SWITCH_INTERVAL_S = 0.001


def keep_pauses_short() -> None:
    """Make this process's pauses short. Call it once all modules are loaded.

    From time to time the garbage collector looks at every object, which stops the process for 20 ms
    or more. The objects that exist now live as long as the process, so the collector is told to
    ignore them.

    Threads hand over the interpreter every millisecond instead of every five, because the event
    loop shares it with the thread that reads large messages.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()


# Memory of the C library.

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_KEPT_BYTES = 32 << 20
"""Largest threshold that glibc accepts. Larger blocks are mapped as before."""

_KEPT_BYTES = 1 << 30
"""Amount of freed memory at the top of the heap that the process keeps."""


def keep_freed_memory() -> None:
    """Have this process keep freed memory for the next tensor.

    By default glibc maps every large block anew and returns it when it is freed. Each tensor that
    passes through then costs one page fault per 4 KiB. For 1 MiB activations over gRPC, both ends
    together took 8.6 ms of CPU time per transfer, and 4.2 ms with blocks kept. Does nothing if the
    C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back_memory() -> None:
    """Give freed memory back to the system. Does nothing if the C library can't be asked to.

    glibc keeps what lies between blocks in use. Once a stage's weights had been made narrow, that
    was a quarter of a byte for each of them.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
