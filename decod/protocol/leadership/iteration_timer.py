"""How long an iteration may go on without progress before the leader repeats it."""

_USUAL_ITERATIONS = 4
"""So many times the last iteration's length are always granted."""


class IterationTimer:
    """The leader's clock of one iteration after another.

    Args:
        timeout_s: Least time without progress.
    """

    def __init__(self, timeout_s: float) -> None:
        self.by_s: float | None = None
        """When the iteration is repeated; None: never, nobody can work on it."""
        self._timeout_s = timeout_s
        self._start_s = 0.0
        self._usual_s = 0.0
        self._progressed_s = 0.0

    def begin(self, now_s: float, *, runs: bool) -> None:
        """An iteration begins; `runs`: all that it takes is there."""
        self._start_s, self.by_s = now_s, None
        if runs:
            self.progressed(now_s)

    @property
    def due_s(self) -> float:
        """When the iteration last got on, or until when it would usually last."""
        return max(self._progressed_s, self._start_s + self._usual_s)

    def progressed(self, now_s: float) -> None:
        self._progressed_s = now_s
        self.by_s = now_s + max(self._timeout_s, _USUAL_ITERATIONS * self._usual_s)

    def committed(self, now_s: float) -> float:
        """Return how long the iteration took."""
        self._usual_s = now_s - self._start_s
        return self._usual_s
