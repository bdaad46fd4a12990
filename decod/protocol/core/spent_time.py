"""Where a member's time goes: what it spends on an iteration, by the durations that it is told.

The device computes one job at a time, and waits in between. Sends overlap with both, and with each
other: a second in which three tensors travel is one second.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from decod.limits import within

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
        spans, self._spans = self._spans, []
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
        since_s, self._committed_s = self._committed_s, now_s
        before_s, self._computed_s = self._computed_s, computed_s
        sending_s = self._sending.take(now_s if since_s is None else since_s)
        if since_s is None:
            return  # What came before the first commit here is no iteration's.
        whole_s = min(now_s - since_s, ITERATION_MAX_S)
        computing_s = min(computed_s - before_s, whole_s)
        times = IterationTimes(computing_s, whole_s - computing_s, min(sending_s, whole_s))
        self._last.append(times)
