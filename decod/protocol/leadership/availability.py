"""What operators want of their nodes' places in the run: to pause, to take part again, to leave.

    WORKING --PauseRequested, agreed, a view shows it--> PAUSED --the same, not paused--> WORKING
    PAUSED --if its device is to be freed--> DRAINING
    either of them --DrainRequested--> DRAINING --a view without it, or time is up--> (stops)

The leader decides, and keeps what is wanted in its `Seats`. `Availability` is a node's own part. It
repeats what it wants until a view shows it, so that neither a lost
message nor a leader that has forgotten it leaves the wish behind. The leader's answer to a wish is
noted once, for whoever asked. A paused node is a member with capacity 0: nobody routes anything
through it, and it reduces, votes and commits as an idle relay does. One whose device is to be freed
can't: it leaves the view once it is paused, and comes back as a newcomer. A node that leaves does
what its iteration asks of it, for it is counted on there; it is left out of the next. If nobody
else serves its stage it waits for a successor. When its time is up it goes at once, and says so to
the leader, which goes on with the iteration without it.

A node whose device runs out of memory again asks for one microbatch less at a time in the same way.
"""

import math

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.events import Received, earliest
from decod.protocol.core.messages import Capacity, CapacityAnswer, Leave

_REPEAT_S = 5.0
"""Pause between two repeats of what this node wants, while no view shows it."""


