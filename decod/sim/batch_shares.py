"""I2 where nodes step by themselves: each has a share of the batch, and averages join the shares.

A part of the checker in `decod.sim.invariants`, which raises the violations found here. An average
must hold all that the members of its stage have trained on by themselves, and nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from decod.ids import MicrobatchId, NodeId
from decod.protocol.core.view import View
from decod.sim.averages import Counts
from decod.sim.simulated_compute import SimulatedStep
from decod.sim.simulated_host import SimHost


@dataclass(slots=True)
class _Stage:
    """The steps of one stage's nodes in one iteration."""

    members: dict[NodeId, int]
    """With the iteration that each was admitted with."""
    stepped: set[NodeId] = field(default_factory=set)
    owners: dict[MicrobatchId, NodeId] = field(default_factory=dict)
    """Whose share of the iteration each microbatch is in."""
    contributed: Counter[MicrobatchId] = field(default_factory=Counter)
    """How often each microbatch has been put into the average."""

    @property
    def whole(self) -> bool:
        """Whether all members have stepped."""
        return self.members.keys() <= self.stepped


class ShareChecker:
    """Follows which node has trained on which microbatch."""

    def __init__(self) -> None:
        self._iterations: dict[tuple[int, int], dict[int, _Stage]] = {}
        """Era and iteration, then stage."""
        self._sent: dict[tuple[int, int, int], _Stage] = {}
        """By era, stage and iteration: the steps with which averages began to travel."""
        self._trained: Counter[tuple[int, int, MicrobatchId]] = Counter()
        """By era and stage: how many batches have held each microbatch."""
        self._learners: dict[MicrobatchId, set[tuple[NodeId, int]]] = {}
        """Relays that have learnt from each microbatch, as who they were then, in this era."""
        self._era = 0

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
        roster = {member.node_id: member.since_iteration for member in view.roster(index)}
        stage = stages.setdefault(index, _Stage(roster))
        first = host.node_id not in stage.stepped
        stage.stepped.add(host.node_id)
        if twice := _shared(step.counts, stage.owners, host.node_id):
            return f"stage {index}: {twice}"
        if first:
            self._trained.update((era, index, microbatch) for microbatch, _ in step.counts)
            stage.contributed.update(dict(step.contributed))
        contributed = stage.contributed.items()
        more = [m for m, num in contributed if num > max(1, self._trained[era, index, m])]
        if wrong := _odd(more, f"stage {index}: more than once in what is averaged"):
            return wrong
        if step.weights_total < 0:
            return ""
        if (num := sum(num for _, num in step.averaged)) != step.weights_total:
            return f"{num} microbatches divided by {step.weights_total}"
        return self._check_averages(index, stage, step, era)

    def _check_averages(self, index: int, stage: _Stage, step: SimulatedStep, era: int) -> str:
        """Compare the averages of a step with what its stage's members have put into them."""
        averaged = Counter(dict(step.averaged))
        if step.averaged and stage.whole:
            wrong = _differing(averaged, stage.contributed, f"the average of stage {index}")
            if wrong:
                return wrong
        self._sent[era, index, step.iteration] = stage
        if not step.delayed:
            return ""
        what = f"the delayed average of stage {index}"
        delayed = Counter(dict(step.delayed))
        # Nodes that were lost, or had to load their state anew, have taken theirs along.
        own = Counter[MicrobatchId]() if step.missed_all else Counter(dict(step.sent))
        lacking = own - delayed
        if wrong := _odd(lacking, f"{what} lacks"):
            return wrong
        before = [at for at in self._sent if at[:2] == (era, index) and at[2] < step.iteration]
        sent = self._sent[max(before)] if before else None
        known = sent is not None and sent.whole
        return _odd(delayed - sent.contributed, what) if sent and known else ""

    def batch(self, era: int, iteration: int, view: View | None) -> tuple[Counts, bool, str]:
        """Return the batch of an iteration that is over, and what is wrong with the stages' shares.

        Args:
            era: Of the iteration.
            iteration: Its number.
            view: In which it was voted on. None: it is not known.

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
        wrong = "" if view is None else self._repeated(era, batch, stages, view)
        return tuple((microbatch, 1) for microbatch in sorted(batch)), bool(whole), wrong

    def _repeated(
        self, era: int, batch: Iterable[MicrobatchId], stages: Mapping[int, _Stage], view: View
    ) -> str:
        """Return what is trained on again although all that have learnt from it are there."""
        if era != self._era:
            self._learners.clear()
            self._era = era
        members = {(m.node_id, m.since_iteration) for m in view.members}
        needless = list[MicrobatchId]()
        for microbatch in batch:
            before = self._learners.get(microbatch, set())
            if len(before) >= view.num_stages - 1 and before <= members:
                needless.append(microbatch)
            now = {
                (stage.owners[microbatch], stage.members[stage.owners[microbatch]])
                for index, stage in stages.items()
                if index and microbatch in stage.owners
            }
            self._learners[microbatch] = before & members | now
        return _odd(needless, "trained on again, but not lost")


def _shared(counts: Counts, owners: dict[MicrobatchId, NodeId], node_id: NodeId) -> str:
    """Enter a node's microbatches. Return which are twice there, or an empty text."""
    twice = [mb for mb, num in counts if num != 1 or owners.setdefault(mb, node_id) != node_id]
    return _odd(twice, "more than once there")


def _differing(one: Counter[MicrobatchId], other: Counter[MicrobatchId], what: str) -> str:
    return _odd({m for m in one | other if one[m] != other[m]}, what)


def _odd(microbatches: Iterable[MicrobatchId], what: str) -> str:
    found = sorted(microbatches)
    return f"{what}: {', '.join(map(str, found[:8]))} of {len(found)}" if found else ""
