"""How a peer comes to the state that the others have, while they go on.

States are told apart by what has led to them (`Past`). The peer asks for the run's present state,
and gets all later averages beside the others. Once its training loop has the state, it applies
those that came meanwhile. So it is level however long the state has travelled, and nobody waits for
it.
"""

import hashlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decod.ids import NodeId
from decod.protocol.collaboration.loop import DeliverAverage, LoadState, PeerSink, RoundConfig
from decod.protocol.core.compute_queue import TensorStore
from decod.protocol.core.messages.round_messages import PAST_MAX, Height


def after(height: Height, average_hash: str) -> Height:
    """Return the state that an average leads to."""
    text = f"{height.round} {height.state_id} {average_hash}"
    return Height(height.round + 1, hashlib.sha256(text.encode()).hexdigest())


class Past:
    """The states that have led to the present one.

    Each average makes another state. A state's id is a hash of the state before and of the average,
    so peers with the same id have applied the same averages to the same beginning. Nobody has to
    compare parameters, which may differ in their last bits between devices.

    Args:
        height: The present one.
        has_state: Whether the run began with it, or has come to it. Otherwise it is a newcomer's
            own, which is worth nothing to the others.
    """

    def __init__(self, height: Height, *, has_state: bool = True) -> None:
        self.height = height
        self.has_state = has_state
        self._before: deque[tuple[Height, int]] = deque(maxlen=PAST_MAX)
        """The newest first, and the samples that led on from each."""

    def advance(self, height: Height, num_samples: int) -> None:
        """Another state has come, by so many samples."""
        self._before.appendleft((self.height, num_samples))
        self.height = height

    def restart(self, height: Height) -> None:
        """The state is another one, which has not come from this."""
        self.height = height
        self.has_state = True
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
        known = {*state_ids}
        num_samples = 0
        if self.height.state_id in known:
            return 0
        for height, num in self._before:
            num_samples += num
            if height.state_id in known:
                break
        return num_samples


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
        out: Where this peer says what it wants done.
    """

    def __init__(self, config: RoundConfig, tensors: TensorStore, out: PeerSink) -> None:
        self._config = config
        self._tensors = tensors
        self._out = out
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

    def begin(self, height: Height, donors: Collection[NodeId], *, averaging: bool) -> None:
        """Ask for the run's state, unless an average is under way that would be missing."""
        if self._wanted is not None or self.next_s is not None:
            return
        if donors and (self._later or not averaging):
            self._wanted = height
            self._is_outrun = False
            self._out.put(LoadState(tuple(donors), height))

    def look(self, now_s: float) -> None:
        """The pause before the next attempt may be over."""
        if self.next_s is not None and self.next_s <= now_s:
            self.next_s = None

    def keep(self, later: LaterAverage) -> None:
        """An average has been committed meanwhile."""
        self._later.append(later)
        while len(self._later) > self._config.backlog_max:
            self._tensors.release(self._later.popleft().average.tensor)
            if self.under_way and not self._is_outrun:
                self._is_outrun = True
                self._out.note("peer.outrun", rounds=self._config.backlog_max)

    @property
    def is_hopeless(self) -> bool:
        """Whether the loop can use no state that comes."""
        return self._num_refused >= self._config.loads_max

    def failed(self, now_s: float, height: Height, reason: str) -> None:
        """The state could not be fetched: ask for another one soon."""
        self._wanted = None
        self.next_s = now_s + self._config.load_pause_s
        self._out.note("peer.unloaded", round=height.round, reason=reason)

    def refused(self, now_s: float, height: Height, reason: str) -> None:
        """The loop could not use what came: ask for another one, which may come from others."""
        self._num_refused += 1
        self.failed(now_s, height, reason)

    def loaded(self, height: Height) -> list[LaterAverage]:
        """The loop has a state. Return the averages that lead on from it, in order."""
        self._wanted = None
        self._num_refused = 0
        found = list[LaterAverage]()
        for later in self._later:
            if later.before == height:
                found.append(later)
                height = later.after
            else:
                self._tensors.release(later.average.tensor)
        self._later.clear()
        return found

    def leading_on(self, height: Height) -> list[LaterAverage]:
        """Return the averages that lead on from a state, in order, and keep the others."""
        found = list[LaterAverage]()
        for later in [*self._later]:
            if later.before == height:
                found.append(later)
                self._later.remove(later)
                height = later.after
        return found
