"""How transfers that overlap share one link, so that each can be judged as if it had been alone."""

from dataclasses import dataclass


@dataclass(slots=True)
class LinkShare:
    """A clock that runs at 1/n of real time while n transfers are on their way to one peer.

    What it shows between a transfer's start and end is the time that the transfer would have taken
    alone, if those that were on their way together got equal parts of the link.
    """

    num: int = 0
    """Transfers on their way."""
    _shown_s: float = 0.0
    _looked_s: float = 0.0

    def enter(self, now_s: float) -> float:
        """Begin a transfer; returns what to give to `leave`."""
        self._advance(now_s)
        self.num += 1
        return self._shown_s

    def leave(self, now_s: float, entered_s: float) -> float:
        """End a transfer; returns the time that it would have taken alone, in seconds."""
        self._advance(now_s)
        self.num -= 1
        return self._shown_s - entered_s

    def _advance(self, now_s: float) -> None:
        if self.num:
            self._shown_s += (now_s - self._looked_s) / self.num
        self._looked_s = now_s
