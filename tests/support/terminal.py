"""A `decod` on a terminal of its own, which is closed when this process gets SIGUSR1.

    python -m tests.support.terminal leader run.toml ...

The terminal is real (a pseudo-terminal), and so is its end: the system tells the processes on it by
SIGHUP, and refuses whatever they write after that. What they write before goes to this process's
standard output. Its exit code is that of `decod`; a signal that ended `decod` is a negative number.
"""

import os
import pty
import select
import signal
import sys

PROGRAM = (sys.executable, "-u", "-m", "tests.support.terminal")

CLOSE = signal.SIGUSR1
"""Closes the terminal."""


def main() -> None:
    # Written to by the system when a signal comes, so that waiting ends.
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    closing: list[bool] = []
    signal.signal(CLOSE, lambda *_: closing.append(True))
    signal.set_wakeup_fd(woken)
    pid, master = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-m", "decod", *sys.argv[1:]])
    # Whoever ends this process means `decod`.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    while not closing:
        if master in select.select([master, wake], [], [])[0] and not _copy(master):
            break
    os.close(master)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _copy(master: int) -> bool:
    """Pass on what was written; return whether there may be more."""
    try:
        data = os.read(master, 1 << 16)
    except OSError:
        # Nobody has the terminal open any more.
        return False
    os.write(1, data.replace(b"\r\n", b"\n"))
    return bool(data)


if __name__ == "__main__":
    main()
