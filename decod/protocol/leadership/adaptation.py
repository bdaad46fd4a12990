"""How often members average, and how finely averages travel: adapted to gradients and links.

`Adapt.RANK` follows DiLoCoX (arXiv:2506.21263), section 2.4.2 and algorithm 3. The text says that
rank and H follow the effective rank of the averages, as a mean over a window. Deviations: the mean
is taken in relation to the first window's. An average of rank r has an effective rank below r, so a
rule that adopts it would shrink the rank to 1 by itself. What the text leaves open: it names no
measure of the effective rank; see `decod.compression.lowrank`.

`Adapt.LINKS` goes beyond the paper. It takes the finest format whose average arrives before the
next outer step at the slowest member, and averages as often as that format allows.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from decod.protocol.core.average_spec import WHOLE, AverageFormat, AverageSpec
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

    Args:
        sync: The run's start values, which are never exceeded.
        formats: In which averages may travel, the largest first.
    """

    def __init__(self, sync: SyncConfig, formats: Sequence[AverageFormat] = ()) -> None:
        self._sync, self._formats = sync, formats
        self._rank = sync.rank if sync.compression.has_factors else 0
        """Of the factors of matrices, at the start. 0: there are none."""
        self._sizes = {each.spec: each.num_bytes for each in formats}
        self._ranks: deque[float] = deque(maxlen=WINDOW)
        self._rates: deque[float] = deque(maxlen=WINDOW)
        """Seconds a byte, of the newest averages."""
        self._iterations_s: deque[float] = deque(maxlen=WINDOW)
        self._ratio, self._reference = 1.0, 0.0
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
        self.spec, self.every = replace(spec, fragment=0), min(every, self._sync.every)
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
        rate, iteration_s = fmean(self._rates), median(self._iterations_s)
        num_fragments = self._sync.fragments
        room_s = FILL_RATIO * iteration_s * max(1, self._sync.every // num_fragments)
        fitting = [f for f in allowed if rate * f.num_bytes <= room_s]
        chosen = max(fitting or allowed[-1:], key=lambda f: f.num_bytes)
        needed = math.ceil(rate * chosen.num_bytes / (FILL_RATIO * iteration_s))
        least = -(-self._sync.every // SPARING_MAX)
        self.every = min(self._sync.every, max(least, needed * num_fragments))
        self.spec = chosen.spec
