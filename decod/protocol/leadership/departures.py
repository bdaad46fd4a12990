"""Members that want to leave: who may go with the next commit, and who is needed until later.

Where members step by themselves, a member that leaves would take along what it has learnt since the
last average. So it stays until others have that:

    LEARNING --an average--> FREE                                  (the average is used at once)
    LEARNING --an average--> SENDING --the next average--> FREE    (it travels, and is used then)

The first of these is of all parameters, also where fragments are averaged in turn.

A member whose contribution travels gets no microbatches: what it learnt from them would be lost. It
has a capacity of 0, as if it were paused. If nobody else works on its stage, it goes on as before,
and no average makes it free.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, noted
from decod.protocol.core.view import Member, Role, View
from decod.run.training_config import SyncConfig

EVERYBODY = NodeId("everybody")
"""Stands for all members when the run is about to end. It has no work that could be taken from it:
with overlap, what is learnt while the last average travels is lost."""


class Stake(Enum):
    """What would be lost with a member that left with the last commit."""

    LEARNING = "learning"
    """What it has learnt since the last average."""
    SENDING = "sending"
    """Its part in the average that travels, and nothing else."""
    FREE = "free"
    """Nothing."""


class Partings:
    """Members that want to leave, until nothing is lost with them.

    Args:
        sync: Of the run.
    """

    def __init__(self, sync: SyncConfig) -> None:
        self._sync = sync
        self._stakes: dict[NodeId, Stake] = {}
        self._taken: dict[NodeId, int] = {}
        """The capacities that members had before they got no more work."""
        self.average_travels: Callable[[], bool] = lambda: False
        """Whether an average is on its way at the leader."""

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
        """Whether an average should come early. While one travels, all would have to wait for it.

        Args:
            needed: Those that could not go anyway.
        """
        waiting = any(not self.free(node) and node not in needed for node in self._stakes)
        return waiting and not self.average_travels()

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
