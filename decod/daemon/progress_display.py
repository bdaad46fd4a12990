"""Progress of training on the terminal: a line for the last commit, at most one a second."""

import time
from collections.abc import Callable

from decod.obs.run_progress import RunProgress

_INTERVAL_S = 1.0


class ProgressDisplay:
    """The lines on a node's commits. A commit within a second after a line gets none.

    Args:
        progress: The run's progress at the node.
        say: Takes lines for the operator's terminal.
    """

    def __init__(self, progress: RunProgress, say: Callable[[str], None]) -> None:
        self._progress, self._say = progress, say
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
        progress = self._progress
        self._iteration = progress.iteration
        # A node that enters a run after a rollback knows the iteration, but not its loss.
        loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
        rate = f"{progress.tokens_per_s:.0f} tokens/s" if progress.tokens_per_s else "-"
        self._say(f"iteration {progress.iteration}  loss {loss}  {rate}")
