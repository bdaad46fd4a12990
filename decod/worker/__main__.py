"""The compute process: reads jobs from a socket, one JSON object a line, until it closes.

The node process starts it with an inherited socket and memory file. Nobody types this command.
"""

from collections.abc import Sequence

from decod.system import die_with_parent
from decod.worker.job_methods import JobRunner
from decod.worker.runner import end_at_once, serve_inherited


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the compute process until its socket closes, or the node process ends."""
    # A rank that waits for another in a collective reads no jobs, and doesn't see its socket close.
    die_with_parent()
    return serve_inherited("python -m decod.worker", JobRunner, arguments)


if __name__ == "__main__":
    end_at_once(main())
