"""A simulated host's own clock, which may stand still while the world goes on."""

from decod.sim.kernel import Kernel

_STALL_COUNTS_S = 0.6
"""How much of a stall a daemon takes for time in which it ran: one wait of its event loop, and how
late that may end. A test holds it against `decod.driver.loop`."""

_EPSILON_S = 1e-9
"""Instants are converted to the host's clock and back: what is lost by that is none too early."""


class HostClock:
    """Shows the core's time on one host.

    Args:
        kernel: Of the run; its instants are the world's.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._behind_s = 0.0
        """By how much it is slow, without the present stop."""
        self._stopped_s: float | None = None
        """When it stopped; None: it runs."""
        self._until_s = 0.0
        """When it goes on, or has gone on last."""
        self._least_s = 0.0
        """What it has shown."""

    @property
    def now_s(self) -> float:
        """The host's time. It never goes back."""
        stopped_s = self._stopped_s
        instant_s = self._kernel.now_s if stopped_s is None else stopped_s
        return max(self._least_s, instant_s - self._behind_s)

    def stop(self, duration_s: float) -> None:
        """Let it stand still for a while, though the host goes on."""
        self._until_s = max(self._until_s, self._kernel.now_s + duration_s)
        if self._stopped_s is None:
            self._stopped_s = self._kernel.now_s
        self._kernel.at(self._until_s, self._go_on)

    def _go_on(self) -> None:
        if self._stopped_s is not None and self._kernel.now_s >= self._until_s:
            self._behind_s += self._kernel.now_s - self._stopped_s
            self._stopped_s = None

    def stalled_since(self, before_s: float) -> None:
        """The host has stood still since its clock showed `before_s`: little of that counts."""
        self._behind_s += max(0.0, self.now_s - before_s - _STALL_COUNTS_S)

    def instant_of(self, time_s: float) -> float:
        """Return the world's instant at which this clock will show `time_s`, as far as is known."""
        from_s = self._kernel.now_s if self._stopped_s is None else self._until_s
        return from_s + max(0.0, time_s - self.now_s)

    def reaches(self, time_s: float) -> bool:
        """Whether it shows a time, as it does from then on if it was as near as can be."""
        reached = time_s <= self.now_s + _EPSILON_S
        if reached:
            self._least_s = max(self._least_s, time_s)
        return reached
