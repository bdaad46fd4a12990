"""How a peer comes to the state that the others have, while they go on.

The peer asks for the run's present state, and gets all later averages beside the others. Once its
training loop has the state, it applies those that came meanwhile. So it is level however long the
state has travelled, and nobody waits for it.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from decod.ids import NodeId
from decod.protocol.collaboration.heights import Past
from decod.protocol.collaboration.loop import (
    CopyRequested,
    CopyState,
    DeliverAverage,
    LoadState,
    PeerEffect,
    RefuseCopy,
)
from decod.protocol.collaboration.round_params import RoundConfig
from decod.protocol.core.compute_queue import TensorStore
from decod.protocol.core.effects import noted
from decod.protocol.core.messages.round_messages import Height


@dataclass(frozen=True, slots=True)
class LaterAverage:
    """An average that is committed, and that the loop can't apply yet."""

    before: Height
    after: Height
    average: DeliverAverage


class Loading:
    """One peer's loading of a state.

    Args:
        config: Of the run.
        tensors: Where averages are held.
    """

    def __init__(self, config: RoundConfig, tensors: TensorStore) -> None:
        self._config, self._tensors = config, tensors
        self._wanted: Height | None = None
        self._later: deque[LaterAverage] = deque()
        self.next_s: float | None = None
        """When the next attempt is due. None: none is."""
        self._num_refused = 0
        """States in a row that the loop could not use."""
        self._is_outrun = False
        """An average that leads on from the state under way is gone."""

    @property
    def under_way(self) -> bool:
        return self._wanted is not None

    def begin(
        self, height: Height, donors: Collection[NodeId], *, averaging: bool
    ) -> list[PeerEffect]:
        """Ask for the run's state, unless an average is under way that would be missing."""
        if self._wanted is not None or self.next_s is not None:
            return []
        if not donors or (averaging and not self._later):
            return []
        self._wanted, self._is_outrun = height, False
        return [LoadState(tuple(donors), height)]

    def look(self, now_s: float) -> None:
        """The pause before the next attempt may be over."""
        if self.next_s is not None and self.next_s <= now_s:
            self.next_s = None

    def keep(self, later: LaterAverage) -> list[PeerEffect]:
        """An average has been committed meanwhile."""
        self._later.append(later)
        effects: list[PeerEffect] = []
        while len(self._later) > self._config.backlog_max:
            effects += self._tensors.release(self._later.popleft().average.tensor)
            if self.under_way and not self._is_outrun:
                self._is_outrun = True
                effects.append(noted("peer.outrun", rounds=self._config.backlog_max))
        return effects

    @property
    def is_hopeless(self) -> bool:
        """Whether the loop can use no state that comes."""
        return self._num_refused >= self._config.loads_max

    def failed(self, now_s: float, height: Height, reason: str) -> list[PeerEffect]:
        """The state could not be fetched: ask for another one soon."""
        self._wanted, self.next_s = None, now_s + self._config.load_pause_s
        return [noted("peer.unloaded", round=height.round, reason=reason)]

    def refused(self, now_s: float, height: Height, reason: str) -> list[PeerEffect]:
        """The loop could not use what came: ask for another one, which may come from others."""
        self._num_refused += 1
        return self.failed(now_s, height, reason)

    def loaded(self, height: Height) -> tuple[list[LaterAverage], list[PeerEffect]]:
        """The loop has a state.

        Returns the averages that lead on from it, in order, and effects.
        """
        self._wanted, self._num_refused = None, 0
        found, effects = list[LaterAverage](), list[PeerEffect]()
        for later in self._later:
            if later.before == height:
                found.append(later)
                height = later.after
            else:
                effects += self._tensors.release(later.average.tensor)
        self._later.clear()
        return found, effects

    def leading_on(self, height: Height) -> list[LaterAverage]:
        """Return the averages that lead on from a state, in order, and keep the others."""
        found = list[LaterAverage]()
        for later in [*self._later]:
            if later.before == height:
                found.append(later)
                self._later.remove(later)
                height = later.after
        return found


def answered(
    copies: deque[CopyRequested], applied: int, past: Past, *, num_waiting: int
) -> list[PeerEffect]:
    """Give copies of the state to those who ask for it, once the loop has it.

    Args:
        copies: What is asked for. Who is answered is removed.
        applied: The last round whose average the loop has applied.
        past: Of this peer.
        num_waiting: Averages that the loop has not applied.
    """
    effects: list[PeerEffect] = []
    for asked in [*copies]:
        number = asked.height.round
        if number < applied:
            effects.append(RefuseCopy(asked.request, f"it is at round {applied}"))
        elif number > past.height.round:
            effects.append(RefuseCopy(asked.request, "it is not that far"))
        elif asked.height != past.at(number):
            effects.append(RefuseCopy(asked.request, f"it has another state of round {number}"))
        elif number == applied:
            effects.append(CopyState(asked.request))
        elif num_waiting > 1:
            effects.append(RefuseCopy(asked.request, "its loop stands still"))
        else:
            continue
        copies.remove(asked)
    return effects
