"""The share of a link that each of several overlapping transfers gets.

With it, the rate of each transfer can be computed as if it had had the link to itself.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class LinkShare:
    """A clock that runs at 1/n of real time while n transfers are on their way to one peer.

    Between a transfer's start and end, the clock advances by the time that the transfer would have
    taken alone. This assumes that overlapping transfers get equal parts of the link.
    """

    num: int = 0
    """Transfers on their way."""
    _shown_s: float = 0.0
    _looked_s: float = 0.0

    def enter(self, now_s: float) -> float:
        """Begin a transfer; return the clock's time, to be passed to `leave`."""
        self._advance(now_s)
        self.num += 1
        return self._shown_s

    def leave(self, now_s: float, entered_s: float) -> float:
        """End a transfer; return the time that it would have taken alone, in seconds."""
        self._advance(now_s)
        self.num -= 1
        return self._shown_s - entered_s

    def _advance(self, now_s: float) -> None:
        if self.num:
            self._shown_s += (now_s - self._looked_s) / self.num
        self._looked_s = now_s
