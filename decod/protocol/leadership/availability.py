"""What operators want of their nodes' places in the run: to pause, to take part again, to leave.

    WORKING --PauseRequested, agreed, a view shows it--> PAUSED --the same, not paused--> WORKING
    PAUSED --if its device is to be freed--> DRAINING
    either of them --DrainRequested--> DRAINING --a view without it, or time is up--> (stops)

The leader decides: `Capacities` and `Partings` are its records. A node's own part is
`Availability`. The node repeats what it wants until a view shows it, so that neither a lost
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
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note, Send, Stop, StopReason, noted
from decod.protocol.core.events import Received, earliest
from decod.protocol.core.messages import Capacity, CapacityAnswer, Leave
from decod.protocol.core.view import Member, Role, View
from decod.run.training_config import SyncConfig


@dataclass(slots=True)
class _Request:
    request: Capacity
    refusal: str = ""


class Capacities:
    """The newest request of each member.

    A request is agreed or refused when it comes, and looked at again when a view is made of it: if
    the others of a stage have gone meanwhile, a pause is taken back, and its node is told. So no
    pause ever stops a stage. (The loss of its last worker can; then the run waits for one.)
    """

    def __init__(self) -> None:
        self._requests: dict[NodeId, _Request] = {}
        self._taken_back: list[Effect] = []

    def ask(
        self,
        members: Sequence[Member],
        sender: Member,
        request: Capacity,
        leaving: Collection[NodeId],
    ) -> list[Effect]:
        """Answer a member; the same request gets the same answer, an earlier one none.

        Args:
            members: Of the run.
            sender: One of them.
            request: What it wants.
            leaving: Members that do not count.
        """
        known = self._requests.get(sender.node_id)
        if known is not None and request.request_id < known.request.request_id:
            return []
        if known is None or request.request_id > known.request.request_id:
            others = [self._with_request(m) for m in members if m.node_id != sender.node_id]
            refusal = _refusal_of(others, sender, request.capacity, leaving)
            known = self._requests[sender.node_id] = _Request(request, refusal)
        return [_answer_to(sender.node_id, known)]

    def pending(self, view: View) -> bool:
        """Whether a view has a member that is to have another capacity."""
        return any(self._with_request(member) is not member for member in view.members)

    def apply(self, members: Sequence[Member], leaving: Collection[NodeId]) -> list[Member]:
        """Return the members with the capacities that they want, as far as no stage stops."""
        result = {member.node_id: member for member in members}
        # Who takes part again comes first: others may pause for that.
        for member in sorted(members, key=lambda m: not self._with_request(m).capacity):
            changed = self._with_request(member)
            if changed is member:
                continue
            others = [m for m in result.values() if m is not member]
            if refusal := _refusal_of(others, member, changed.capacity, leaving):
                known = self._requests[member.node_id]
                known.refusal = refusal
                self._taken_back.append(_answer_to(member.node_id, known))
            else:
                result[member.node_id] = changed
        return list(result.values())

    def opened(self, view: View) -> list[Effect]:
        """Forget who is not in a view; return what members must be told of what was taken back."""
        self._requests = {node: known for node, known in self._requests.items() if node in view}
        taken_back = self._taken_back
        self._taken_back = []
        return taken_back

    def forget(self, node: NodeId) -> None:
        """A member is gone. A later life of it wants nothing yet, and counts its requests anew."""
        self._requests.pop(node, None)

    def _with_request(self, member: Member) -> Member:
        known = self._requests.get(member.node_id)
        if known is None or known.refusal or known.request.capacity == member.capacity:
            return member
        return replace(member, capacity=known.request.capacity)


def _refusal_of(
    others: Sequence[Member], member: Member, capacity: int, leaving: Collection[NodeId]
) -> str:
    """Return why a member can't have a capacity, or nothing."""
    if capacity:
        return ""
    if member.role is Role.DATA:
        return "it is a data node: every iteration waits for its share of the batch"
    stage = member.stage_index
    if any(m.stage_index == stage and m.capacity and m.node_id not in leaving for m in others):
        return ""
    return f"stage {stage} would stop: nobody else takes its microbatches"


def _answer_to(node: NodeId, known: _Request) -> Effect:
    return Send(node, CapacityAnswer(known.request.request_id, known.refusal))


EVERYBODY = NodeId("everybody")
"""Stands for all members when the run is about to end. It has no work that could be taken from it:
with overlap, what is learnt while the last average travels is lost."""


class Stake(Enum):
    """What would be lost with a member that left with the last commit."""

    LEARNING = "learning"
    """What the member has learnt since the last average."""
    SENDING = "sending"
    """The member's part in the average that travels, and nothing else."""
    FREE = "free"
    """Nothing."""


