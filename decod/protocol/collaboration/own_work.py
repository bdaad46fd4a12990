"""What this peer's training loop has done, and what it is still to do.

    stepped -> outstanding -> asked -> held --- in a committed average
                    ^                   |
                    `-- given back -----'   (the round went on without it)

Samples of a step are outstanding until the node asks for them. From then on it holds them, until an
average with them is committed. A round that goes on without them gives them back: they count in the
next. So each sample counts once, or is dropped and counted as such.

Averages that are committed wait here for the loop. It applies them in order, when it ends a step.
"""

import hashlib
from collections import deque
from dataclasses import dataclass

from decod.ids import NodeId, TensorId
from decod.protocol.averaging.averager import Weight
from decod.protocol.collaboration.loop import (
    AskContribution,
    DeliverAverage,
    GiveBack,
    LoopContributed,
    LoopStepped,
    PeerSink,
    RoundConfig,
    StepAlone,
)
from decod.protocol.core.compute_queue import TensorStore

_MEMORY = 0.8
"""Weight of what was known before, when a step's time is measured."""

_DIGEST_MASK = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Held:
    """A contribution that the node holds."""

    tensor: TensorId
    weight: Weight
    base_round: int


class OwnWork:
    """One peer's work.

    Args:
        node_id: This peer.
        config: Of the run.
        tensors: Where contributions and averages are held.
        out: Where this peer says what it wants done.
    """

    def __init__(
        self, node_id: NodeId, config: RoundConfig, tensors: TensorStore, out: PeerSink
    ) -> None:
        self._node_id = node_id
        self._config = config
        self._tensors = tensors
        self._out = out
        self._outstanding = 0
        """Below 0: the loop has given samples of a step that it is about to tell of."""
        self._asked: int | None = None
        self._next_request = 1
        self.held: Held | None = None
        """What the loop has given for a round. None: nothing that counts."""
        self.alone = 0
        """The round that the loop steps by itself. 0: none."""
        self._backlog: deque[int] = deque()
        """Rounds whose averages the loop has not applied yet."""
        self.num_stepped = self.num_applied = self.num_dropped = 0
        """Samples since the start: of all steps, in averages that count, and in none."""
        self._free_s: float | None = None
        """Since when the loop may work on its step. None: it has ended one, and asks or waits."""
        self.step_s = self.samples_per_s = 0.0

    @property
    def num_outstanding(self) -> int:
        """Samples that the next average could have."""
        held = self.held.weight.num if self.held is not None else 0
        return max(0, self._outstanding + held)

    @property
    def num_waiting(self) -> int:
        """Averages that the loop has not applied."""
        return len(self._backlog)

    @property
    def is_stuck(self) -> bool:
        """Whether the loop has stood still for so many rounds that it gets no more averages."""
        return self.num_waiting >= self._config.backlog_max

    @property
    def is_laden(self) -> bool:
        """Whether this peer holds so much that it takes part in no further round."""
        return self._tensors.size_bytes > self._config.held_max_bytes

    @property
    def promised(self) -> bool:
        """Whether the loop's work so far is, or will be, part of a round under way."""
        return self._asked is not None or self.held is not None or bool(self.alone)

    def stepped(self, now_s: float, event: LoopStepped) -> None:
        """The loop has finished a step."""
        self._outstanding += event.num_samples
        self.num_stepped += event.num_samples
        if self._free_s is not None and now_s > self._free_s:
            step_s = now_s - self._free_s
            usual_s = self.step_s
            # A pause, as for a checkpoint, or a first step that compiles, is no measure of a step.
            known = _MEMORY if 0 < usual_s <= 2 * step_s else 0.0
            step_s = min(step_s, 2 * usual_s) if usual_s else step_s
            self.step_s = known * self.step_s + (1 - known) * step_s
            rate = event.num_samples / step_s
            self.samples_per_s = known * self.samples_per_s + (1 - known) * rate
        self._free_s = None

    def goes_on(self, now_s: float) -> None:
        """The loop has been told to go on, or has what it waits for."""
        if self._free_s is None:
            self._free_s = now_s

    # --- contributions ------------------------------------------------------------------------

    def ask(self) -> None:
        """Have the loop give what is outstanding, if that is not under way."""
        if self._asked is None and self.held is None:
            self._asked = self._next_request
            self._next_request += 1
            self._out.put(AskContribution(self._asked))

    def contributed(self, event: LoopContributed) -> None:
        """Take what the loop gives. `held` is not None then, unless there was nothing."""
        tensor = self._tensors.add(event.tensor) if event.tensor is not None else None
        if event.request != self._asked:  # The state was replaced meanwhile, and all work with it.
            if tensor is not None:
                self._tensors.release(tensor)
            return
        self._asked = None
        self._outstanding -= event.num_samples + event.num_dropped
        self.num_dropped += event.num_dropped
        named = f"{self._node_id} {event.request} {event.num_samples}"
        digest = int.from_bytes(hashlib.sha256(named.encode()).digest()[:8]) & _DIGEST_MASK
        if tensor is not None:
            self.held = Held(tensor, Weight(event.num_samples, digest), event.base_round)

    def count(self) -> None:
        """What is held counts: an average with it is committed."""
        held = self.held
        self.held = None
        assert held is not None
        self.num_applied += held.weight.num
        self._tensors.release(held.tensor)

    def give_back(self) -> None:
        """A round went on without what is held."""
        held = self.held
        self.held = None
        if held is not None:
            self._outstanding += held.weight.num
            self._out.put(GiveBack(held.tensor))
            self._tensors.release(held.tensor)

    def step_alone(self, round_number: int) -> None:
        """Have the loop step from all that is outstanding."""
        assert not self.promised
        self.alone = round_number
        self._out.put(StepAlone(round_number))

    # --- averages -----------------------------------------------------------------------------

    def deliver(self, average: DeliverAverage) -> None:
        """Have the loop apply an average."""
        self._backlog.append(average.round)
        self._tensors.hand_over(average.tensor)
        self._out.put(average)

    def applied(self, round_number: int) -> None:
        """The loop has applied an average, or has stepped by itself."""
        if round_number == self.alone:
            self.alone = 0
            self.num_applied += self._outstanding
            self._outstanding = 0
        elif self._backlog and self._backlog[0] == round_number:
            self._backlog.popleft()

    def restart(self) -> None:
        """The loop's state is replaced: what it has done since counts nowhere."""
        self.num_dropped += self.num_outstanding
        if self.held is not None:
            self._tensors.release(self.held.tensor)
        self._outstanding = 0
        self.held = None
        self._asked = None
        self.alone = 0
        self._backlog.clear()
