"""How long a node waits for its compute process before it takes it for hung.

A process that is merely slow must not be ended: that costs what it holds. So each kind of job is
granted ten times what the longest of that kind has taken, and never less than a floor; the first of
a kind, which may load and compile, more than that; and whatever reads or writes tensors, time for
their bytes. The floor is a quarter of `iteration_timeout_s`, up to a minute, and half of it for a
first job: so that a process that hangs costs less than an iteration. Jobs that no iteration waits
for have ten minutes. Only time counts in which this node has run itself: where a whole host stands
still, its compute process does too, and neither is to blame.

Long before that others may do its work. A process is *late* after a few times the longest job of
the kind, and a few seconds at least. It lives on if nobody can take its place.
"""

import math

from decod.run.protocol_config import ProtocolConfig

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

_PROMPT = frozenset({"reset", "drop", "retract"})
"""Kinds of jobs that forget something: the first takes no longer than others."""

_LOOK_S = 1.0
_LOOKS = 10
"""In the time of a floor, at least."""


class Patience:
    """Watches over the one job that a compute process does at a time.

    `look` is to be called every `interval_s`; of the time between two calls of any method no more
    than twice that counts.

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
        compiles what its kind needs."""
        usual_s = self._usual_s
        if usual_s is None or self.kind in _UNHURRIED:
            return math.inf
        return max(_LATE_LEAST_S, _LATE * usual_s) + self._num_bytes / _SLOWEST_BYTES_PER_S

    def is_late(self, now_s: float) -> bool:
        """Whether the process has not answered for so long that others should do its work."""
        self._wait(now_s)
        return bool(self.kind) and self._waited_s > self.late_s

    def begin(self, now_s: float, kind: str, *, num_bytes: int = 0) -> None:
        """A job begins; `num_bytes`: of the tensors that it reads and writes here."""
        self.kind, self._num_bytes = kind, num_bytes
        self._waited_s, self._last_s = 0.0, now_s

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