class Availability:
    """What one node wants for itself.

    Args:
        context: The node's.
        capacity: What it holds when it is not paused.
    """

    def __init__(self, context: Context, capacity: int) -> None:
        self._context = context
        self._out = context.out
        self._full = self._wanted = capacity
        self._ran_out = False
        """The device has had no memory for a job before."""
        self._request_id = 0
        self._answered = True
        """The leader has answered the last wish."""
        self._shown_paused = False
        self.draining = False
        self._frees = False
        """The device is wanted for something else: a paused node leaves, to come back one day."""
        self._leave_by_s: float | None = None
        self._repeat_s: float | None = None

    @property
    def deadline_s(self) -> float | None:
        return earliest(self._repeat_s, self._leave_by_s)

    @property
    def capacity(self) -> int:
        """Microbatches that this node can be given now: 0 while it is paused."""
        view = self._context.view
        node_id = self._context.node_id
        return view.by_id[node_id].capacity if node_id in view else self._full

    @property
    def _serves_alone(self) -> bool:
        """Whether no other member of this node's stage takes microbatches."""
        workers = self._context.view.workers[self._context.member.stage_index]
        return all(m.node_id == self._context.node_id for m in workers)

    # --- pausing ------------------------------------------------------------------------------

    def pause(self, now_s: float, *, paused: bool, frees_device: bool = False) -> None:
        """Take in what the operator wants; ends with one note, that it is agreed or refused."""
        if refusal := self._refusal(paused=paused):
            self._out.note("capacity.refused", reason=refusal)
        else:
            self._frees = paused and frees_device
            self._want(now_s, 0 if paused else self._full)

    def out_of_memory(self, now_s: float) -> None:
        """The device had no memory for a job. If it is not the first one, take less at a time."""
        again = self._ran_out
        self._ran_out = True
        known = self._context.node_id in self._context.view
        if not again or self._full == 1 or self.draining or not known:
            return
        self._full -= 1
        self._out.note("capacity.lowered", capacity=self._full)
        if self._wanted:
            self._want(now_s, self._full)

    def _want(self, now_s: float, capacity: int) -> None:
        self._wanted = capacity
        self._request_id += 1
        self._answered = False
        self._repeat_s = now_s + _REPEAT_S
        self._say()

    def _refusal(self, *, paused: bool) -> str:
        """Return why the leader need not be asked, or nothing."""
        if self._context.node_id not in self._context.view:
            return "it has not entered the run yet"
        if self.draining:
            return "it is freeing its device" if self._frees else "it is leaving the run"
        if self._context.member.stage_index == 0:
            return "it is a data node: every iteration waits for its share of the batch"
        if paused and self.capacity and self._serves_alone:
            stage = self._context.member.stage_index
            return f"stage {stage} would stop: nobody else takes its microbatches"
        return ""

    def received(self, now_s: float, received: Received) -> None:  # noqa: ARG002
        """Take in the leader's answer."""
        assert isinstance(received.message, CapacityAnswer)
        self.answered(received.sender, received.message)

    def answered(self, sender: NodeId, message: CapacityAnswer) -> None:
        """The leader agrees or refuses; it may refuse what it has agreed to."""
        if sender != self._context.view.leader or message.request_id != self._request_id:
            return
        first = not self._answered
        self._answered = True
        if message.refusal:
            differs = self._wanted != self.capacity
            self._wanted = self.capacity
            self._frees = False
            if first or differs:
                self._out.note("capacity.refused", reason=message.refusal)
        elif first:
            self._out.note("capacity.agreed", capacity=self._wanted)

    def opened(self, now_s: float, *, resigns: bool = False) -> None:
        """An iteration has begun, maybe with another view.

        Args:
            now_s: The time.
            resigns: This node leads, and wants to leave.
        """
        paused = self.capacity == 0
        if self._unshown and self._repeat_s is None:
            self._repeat_s = now_s + _REPEAT_S
        leaves = resigns or (self.draining and not self._frees)
        if paused != self._shown_paused and not leaves:
            if paused:
                self._out.note("node.paused")
            else:
                self._out.note("node.resumed", capacity=self.capacity)
        self._shown_paused = paused
        if self._frees and paused:
            self._leave(now_s)

    @property
    def _unshown(self) -> bool:
        return not self._answered or self._wanted != self.capacity

    # --- leaving ------------------------------------------------------------------------------

    def drain(self, now_s: float, timeout_s: float) -> None:
        """Leave within so many seconds; a second request can only shorten that."""
        self._frees = False
        if self._context.node_id not in self._context.view:
            self._out.send(self._context.view.leader, Leave(self._reason))
            self._out.put(Stop(StopReason.DRAINED, "it had not begun to train"))
            return
        if timeout_s < math.inf:
            self._leave_by_s = earliest(self._leave_by_s, now_s + timeout_s)
        self._leave(now_s)

    @property
    def _reason(self) -> str:
        return "paused, and its device is freed" if self._frees else "drained by its operator"

    def _leave(self, now_s: float) -> None:
        if self.draining:
            return
        self.draining = True
        self._repeat_s = now_s + _REPEAT_S
        self._say()
        if self._context.run.sync.steps_locally:
            self._out.note("contribution.awaited")
        if self._serves_alone:
            self._out.note("successor.awaited", stage=self._context.member.stage_index)

    def dismissed(self) -> Stop:
        """This node is in the view no more. Whether anybody trains without it, it can't know."""
        if self.draining:
            return self.ended(Stop(StopReason.REMOVED, "finished what it held, and left"))
        return Stop(StopReason.REMOVED, "the leader counts this node as lost")

    def ended(self, stop: Stop) -> Stop:
        """Return how this node's end is told: who wants to leave has not been lost."""
        if self.draining and stop.reason in (StopReason.REMOVED, StopReason.LEADER_LOST):
            reason = StopReason.PAUSED if self._frees else StopReason.DRAINED
            return Stop(reason, stop.detail)
        return stop

    # --- time ---------------------------------------------------------------------------------

    def overdue(self, now_s: float) -> None:
        """Leave if time is up; else say again what no view shows."""
        if self._leave_by_s is not None and self._leave_by_s <= now_s:
            detail = "time was up before an iteration ended without it: it left at once"
            if self._context.run.sync.steps_locally:
                detail += ", and what it had learnt since the last average is lost"
            leave = Leave("did not finish in time", at_once=True)
            self._out.send(self._context.view.leader, leave)
            self._out.put(Stop(StopReason.DRAINED, detail))
        elif self._repeat_s is not None and self._repeat_s <= now_s:
            self._say()
            self._repeat_s = now_s + _REPEAT_S if self.draining or self._unshown else None

    def _say(self) -> None:
        leader = self._context.view.leader
        if self.draining:
            self._out.send(leader, Leave(self._reason))
        elif self._unshown:
            self._out.send(leader, Capacity(self._request_id, self._wanted))
