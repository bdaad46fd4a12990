"""Which iterations end with an average, of what, and what was lost between averages.

The leader says so in each opening. `adaptation` chooses rank, format and H.
"""

from collections import deque
from dataclasses import replace
from statistics import median
from typing import Any

from decod.ids import Iteration, NodeId
from decod.protocol.core.average_spec import WHOLE, AverageSpec
from decod.protocol.core.effects import Note, noted
from decod.protocol.core.era import Origin, Source
from decod.protocol.core.messages import BeginAggregation, Ready
from decod.protocol.core.messages.averaging_messages import StageAverages
from decod.protocol.core.node_identity import RunFacts
from decod.protocol.core.view import Opening, View
from decod.protocol.leadership.adaptation import Adaptation, OuterStepFacts
from decod.protocol.leadership.learning import Learning
from decod.run.run_config import RunConfig

_DURATIONS_MAX = 64

_EARLY_SHARE = 10
"""Early averages are made at most so many times as often as the run says."""


class SyncSchedule:
    """The leader's record of the last average, and when the next is due.

    Args:
        run: The run's settings.
        facts: What else is known of it.
    """

    def __init__(self, run: RunConfig, facts: RunFacts) -> None:
        self._sync, self._last = run.sync, run.num_iterations
        self.anchor = Iteration(facts.start_iteration, 0)
        """The last committed iteration that ended with an average."""
        self.adaptation = Adaptation(run.sync, facts.formats)
        self.learning = Learning(run)
        self._fragment = 0
        """Of the next average."""
        self.travelling = WHOLE
        """Of the average that travels."""
        self.early = 0
        """The iteration that ends with an average before one is due. It is of all parameters."""
        self.slow: tuple[tuple[NodeId, int], ...] = ()
        """Members that send slowly, and their shares of averages."""
        self._travelled: dict[int, int] = {}
        """By stage: the version of the average that has travelled to all of its members."""
        self._durations_s: deque[float] = deque(maxlen=_DURATIONS_MAX)
        """Of the iterations since the last average."""
        self._plan()

    def _plan(self) -> None:
        """Say when the next average is due, and what it is of."""
        num_fragments = self._sync.fragments
        self._fragment = self._fragment % num_fragments + 1 if num_fragments > 1 else 0
        self._due = self.anchor.number + self.adaptation.interval

    @property
    def due(self) -> int:
        """The iteration that ends with the next average. The last of the run has one."""
        return min(self._due, self._last) if self._last else self._due

    @property
    def spec(self) -> AverageSpec:
        """Of the next average. The last of the run, and an early one, are of all parameters."""
        whole = self.due in (self._last, self.early)
        return replace(self.adaptation.spec, fragment=0 if whole else self._fragment)

    def is_local(self, iteration: Iteration) -> bool:
        """Whether an iteration ends without an average."""
        return iteration.number < self.due

    def hasten(self, iteration: Iteration) -> bool:
        """Let an iteration that is about to be opened end with an average of all parameters.

        Returns whether it does, though none would be due. It does not if that were too early.
        """
        # Where averages travel, the last one has not begun to when this is asked the first time.
        apart = max(1 + self._sync.overlap, self._sync.every // _EARLY_SHARE)
        early = self.is_local(iteration) and iteration.number - self.anchor.number >= apart
        if early or (not self.is_local(iteration) and self.spec.fragment):
            self._due = self.early = iteration.number
        return iteration.number == self.early

    def committed(
        self, begun: BeginAggregation, vote: Ready, duration_s: float = 0.0
    ) -> tuple[int | None, list[Note]]:
        """An iteration is final.

        Args:
            begun: Its batch.
            vote: Of all stages.
            duration_s: Since it was opened.

        Returns:
            The iteration of the average before this one, or None if this one has none; and what was
            lost.
        """
        iteration = begun.averaging.iteration
        if self.is_local(iteration):
            self._durations_s.append(duration_s)
            self.learning.trained(begun.num_committed)
            self._travelled = {stage: version for stage, version in vote.travelled if version}
            return None, []
        self._travelled = {}
        lost = self.learning.averaged(
            begun.num_committed,
            vote.averages,
            self.spec.fragment,
            last=iteration.number == self._last,
        )
        notes = [
            noted("learning.lost", stage=stage, num_microbatches=num, iteration=str(iteration))
            for stage, num in lost
        ]
        used = self.travelling if self._sync.overlap else self.spec
        self.adaptation.stepped(used, self._measured(vote.averages))
        self._durations_s.clear()
        self.slow = vote.slow
        before, self.anchor, self.travelling = self.anchor.number, iteration, self.spec
        self._plan()
        return before, notes

    def _measured(self, averages: tuple[StageAverages, ...]) -> OuterStepFacts:
        ranks = [each.effective_rank for each in averages if each.effective_rank > 0]
        durations_s = self._durations_s
        return OuterStepFacts(
            effective_rank=sum(ranks) / len(ranks) if ranks else 0.0,
            travel_s=max((each.travel_s for each in averages), default=0.0),
            iteration_s=median(durations_s) if durations_s else 0.0,
        )

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

    def resume(self, opening: Opening) -> None:
        """Go on as an opening says."""
        self.anchor, self.travelling = opening.anchor, opening.travelling
        self.slow, self._travelled = opening.slow, {}
        self._due, number = self.anchor.number + self.adaptation.interval, opening.iteration.number
        self.early = number if number < self.due and not opening.local else 0
        self._due, self._fragment = opening.due or number, opening.spec.fragment
        interval = self._due - self.anchor.number
        self.adaptation.resume(opening.spec, interval * self._sync.fragments)
        self.learning.forget()

    def begin_era(self, committed: Iteration, origin: Origin) -> None:
        """An era begins, behind an iteration.

        What an average that travelled would have held is repeated with the iterations, or lost with
        the stage.
        """
        self.learning.go_back(self.adaptation.interval)
        self.early = 0
        mixed = origin.source is Source.NEIGHBOURS  # Nobody goes back.
        number = self.anchor.number if mixed else committed.number
        self.anchor, self.travelling = replace(committed, number=number), WHOLE
        self._travelled = {}
        self._durations_s.clear()
        self._fragment = 0
        self._plan()

    def told(self, committed: Iteration, opened: Iteration, view: View) -> dict[str, Any]:
        """Return what the opening of an iteration says of averages.

        A stage whose average is not said to have travelled may begin a new one. So its old one is
        forgotten here, and no later opening mentions it.
        """
        averaged = None if self.anchor == committed else self.anchor
        due = self.due if self.is_local(opened) else 0
        new = {m.stage_index for m in view.members if m.since_iteration >= committed.number}
        # Whatever made an outer step fail may have been in the average.
        repeated = not due and opened.attempt > 1
        for stage in [*self._travelled] if repeated else new:
            self._travelled.pop(stage, None)
        return {
            "averaged": averaged,
            "due": due,
            "spec": self.spec,
            "travelling": self.travelling,
            "slow": self.slow,
            "travelled": tuple(sorted(self._travelled.items())),
        }
