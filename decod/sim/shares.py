"""I2 where nodes step by themselves: each has a share of the batch, and averages join the shares.

A part of the checker in `decod.sim.invariants`, which raises the violations found here. An average
must hold all that the members of its stage have trained on by themselves, and nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.view import View
from decod.sim.averages import Counts
from decod.sim.compute import SimulatedStep
from decod.sim.host import SimHost


@dataclass(slots=True)
class _Stage:
    """The steps of one stage's nodes in one iteration."""

    members: frozenset[NodeId]
    stepped: set[NodeId] = field(default_factory=set)
    owners: dict[MicrobatchId, NodeId] = field(default_factory=dict)
    """Whose share of the iteration each microbatch is in."""
    contributed: dict[MicrobatchId, NodeId] = field(default_factory=dict)
    """Who has put each microbatch into the average."""

    @property
    def whole(self) -> bool:
        """Whether all members have stepped."""
        return self.members <= self.stepped


class ShareChecker:
    """Follows which node has trained on which microbatch."""

    def __init__(self) -> None:
        self._iterations: dict[tuple[int, int], dict[int, _Stage]] = {}
        """Era and iteration, then stage."""
        self._sent: dict[tuple[int, int, int], _Stage] = {}
        """By era, stage and iteration: the steps with which averages began to travel."""

    def committed(self, host: SimHost, step: SimulatedStep, view: View, era: int) -> str:
        """Take in a node's step. Return what is wrong, or an empty text.

        Args:
            host: The node.
            step: Its step.
            view: In which it was voted on.
            era: Of the step.
        """
        index = host.compute.stage_index
        stages = self._iterations.setdefault((era, step.iteration), {})
        roster = frozenset(member.node_id for member in view.roster(index))
        stage = stages.setdefault(index, _Stage(roster))
        stage.stepped.add(host.node_id)
        for counts, owners in (
            (step.counts, stage.owners),
            (step.contributed, stage.contributed),
        ):
            if twice := _shared(counts, owners, host.node_id):
                return f"stage {index}: {twice}"
        if step.weights_total < 0:
            return ""
        if len(step.averaged) != step.weights_total:
            return f"{len(step.averaged)} microbatches divided by {step.weights_total}"
        return self._check_averages(index, stage, step, era)

    def _check_averages(self, index: int, stage: _Stage, step: SimulatedStep, era: int) -> str:
        """Compare the averages of a step with what its stage's members have put into them."""
        averaged = {microbatch for microbatch, _ in step.averaged}
        if step.averaged and stage.whole:
            wrong = _odd(averaged ^ stage.contributed.keys(), f"the average of stage {index}")
            if wrong:
                return wrong
        self._sent[era, index, step.iteration] = stage
        if not step.delayed:
            return ""
        what = f"the delayed average of stage {index}"
        delayed = {microbatch for microbatch, _ in step.delayed}
        # Nodes that were lost, or had to load their state anew, have taken theirs along.
        sent_here = set() if step.missed_all else {microbatch for microbatch, _ in step.sent}
        lacking = sent_here - delayed
        if wrong := _odd(lacking, f"{what} lacks"):
            return wrong
        before = [at for at in self._sent if at[:2] == (era, index) and at[2] < step.iteration]
        sent = self._sent[max(before)] if before else None
        known = sent is not None and sent.whole
        return _odd(delayed - sent.contributed.keys(), what) if sent and known else ""

    def batch(self, era: int, iteration: int) -> tuple[Counts, bool, str]:
        """Return the batch of an iteration that is over, and what is wrong with the stages' shares.

        Returns:
            The batch, whether it is whole, and what is wrong. If members of all stages were lost,
            it is what is known of it.
        """
        stages = self._iterations.pop((era, iteration), {})
        whole = {index: stage.owners.keys() for index, stage in stages.items() if stage.whole}
        known = {index: stage.owners.keys() for index, stage in stages.items()}
        found_first = (whole or known).items()
        if not found_first:
            return (), False, ""
        first, batch = max(found_first, key=lambda item: len(item[1]))
        for index, found in whole.items():
            if wrong := _odd(found ^ batch, f"iteration {iteration}, stages {first} and {index}"):
                return (), False, wrong
        return tuple((microbatch, 1) for microbatch in sorted(batch)), bool(whole), ""


def _shared(counts: Counts, owners: dict[MicrobatchId, NodeId], node_id: NodeId) -> str:
    """Enter a node's microbatches. Return which are twice there, or an empty text."""
    twice = [mb for mb, num in counts if num != 1 or owners.setdefault(mb, node_id) != node_id]
    return _odd(twice, "more than once there")


def _odd(microbatches: Iterable[MicrobatchId], what: str) -> str:
    found = sorted(microbatches)
    return f"{what}: {', '.join(map(str, found[:8]))} of {len(found)}" if found else ""
