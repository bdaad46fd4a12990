"""Pauses between attempts: twice as long each time, up to a limit."""

import random
import secrets

FIRST_S = 1.0
LONGEST_S = 60.0


class Backoff:
    """The pauses before attempts.

    Each pause is drawn between half its length and its full length, so that nodes that were cut off
    together do not come back together.

    Args:
        rng: Draws the pauses. If absent, one with a random seed.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random(secrets.randbits(64))  # noqa: S311 - no secret.
        self._length_s = FIRST_S

    def next_s(self) -> float:
        """Return the next pause, in seconds."""
        length_s, self._length_s = self._length_s, min(2 * self._length_s, LONGEST_S)
        return self._rng.uniform(length_s / 2, length_s)

    def reset(self) -> None:
        """Begin with short pauses again, after a time without failures."""
        self._length_s = FIRST_S
