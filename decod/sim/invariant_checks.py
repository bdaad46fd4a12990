"""Checks of single invariants: I2 where nodes step by themselves, and I3 to I5.

These are parts of the checker in `decod.sim.invariants`, which raises the violations found here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from decod.ids import Iteration, MicrobatchId, NodeId
from decod.protocol.core.messages import Message, Open
from decod.protocol.core.view import View
from decod.sim.averages import Counts
from decod.sim.core import NodeProgress, positions_of
from decod.sim.simulated_compute import SimulatedStep
from decod.sim.simulated_host import SimHost


class DataChecker:
    """Follows which microbatches the committed batches hold.

    Args:
        batch: Number of microbatches in an iteration.
        bases: The iteration that each era of the run began with.

    Attributes:
        put_off: Number of microbatches deferred in each iteration, by the leader's term and the
        iteration.
        reread: Number of those in each batch that had been trained on before, likewise.
    """

    def __init__(self, batch: int, bases: Mapping[int, int]) -> None:
        self.put_off: dict[tuple[int, Iteration], int] = {}
        self.reread: dict[tuple[int, Iteration], int] = {}
        self._batch = batch
        self._bases = bases
        self._used: dict[MicrobatchId, int] = {}
        """The iteration that committed each microbatch, according to the newest era."""
        self._unknown: dict[int, int] = {}
        """Microbatches of each iteration that only lost nodes knew of."""
        self._era = 0

    def committed(self, step: SimulatedStep, era: int, *, num_unknown: int = 0) -> str:
        """Take in the first commit of an iteration. Return what is wrong, or an empty text.

        Args:
            step: With the batch.
            era: Of the step.
            num_unknown: Microbatches of the batch that only lost nodes knew of.
        """
        if era > self._era:
            base = self._bases.get(era, 0)
            self._era = era
            self._used = {m: used for m, used in self._used.items() if used <= base}
            self._unknown = {at: num for at, num in self._unknown.items() if at <= base}
        elif era < self._era:
            return ""  # The era was abandoned: its microbatches are used again.
        place = (era, step.iteration)
        iterations = [(t, r) for t, r in self.put_off if (r.era, r.number) == place]
        told = self.reread[max(iterations)] if iterations else 0
        new = [microbatch for microbatch, _ in step.counts if microbatch not in self._used]
        again = [
            f"{microbatch}, of {used}"
            for microbatch, _ in step.counts
            if (used := self._used.setdefault(microbatch, step.iteration)) != step.iteration
        ]
        # Those of earlier iterations that only lost nodes knew of are first seen now.
        num_late = sum(microbatch.iteration < step.iteration for microbatch in new)
        num_seen = self._seen(min(num_late, max(0, told - len(again))))
        num_unknown_again = told - len(again) - num_seen
        self._unknown[step.iteration] = num_unknown - num_unknown_again
        if not 0 <= num_unknown_again <= num_unknown:
            text = f"{len(again)} microbatches of iteration {step.iteration} are of earlier ones"
            return f"{text} ({'; '.join(again[:8])}), {told} are told of"
        own = sum(microbatch.iteration == step.iteration for microbatch, _ in step.counts)
        if (
            not num_unknown
            and iterations
            and self.put_off[max(iterations)] == 0
            and own != self._batch
        ):
            text = f"iteration {step.iteration} has {own} of its own {self._batch} microbatches"
            return f"{text}, and nothing is put off"
        return ""

    def _seen(self, num: int) -> int:
        """Take note that unknown microbatches are known now. Return how many of `num` were."""
        left = num
        for at in sorted(self._unknown):
            known = min(left, self._unknown[at])
            self._unknown[at] -= known
            left -= known
        return num - left

    def counted(self, host: SimHost, num_iterations: int) -> str:
        """Compare the count of a node that has seen all iterations. Return as `committed` does."""
        positions = positions_of(host.machine)
        last = host.compute.iteration == num_iterations
        if positions is None or not positions.whole or not last:
            return ""
        known = len(self._used) + sum(self._unknown.values())
        missing = self._batch * num_iterations - known
        told = positions.num_skipped + positions.num_deferred
        if missing == told:
            return ""
        return f"{missing} microbatches were not trained on, {told} are told of"


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
    used_at: int = 0
    """The iteration that has used the average, if it has travelled. 0: none yet."""

    @property
    def whole(self) -> bool:
        """Whether all members have stepped."""
        return self.members.keys() <= self.stepped


class ShareChecker:
    """Follows which node has trained on which microbatch.

    An average must hold all that the members of its stage have trained on by themselves, and
    nothing else.
    """

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
        before = [at for at in self._sent if at[:2] == (era, index) and at[2] < step.iteration]
        if step.ends_phase:
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
        sent = self._sent[max(before)] if before else None
        if sent is not None:
            sent.used_at = sent.used_at or step.iteration
            if sent.used_at != step.iteration:
                return f"{what} was used in iteration {sent.used_at} already"
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


@dataclass(slots=True)
class _Known:
    """One iteration's commit."""

    told: tuple[Iteration, int, int]
    """The iteration, and the term and version of the view that voted."""
    lives: dict[NodeId, int] = field(default_factory=dict)
    """Hosts that know of it, with the life in which they heard."""


