"""The leader's record of its members: how busy each is, what it wants, what would be lost with it.

A member may want another capacity, none for a pause, or to leave. The leader agrees or refuses when
the wish comes, and looks at it again when it makes a view: if the others of a stage have gone
meanwhile, a pause is taken back, and its node is told. So no pause ever stops a stage. (The loss of
its last worker can; then the run waits for one.)

Who leaves is left out of a commit's view, unless it is its stage's last. Where members step by
themselves, one that leaves would take along what it has learnt since the last average. So it stays
until others have that:

    LEARNING --an average--> FREE                                (the average is used at once)
    LEARNING --an average--> SENDING --the next average--> FREE  (it travels, and is used then)

The first of these is of all parameters, also where fragments are averaged in turn.

A member whose contribution travels gets no microbatches: what it learnt from them would be lost. It
has a capacity of 0, as if it were paused. If nobody else works on its stage, it goes on as before,
and no average makes it free.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, EffectSink
from decod.protocol.core.messages import Capacity, CapacityAnswer, NodeLoad
from decod.protocol.core.view import Member, Role, View
from decod.run.training_config import SyncConfig


class Stake(Enum):
    """What would be lost with a member that left with the last commit."""

    LEARNING = "learning"
    """What the member has learnt since the last average."""
    SENDING = "sending"
    """The member's part in the average that travels, and nothing else."""
    FREE = "free"
    """Nothing."""


@dataclass(slots=True)
class _Seat:
    """One member's."""

    load: NodeLoad | None = None
    """What it last said of itself."""
    wish: Capacity | None = None
    """Its newest request."""
    refusal: str = ""
    """Why it can't have that; empty if it can."""
    leaving: str | None = None
    """Why it leaves with a commit, or None."""
    stake: Stake | None = None
    """Of one that waits for an average before it goes."""
    taken: int = 0
    """The capacity that it had before it got no more work."""


