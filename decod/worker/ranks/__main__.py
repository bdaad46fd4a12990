"""A rank: reads jobs from rank 0, until it ends. Nobody types this command."""

import argparse
import os
from collections.abc import Sequence
from threading import Thread

from decod.worker.ranks.mirror_runner import MirrorRunner
from decod.worker.serving import end_at_once, serve_inherited


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rank until its socket closes, or rank 0 ends."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    options, others = parser.parse_known_args(arguments)
    Thread(target=_live_with, args=(options.lifeline_fd,), daemon=True).start()
    return serve_inherited("python -m decod.worker.ranks", MirrorRunner, others)


def _live_with(lifeline_fd: int) -> None:
    """End this process once rank 0 has ended: even within a collective, where it reads no jobs."""
    os.read(lifeline_fd, 1)
    end_at_once(0)


if __name__ == "__main__":
    end_at_once(main())
