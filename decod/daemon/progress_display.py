"""Progress of training on the terminal: a line for the last commit, at most one a second."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decod.daemon.host import Node

_INTERVAL_S = 1.0


class ProgressDisplay:
    """The lines on a node's commits. A commit within a second after a line gets none."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._shown_s = 0.0
        self._iteration = node.progress.iteration
        node.progress.on_commit.append(self._show)

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _INTERVAL_S:
            self._shown_s = now_s
            self._say()

    def stop(self) -> None:
        """Stop showing progress. Another object shows it from now on."""
        self._node.progress.on_commit.remove(self._show)
        self._iteration = self._node.progress.iteration

    def show_last(self) -> None:
        """Show the last commit, if it has not been shown."""
        if self._node.progress.iteration != self._iteration:
            self._say()

    def _say(self) -> None:
        progress = self._node.progress
        self._iteration = progress.iteration
        # A node that enters a run after a rollback knows the iteration, but not its loss.
        loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
        rate = f"{progress.tokens_per_s:.0f} tokens/s" if progress.tokens_per_s else "-"
        self._node.say(f"iteration {progress.iteration}  loss {loss}  {rate}")
