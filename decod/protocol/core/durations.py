"""How long things take: estimates, where a member's time goes, when a process counts as hung."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

from decod.limits import within
from decod.run.protocol_config import ProtocolConfig

_WINDOW = 5
"""Three of them decide the median: a lasting change shows after so many measurements."""

STALE_S = 300.0
"""Age beyond which a measurement says nothing beside a newer one, and is worth repeating."""


@dataclass(slots=True)
class Recent:
    """The last few measurements of one quantity.

    A mean with decaying weights, as is usual for round trip times, is pulled far off by one
    transfer that hit a stalled receiver, and creeps towards a lasting change. The median of the
    last five does neither: two outliers in five do not move it, and after three measurements of a
    link that was cut to a tenth it shows the tenth, exactly.
    """

    _values: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _middle: float | None = None
    measured_s: float = 0.0
    """When the newest was taken."""

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, now_s: float, value: float, *, stale_s: float = STALE_S) -> None:
        """Take in a measurement. It stands alone if those before it are stale."""
        if self._values and now_s - self.measured_s > stale_s:
            self._values.clear()
        self._values.append(value)
        self._middle = None
        self.measured_s = now_s

    def stale(self, now_s: float, *, after_s: float = STALE_S) -> bool:
        """Whether there is nothing, or nothing recent."""
        return not self._values or now_s - self.measured_s > after_s

    @property
    def median(self) -> float:
        """The middle one; there must be one."""
        if self._middle is None:
            self._middle = median(self._values)
        return self._middle

    @property
    def least(self) -> float:
        """The smallest one; there must be one."""
        return min(self._values)


ITERATION_MAX_S = 604_800.0
"""A week. What is longer counts as that."""

SpentSeconds = Annotated[float, within(0.0, ITERATION_MAX_S)]

_NUM_REMEMBERED = 5
"""Iterations whose medians are told. One that was disturbed names nobody."""

_SPANS_MAX = 4096
"""Stretches of time that are kept apart."""


class BusyTime:
    """How long at least one of some activities was under way. Each is told of when it ends."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        """Begin and end of each stretch, in order, with gaps between."""

    def add(self, end_s: float, duration_s: float) -> None:
        """Count an activity that ends now, at `end_s`, on a clock that does not go back."""
        begin_s = end_s - duration_s
        while self._spans and self._spans[-1][1] >= begin_s:
            begin_s = min(begin_s, self._spans.pop()[0])
        self._spans.append((begin_s, end_s))
        if len(self._spans) > _SPANS_MAX:
            # An iteration that is repeated again and again. A gap more or less does not matter.
            self._spans[:2] = [(self._spans[0][0], self._spans[1][1])]

    def take(self, since_s: float) -> float:
        """Return the time from `since_s` on, and begin anew."""
        spans = self._spans
        self._spans = []
        return sum(max(0.0, end_s - max(begin_s, since_s)) for begin_s, end_s in spans)


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """What a member has spent on an iteration, from one commit to the next, in seconds."""

    computing_s: SpentSeconds
    """The device works. At a data node this includes reading data."""
    waiting_s: SpentSeconds
    """The rest."""
    sending_s: SpentSeconds
    """At least one tensor travels from here. Overlaps with the other two."""


class SpentTime:
    """Adds up what a member spends, from commit to commit."""

    def __init__(self) -> None:
        self._last: deque[IterationTimes] = deque(maxlen=_NUM_REMEMBERED)
        self._sending = BusyTime()
        self._computed_s = 0.0
        self._committed_s: float | None = None

    @property
    def usual(self) -> IterationTimes | None:
        """Medians of the last iterations. None before the second commit here."""
        if not self._last:
            return None

        def usual_s(of: Callable[[IterationTimes], float]) -> float:
            return median(map(of, self._last))

        return IterationTimes(
            usual_s(lambda each: each.computing_s),
            usual_s(lambda each: each.waiting_s),
            usual_s(lambda each: each.sending_s),
        )

    def sent(self, now_s: float, duration_s: float) -> None:
        """A tensor has arrived for which the iteration has waited."""
        self._sending.add(now_s, duration_s)

    def committed(self, now_s: float, computed_s: float) -> None:
        """An iteration has been committed here.

        Args:
            now_s: The time.
            computed_s: How long the device has worked, ever.
        """
        since_s = self._committed_s
        self._committed_s = now_s
        before_s = self._computed_s
        self._computed_s = computed_s
        sending_s = self._sending.take(now_s if since_s is None else since_s)
        if since_s is None:
            return  # What came before the first commit here is no iteration's.
        whole_s = min(now_s - since_s, ITERATION_MAX_S)
        computing_s = min(computed_s - before_s, whole_s)
        times = IterationTimes(computing_s, whole_s - computing_s, min(sending_s, whole_s))
        self._last.append(times)


_FLOOR_S = (5.0, 60.0)
_ITERATION_SHARE = 1 / 4
_USUAL = 10.0
"""So many times the longest job of its kind are always granted."""

_LATE = 4.0
_LATE_LEAST_S = 4.0
"""A job is late after so many times the longest of its kind, and after so long at least: together
with the time that others need to take over, that is less than 10 s where jobs are short."""

_UNHURRIED_S = 600.0
_FIRST_SHARE = 1 / 2

_SLOWEST_BYTES_PER_S = 5e7
"""What every device, disk and hash exceeds."""

_UNHURRIED = frozenset({"configure", "build", "measure"})
"""Kinds of jobs that load libraries, or read or write a whole model: no iteration waits for
them."""

_READS_DATA = "embed"
"""The kind of job that may wait for data, for minutes if a store is away, as its node knows."""

_PROMPT = frozenset({"reset", "drop", "retract"})
"""Kinds of jobs that forget something: the first takes no longer than others."""

_LOOK_S = 1.0
_LOOKS = 10
"""In the time of a floor, at least."""


class Patience:
    """Watches over the one job that a compute process does at a time.

    `look` is to be called every `interval_s`; of the time between two calls of any method no more
    than twice that counts.

    A process that is merely slow must not be ended: that costs what it holds. So each kind of job
    is granted ten times what the longest of that kind has taken, and never less than a floor; the
    first of a kind, which may load and compile, more than that; and whatever reads or writes
    tensors, time for their bytes. The floor is a quarter of `iteration_timeout_s`, up to a minute,
    and half of it for a first job: so that a process that hangs costs less than an iteration. Jobs
    that no iteration waits for have ten minutes. Only time counts in which this node has run
    itself: where a whole host stands still, its compute process does too, and neither is to blame.

    Long before that others may do its work. A process is *late* after a few times the longest job
    of the kind, and a few seconds at least. It lives on if nobody can take its place.

    Args:
        config: The run's.
    """

    def __init__(self, config: ProtocolConfig) -> None:
        least_s, most_s = _FLOOR_S
        self._floor_s = min(most_s, max(least_s, _ITERATION_SHARE * config.iteration_timeout_s))
        first_s = min(_UNHURRIED_S, _FIRST_SHARE * config.iteration_timeout_s)
        self._first_s = max(self._floor_s, first_s)
        self.interval_s = min(_LOOK_S, self._floor_s / _LOOKS)
        self.kind = ""
        """Of the job that is being done; empty if there is none."""
        self._num_bytes = 0
        self._waited_s = self._last_s = 0.0
        self._longest_s: dict[str, float] = {}

    @property
    def _usual_s(self) -> float | None:
        """The longest job of this kind; None if this is the first, which may load and compile."""
        return self._longest_s.get(self.kind, 0.0 if self.kind in _PROMPT else None)

    @property
    def limit_s(self) -> float:
        """How long the job that is being done may take."""
        usual_s = self._usual_s
        least_s = self._floor_s if usual_s is not None else self._first_s
        # An idle relay measures again in the middle of an iteration, with all libraries loaded.
        again = self.kind == "measure" and usual_s is not None
        if self.kind in _UNHURRIED and not again:
            least_s = _UNHURRIED_S
        grown_s = _USUAL * (usual_s or 0.0)
        return max(least_s, grown_s) + self._num_bytes / _SLOWEST_BYTES_PER_S

    @property
    def late_s(self) -> float:
        """After how long the job that is being done is late; never if it is the first that loads or
        compiles what its kind needs, or waits for data."""
        usual_s = self._usual_s
        if usual_s is None or self.kind in _UNHURRIED or self.kind == _READS_DATA:
            return math.inf
        return max(_LATE_LEAST_S, _LATE * usual_s) + self._num_bytes / _SLOWEST_BYTES_PER_S

    def is_late(self, now_s: float) -> bool:
        """Whether the process has not answered for so long that others should do its work."""
        self._wait(now_s)
        return bool(self.kind) and self._waited_s > self.late_s

    def begin(self, now_s: float, kind: str, *, num_bytes: int = 0) -> None:
        """A job begins; `num_bytes`: of the tensors that it reads and writes here."""
        self.kind = kind
        self._num_bytes = num_bytes
        self._waited_s = 0.0
        self._last_s = now_s

    def end(self, now_s: float, *, done: bool = True) -> None:
        """The job has ended; one that was refused says nothing of how long its kind takes."""
        self._wait(now_s)
        if done:
            self.took(self.kind, self._waited_s)
        self.kind = ""

    def took(self, kind: str, duration_s: float) -> None:
        """A job of a kind has taken so long."""
        self._longest_s[kind] = max(self._longest_s.get(kind, 0.0), duration_s)

    def look(self, now_s: float) -> float | None:
        """Return for how long the process has not answered, if that is too long; else None."""
        self._wait(now_s)
        return self._waited_s if self.kind and self._waited_s > self.limit_s else None

    def _wait(self, now_s: float) -> None:
        self._waited_s += min(now_s - self._last_s, 2 * self.interval_s)
        self._last_s = now_s
