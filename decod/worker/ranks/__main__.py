"""A rank: reads jobs from rank 0, until it ends. Nobody types this command."""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from threading import Thread
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: which signal a process gets when its parent ends."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the rank until its socket closes, or rank 0 ends."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    options, others = parser.parse_known_args(arguments)
    _die_with_parent()
    Thread(target=_live_with, args=(options.lifeline_fd,), daemon=True).start()
    # Loading torch takes seconds. A rank that lives on by itself then would stay for good.
    from decod.worker.ranks.mirror_runner import MirrorRunner
    from decod.worker.serving import end_at_once, serve_inherited

    end_at_once(serve_inherited("python -m decod.worker.ranks", MirrorRunner, others))


def _die_with_parent() -> None:
    """Have the kernel kill this process once rank 0 has ended, even if this one stands still.

    Otherwise a stopped rank would keep its device's memory. Only Linux does that. The parent is the
    thread that has started this process: rank 0's main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _live_with(lifeline_fd: int) -> None:
    """End this process once rank 0 has ended: even within a collective, where it reads no jobs."""
    os.read(lifeline_fd, 1)
    # Nothing is left to save, and an orderly end of torch takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