class Seats:
    """All of them. A seat begins empty, and is taken when something is known of its member.

    Args:
        sync: The run's.
        out: The leading node's.
    """

    def __init__(self, sync: SyncConfig, out: EffectSink[Effect]) -> None:
        self._sync = sync
        self._out = out
        self._seats = defaultdict[NodeId, _Seat](_Seat)
        self._ending: Stake | None = None
        """What would be lost if the run ended with the last commit, and its end waits for that. The
        run has no work that could be taken from it: with overlap, what is learnt while the last
        average travels is lost."""
        self._taken_back: list[tuple[NodeId, CapacityAnswer]] = []
        """What members are told with the next view: they can't have what they were promised."""

    def forget(self, node: NodeId) -> None:
        """A member is gone. A later life of it wants nothing yet, and counts its requests anew."""
        self._seats.pop(node, None)

    # --- loads --------------------------------------------------------------------------------

    @property
    def loads(self) -> dict[NodeId, NodeLoad]:
        """The newest answers of members."""
        seats = self._seats.items()
        return {node: seat.load for node, seat in seats if seat.load is not None}

    def told(self, loads: Iterable[NodeLoad]) -> None:
        """Members have said how busy they are."""
        for load in loads:
            self._seats[load.node_id].load = load

    # --- capacities ---------------------------------------------------------------------------

    def ask(self, view: View, sender: Member, request: Capacity) -> None:
        """Answer a member; the same request gets the same answer, an earlier one none.

        Args:
            view: The run's.
            sender: One of its members.
            request: What it wants.
        """
        seat = self._seats[sender.node_id]
        if seat.wish is not None and request.request_id < seat.wish.request_id:
            return
        if seat.wish is None or request.request_id > seat.wish.request_id:
            others = [self._resized(m) for m in view.members if m.node_id != sender.node_id]
            seat.wish = request
            seat.refusal = self._refusal(others, sender, request.capacity)
        self._out.send(sender.node_id, CapacityAnswer(request.request_id, seat.refusal))

    def resizes(self, view: View) -> bool:
        """Whether a view has a member that is to have the capacity that it wants."""
        return any(self._resized(member) is not member for member in view.members)

    def resized(self, members: Sequence[Member]) -> list[Member]:
        """Return members with the capacities that they want, as far as no stage stops."""
        result = {member.node_id: member for member in members}
        # Who takes part again comes first: others may pause for that.
        for member in sorted(members, key=lambda m: not self._resized(m).capacity):
            changed = self._resized(member)
            if changed is member:
                continue
            others = [m for m in result.values() if m is not member]
            if refusal := self._refusal(others, member, changed.capacity):
                seat = self._seats[member.node_id]
                assert seat.wish is not None
                seat.refusal = refusal
                answer = CapacityAnswer(seat.wish.request_id, refusal)
                self._taken_back.append((member.node_id, answer))
            else:
                result[member.node_id] = changed
        return list(result.values())

    def opened(self, view: View) -> None:
        """Forget what those want who are not in a view. Tell others what was taken back."""
        for node, seat in self._seats.items():
            if node not in view:
                seat.wish = None
        for node, answer in self._taken_back:
            self._out.send(node, answer)
        self._taken_back.clear()

    def _resized(self, member: Member) -> Member:
        """Return a member with the capacity that it wants."""
        seat = self._seats.get(member.node_id)
        if seat is None or seat.wish is None or seat.refusal:
            return member
        capacity = seat.wish.capacity
        return member if capacity == member.capacity else replace(member, capacity=capacity)

    def _refusal(self, others: Sequence[Member], member: Member, capacity: int) -> str:
        """Return why a member can't have a capacity, or nothing."""
        if capacity:
            return ""
        if member.role is Role.DATA:
            return "it is a data node: every iteration waits for its share of the batch"
        stage = member.stage_index
        serving = [m for m in others if m.stage_index == stage and m.capacity]
        if any(not self.leaves(m.node_id) for m in serving):
            return ""
        return f"stage {stage} would stop: nobody else takes its microbatches"

    # --- leaving ------------------------------------------------------------------------------

    def leaves(self, node: NodeId) -> bool:
        """Whether a member has asked to leave."""
        seat = self._seats.get(node)
        return seat is not None and seat.leaving is not None

    def leave(self, node: NodeId, reason: str) -> None:
        """A member wants to leave: whatever else it wanted does not matter now."""
        seat = self._seats[node]
        seat.leaving = reason
        seat.wish = None
        self.wait_for_average(node)

    def note_leaving(self, view: View, node: NodeId) -> None:
        """Have it noted that a member is to leave, and that its whole stage is."""
        self._out.note("member.leaving", peer=node, reason=self._seats[node].leaving)
        stage = view.by_id[node].stage_index
        if all(self.leaves(m.node_id) for m in view.roster(stage)):
            self._out.note("stage.ending", stage=stage, peer=node)

    def leave_out(self, node: NodeId) -> None:
        """A member is gone, though the iteration that it had a part in goes on."""
        self._seats[node].leaving = "it is gone"

    def wait_for_average(self, node: NodeId) -> None:
        """A member is not to go before others have what it has learnt; said again, as before."""
        if self._sync.steps_locally:
            seat = self._seats[node]
            seat.stake = seat.stake or Stake.LEARNING

    def wait_to_end(self) -> None:
        """The run is not to end before an average holds what members have learnt."""
        if self._sync.steps_locally:
            self._ending = self._ending or Stake.LEARNING

    def stay(self, node: NodeId) -> None:
        """A member does not leave after all."""
        self._seats[node].stake = None

    def free(self, node: NodeId) -> bool:
        """Whether nothing is lost if a member goes with the last commit."""
        seat = self._seats.get(node)
        return seat is None or seat.stake in (None, Stake.FREE)

    def hurry(self, view: View) -> bool:
        """Whether somebody waits for an average who could go then, so one should come early."""
        if self._ending not in (None, Stake.FREE):
            return True
        needed = self.still_needed(view)
        return any(not self.free(node) and node not in needed for node in self._seats)

    def still_needed(self, view: View) -> set[NodeId]:
        """Return leaving nodes that are needed until somebody else serves their stage."""
        # Where all are paused, one keeps the weights.
        serving = [w or r for r, w in zip(view.rosters, view.workers, strict=True) if r]
        leaving = [nodes for nodes in serving if all(self.leaves(m.node_id) for m in nodes)]
        return {nodes[0].node_id for nodes in leaving}

    def departing(self, view: View) -> list[NodeId]:
        """Return who leaves with a commit."""
        going = {m.node_id for m in view.members if self.leaves(m.node_id) and self.free(m.node_id)}
        return sorted(going - self.still_needed(view))

    def committed(self, view: View, *, averaged: bool, whole: bool, last: bool) -> None:
        """An iteration is final. Have it noted that the run may end, if that waits for this.

        Args:
            view: Its members.
            averaged: A local phase has ended with it, or an average has arrived.
            whole: A local phase of all parameters has, and not only of a fragment of them.
            last: It was the run's last, which uses all averages.
        """
        used = averaged and (last or (whole and not self._sync.overlap))
        for node, seat in self._seats.items():
            if seat.stake is None:
                continue
            capacity = view.by_id[node].capacity if node in view else 0
            sends = seat.stake is Stake.SENDING and not capacity
            seat.stake = _next_stake(sends=sends, averaged=averaged, whole=whole, used=used)
            if seat.stake is Stake.SENDING:
                seat.taken = capacity or seat.taken
        if self._ending is None:
            return
        sends = self._ending is Stake.SENDING
        self._ending = _next_stake(sends=sends, averaged=averaged, whole=whole, used=used)
        if self._ending is Stake.FREE:
            self._ending = None
            self._out.note("learning.shared")

    def begin_era(self) -> None:
        """The run goes back: nobody has learnt anything."""
        for seat in self._seats.values():
            seat.stake = seat.stake and Stake.LEARNING
        self._ending = self._ending and Stake.LEARNING

    def relieved(self, members: Sequence[Member]) -> list[Member]:
        """Return members without work for those whose contribution travels.

        One of each stage keeps its work.
        """
        found = {member.node_id: self._whole(member) for member in members}
        for node, seat in self._seats.items():
            member = found.get(node)
            if member is None or seat.stake is not Stake.SENDING:
                continue
            of_stage = [m for m in found.values() if m.stage_index == member.stage_index]
            if any(m.capacity and m is not member for m in of_stage):
                found[node] = replace(member, capacity=0)
        return list(found.values())

    def relieves(self, view: View) -> bool:
        """Whether a view has a member that is to have no work any more, or to have it back."""
        return self.relieved(view.members) != list(view.members)

    def _whole(self, member: Member) -> Member:
        """Return a member with the capacity that was taken from it."""
        seat = self._seats.get(member.node_id)
        if seat is None or member.capacity or not seat.taken:
            return member
        return replace(member, capacity=seat.taken)


def _next_stake(*, sends: bool, averaged: bool, whole: bool, used: bool) -> Stake:
    """Return what would be lost after a commit with one that has waited for it.

    Args:
        sends: Its contribution travelled, and it had no work.
        averaged: A local phase has ended, or an average has arrived.
        whole: A local phase of all parameters has.
        used: Its average is used at once.
    """
    if used or (sends and averaged):
        return Stake.FREE
    return Stake.SENDING if sends or (averaged and whole) else Stake.LEARNING
