"""States of a collaborative run, by what has led to them.

Each average makes another state. A state's id is a hash of the state before and of the average, so
peers with the same id have applied the same averages to the same beginning. Nobody has to compare
parameters, which may differ in their last bits between devices.
"""

import hashlib
from collections import deque
from collections.abc import Sequence

from decod.protocol.core.messages.round_messages import PAST_MAX, Height


def after(height: Height, average_hash: str) -> Height:
    """Return the state that an average leads to."""
    text = f"{height.round} {height.state_id} {average_hash}"
    return Height(height.round + 1, hashlib.sha256(text.encode()).hexdigest())


class Past:
    """The states that have led to the present one.

    Args:
        height: The present one.
        has_state: Whether the run began with it, or has come to it. Otherwise it is a newcomer's
            own, which is worth nothing to the others.
    """

    def __init__(self, height: Height, *, has_state: bool = True) -> None:
        self.height, self.has_state = height, has_state
        self._before: deque[tuple[Height, int]] = deque(maxlen=PAST_MAX)
        """The newest first, and the samples that led on from each."""

    def advance(self, height: Height, num_samples: int) -> None:
        """Another state has come, by so many samples."""
        self._before.appendleft((self.height, num_samples))
        self.height = height

    def restart(self, height: Height) -> None:
        """The state is another one, which has not come from this."""
        self.height, self.has_state = height, True
        self._before.clear()

    def at(self, round_number: int) -> Height | None:
        """Return the state after a round. None: it is not known."""
        back = self.height.round - round_number
        if back == 0:
            return self.height
        return self._before[back - 1][0] if 0 < back <= len(self._before) else None

    @property
    def ids(self) -> tuple[str, ...]:
        """State ids before the present one, the newest first."""
        return tuple(height.state_id for height, _ in self._before)

    def came_from(self, height: Height) -> bool:
        """Whether a state is one of those before the present one."""
        return any(before == height for before, _ in self._before)

    def num_since(self, state_ids: Sequence[str]) -> int:
        """Return the samples since the newest state that is one of these.

        Those are lost if the run goes on from a state with this past. If none is known, all that
        is remembered counts.
        """
        known, num_samples = {*state_ids}, 0
        if self.height.state_id in known:
            return 0
        for height, num in self._before:
            num_samples += num
            if height.state_id in known:
                break
        return num_samples
