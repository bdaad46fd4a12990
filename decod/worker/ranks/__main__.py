"""A rank: reads jobs from rank 0, until it ends. Nobody types this command."""

import argparse
import os
from collections.abc import Sequence
from threading import Thread
from typing import NoReturn

from decod.system import die_with_parent


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the rank until its socket closes, or rank 0 ends."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    options, others = parser.parse_known_args(arguments)
    die_with_parent()
    Thread(target=_live_with, args=(options.lifeline_fd,), daemon=True).start()
    # Loading torch takes seconds. A rank that lives on by itself then would stay for good.
    from decod.worker.ranks.mirror_runner import MirrorRunner
    from decod.worker.runner import end_at_once, serve_inherited

    end_at_once(serve_inherited("python -m decod.worker.ranks", MirrorRunner, others))


def _live_with(lifeline_fd: int) -> None:
    """End this process once rank 0 has ended: even within a collective, where it reads no jobs."""
    os.read(lifeline_fd, 1)
    # Nothing is left to save, and an orderly end of torch takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