class Partings:
    """Members that want to leave, until nothing is lost with them.

    Where members step by themselves, a member that leaves would take along what it has learnt since
    the last average. So it stays until others have that:

        LEARNING --an average--> FREE                                (the average is used at once)
        LEARNING --an average--> SENDING --the next average--> FREE  (it travels, and is used then)

    The first of these is of all parameters, also where fragments are averaged in turn.

    A member whose contribution travels gets no microbatches: what it learnt from them would be
    lost. It has a capacity of 0, as if it were paused. If nobody else works on its stage, it goes
    on as before, and no average makes it free.

    Args:
        sync: Of the run.
    """

    def __init__(self, sync: SyncConfig) -> None:
        self._sync = sync
        self._stakes: dict[NodeId, Stake] = {}
        self._taken: dict[NodeId, int] = {}
        """The capacities that members had before they got no more work."""

    def ask(self, node: NodeId) -> None:
        """A member wants to leave; asking again changes nothing."""
        if self._sync.steps_locally:
            self._stakes.setdefault(node, Stake.LEARNING)

    def stay(self, node: NodeId) -> None:
        """A member does not leave after all."""
        self._stakes.pop(node, None)

    def forget(self, node: NodeId) -> None:
        """A member is gone."""
        self._stakes.pop(node, None)
        self._taken.pop(node, None)

    def free(self, node: NodeId) -> bool:
        """Whether nothing is lost if a member goes with the last commit."""
        return self._stakes.get(node, Stake.FREE) is Stake.FREE

    def hurry(self, needed: Container[NodeId]) -> bool:
        """Whether somebody waits for an average, so that one should come early.

        Args:
            needed: Those that could not go anyway.
        """
        return any(not self.free(node) and node not in needed for node in self._stakes)

    def committed(
        self, view: View, *, averaged: bool, whole: bool = True, last: bool
    ) -> list[Effect]:
        """An iteration is final. Return the note that the run may end, if that waits for this.

        Args:
            view: Its members.
            averaged: It has ended with an average.
            whole: That is of all parameters, and not only of a fragment of them.
            last: It was the run's last, which uses all averages.
        """
        for node, stake in self._stakes.items():
            capacity = view.by_id[node].capacity if node in view else 0
            sends = stake is Stake.SENDING and not capacity
            if averaged and (sends or last or (whole and not self._sync.overlap)):
                self._stakes[node] = Stake.FREE
            elif sends or (averaged and whole):
                self._stakes[node] = Stake.SENDING
                self._taken[node] = capacity or self._taken.get(node, 0)
            else:
                self._stakes[node] = Stake.LEARNING
        if self._stakes.get(EVERYBODY) is not Stake.FREE:
            return []
        self.forget(EVERYBODY)
        return [noted("learning.shared")]

    def begin_era(self) -> None:
        """The run goes back: nobody has learnt anything."""
        self._stakes = dict.fromkeys(self._stakes, Stake.LEARNING)

    def apply(self, members: Sequence[Member]) -> list[Member]:
        """Return members without work for those whose contribution travels.

        One of each stage keeps its work.
        """
        found = {member.node_id: self._whole(member) for member in members}
        for node, stake in self._stakes.items():
            member = found.get(node)
            if member is None or stake is not Stake.SENDING:
                continue
            of_stage = [m for m in found.values() if m.stage_index == member.stage_index]
            if any(m.capacity and m is not member for m in of_stage):
                found[node] = replace(member, capacity=0)
        return list(found.values())

    def _whole(self, member: Member) -> Member:
        """Return a member with the capacity that was taken from it."""
        taken = self._taken.get(member.node_id, 0)
        return member if member.capacity or not taken else replace(member, capacity=taken)

    def pending(self, view: View) -> bool:
        """Whether a member of a view is to have another capacity."""
        return self.apply(view.members) != list(view.members)


def leaving_notes(view: View, node: NodeId, leaving: Mapping[NodeId, str]) -> list[Effect]:
    """Return the notes that a member wants to leave, and that its whole stage does."""
    effects: list[Effect] = [noted("member.leaving", peer=node, reason=leaving[node])]
    stage = view.by_id[node].stage_index
    if all(m.node_id in leaving for m in view.roster(stage)):
        effects.append(noted("stage.ending", stage=stage, peer=node))
    return effects


def departing(view: View, leaving: Container[NodeId], partings: Partings) -> list[NodeId]:
    """Return who leaves with a commit."""
    needed = still_needed(view, leaving)
    free = (m.node_id for m in view.members if m.node_id in leaving and partings.free(m.node_id))
    return sorted({*free} - needed)


def still_needed(view: View, leaving: Container[NodeId]) -> set[NodeId]:
    """Return leaving nodes that are needed until somebody else serves their stage."""
    # Where all are paused, one keeps the weights.
    serving = [w or r for r, w in zip(view.rosters, view.workers, strict=True) if r]
    return {nodes[0].node_id for nodes in serving if all(m.node_id in leaving for m in nodes)}


