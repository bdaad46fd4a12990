"""Which iterations end with an average, of what, and what was lost between averages.

The leader says so in each opening. `Adaptation` chooses rank, format and H.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from decod.ids import Iteration, NodeId
from decod.protocol.core.average_spec import WHOLE, AverageFormat, AverageSpec
from decod.protocol.core.context import RunFacts
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.era import Origin, Source
from decod.protocol.core.messages import BeginAggregation, Ready
from decod.protocol.core.messages.averaging_messages import StageAverages
from decod.protocol.core.view import Opening, View
from decod.run.run_config import RunConfig
from decod.run.training_config import Adapt, SyncConfig

WINDOW = 5
"""Outer steps over which a mean is taken. From the paper, section 4.1."""

FILL_RATIO = 0.9
"""Share of a local phase that an average may take: times vary."""

SPARING_MAX = 4
"""With fast links, members average up to so many times as often as the run file says."""


@dataclass(frozen=True, slots=True)
class OuterStepFacts:
    """What the members have told of an outer step."""

    effective_rank: float
    """As a mean over the stages. 0: not known."""
    travel_s: float
    """How long the average took at the slowest member. 0: not known."""
    iteration_s: float
    """Median duration of the iterations before the step, without those that waited for it."""


class Adaptation:
    """The leader's choice of rank, bits and H.

    `Adapt.RANK` follows DiLoCoX (arXiv:2506.21263), section 2.4.2 and algorithm 3. The text says
    that rank and H follow the effective rank of the averages, as a mean over a window. Deviations:
    the mean is taken in relation to the first window's. An average of rank r has an effective rank
    below r, so a rule that adopts it would shrink the rank to 1 by itself. What the text leaves
    open: it names no measure of the effective rank; see `decod.compression.lowrank`.

    `Adapt.LINKS` goes beyond the paper. It takes the finest format whose average arrives before the
    next outer step at the slowest member, and averages as often as that format allows.

    Args:
        sync: The run's start values, which are never exceeded.
        formats: In which averages may travel, the largest first.
    """

    def __init__(self, sync: SyncConfig, formats: Sequence[AverageFormat] = ()) -> None:
        self._sync = sync
        self._formats = formats
        self._rank = sync.rank if sync.compression.has_factors else 0
        """Of the factors of matrices, at the start. 0: there are none."""
        self._sizes = {each.spec: each.num_bytes for each in formats}
        self._ranks: deque[float] = deque(maxlen=WINDOW)
        self._rates: deque[float] = deque(maxlen=WINDOW)
        """Seconds a byte, of the newest averages."""
        self._iterations_s: deque[float] = deque(maxlen=WINDOW)
        self._ratio = 1.0
        self._reference = 0.0
        """Effective rank in relation to that of the first window. Of a window of ratio 1."""
        self.every = sync.every
        """Iterations from one average of a parameter to the next."""
        self.spec = WHOLE
        """Rank and bits of the next average."""
        self.told: OuterStepFacts | None = None
        """Of the last outer step."""

    def resume(self, spec: AverageSpec, every: int) -> None:
        """Go on from what another leader has chosen."""
        if self._sync.adapt is Adapt.OFF:
            return
        self.spec = replace(spec, fragment=0)
        self.every = min(every, self._sync.every)
        if spec.rank:
            self._ratio = spec.rank / self._rank

    @property
    def budget_s(self) -> float:
        """The time that an average has at the present H. 0: not known."""
        iterations_s = self._iterations_s
        return self.interval * median(iterations_s) if iterations_s else 0.0

    @property
    def interval(self) -> int:
        """Iterations from one average to the next, of another fragment or the same."""
        return max(1, self.every // self._sync.fragments)

    def stepped(self, used: AverageSpec, measured: OuterStepFacts) -> None:
        """Choose anew, after an outer step.

        Args:
            used: Of the average that the step came from.
            measured: What the members tell of it.
        """
        self.told = measured
        if measured.iteration_s > 0:
            self._iterations_s.append(measured.iteration_s)
        num_bytes = self._sizes.get(replace(used, fragment=0), 0)
        if measured.travel_s > 0 and num_bytes:
            self._rates.append(measured.travel_s / num_bytes)
        if measured.effective_rank > 0:
            self._follow(measured.effective_rank)
        match self._sync.adapt:
            case Adapt.OFF:
                return
            case Adapt.RANK:
                rank = self._rank_max
                self.every = max(1, round(self._ratio * self._sync.every))
                self.spec = AverageSpec(rank=0 if rank == self._rank else rank)
            case Adapt.LINKS:
                self._fit()

    @property
    def _rank_max(self) -> int:
        return max(1, round(self._ratio * self._rank))

    def _follow(self, effective_rank: float) -> None:
        """Take in an effective rank. The first window is the measure of all others."""
        self._ranks.append(effective_rank)
        if len(self._ranks) < WINDOW:
            return
        mean = fmean(self._ranks)
        if not self._reference:
            self._reference = mean / self._ratio
        self._ratio = min(1.0, mean / self._reference)

    def _fit(self) -> None:
        """Take the finest format that fits, and then the shortest local phase that it fits."""
        rank_max = self._rank_max
        allowed = [f for f in self._formats if (f.spec.rank or self._rank) <= rank_max]
        if not (self._rates and self._iterations_s and allowed):
            return
        rate = fmean(self._rates)
        iteration_s = median(self._iterations_s)
        num_fragments = self._sync.fragments
        room_s = FILL_RATIO * iteration_s * max(1, self._sync.every // num_fragments)
        fitting = [f for f in allowed if rate * f.num_bytes <= room_s]
        chosen = max(fitting or allowed[-1:], key=lambda f: f.num_bytes)
        needed = math.ceil(rate * chosen.num_bytes / (FILL_RATIO * iteration_s))
        least = -(-self._sync.every // SPARING_MAX)
        self.every = min(self._sync.every, max(least, needed * num_fragments))
        self.spec = chosen.spec


class Learning:
    """Microbatches that are in no average yet, and those that were lost.

    Parameters may be averaged in fragments, in turn. What is lost to one of F fragments is the F-th
    part of a microbatch.

    A member that is lost takes along what it has learnt since the last average. The account says
    how many microbatches each average should hold, and the members' vote says how many it holds.

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
        self._since = [0] * self._num_fragments
        self._travelling = 0
        num_intervals = self._num_fragments * (self._num_fragments - 1) // 2
        if num_intervals:
            for stage in self._stages:
                self._lose(stage, num_intervals * interval * self._batch)


