"""A simulated host's own clock, which may stop while the world goes on."""

from decod.sim.kernel import Kernel

_STALL_COUNTS_S = 0.6
"""How much of a stall a daemon counts as running time: one wait of its event loop, plus the most
that the wait may end late. A test compares it with `decod.driver.event_loop`."""

_EPSILON_S = 1e-9
"""Tolerance for rounding: instants are converted to the host's clock and back."""


class HostClock:
    """Shows the core's time on one host.

    Args:
        kernel: The run's kernel; its instants are world time.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._behind_s = 0.0
        """How far it lags behind world time, without the present stop."""
        self._stopped_s: float | None = None
        """World time at which it stopped. None: it runs."""
        self._until_s = 0.0
        """World time at which the present or last stop ends."""
        self._least_s = 0.0
        """The latest time that it has shown."""

    @property
    def now_s(self) -> float:
        """The host's time. It never goes back."""
        stopped_s = self._stopped_s
        instant_s = self._kernel.now_s if stopped_s is None else stopped_s
        return max(self._least_s, instant_s - self._behind_s)

    def stop(self, duration_s: float) -> None:
        """Stop the clock for a while. The host itself goes on."""
        self._until_s = max(self._until_s, self._kernel.now_s + duration_s)
        if self._stopped_s is None:
            self._stopped_s = self._kernel.now_s
        self._kernel.at(self._until_s, self._go_on)

    def _go_on(self) -> None:
        if self._stopped_s is not None and self._kernel.now_s >= self._until_s:
            self._behind_s += self._kernel.now_s - self._stopped_s
            self._stopped_s = None

    def stalled_since(self, before_s: float) -> float:
        """Take in a stall that began when the clock showed `before_s`. Little of it counts.

        Returns:
            How much of it does not.
        """
        lost_s = max(0.0, self.now_s - before_s - _STALL_COUNTS_S)
        self._behind_s += lost_s
        return lost_s

    def instant_of(self, time_s: float) -> float:
        """Return the world's instant at which this clock will show `time_s`, as known now."""
        from_s = self._kernel.now_s if self._stopped_s is None else self._until_s
        return from_s + max(0.0, time_s - self.now_s)

    def reaches(self, time_s: float) -> bool:
        """Return whether the clock shows a time. A near miss counts, and sets the clock to it."""
        reached = time_s <= self.now_s + _EPSILON_S
        if reached:
            self._least_s = max(self._least_s, time_s)
        return reached