class Commits:
    """Remembers the attempt at which each iteration was committed, and the hosts that know of it.

    If all those hosts have restarted since, the commit is forgotten and the others must repeat the
    iteration.
    """

    def __init__(self) -> None:
        self.hosts: Mapping[NodeId, SimHost] = {}
        """All hosts of the run."""
        self._known: dict[tuple[int, int], _Known] = {}
        """By era and iteration."""

    def decided(self, host: SimHost, message: Open) -> str:
        """Take in a commit that a host announces. Return what is wrong, or an empty text."""
        iteration = message.closed
        told = (iteration, message.view_term, message.view_version)
        place = (iteration.era, iteration.number)
        known = self._known.setdefault(place, _Known(told))
        if known.told != told and not self._remembered(known):
            known = self._known[place] = _Known(told)
        if known.told == told:
            known.lives[host.node_id] = host.life
            return ""
        was, now = (f"{r} by view {v} of term {t}" for r, t, v in (known.told, told))
        return f"iteration {iteration.number} is committed twice: in iteration {was}, and {now}"

    def stepped(self, host: SimHost, era: int, iteration: int) -> None:
        """Take in that a host has taken the committed step of an iteration."""
        if (known := self._known.get((era, iteration))) is not None:
            known.lives[host.node_id] = host.life

    def _remembered(self, known: _Known) -> bool:
        """Return whether a host still knows of a commit."""
        return any(self.hosts[node].life == life for node, life in known.lives.items())


class Decisions:
    """Remembers whether the leaders have committed or aborted each iteration."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, Iteration], tuple[str, str, int]] = {}
        """The first decision of each iteration, by its members' term: decision, host, host's
        term."""

    def decided(self, name: str, term_before: int, message: Open) -> str:
        """Take in a leader's decision. Return what is wrong, or an empty text.

        The next leader may commit an iteration that its predecessor aborted, if the members that
        elected it had not heard of the abort. Whether other members had heard shows in their
        commits.

        Args:
            name: Name of the host that decides.
            term_before: The host's term before the decision.
            message: The decision. The abort of a leader that was voted out is void: do not pass it.
        """
        decision = "commit" if message.committed else "abort"
        told = (decision, name, message.opening.view.term)
        first = self._first.setdefault((term_before, message.closed), told)
        if decision == "commit" and first[2] < told[2]:
            self._first[term_before, message.closed] = told
        elif first[0] != decision:
            return (
                f"{decision} of iteration {message.closed}, which {first[1]} says is a {first[0]}"
            )
        return ""


def missed(host: SimHost, place: NodeProgress, message: Message) -> str:
    """Return what is wrong if a node hears of a new leader's opening and does not follow.

    Args:
        host: The node's host.
        place: The node's progress after the event.
        message: The message that the node has just taken in.
    """
    if not isinstance(message, Open):
        return ""
    opening = message.opening
    term = opening.view.term
    if not place.in_view or host.node_id not in opening.view or term <= place.term:
        return ""
    told = f"iteration {opening.iteration} of {term}"
    return f"it stays in term {place.term} though it is told of {told}"
