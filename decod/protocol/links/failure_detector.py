"""How long a peer may be silent before it is suspected: an accrual failure detector.

A peer that shows itself regularly is suspected after a fixed time. One whose signs of life come
irregularly, because its host is busy or its link delays, is given more: as long as its past makes a
longer silence a thing of one in a hundred million. So a loaded host keeps its place, and a host
that vanishes is found soon.

Source: Hayashibara, Défago, Yared, Katayama, "The phi accrual failure detector" (SRDS 2004),
with a normal distribution, as in Akka. Deviations: the fixed time is the least that is ever given,
and what is asked for is the silence at which phi reaches the threshold, not phi.
"""

from collections import deque
from math import sqrt

from decod.protocol.core.messages.membership_messages import SLACK_MAX as SLACK_MAX

_DEVIATIONS = 5.61
"""Standard deviations above the mean at which phi is 8."""

_WINDOW = 100
"""Silences that are remembered."""

_GAP_SHARE = 0.5
"""Signs of life that follow each other faster than this share of the interval are one: traffic
must not make a peer seem more regular than its heartbeats are."""


class Accrual:
    """Learns from a peer's signs of life how long it may be silent.

    Args:
        floor_s: The fixed time: what is given at least.
        interval_s: How often the peer shows itself if it has nothing else to say.
    """

    def __init__(self, *, floor_s: float, interval_s: float) -> None:
        self._floor_s = floor_s
        self._gap_min_s = _GAP_SHARE * interval_s
        self._gaps_s: deque[float] = deque(maxlen=_WINDOW)
        self._slack = 1.0

    @property
    def slack(self) -> float:
        """How many times the fixed time the peer is given, from 1 to `SLACK_MAX`."""
        return self._slack

    @property
    def timeout_s(self) -> float:
        """The silence after which the peer is suspected."""
        return self._slack * self._floor_s

    def ended(self, silence_s: float) -> None:
        """The peer has shown itself after it was silent for so long."""
        if silence_s < self._gap_min_s:
            return
        gaps_s = self._gaps_s
        gaps_s.append(silence_s)
        mean_s = sum(gaps_s) / len(gaps_s)
        variance = sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s)
        least_s = mean_s + _DEVIATIONS * sqrt(variance)
        self._slack = min(SLACK_MAX, max(1.0, least_s / self._floor_s))
