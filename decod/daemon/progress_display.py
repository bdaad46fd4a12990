"""Progress of training on the terminal: a line for the last commit, at most one a second.

    12:03:41 brave-otter  iteration 12 of 200  loss 3.2012 (-0.1034)  4029 tokens/s  9 m left

The number in brackets compares the loss with the mean of the iterations before: training goes well
if it is negative. `decod demo` and the benchmarks read these lines.
"""

import time
from collections.abc import Callable
from datetime import datetime

from decod.clocks import wall_clock
from decod.journal.run_progress import RunProgress
from decod.texts import span

_INTERVAL_S = 1.0


class ProgressDisplay:
    """The lines on a node's commits. A commit within a second after a line gets none.

    Args:
        progress: The run's progress at the node.
        say: Takes lines for the operator's terminal.
        name: This node's.
    """

    def __init__(self, progress: RunProgress, say: Callable[[str], None], name: str) -> None:
        self._progress, self._say, self._name = progress, say, name
        self._shown_s = 0.0
        self._iteration = progress.iteration
        progress.on_commit.append(self._show)

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _INTERVAL_S:
            self._shown_s = now_s
            self._show_now()

    def stop(self) -> None:
        """Stop showing progress. Another object shows it from now on."""
        self._progress.on_commit.remove(self._show)
        self._iteration = self._progress.iteration

    def show_last(self) -> None:
        """Show the last commit, if it has not been shown."""
        if self._progress.iteration != self._iteration:
            self._show_now()

    def _show_now(self) -> None:
        self._iteration = self._progress.iteration
        now = datetime.fromtimestamp(wall_clock()).astimezone()
        self._say(f"{now:%H:%M:%S} {self._name}  {progress_text(self._progress)}")


def progress_text(progress: RunProgress) -> str:
    """Return the last iteration, its loss and trend, the speed and the time left, in a line."""
    total = f" of {progress.num_iterations}" if progress.num_iterations else ""
    # A node that enters a run after a rollback knows the iteration, but not its loss.
    loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
    change = progress.loss_change
    trend = "" if change is None else f" ({change:+.4f})"
    rate = f"{progress.tokens_per_s:.0f} tokens/s" if progress.tokens_per_s else "-"
    left = f"  {span(progress.left_s)} left" if progress.left_s else ""
    return f"iteration {progress.iteration}{total}  loss {loss}{trend}  {rate}{left}"