def survives(before: View, view: View, gone: Sequence[NodeId]) -> bool:
    """Return whether others can do again in the iteration what members that are gone have done."""
    others = all(before.by_id[node].role is not Role.DATA for node in gone)
    return others and not view.idle_stages


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

    def pause(self, now_s: float, *, paused: bool, frees_device: bool = False) -> list[Effect]:
        """Take in what the operator wants; ends with one note, that it is agreed or refused."""
        if refusal := self._refusal(paused=paused):
            return [_refused(refusal)]
        self._frees = paused and frees_device
        return self._want(now_s, 0 if paused else self._full)

    def out_of_memory(self, now_s: float) -> list[Effect]:
        """The device had no memory for a job. If it is not the first one, take less at a time."""
        again = self._ran_out
        self._ran_out = True
        known = self._context.node_id in self._context.view
        if not again or self._full == 1 or self.draining or not known:
            return []
        self._full -= 1
        lowered = Note("capacity.lowered", (("capacity", self._full),))
        if not self._wanted:
            return [lowered]
        return [lowered, *self._want(now_s, self._full)]

    def _want(self, now_s: float, capacity: int) -> list[Effect]:
        self._wanted = capacity
        self._request_id += 1
        self._answered = False
        self._repeat_s = now_s + _REPEAT_S
        return self._say()

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

    def received(self, now_s: float, received: Received) -> list[Effect]:  # noqa: ARG002
        """Take in the leader's answer."""
        assert isinstance(received.message, CapacityAnswer)
        return self.answered(received.sender, received.message)

    def answered(self, sender: NodeId, message: CapacityAnswer) -> list[Effect]:
        """The leader agrees or refuses; it may refuse what it has agreed to."""
        if sender != self._context.view.leader or message.request_id != self._request_id:
            return []
        first = not self._answered
        self._answered = True
        if message.refusal:
            differs = self._wanted != self.capacity
            self._wanted = self.capacity
            self._frees = False
            return [_refused(message.refusal)] if first or differs else []
        return [Note("capacity.agreed", (("capacity", self._wanted),))] if first else []

    def opened(self, now_s: float, *, resigns: bool = False) -> list[Effect]:
        """An iteration has begun, maybe with another view.

        Args:
            now_s: The time.
            resigns: This node leads, and wants to leave.
        """
        paused = self.capacity == 0
        if self._unshown and self._repeat_s is None:
            self._repeat_s = now_s + _REPEAT_S
        effects: list[Effect] = []
        leaves = resigns or (self.draining and not self._frees)
        if paused != self._shown_paused and not leaves:
            resumed = Note("node.resumed", (("capacity", self.capacity),))
            effects.append(Note("node.paused") if paused else resumed)
        self._shown_paused = paused
        return effects + (self._leave(now_s) if self._frees and paused else [])

    @property
    def _unshown(self) -> bool:
        return not self._answered or self._wanted != self.capacity

    # --- leaving ------------------------------------------------------------------------------

    def drain(self, now_s: float, timeout_s: float) -> list[Effect]:
        """Leave within so many seconds; a second request can only shorten that."""
        self._frees = False
        if self._context.node_id not in self._context.view:
            leave = Send(self._context.view.leader, Leave(self._reason))
            return [leave, Stop(StopReason.DRAINED, "it had not begun to train")]
        if timeout_s < math.inf:
            self._leave_by_s = earliest(self._leave_by_s, now_s + timeout_s)
        return self._leave(now_s)

    @property
    def _reason(self) -> str:
        return "paused, and its device is freed" if self._frees else "drained by its operator"

    def _leave(self, now_s: float) -> list[Effect]:
        if self.draining:
            return []
        self.draining = True
        self._repeat_s = now_s + _REPEAT_S
        effects = self._say()
        if self._context.run.sync.steps_locally:
            effects.append(Note("contribution.awaited"))
        if self._serves_alone:
            effects.append(
                Note("successor.awaited", (("stage", self._context.member.stage_index),))
            )
        return effects

    def dismissed(self) -> Effect:
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

    def overdue(self, now_s: float) -> list[Effect]:
        """Leave if time is up; else say again what no view shows."""
        if self._leave_by_s is not None and self._leave_by_s <= now_s:
            detail = "time was up before an iteration ended without it: it left at once"
            if self._context.run.sync.steps_locally:
                detail += ", and what it had learnt since the last average is lost"
            leave = Leave("did not finish in time", at_once=True)
            return [Send(self._context.view.leader, leave), Stop(StopReason.DRAINED, detail)]
        if self._repeat_s is None or self._repeat_s > now_s:
            return []
        said = self._say()
        self._repeat_s = now_s + _REPEAT_S if said else None
        return said

    def _say(self) -> list[Effect]:
        leader = self._context.view.leader
        if self.draining:
            return [Send(leader, Leave(self._reason))]
        if self._unshown:
            return [Send(leader, Capacity(self._request_id, self._wanted))]
        return []


def _refused(reason: str) -> Note:
    return Note("capacity.refused", (("reason", reason),))
