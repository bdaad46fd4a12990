"""Which iterations end with an average: the leader says so when it opens them."""

from dataclasses import replace
from typing import Any

from decod.ids import Iteration
from decod.protocol.core.effects import Note, noted
from decod.protocol.core.era import Origin, Source
from decod.protocol.core.identity import RunShape
from decod.protocol.core.messages import BeginAggregation, Ready
from decod.protocol.core.view import Opening

_EARLY_SHARE = 10
"""Early averages are made at most so many times as often as the run says."""


class SyncSchedule:
    """The leader's record of the last average, and when the next is due.

    Args:
        shape: The run's.
    """

    def __init__(self, shape: RunShape) -> None:
        self._sync, self._last = shape.sync, shape.num_iterations
        self.anchor = Iteration(shape.start_iteration, 0)
        """The last committed iteration that ended with an average."""
        self.early = 0
        """The iteration that ends with an average before one is due."""
        self._learnt: int | None = 0
        """Microbatches since then. None: another leader has counted them."""
        self._travelling: int | None = 0
        """Microbatches that the average which travels would hold, if nothing were lost."""
        self.num_lost: dict[int, int] = {}
        """By stage: microbatches whose part in the training was lost with the members that had
        learnt from them. As far as this leader has counted."""

    def is_local(self, iteration: Iteration) -> bool:
        """Whether an iteration ends without an average. The last of the run has one."""
        due = iteration.number - self.anchor.number >= self._sync.every
        due = due or iteration.number == self.early
        return not due and iteration.number != self._last

    def hasten(self, iteration: Iteration) -> bool:
        """Let an iteration that is about to be opened end with an average, if it is not too early.

        Returns whether it does so before an average is due.
        """
        # Where averages travel, the last one has not begun to when this is asked the first time.
        apart = max(1 + self._sync.overlaps, self._sync.every // _EARLY_SHARE)
        if self.is_local(iteration) and iteration.number - self.anchor.number >= apart:
            self.early = iteration.number
        return iteration.number == self.early

    def committed(self, begun: BeginAggregation, vote: Ready) -> tuple[int | None, list[Note]]:
        """An iteration is final.

        Args:
            begun: Its batch.
            vote: Of all stages.

        Returns:
            The iteration of the average before this one, or None if this one has none; and what was
            lost.
        """
        iteration, notes = begun.averaging.iteration, self._count(begun, vote)
        if self.is_local(iteration):
            return None, notes
        before, self.anchor = self.anchor.number, iteration
        return before, notes

    def failure(self, begun: BeginAggregation | None, vote: Ready) -> str:
        """Return why an iteration can't be committed; empty if it can.

        A stage that steps by itself must have trained on exactly the batch (I2). Members that
        average each iteration's gradients check that themselves.
        """
        if vote.failure or begun is None or not self._sync.steps_locally:
            return vote.failure
        shares = {stage: (num, digest) for stage, num, digest in vote.folded}
        for stage, _ in vote.hashes:
            num, digest = shares.get(stage, (0, 0))
            if (num, digest) != (begun.num_committed, begun.digest):
                expected = begun.num_committed
                return f"stage {stage} folded {num} microbatches, not the {expected} committed"
        return ""

    def _count(self, begun: BeginAggregation, vote: Ready) -> list[Note]:
        """Count what members have learnt in an iteration, and what was lost with some of them."""
        overlaps = self._sync.overlaps
        iteration, last = begun.averaging.iteration, begun.averaging.iteration.number == self._last
        learnt = None if self._learnt is None else self._learnt + begun.num_committed
        if self.is_local(iteration):
            self._learnt = learnt
            return []
        expected = self._travelling if overlaps else learnt
        if overlaps and last:
            known = learnt is not None and self._travelling is not None
            expected = (learnt or 0) + (self._travelling or 0) if known else None
        self._learnt, self._travelling = 0, learnt
        if expected is None:
            return []
        lost = [(stage, expected - num) for stage, num in vote.learnt if num < expected]
        for stage, num in lost:
            self.num_lost[stage] = self.num_lost.get(stage, 0) + num
        return [
            noted("learning.lost", stage=stage, num_microbatches=num, iteration=str(iteration))
            for stage, num in lost
        ]

    def resume(self, opening: Opening) -> None:
        """Go on as an opening says."""
        self.anchor, self._learnt, self._travelling = opening.anchor, None, None
        if self.is_local(opening.iteration) and not opening.local:
            self.early = opening.iteration.number

    def begin_era(self, committed: Iteration, origin: Origin) -> None:
        """An era begins, behind an iteration.

        What an average that travelled would have held is repeated with the iterations, or lost with
        the stage.
        """
        self._learnt, self._travelling, self.early = 0, 0, 0
        mixed = origin.source is Source.NEIGHBOURS  # Nobody goes back.
        number = self.anchor.number if mixed else committed.number
        self.anchor = replace(committed, number=number)

    def told(self, committed: Iteration, opened: Iteration) -> dict[str, Any]:
        """Return what the opening of an iteration says of averages."""
        averaged = None if self.anchor == committed else self.anchor
        return {"averaged": averaged, "local": self.is_local(opened)}
