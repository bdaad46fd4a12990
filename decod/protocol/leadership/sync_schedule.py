"""Which iterations end with an average: the leader says so when it opens them."""

from dataclasses import replace
from typing import Any

from decod.ids import Iteration
from decod.protocol.core.identity import RunShape
from decod.protocol.core.view import Opening


class SyncSchedule:
    """The leader's record of the last average, and when the next is due.

    Args:
        shape: The run's.
    """

    def __init__(self, shape: RunShape) -> None:
        self._every, self._last = shape.sync_every, shape.num_iterations
        self.anchor = Iteration(shape.start_iteration, 0)
        """The last committed iteration that ended with an average."""

    def is_local(self, iteration: Iteration) -> bool:
        """Whether an iteration ends without an average. The last of the run has one."""
        due = iteration.number - self.anchor.number >= self._every
        return not due and iteration.number != self._last

    def committed(self, iteration: Iteration) -> int | None:
        """An iteration is final.

        Returns:
            The iteration of the average before this one. None: this one has none.
        """
        if self.is_local(iteration):
            return None
        before, self.anchor = self.anchor.number, iteration
        return before

    def resume(self, opening: Opening) -> None:
        """Go on as an opening says."""
        self.anchor = opening.anchor

    def begin_era(self, committed: Iteration, *, returns: bool) -> None:
        """An era begins, behind an iteration. `returns`: to a state that all fetch."""
        number = committed.number if returns else self.anchor.number
        self.anchor = replace(committed, number=number)

    def told(self, committed: Iteration, opened: Iteration) -> dict[str, Any]:
        """Return what the opening of an iteration says of averages."""
        averaged = None if self.anchor == committed else self.anchor
        return {"averaged": averaged, "local": self.is_local(opened)}