_DURATIONS_MAX = 64

_EARLY_SHARE = 10
"""Early averages are made at most so many times as often as the run says."""


class SyncSchedule:
    """The leader's record of the last average, and when the next is due.

    Args:
        run: The run's settings.
        facts: What else is known of it.
        out: The leading node's.
    """

    def __init__(self, run: RunConfig, facts: RunFacts, out: EffectSink[Effect]) -> None:
        self._out = out
        self._sync = run.sync
        self._last = run.num_iterations
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
    ) -> int | None:
        """An iteration is final. Have it noted what was lost.

        Args:
            begun: Its batch.
            vote: Of all stages.
            duration_s: Since it was opened.

        Returns:
            The iteration of the average before this one, or None if this one has none.
        """
        iteration = begun.averaging.iteration
        if self.is_local(iteration):
            self._durations_s.append(duration_s)
            self.learning.trained(begun.num_committed)
            self._travelled = {stage: version for stage, version in vote.travelled if version}
            return None
        self._travelled = {}
        lost = self.learning.averaged(
            begun.num_committed,
            vote.averages,
            self.spec.fragment,
            last=iteration.number == self._last,
        )
        for stage, num in lost:
            self._out.note(
                "learning.lost", stage=stage, num_microbatches=num, iteration=str(iteration)
            )
        used = self.travelling if self._sync.overlap else self.spec
        self.adaptation.stepped(used, self._measured(vote.averages))
        self._durations_s.clear()
        self.slow = vote.slow
        before = self.anchor.number
        self.anchor = iteration
        self.travelling = self.spec
        self._plan()
        return before

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
        self.anchor = opening.anchor
        self.travelling = opening.travelling
        self.slow = opening.slow
        self._travelled = {}
        self._due = self.anchor.number + self.adaptation.interval
        number = opening.iteration.number
        self.early = number if number < self.due and not opening.local else 0
        self._due = opening.due or number
        self._fragment = opening.spec.fragment
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
        self.anchor = replace(committed, number=number)
        self.travelling = WHOLE
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
