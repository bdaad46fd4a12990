"""One number from a few measurements: what counts is the last handful, not the whole past.

A mean with decaying weights, as is usual for round trip times, is pulled far off by one transfer
that hit a stalled receiver, and creeps towards a lasting change. The median of the last five does
neither: two outliers in five do not move it, and after three measurements of a link that was cut
to a tenth it shows the tenth, exactly.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_WINDOW = 5
"""Three of them decide the median: a lasting change shows after so many measurements."""

STALE_S = 300.0
"""Age beyond which a measurement says nothing beside a newer one, and is worth repeating."""


@dataclass(slots=True)
class Recent:
    """The last few measurements of one quantity."""

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
