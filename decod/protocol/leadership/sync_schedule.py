"""Which iterations end with an average, of what, and what was lost between averages.

    local phase of H iterations -> its average is used at once
                                `-> with overlap: it travels -> used at the arrival

The arrival is the first iteration that begins when all members of all stages have the average. If
there is none before the next local phase ends, the average is used there. The leader says so in
each opening. `Adaptation` chooses rank, format and H.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple

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
"""Share of the longest local phase that an average may take: times vary."""

DELAY_RATIO = 0.2
"""Share of a local phase after which an average costs next to nothing by being late."""

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

    `Adapt.LINKS` goes beyond the paper. Averages travel in 4 bits, which cost nothing in loss, with
    the highest rank that arrives before the next local phase ends at the slowest member. Members
    average as often as they can while an average takes a fifth of a local phase at most.

    Args:
        sync: The run's start values, which are never exceeded.
        formats: In which averages may travel, the largest first. None: there is no choice.
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
        self.spec = formats[0].spec if formats else WHOLE
        """Rank and bits of the next average."""
        self.told: OuterStepFacts | None = None
        """Of the last outer step."""

    def resume(self, spec: AverageSpec) -> None:
        """Go on from what another leader has chosen. H follows from the rank, or is measured."""
        if self._sync.adapt is Adapt.OFF:
            return
        self.spec = replace(spec, fragment=0)
        if spec.rank:
            self._ratio = spec.rank / self._rank
            if self._sync.adapt is Adapt.RANK:
                self.every = self._every_by_rank

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
                self.every = self._every_by_rank
                self.spec = AverageSpec(rank=0 if rank == self._rank else rank)
            case Adapt.LINKS:
                self._fit()

    @property
    def _rank_max(self) -> int:
        return max(1, round(self._ratio * self._rank))

    @property
    def _every_by_rank(self) -> int:
        return max(1, round(self._ratio * self._sync.every))

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
        """Take the highest rank that fits, and then the shortest local phase that suits it."""
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
        needed = math.ceil(rate * chosen.num_bytes / (DELAY_RATIO * iteration_s))
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

    def ended(self, fragment: int, *, travels: bool) -> int | None:
        """A local phase has ended.

        Args:
            fragment: Whose own average is made. 0: that of all.
            travels: It begins to travel.

        Returns:
            What the averages that are used now would hold, if nothing were lost. None: not known.
        """
        here = slice(fragment - 1, fragment) if fragment else slice(None)
        known = self._since[here]
        own = None if None in known else max(each for each in known if each is not None)
        self._since[here] = [0] * len(known)
        used = self._travelling
        self._travelling = own if travels else 0
        if travels:
            return used
        return None if own is None or used is None else own + used

    def arrived(self) -> int | None:
        """The average that has travelled is used. Return as `ended` does."""
        used = self._travelling
        self._travelling = 0
        return used

    def count_lost(
        self, expected: int | None, averages: Sequence[StageAverages], fragment: int
    ) -> list[tuple[int, int]]:
        """Count what averages lack.

        Args:
            expected: What they would hold, if nothing were lost. None: not known.
            averages: What those of each stage hold.
            fragment: Of which they are. 0: of all.

        Returns:
            Stages that have lost something, and how many microbatches.
        """
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

    @property
    def apart(self) -> bool:
        """Whether members have learnt something, as far as is known, that is in no average yet."""
        return any(self._since)

    def forget(self) -> None:
        """Another leader has counted until now."""
        self._since = [None] * self._num_fragments
        self._travelling = None

    def go_back(self, interval: int, num_stages: int) -> None:
        """The run goes back to an average. Iterations are repeated from there on.

        What members had learnt by then and not averaged yet is lost: the last average was of one
        fragment, and each other fragment's was some intervals earlier.

        Args:
            interval: Iterations from one average to the next.
            num_stages: That have learnt.
        """
        self._since = [0] * self._num_fragments
        self._travelling = 0
        num_intervals = self._num_fragments * (self._num_fragments - 1) // 2
        if num_intervals:
            for stage in range(num_stages):
                self._lose(stage, num_intervals * interval * self._batch)


_DURATIONS_MAX = 64

_EARLY_SHARE = 10
"""Early averages are made at most so many times as often as the run says."""


class Commit(NamedTuple):
    """What the end of an iteration means for what the members of a stage have in common."""

    before: int | None = None
    """The iteration that it came from until now. None: it has not changed."""
    whole: bool = False
    """A local phase of all parameters has ended."""
    average_delay: int = 0
    """Iterations since the end of the local phase whose average was used. 0: of this one, or none
    was used."""


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
        """The last committed iteration that ended a local phase, or was an arrival."""
        self.adaptation = Adaptation(run.sync, facts.formats)
        self.learning = Learning(run)
        self._fragment = 0
        """Of the next average."""
        self.travelling: AverageSpec | None = None
        """Of the average that travels. None: none does."""
        self.average_delay = 0
        """Iterations after which the last average was used that had travelled."""
        self.early = 0
        """The iteration that ends with an average before one is due. It is of all parameters."""
        self.slow: tuple[tuple[NodeId, int], ...] = ()
        """Members that send slowly, and their shares of averages."""
        self._travelled: dict[int, int] = {}
        """By stage: the version of the average that has travelled to all of its members."""
        self._num_stages = run.stages.num_relay_stages + 1
        self._opened: Opening | None = None
        """The newest opening of an iteration."""
        self._arrival_failed = False
        """An arrival could not be ended. So the average is used where the next phase ends."""
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

        Returns whether it does, though none would be due. It does not if that were too early, or if
        it is to end with an average that has travelled.
        """
        if self.is_local(iteration) and len(self._travelled) == self._num_stages:
            return False  # See `Opening.arrival`.
        # Where averages travel, the last one has not begun to when this is asked the first time.
        apart = max(1 + self._sync.overlap, self._sync.every // _EARLY_SHARE)
        early = self.is_local(iteration) and iteration.number - self.anchor.number >= apart
        if early or (not self.is_local(iteration) and self.spec.fragment):
            self._due = self.early = iteration.number
        return iteration.number == self.early

    def committed(self, begun: BeginAggregation, vote: Ready, duration_s: float = 0.0) -> Commit:
        """An iteration is final. Have it noted what was lost.

        Args:
            begun: Its batch.
            vote: Of all stages.
            duration_s: Since it was opened.
        """
        iteration = begun.averaging.iteration
        learning = self.learning
        learning.trained(begun.num_committed)
        local = self.is_local(iteration)
        if local and iteration != self._arrival:
            self._durations_s.append(duration_s)
            if not self._arrival_failed:
                self._travelled = {stage: version for stage, version in vote.travelled if version}
            return Commit()
        spec = self.spec
        overlaps = self._sync.overlap
        used = self.travelling if overlaps else spec
        travels = overlaps and iteration.number != self._last
        expected = learning.arrived() if local else learning.ended(spec.fragment, travels=travels)
        fragment = used.fragment if local and used is not None else spec.fragment
        for stage, num in learning.count_lost(expected, vote.averages, fragment):
            self._out.note(
                "learning.lost", stage=stage, num_microbatches=num, iteration=str(iteration)
            )
        before = self.anchor.number
        delay = iteration.number - before if overlaps and used is not None else 0
        self.average_delay = delay or self.average_delay
        if used is not None:
            self.adaptation.stepped(used, self._measured(vote.averages))
            self._durations_s.clear()
        self.anchor = iteration
        self.travelling = None
        self._travelled = {}
        if local:
            return Commit(before, average_delay=delay)
        self._arrival_failed = False
        self.slow = vote.slow
        self.travelling = spec if travels else None
        self._plan()
        return Commit(before, whole=not spec.fragment, average_delay=delay)

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
        self._opened = opening  # It may be committed as it was opened.
        self._arrival_failed = False
        number = opening.iteration.number
        self._due = opening.due or number
        self._fragment = opening.spec.fragment
        # Of fragments, only an early average, or a run's last, is of all.
        whole = self._sync.fragments > 1 and not self._fragment
        self.early = number if whole and not opening.local else 0
        self._num_stages = opening.view.num_stages
        self.adaptation.resume(opening.spec)
        self.learning.forget()

    def begin_era(self, committed: Iteration, origin: Origin, num_stages: int) -> None:
        """An era begins, behind an iteration, with so many stages.

        What an average that travelled would have held is repeated with the iterations, or lost with
        the stage.
        """
        self.learning.go_back(self.adaptation.interval, self._num_stages)
        self._num_stages = num_stages
        self.early = 0
        mixed = origin.source is Source.NEIGHBOURS  # Nobody goes back.
        number = self.anchor.number if mixed else committed.number
        self.anchor = replace(committed, number=number)
        self.travelling = None
        self._travelled = {}
        self._opened = None
        self._arrival_failed = False
        self._durations_s.clear()
        self._fragment = 0
        self._plan()

    def opened(self, opening: Opening) -> None:
        """An iteration is opened."""
        self._opened = opening

    @property
    def _arrival(self) -> Iteration | None:
        """The newest iteration, if it was opened as an arrival."""
        opened = self._opened
        return opened.iteration if opened is not None and opened.arrival else None

    def told(self, committed: Iteration, opened: Iteration, view: View) -> dict[str, Any]:
        """Return what the opening of an iteration says of averages.

        A stage whose average is not said to have travelled may begin a new one. So its old one is
        forgotten here, and no later opening mentions it.
        """
        averaged = None if self.anchor == committed else self.anchor
        local = self.is_local(opened)
        due = self.due if local else 0
        new = {m.stage_index for m in view.members if m.since_iteration >= committed.number}
        # Whatever made an outer step fail may have been in the average.
        again = opened.attempt > 1
        arrival = self._arrival
        failed = again and arrival is not None and arrival.number == opened.number
        self._arrival_failed = self._arrival_failed or failed
        repeated = failed or (again and not local)
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
