"""The averaging process: codes contributions, adds up parts and decodes averages, on the CPU.

The loop's device stays free for training meanwhile. The node process starts it with an inherited
socket and memory file. Nobody types this command.
"""

from collections.abc import Sequence

from decod.worker.averaging.averaging_jobs import AverageRunner
from decod.worker.serving import end_at_once, serve_inherited


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the averaging process until its socket closes."""
    return serve_inherited("python -m decod.worker.averaging", AverageRunner, arguments)


if __name__ == "__main__":
    end_at_once(main())
