"""How long a node waits for its compute process before it takes it for hung.

A process that is merely slow must not be ended: that costs what it holds. So each kind of job is
granted ten times what the longest of that kind has taken, and never less than a floor; the first of
a kind, which may load and compile, more than that; and whatever reads or writes tensors, time for
their bytes. The floor is a quarter of `iteration_timeout_s`, up to a minute, and half of it for a
first job: so that a process that hangs costs less than an iteration. Jobs that no iteration waits
for have ten minutes. Only time counts in which this node has run itself: where a whole host stands
still, its compute process does too, and neither is to blame.

A job that takes a few times as long as its kind ever did is *late*. Others of the stage could have
done it by then. So the node says so, and the leader goes on without it if the stage has others.
"""

from decod.protocol.core.params import ProtocolConfig

_FLOOR_S = (5.0, 60.0)
_ITERATION_SHARE = 1 / 4
_USUAL = 10.0
"""So many times the longest job of its kind are always granted."""

_LATE_S, _LATE_USUAL = 5.0, 4.0
"""A job is late after this time, or so many times the longest of its kind if that is more."""

_UNHURRIED_S = 600.0
_FIRST_SHARE = 1 / 2

_SLOWEST_BYTES_PER_S = 5e7
"""What every device, disk and hash exceeds."""

_UNHURRIED = frozenset({"configure", "build", "measure", "initial", "export"})
"""Kinds of jobs that load libraries, or read or write a whole model: no iteration waits for
them."""

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
    def limit_s(self) -> float:
        """How long the job that is being done may take."""
        usual_s = self._longest_s.get(self.kind)
        least_s = self._floor_s if usual_s is not None else self._first_s
        # An idle relay measures again in the middle of an iteration, with all libraries loaded.
        again = self.kind == "measure" and usual_s is not None
        if self.kind in _UNHURRIED and not again:
            least_s = _UNHURRIED_S
        grown_s = _USUAL * (usual_s or 0.0)
        return max(least_s, grown_s) + self._num_bytes / _SLOWEST_BYTES_PER_S

    def begin(self, now_s: float, kind: str, *, num_bytes: int = 0) -> None:
        """A job begins; `num_bytes`: of the tensors that it reads and writes here."""
        self.kind, self._num_bytes = kind, num_bytes
        self._waited_s, self._last_s = 0.0, now_s

    def end(self, now_s: float, *, done: bool = True) -> None:
        """The job has ended; one that was refused says nothing of how long its kind takes."""
        self._wait(now_s)
        if done:
            self._longest_s[self.kind] = max(self._longest_s.get(self.kind, 0.0), self._waited_s)
        self.kind = ""

    def look(self, now_s: float) -> float | None:
        """Return for how long the process has not answered, if that is too long; else None."""
        self._wait(now_s)
        return self._waited_s if self.kind and self._waited_s > self.limit_s else None

    @property
    def is_late(self) -> bool:
        """Whether the job had taken much longer than its kind usually does, when last looked at."""
        usual_s = self._longest_s.get(self.kind)
        if usual_s is None or self.kind in _UNHURRIED:
            return False
        granted_s = max(_LATE_S, _LATE_USUAL * usual_s) + self._num_bytes / _SLOWEST_BYTES_PER_S
        return self._waited_s > granted_s

    def _wait(self, now_s: float) -> None:
        self._waited_s += min(now_s - self._last_s, 2 * self.interval_s)
        self._last_s = now_s
