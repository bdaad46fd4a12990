"""A `decod` on a terminal of its own. SIGUSR1 to this process closes the terminal.

    python -m tests.support.terminal leader run.toml ...

The terminal is real (a pseudo-terminal), and so is its end: the system sends SIGHUP to the
processes on it, and refuses everything that they write after that. Their earlier output goes to
this process's standard output. Its exit code is that of `decod`, or 128 plus the number of the
signal that ended `decod`.
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
    # The system writes to this pipe when a signal comes, which ends the wait.
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    closing: list[bool] = []
    signal.signal(CLOSE, lambda *_: closing.append(True))
    signal.set_wakeup_fd(woken)
    pid, master = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-m", "decod", *sys.argv[1:]])
    # A signal to end this process is meant for `decod`.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    while not closing:
        if master in select.select([master, wake], [], [])[0] and not _copy(master):
            break
    os.close(master)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _copy(master: int) -> bool:
    """Pass on the output. Return whether there may be more."""
    try:
        data = os.read(master, 1 << 16)
    except OSError:
        # No process has the terminal open any longer.
        return False
    os.write(1, data.replace(b"\r\n", b"\n"))
    return bool(data)


if __name__ == "__main__":
    main()
