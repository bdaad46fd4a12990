"""The leader's account of what members have learnt by themselves, and of what was lost with some.

A member that is lost takes along what it has learnt since the last average. The account says how
many microbatches each average should hold, and the members' vote says how many it holds.
"""

from collections.abc import Sequence

from decod.protocol.core.messages.averaging_messages import StageAverages
from decod.run.run_config import RunConfig


class Learning:
    """Microbatches that are in no average yet, and those that were lost.

    Parameters may be averaged in fragments, in turn. What is lost to one of F fragments is the F-th
    part of a microbatch.

    Args:
        run: The run's settings.
    """

    def __init__(self, run: RunConfig) -> None:
        self._sync = run.sync
        self._stages = range(run.stages.num_relay_stages + 1)
        num_fragments = self._num_fragments = run.sync.fragments
        self._since: list[int | None] = [0] * num_fragments
        """Since the last average of each fragment. None: another leader has counted them."""
        self._travelling: int | None = 0
        """What the average that travels would hold, if nothing were lost."""
        self._lost: dict[int, int] = {}
        """By stage, in parts of microbatches."""
        self.num_late = 0
        """Microbatches that came too late for an average, and counted in the next. Summed over
        stages."""
        self._batch = 0

    @property
    def num_lost(self) -> dict[int, int]:
        """By stage: microbatches whose part in the training was lost with the members that had
        learnt from them. As far as this leader has counted.
        """
        return {stage: -(-parts // self._num_fragments) for stage, parts in self._lost.items()}

    def trained(self, num: int) -> None:
        """Members have taken an inner step, from so many microbatches together."""
        self._batch = num
        self._since = [None if known is None else known + num for known in self._since]

    def averaged(
        self, num: int, averages: Sequence[StageAverages], fragment: int, *, last: bool
    ) -> list[tuple[int, int]]:
        """Members have taken an inner step and an outer step.

        Args:
            num: Microbatches of the iteration.
            averages: From which the outer step comes.
            fragment: Whose own average was made, or begins to travel. 0: that of all.
            last: The last outer step of a run uses both averages.

        Returns:
            Stages that have lost something, and how many microbatches.
        """
        self.trained(num)
        here = slice(fragment - 1, fragment) if fragment else slice(None)
        known = self._since[here]
        own = None if None in known else max(each for each in known if each is not None)
        expected = self._travelling if self._sync.overlap else own
        if self._sync.overlap and last:
            known_both = own is not None and self._travelling is not None
            expected = (own or 0) + (self._travelling or 0) if known_both else None
        self._since[here] = [0] * len(known)
        self._travelling = own
        if expected is None:
            return []
        for each in averages:
            self.num_late += each.num_late
        missing = [
            (each.stage_index, expected - each.num_microbatches - each.num_late)
            for each in averages
        ]
        lost = [(stage, num_missing) for stage, num_missing in missing if num_missing > 0]
        for stage, num_missing in lost:
            self._lose(stage, num_missing * (1 if fragment else self._num_fragments))
        return lost

    def _lose(self, stage: int, num_parts: int) -> None:
        self._lost[stage] = self._lost.get(stage, 0) + num_parts

    def forget(self) -> None:
        """Another leader has counted until now."""
        self._since = [None] * self._num_fragments
        self._travelling = None

    def go_back(self, interval: int) -> None:
        """The run goes back to an average. Iterations are repeated from there on.

        What members had learnt by then and not averaged yet is lost: the last average was of one
        fragment, and each other fragment's was some intervals earlier.

        Args:
            interval: Iterations from one average to the next.
        """
        self._since, self._travelling = [0] * self._num_fragments, 0
        num_intervals = self._num_fragments * (self._num_fragments - 1) // 2
        if num_intervals:
            for stage in self._stages:
                self._lose(stage, num_intervals * interval * self._batch)
