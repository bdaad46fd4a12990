"""An average that travels while its members train on.

    NONE -> TRAVELLING -> HERE -> USED, by the outer step of the arrival
                 `------> DROPPED, in all of the stage

When a local phase has ended, each member's contribution to its average stands on its device. The
members average these contributions while they train on. They use the result in the arrival: the
first iteration that begins when all members of all stages have it. If there is none before the next
local phase ends, that iteration's outer step uses it, and waits for it if it must.

Who takes part follows from the view: the members that were there when the phase ended. Newcomers
get the average too. If a member is lost, the others average anew without it: their contributions
are kept until the average is used. The same holds if another leader has been elected, or if the
end of a phase is repeated, because messages may have been lost then. An average whose parts can't
all be had is dropped by all. That costs what was learnt in one phase, never a fork.

Members say in their votes whether the average is here. Once all of a stage have it, the leader says
so in its openings, and they keep it whoever is lost. A newcomer ends that: it may need parts of
somebody who is lost.

If a quorum is enough, contributions have a grace window. It is the first half of the next local
phase (the first quarter, and the third, if the average has two phases): means take as long to
travel as contributions. Nobody waits for it, but a late contribution delays the arrival until then.
Contributions that come later count in the next average.

Members say in their votes how fast they send. A member that sends much more slowly than the others
reduces fewer parts. If a quorum is enough, it withholds its contribution while an earlier one is
still on its way.

Source: DiLoCoX (arXiv:2506.21263), section 2.3, which describes no losses and no newcomers, and
uses each average one phase late. Quorum and grace window: Decoupled DiLoCo (arXiv:2604.21428).
Deviations: there is no central syncer. The owner of each part decides for its part what comes too
late.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable

from decod.ids import AveragingId, Iteration, NodeId, TensorId
from decod.protocol.averaging.averager import (
    Averager,
    Averaging,
    AveragingState,
    Weight,
    port_of,
)
from decod.protocol.core.context import Context
from decod.protocol.core.events import Received, SendFailed, TensorSent
from decod.protocol.core.messages import ReducedPart, ReducePart

_EARLY_MAX = 1024
"""Messages that are kept until this node has opened the iteration that they follow on."""

_NOTHING = Weight(0, 0)


class Overlap:
    """One member's part in the average of the last local phase.

    Args:
        context: The node's.
        settled: Called when the average is here, or is dropped.
    """

    def __init__(self, context: Context, settled: Callable[[], None]) -> None:
        self._context = context
        self._out = context.out
        self._is_settled = settled
        self._averager: Averager | None = None
        self._id: AveragingId | None = None
        self._own = _NOTHING
        self._own_of = 0
        """What this node's contribution stands for, and the iteration that it was made in."""
        self._parts: list[TensorId] = []
        self.found = _NOTHING
        """What is in the average, once it is here."""
        self._begun_s = self.travel_s = 0.0
        """When the average began, and how long it took, once it is here."""
        self._sent_bytes = 0
        self._sent_s = 0.0
        """Of this node's contribution: what has arrived, and how long that took together."""
        self._rate: float | None = None
        self._outgoing: dict[TensorId, tuple[Iteration, NodeId]] = {}
        """Contributions of the last local phase and of earlier ones that are still on their way, of
        averages that have ended: end of the phase, and receiver."""
        self.missed: tuple[int, ...] = ()
        """Parts of the average that lack this node's contribution, once it is here."""
        self.num_late = 0
        """This node's microbatches that it lacks."""
        self._early: deque[Received] = deque()
        """Messages that wait. Their tensors stay with the driver until they are taken up."""

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way any more: the next outer step can be taken."""
        averager = self._averager
        travels = averager is not None and averager.state is not AveragingState.OVER
        return not travels or bool(self._parts)

    @property
    def travelled(self) -> int:
        """The version of the average that is here; 0 if none is."""
        return self._id.view_version if self._id is not None and self._parts else 0

    @property
    def awaited(self) -> set[NodeId]:
        """From whom something is to come."""
        return set() if self.settled or self._averager is None else self._averager.awaited

    def take(self) -> list[TensorId]:
        """Return the parts of the average, for a step that may be repeated. None: it is dropped."""
        return [self._context.tensors.retain(part) for part in self._parts]

    # --- steps and openings -------------------------------------------------------------------

    def stepped(self, own: Weight, iteration: int) -> None:
        """A local phase has ended with an iteration. To its average this node contributes `own`."""
        self._own = own
        self._own_of = iteration

    def returned(self) -> None:
        """This node's device is about to lose its contribution."""
        self._own = _NOTHING
        if self._averager is not None:
            self._averager.forget()

    def opened(self) -> None:
        """An iteration or a view begins: average what there is, with those who are there."""
        key = self._key()
        if key != self._id:
            self.end()
            self._id = key
            if key is not None:
                self._begin(key)
        if self._averager is not None:
            self._averager.tell(self._newcomers)
            self._averager.grace_over(self._num_closing)

    @property
    def _num_closing(self) -> int:
        """Return how many phases' grace windows are over."""
        context = self._context
        num_phases = context.run.sync.num_phases
        number = context.iteration.number
        if not context.opening.local:
            return num_phases
        interval = context.opening.due - context.opening.anchor.number
        elapsed = number - 1 - context.opening.anchor.number
        ends = ((2 * phase + 1) * interval for phase in range(num_phases))
        return sum(2 * num_phases * elapsed >= end for end in ends)

    @property
    def _contributors(self) -> tuple[NodeId, ...]:
        context = self._context
        roster = context.view.roster(context.member.stage_index)
        number = context.opening.anchor.number
        return tuple(m.node_id for m in roster if m.since_iteration < number)

    @property
    def _newcomers(self) -> tuple[NodeId, ...]:
        context = self._context
        old = self._contributors
        roster = context.view.roster(context.member.stage_index)
        return tuple(m.node_id for m in roster if m.node_id not in old)

    def _key(self) -> AveragingId | None:
        """Return the name of the average, the same at all members. None: there is none."""
        context = self._context
        contributors = self._contributors
        if context.opening.travelling is None:
            return None
        # Who lacks it begins no other average under its name: that says nothing of the roster.
        version = dict(context.opening.travelled).get(context.member.stage_index, 0)
        if self._parts and self._id == AveragingId(context.opening.anchor, version):
            return self._id
        if not contributors:
            return None
        attempt = 1 if context.opening.local else context.iteration.attempt
        told = (context.view.term, attempt, context.opening.travelling, *contributors)
        text = " ".join(map(str, told))
        version = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
        return AveragingId(context.opening.anchor, version)

    def _begin(self, key: AveragingId) -> None:
        context = self._context
        port = port_of(context)
        roster = self._contributors
        spec = context.opening.travelling
        assert spec is not None, "it has a key"
        ratio = context.run.sync.quorum
        averaging = Averaging(
            key,
            roster,
            context.owners(roster),
            spec,
            overlapped=True,
            quorum=math.ceil(ratio * len(roster)) if ratio < 1 else 0,
        )
        self._averager = averager = Averager(context.node_id, averaging, port, self)
        self._sent_bytes = 0
        self._sent_s = 0.0
        self._begun_s = context.now_s
        listens = context.node_id not in self._contributors
        own = self._own if self._own_of == context.opening.anchor.number else _NOTHING
        # Those who are slow are never all, so somebody contributes.
        busy = context.run.sync.quorum < 1 and context.node_id in dict(context.opening.slow)
        withholds = busy and self._sends_still
        if listens:
            averager.listen()
        else:
            averager.begin(own, None, withholds=withholds)
        early = self._early
        self._early = deque()
        for each in early:
            self.received(each)

    def stop(self) -> None:
        """The run is over: let go of everything."""
        early = self._early
        self._early = deque()
        self.end()
        for each in early:
            self._out.free(each.tensor)

    def end(self) -> None:
        """Let go of the average."""
        averager = self._averager
        self._averager = None
        if averager is not None and self._id is not None:
            step = self._id.iteration
            self._outgoing |= {tensor: (step, to) for tensor, to in averager.outgoing.items()}
        parts = self._parts
        self._parts = []
        self.found = _NOTHING
        self.travel_s = 0.0
        self._id = None
        self.missed = ()
        self.num_late = 0
        self._context.tensors.release(*parts)
        if averager is not None:
            averager.close()
            averager.abandon()

    # --- messages -----------------------------------------------------------------------------

    def received(self, received: Received) -> None:
        """Take in a part of a sum or of the average."""
        message = received.message
        averager = self._averager
        assert isinstance(message, ReducePart | ReducedPart)
        if averager is None or message.averaging != self._id:
            self._keep(received, message.averaging)
            return
        match message:
            case ReducePart():
                averager.part(received.sender, message, received.tensor)
            case ReducedPart() if received.tensor is not None:
                averager.average(received.sender, message, received.tensor)
            case ReducedPart():
                averager.refused(received.sender, message)

    def _keep(self, received: Received, averaging: AveragingId) -> None:
        """Keep a message of an average that this node has not begun yet."""
        if averaging.iteration < self._context.opening.anchor:
            self._out.free(received.tensor)
            return
        self._early.append(received)
        if len(self._early) > _EARLY_MAX:
            self._out.free(self._early.popleft().tensor)

    # --- how fast members send ----------------------------------------------------------------

    def sent(self, event: TensorSent) -> bool:
        """A tensor has arrived at another node. Returns whether it has travelled beside passes."""
        is_earlier = event.tensor in self._outgoing
        if not self._forgotten(event.tensor):
            return is_earlier
        self._sent_bytes += event.size_bytes
        self._sent_s += event.duration_s
        return True

    def undelivered(self, event: SendFailed) -> None:
        """A message or tensor did not arrive."""
        if event.tensor is not None:
            self._forgotten(event.tensor)

    def _forgotten(self, tensor: TensorId) -> bool:
        """Forget a tensor that is on its way no more. Return whether it is of this average."""
        self._outgoing.pop(tensor, None)
        averager = self._averager
        return averager is not None and averager.outgoing.pop(tensor, None) is not None

    @property
    def _sends_still(self) -> bool:
        """Whether a contribution to an earlier outer step is on its way to a member."""
        view = self._context.view
        step = self._context.opening.anchor
        sends = self._outgoing.values()
        return any(before < step and to in view for before, to in sends)

    @property
    def bytes_per_s(self) -> float | None:
        """How fast this node sends, by its newest contribution. None: it has sent none."""
        waits = self._averager is not None and bool(self._averager.outgoing)
        took_s = max(self._sent_s, self._context.now_s - self._begun_s if waits else 0.0)
        if took_s > 0:
            self._rate = self._sent_bytes / took_s
        return self._rate

    # --- the average --------------------------------------------------------------------------

    def averaged(self) -> None:
        """The average is here."""
        averager = self._averager
        assert averager is not None
        self._parts = averager.take()
        self.found = averager.found
        self.missed = tuple(sorted(averager.missed))
        self.num_late = averager.num_missed
        self.travel_s = self._context.now_s - self._begun_s
        self._is_settled()

    def lacking(self, found: Weight) -> None:
        """Members may have been lost, so nobody knows what the sums add up to."""
        raise AssertionError(f"an overlapped average has no total, but lacks something: {found}")

    def averaging_failed(self, reason: str) -> None:
        """Nobody can have the average."""
        stage = self._context.member.stage_index
        self._out.note("average.dropped", stage=stage, reason=reason[:200])
        self._is_settled()
