"""The wall clock by which a node's part of the DHT goes: its leader's, as far as it knows."""

from decod.clocks import wall_clock

TOLERANCE_S = 60.0
"""Clocks of hosts that keep the time differ by less."""


class RunClock:
    """This host's wall clock, corrected by how much the leader's differed when it was asked.

    Records in the DHT name the instant at which they expire. A host whose clock is wrong would
    refuse the records of others, and others would refuse its own.
    """

    def __init__(self) -> None:
        self._off_s = 0.0

    def __call__(self) -> float:
        """Return seconds of the Unix epoch."""
        return wall_clock() - self._off_s

    def compare(self, leader_s: float) -> float:
        """Go by the leader's clock from now on, if this host's differs from it by too much.

        Args:
            leader_s: The leader's clock now, in seconds of the Unix epoch.

        Returns:
            By how many seconds this host's clock is ahead. 0 if that is tolerated.
        """
        off_s = wall_clock() - leader_s
        self._off_s = off_s if abs(off_s) > TOLERANCE_S else 0.0
        return self._off_s
