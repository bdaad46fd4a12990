"""Candidates that follow a member: it sends them each average that its stage makes.

The counterpart of `decod.protocol.state.replay`. A follower is no member: no iteration waits for
it. What it has not taken yet this member still holds, so it is left when it lags too far behind; it
may begin again. A member that serves its stage alone makes no average by itself: while it is
followed it does.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from decod.ids import AveragingId, Iteration, NodeId, TensorId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import SendTensor
from decod.protocol.core.events import SendFailed, TensorSent
from decod.protocol.core.jobs import Propose
from decod.protocol.core.messages.membership_messages import Average, Follow, Followed
from decod.protocol.core.view import Opening
from decod.protocol.state.stage_state import EARLY_MAX, StageState

FOLLOWERS_MAX = 2
"""Of one member: each takes as much of its link as a member of its stage."""

LAG_MAX = 4
"""Iterations whose averages may be on their way to a follower."""

_FAILURES_MAX = 8
"""Sends to one follower that may fail; each is tried again at once."""

_SILENT_S = 15.0
"""After which a follower that says nothing is forgotten: it repeats its wish every two seconds."""

_SAYS_NOTHING = "it says nothing"

_NOTICE_S = 2.0
"""How long the wish for a state may take to all its donors: the state that is named is still to
come then, or stands that long."""


def refuse(context: Context, to: NodeId, message: Follow, reason: str) -> None:
    """Tell a candidate that this node can't be followed."""
    nothing = Iteration(0, 0, context.iteration.era)
    context.out.send(to, Followed(message.request_id, message.stage_index, nothing, reason))


@dataclass(slots=True)
class _Follower:
    request_id: int
    base: Iteration
    """Averages of later iterations are sent."""
    heard_s: float
    unsent: dict[TensorId, int] = field(default_factory=dict)
    """Parts on their way, and their iteration."""
    num_failures: int = 0


class ReplaySource:
    """Who follows this member, and what is on its way to them.

    Args:
        context: The node's.
        stage: Tells which state this node holds.
    """

    def __init__(self, context: Context, stage: StageState) -> None:
        self._context = context
        self._out = context.out
        self._stage = stage
        self._known: dict[NodeId, _Follower] = {}
        self._entered: dict[NodeId, _Follower] = {}
        """Those that entered with the iteration in hand: the last averages are still on their
        way."""
        self._committed_s = math.nan
        self._periods_s: deque[float] = deque(maxlen=5)
        self._past = 0
        """The iteration whose average nobody can have any more who asks now; 0: none yet."""

    def wants(self, iteration: Iteration) -> bool:
        """Whether somebody is to have the average of an iteration. Asked once, when it would be
        made.
        """
        self._past = iteration.number
        return any(f.base.number < iteration.number for f in self._known.values())

    # --- iterations -------------------------------------------------------------------------------

    def opened(self, now_s: float, opening: Opening, *, stepped: bool) -> None:
        """An iteration begins. Who is a member now follows no more.

        Args:
            now_s: The time.
            opening: Of the iteration.
            stepped: Whether this node took the step that was committed.
        """
        self._past = 0
        if stepped:
            self._periods_s.append(now_s - self._committed_s)
            self._committed_s = now_s
        entered = [node for node in self._known if node in opening.view]
        left = {node: self._known.pop(node) for node in entered}
        self._entered = {node: follower for node, follower in left.items() if follower.unsent}
        self._leave_all(self._silent(now_s), _SAYS_NOTHING)
        if opening.origin is not None and not stepped:
            self._leave_all([*self._known], "the run has gone back to an earlier iteration")

    def _silent(self, now_s: float) -> list[NodeId]:
        return [n for n, f in self._known.items() if now_s - f.heard_s > _SILENT_S]

    def end(self) -> None:
        """The run is over."""
        self._leave_all([*self._known], "the run is over")

    def _leave_all(self, nodes: list[NodeId], reason: str) -> None:
        for node in nodes:
            self._leave(node, reason)

    def _leave(self, node: NodeId, reason: str) -> None:
        stage = self._context.member.stage_index
        follower = self._known.pop(node, None) or self._entered.pop(node)
        self._out.note("follower.left", peer=node, stage=stage, reason=reason)
        self._out.send(node, Followed(follower.request_id, stage, follower.base, reason))

    # --- who follows --------------------------------------------------------------------------

    def follow(self, now_s: float, sender: NodeId, message: Follow) -> None:
        """A candidate asks to be sent averages, or says that it still wants them.

        It may be in the view still, as who it was before it started again.
        """
        known = self._follower(sender)
        if known is not None and known.request_id == message.request_id:
            known.heard_s = now_s
        else:
            self._known.pop(sender, None)
            silent = self._silent(now_s)
            if refusal := self._refusal(message, num_silent=len(silent)):
                self._leave_all(silent, _SAYS_NOTHING)
                refuse(self._context, sender, message, refusal)
                return
            for node in silent:
                # It hears of that if it asks again.
                del self._known[node]
            iteration = max(self._stage.iteration + self._lead(now_s), self._past)
            base = Iteration(iteration, 0, self._context.iteration.era)
            self._known[sender] = known = _Follower(message.request_id, base, now_s)
        self._out.send(sender, Followed(message.request_id, message.stage_index, known.base))

    def _refusal(self, message: Follow, *, num_silent: int) -> str:
        stage = self._context.member.stage_index
        if message.stage_index != stage:
            return f"it serves stage {stage}"
        if not self._stage.loaded:
            return "it is loading its stage's state"
        if len(self._known) - num_silent + len(self._entered) >= FOLLOWERS_MAX:
            return "as many as may be follow it"
        return ""

    def _lead(self, now_s: float) -> int:
        """Return how many iterations ahead a state is that all donors can still be asked for."""
        periods_s = [period_s for period_s in self._periods_s if period_s > 0]
        opening = self._context.opening
        alone = opening.local or opening.anchor.number < opening.iteration.number - 1
        if alone or not periods_s:
            return 0  # What all have in common stands for some iterations.
        period_s = median(periods_s)
        waited_s = now_s - self._committed_s
        if waited_s > 3 * period_s + _NOTICE_S:
            return 0  # The run stands still.
        left_s = max(0.0, period_s - waited_s)
        return 0 if left_s > _NOTICE_S else min(EARLY_MAX, 1 + int((_NOTICE_S - left_s) / period_s))

    # --- averages -----------------------------------------------------------------------------

    def share(
        self,
        averaging: AveragingId,
        job: Propose,
        parts: Sequence[TensorId],
    ) -> None:
        """The average of an iteration is whole: send it to those who follow.

        Args:
            averaging: Names it.
            job: The members' step.
            parts: Its inputs. Not released here. None: the step is taken without an average.
        """
        iteration = averaging.iteration.number
        self._past = iteration
        for node, follower in list(self._known.items()):
            if iteration <= follower.base.number:
                continue
            if len(set(follower.unsent.values())) >= LAG_MAX:
                self._leave(node, "it takes averages more slowly than they are made")
                continue
            average = Average(
                averaging,
                0,
                len(parts),
                job.weights_total,
                self._stage.parameter_hash,
                job.gradient_norm,
                iteration - 1 - self._context.opening.anchor.number,
                job.num_ahead,
                job.spec,
                job.ahead_spec,
                job.num_targets,
            )
            for part, tensor in enumerate(parts):
                follower.unsent[self._context.tensors.retain(tensor)] = iteration
                self._out.put(SendTensor(node, replace(average, part=part), tensor))
            if not parts:
                self._out.send(node, average)

    def sent(self, event: TensorSent) -> None:
        """A tensor has arrived at somebody."""
        follower = self._follower(event.to)
        if follower is None:
            return
        follower.unsent.pop(event.tensor, None)
        if not follower.unsent:
            self._entered.pop(event.to, None)

    def _follower(self, node: NodeId) -> _Follower | None:
        return self._known.get(node) or self._entered.get(node)

    def undelivered(self, event: SendFailed) -> None:
        """A word or an average did not reach a follower: an average is sent again a few times.

        To one that has entered meanwhile too: nothing is committed until it is level.
        """
        follower = self._follower(event.to)
        tensor = event.tensor
        if follower is not None and tensor is not None and follower.num_failures < _FAILURES_MAX:
            follower.num_failures += 1
            self._out.put(SendTensor(event.to, event.message, tensor))
            return
        if tensor is not None:
            self._context.tensors.release(tensor)
        message = event.message
        if follower is not None:
            self._leave(event.to, event.reason[:200])
        elif isinstance(message, Followed) and message.refusal and event.to in self._context.view:
            # It has entered, and waits for averages that nobody sends. It can fetch the state.
            self._out.send(event.to, message)
