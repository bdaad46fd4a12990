"""A candidate's way to the state of a stage that trains on: nobody waits for it.

    IDLE -> ASKING -> FETCHING -> LOADING -> STEPPING -> (in the view)
             any of them --it fails--> IDLE, and again after a pause

The candidate asks one member of its stage to be sent the averages of all iterations behind a
committed iteration that is still a little ahead (`Follow`), fetches the state of that iteration
from all members that hold it, and then takes the steps itself, from the averages that have come
meanwhile: the same arithmetic on the same bytes gives the same bits. When it is level it enters
with an opening, as a member that holds what was committed.

An average is sent when the members propose the step, so it may be undone: the candidate proposes
too, and takes the step for final when the next iteration's average comes, which says from which
parameters it starts. The opening with which the candidate enters says outright what is final.

It may enter before it has the last average. That one is on its way then; if it does not come the
state is fetched as it stands, which holds up the commit (`decod.protocol.state.stage_state`).
"""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from decod.ids import AveragingId, Iteration, NodeId, TensorId
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.context import Context
from decod.protocol.core.effects import FetchState, UseMembers
from decod.protocol.core.events import JobFinished, StateFetched, StateFetchFailed, Tensor
from decod.protocol.core.jobs import Built, CommitStep, Job, Load, Propose, Proposed, Retract
from decod.protocol.core.messages.membership_messages import Average, Follow, Followed
from decod.protocol.core.view import Member, Opening, Reach, View

_SILENT_S = 10.0
"""How long the member that is followed may say nothing."""

_PAUSE_S = 1.0
_PAUSE_MAX_S = 300.0
"""Before another beginning; doubles each time."""

_SLOW_PAUSE_S = 30.0
"""Before the first new beginning of a candidate that could not keep up."""


class DonorChoice:
    """The member that one candidate follows, chosen among those that hold its stage's state.

    Args:
        context: The node's.
        address: Where the member can reach this node.
        reach: Whether it can dial this node there.
        incarnation: Of this node. Its requests are numbered from there: a member may still know a
            wish of an earlier life, and would answer an equal number as a repeat of that.
    """

    def __init__(self, context: Context, address: str, reach: Reach, *, incarnation: int) -> None:
        self._out = context.out
        self._address = address
        self._reach = reach
        self.stage_index = 0
        self._donors: tuple[Member, ...] = ()
        self._turn = 0
        self._request_id = incarnation // 2  # Half: so that there are numbers behind it.
        self.followed: NodeId | None = None
        self._since = 0
        """The iteration with which that member was admitted."""
        self.heard_s = 0.0
        self._again_s = -math.inf
        self._pause_s = 0.0

    @property
    def donor_ids(self) -> tuple[NodeId, ...]:
        """All members that hold the state, the one that is followed first."""
        ids = [member.node_id for member in self._donors]
        first = ids.index(self.followed) if self.followed in ids else 0
        return (*ids[first:], *ids[:first])

    def silent(self, now_s: float) -> bool:
        """Whether the member that is followed has said nothing for too long."""
        return self.followed is not None and now_s - self.heard_s > _SILENT_S

    def stays_in(self, view: View) -> bool:
        """Whether the member that is followed is in a view, and still knows its follower."""
        donor = None if self.followed is None else view.by_id.get(self.followed)
        # One that was admitted again has started again: it knows of no follower.
        return donor is not None and donor.since_iteration == self._since

    def aim(self, stage_index: int, donors: tuple[Member, ...]) -> None:
        """Say which stage this node is to serve, and which other members hold its state."""
        new = donors != self._donors
        self.stage_index = stage_index
        self._donors = donors
        if new and donors:
            self._out.put(UseMembers(donors))

    def ask(self, now_s: float) -> None:
        """Choose a member, if it is time; say that this node still follows."""
        if not self._donors or now_s < self._again_s:
            return
        if self.followed is None:
            donor = self._donors[self._turn % len(self._donors)]
            self.followed = donor.node_id
            self._since = donor.since_iteration
            self._request_id += 1
            self.heard_s = now_s
        wish = Follow(self._request_id, self.stage_index, self._address, self._reach)
        self._out.send(self.followed, wish)

    def answered(self, now_s: float, sender: NodeId, request_id: int) -> bool:
        """Return whether an answer is to the newest request."""
        if (sender, request_id) != (self.followed, self._request_id):
            return False
        self.heard_s = now_s
        return True

    def failed(self, now_s: float, reason: str, *, slow: bool) -> None:
        """A try has failed: the next one is with another member, after a pause. `slow`: this node
        could not keep up.
        """
        least_s = _SLOW_PAUSE_S if slow else _PAUSE_S
        self._pause_s = min(_PAUSE_MAX_S, max(least_s, 2 * self._pause_s))
        self._again_s = now_s + self._pause_s
        self._turn += 1
        pause_s = round(self._pause_s)
        self._out.note("replay.failed", stage=self.stage_index, reason=reason, pause_s=pause_s)

    def succeeded(self) -> None:
        """A step can be taken: the next failure is the first one again."""
        self._pause_s = 0.0


_GAP_MAX = 3
"""Iterations whose averages may be here before an earlier one's."""


@dataclass(slots=True)
class ReceivedAverage:
    """The averages of one iteration, as far as they have come."""

    averaging: AveragingId
    num_parts: int
    num_microbatches: int
    base_hash: str
    gradient_norm: float
    num_local: int
    num_ahead: int
    spec: AverageSpec
    ahead_spec: AverageSpec
    num_targets: int
    parts: dict[int, TensorId] = field(default_factory=dict)

    @property
    def iteration(self) -> Iteration:
        return self.averaging.iteration

    @property
    def base(self) -> int:
        """The iteration from whose state the step is taken."""
        return self.iteration.number - 1 - self.num_local

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.num_parts


class Backlog:
    """The averages that wait for their steps, by iteration.

    The parts of an average come in any order. A later averaging of the same iteration, in a new
    view or a new attempt, replaces an earlier one.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._out = context.out
        self._tensors = context.tensors
        self._averages: dict[int, ReceivedAverage] = {}
        self.size_bytes = 0

    def get(self, iteration: int) -> ReceivedAverage | None:
        return self._averages.get(iteration)

    def after(self, base: int) -> ReceivedAverage | None:
        """Return the newest average whose step is taken from the state of an iteration.

        Older ones are of an arrival that failed: members went on without it.
        """
        found = [each for each in self._averages.values() if each.base == base]
        return max(found, key=lambda each: each.iteration, default=None)

    def passes_over(self, iteration: int) -> bool:
        """Whether a later step is taken from a state before that of an iteration."""
        averages = self._averages.values()
        return any(each.base < iteration < each.iteration.number for each in averages)

    def has_gap(self, after: int) -> bool:
        """Whether the average of the iteration after `after` is too late to be on its way."""
        newest = self._averages[max(self._averages)] if self._averages else None
        if newest is None:
            return False
        apart = 1 + max(each.num_local for each in self._averages.values())
        ahead = (newest.iteration.number - after) // apart
        return ahead > _GAP_MAX and any(each.complete for each in self._averages.values())

    def put(self, message: Average, tensor: Tensor | None, base: Iteration | None) -> bool:
        """Keep one part of an average, if its step is taken from a state (None: not known yet).

        An average without parts has no tensor. Returns whether it is kept.
        """
        averaging = message.averaging
        # Of what overtakes the answer to `Follow` nobody knows yet whether it is needed.
        if base is not None and not _is_behind(base, averaging.iteration):
            return False
        iteration = averaging.iteration.number
        average = self._averages.get(iteration)
        if average is not None and average.averaging < averaging:
            self.drop(iteration)
            average = None
        if average is None:
            average = self._averages[iteration] = ReceivedAverage(
                averaging,
                message.num_parts,
                message.num_microbatches,
                message.base_hash,
                message.gradient_norm,
                message.num_local,
                message.num_ahead,
                message.spec,
                message.ahead_spec,
                message.num_targets,
            )
        alike = (average.averaging, average.num_parts) == (averaging, message.num_parts)
        if tensor is None or not alike or message.part in average.parts:
            return not message.num_parts
        average.parts[message.part] = tensor.id
        self.size_bytes += tensor.size_bytes
        return True

    def take(self, iteration: int) -> ReceivedAverage:
        """Hand over the average of an iteration, with the references to its parts."""
        average = self._averages.pop(iteration)
        self.size_bytes -= sum(map(self._tensors.size_of, average.parts.values()))
        return average

    def drop(self, iteration: int) -> None:
        self._tensors.release(*self.take(iteration).parts.values())

    def keep_behind(self, base: Iteration) -> None:
        """Drop the averages whose steps are not taken from a state."""
        needless = [i for i, a in self._averages.items() if not _is_behind(base, a.iteration)]
        for iteration in needless:
            self.drop(iteration)

    def clear(self) -> None:
        for iteration in [*self._averages]:
            self.drop(iteration)


def _is_behind(base: Iteration, iteration: Iteration) -> bool:
    """Whether an iteration's step is one of those that are taken from a state."""
    return iteration.era == base.era and iteration.number > base.number


_OTHER_STATE = "it has come to other parameters than its stage"


class ReplayUser(Protocol):
    """Who needs the state that is replayed: a candidate, and then a member."""

    def progressed(self, now_s: float) -> None:
        """A job of the replay has ended well."""
        ...

    def replay_failed(self, now_s: float, reason: str) -> None:
        """One was refused."""
        ...


class Entry(Enum):
    """With what a candidate enters the view."""

    READY = "ready"
    """The newcomer holds what was committed."""
    WAITING = "waiting"
    """The newcomer will hold that when the last averages have come."""
    LOST = "lost"
    """The newcomer has nothing to build on."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What was committed when this node entered."""

    iteration: Iteration
    view_version: int
    """Of the view that has committed; 0 if it is not known."""
    parameter_hash: str
    """What the parameters after it must hash to; empty if it is not known."""

    def may_include(self, step: ReceivedAverage) -> bool:
        """Whether a step may be this one, or one before it."""
        if step.iteration.number != self.iteration.number:
            return step.iteration.number < self.iteration.number
        known = self.view_version in (0, step.averaging.view_version)
        return step.iteration == self.iteration and known


class Replay:
    """What one candidate knows of the stage that it follows.

    Args:
        context: The node's.
        address: Where members can reach this node.
        user: Told how it goes.
        incarnation: Of this node.
        reach: Whether members can dial this node at its address.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        user: ReplayUser,
        *,
        incarnation: int,
        reach: Reach = Reach.DIALLED,
    ) -> None:
        self._context = context
        self._out = context.out
        self.user = user
        self._choice = DonorChoice(context, address, reach, incarnation=incarnation)
        self._base: Iteration | None = None
        """Whose state is fetched."""
        self._backlog = Backlog(context)
        self._job: Job | None = None
        self._state_at: Iteration | None = None
        """The last iteration whose step is final here."""
        self._hash = ""
        """Of the parameters after it."""
        self._step: ReceivedAverage | None = None
        """What is being proposed, or has been."""
        self._proposed: str | None = None
        self._target: _Target | None = None
        self.pristine = True
        """The compute process holds what was built, and no later state."""
        self.deadline_s: float | None = None
        """When a member that still lacks averages gives up waiting for them."""

    # --- what others may ask ------------------------------------------------------------------

    @property
    def level(self) -> Iteration | None:
        """The newest iteration whose step has been taken here, final or not; None: not there
        yet.
        """
        if self._state_at is None or self._target is not None:
            return None
        return (
            self._state_at if self._step is None or self._proposed is None else self._step.iteration
        )

    @property
    def abreast(self) -> bool:
        """Whether nothing has come that is not stepped through."""
        return self._state_at is not None and self._job is None

    @property
    def waiting(self) -> bool:
        """Whether this node is a member that still lacks averages."""
        return self._target is not None and not self.arrived

    @property
    def parameter_hash(self) -> str:
        """Of the state that this node has; empty if it has none."""
        return self._hash if self._state_at is not None else ""

    # --- beginning and ending -----------------------------------------------------------------

    def aim(self, stage_index: int, donors: tuple[Member, ...]) -> None:
        """Say which stage this node is to serve, and which members hold its state."""
        donors = tuple(m for m in donors if m.node_id != self._context.node_id)
        if stage_index != self._choice.stage_index or not donors:
            self.end()
        self._choice.aim(stage_index, donors)

    def knock(self, now_s: float) -> None:
        """Begin, if it is time; say that this node still follows."""
        followed = self._choice.followed
        if followed is not None and self._choice.silent(now_s):
            self.restart(now_s, f"{followed[:8]} says nothing")
        else:
            self._choice.ask(now_s)

    def end(self) -> None:
        """Let go of everything. What a job still gives is not taken."""
        if self._job is not None:
            self._context.compute.abandon(self._job)
        self._choice.followed = None
        self._base = self._state_at = self._step = self._proposed = None
        self._job = self._target = self.deadline_s = None
        self._backlog.clear()

    def built(self) -> None:
        """The compute process has built a stage: what it had before is gone."""
        self.pristine = True
        self.end()

    def restart(self, now_s: float, reason: str, *, slow: bool = False) -> None:
        """What was begun can't be ended: begin again after a pause, a long one if it is `slow`."""
        self._choice.failed(now_s, reason, slow=slow)
        self.end()

    # --- messages -----------------------------------------------------------------------------

    def answered(self, now_s: float, sender: NodeId, message: Followed) -> None:
        """The member says from where on it sends averages, or that it does not."""
        if not self._choice.answered(now_s, sender, message.request_id):
            return
        base = message.committed
        if message.refusal:
            # Who names the base has sent averages, and left this node behind.
            slow = self._base is not None and base == self._base
            self.restart(now_s, message.refusal, slow=slow)
        elif self._base is None:
            self._base = base
            self._backlog.keep_behind(base)
            donors = self._choice.donor_ids
            self._out.note("state.requested", num_donors=len(donors), iteration=base.number)
            cut = self._context.built_in
            stage = self._choice.stage_index
            self._out.put(FetchState(donors, stage, base.number, cut=cut))
        elif self._target is None and base != self._base:
            self.restart(now_s, f"{sender[:8]} has started again")

    def unreachable(self, now_s: float, node: NodeId, reason: str) -> None:
        """A `Follow` could not be delivered."""
        if node == self._choice.followed:
            self.restart(now_s, reason)

    def average(
        self, now_s: float, sender: NodeId, message: Average, tensor: Tensor | None
    ) -> None:
        """One part of an average has come, or the word that there is none."""
        tensors = self._context.tensors
        step = self._step
        unused = [] if tensor is None else [tensors.add(tensor)]
        stale = step is not None and message.averaging <= step.averaging
        wanted = sender == self._choice.followed and not stale
        if not (wanted and self._backlog.put(message, tensor, self._state_at or self._base)):
            tensors.release(*unused)
            return
        self._choice.heard_s = now_s
        size_bytes = self._backlog.size_bytes
        if size_bytes > self._context.run.protocol.keep_max_bytes:
            what = f"{size_bytes >> 20} MiB of averages came before its state did"
            self.restart(now_s, what, slow=True)
        else:
            self._advance(now_s)

    # --- the state ----------------------------------------------------------------------------

    def takes(self, event: StateFetched | StateFetchFailed) -> bool:
        """Whether an event is about the state that this node has asked for as a follower."""
        wanted = self._base is not None and self._state_at is None and self._job is None
        place = (self._choice.stage_index, self._base.number if self._base is not None else -1)
        same = event.cut == self._context.built_in and event.part is None
        return wanted and same and (event.stage_index, event.iteration) == place

    def fetched(self, event: StateFetched) -> None:
        self._context.tensors.add(event.tensor)
        self._job = job = Load(event.iteration, (event.manifest,))
        self.pristine = False
        self._context.compute.submit(job, self, [event.tensor.id])

    def fetch_failed(self, now_s: float, event: StateFetchFailed) -> None:
        self.restart(now_s, event.reason)

    # --- jobs ---------------------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        """The state has been loaded, or a step proposed."""
        if job is not self._job:
            return
        self._job = None
        match event.result:
            case Built(parameter_hash):
                assert self._base is not None, "its state has been loaded"
                self._state_at = self._base
                self._hash = parameter_hash
                self._out.note("state.loaded", iteration=self._base.number)
            case Proposed(parameter_hash):
                self._proposed = parameter_hash
        self._advance(now_s)
        self.user.progressed(now_s)

    def job_failed(self, now_s: float, job: Job, reason: str) -> bool:
        """One of these was refused. Without another the node can't go on."""
        if job is not self._job:
            return True
        self.user.replay_failed(now_s, reason)
        return False

    def _advance(self, now_s: float) -> None:
        """Take the steps that can be taken: one job at a time."""
        if self._state_at is None or self._job is not None:
            return
        if self._step is not None:
            final = self._final(self._step)
            if final is None:
                return
            if final and not self._right(self._step):
                self.restart(now_s, _OTHER_STATE)
                return
            self._conclude(self._step, final=final)
        state_at = self._state_at
        target = self._target
        if target is not None and state_at.number >= target.iteration.number:
            return
        step = self._backlog.after(state_at.number)
        if step is not None and target is not None and not target.may_include(step):
            self._backlog.drop(step.iteration.number)
        elif step is None or not step.complete:
            if self._backlog.has_gap(state_at.number):
                self.restart(now_s, "an average is missing")
        elif step.base_hash and step.base_hash != self._hash:
            self.restart(now_s, _OTHER_STATE)
        else:
            self._choice.succeeded()
            self._propose(self._backlog.take(step.iteration.number))

    def _propose(self, step: ReceivedAverage) -> None:
        assert self._step is None, "the device keeps one proposed step"
        self._step = step
        self._proposed = None
        inputs = [step.parts[part] for part in range(step.num_parts)]
        self._job = job = Propose(
            step.iteration.number,
            len(inputs) - step.num_ahead,
            step.num_microbatches,
            step.gradient_norm,
            step.num_ahead,
            step.spec,
            step.ahead_spec,
            num_targets=step.num_targets,
        )
        self._context.compute.submit(job, self, inputs)

    def _final(self, step: ReceivedAverage) -> bool | None:
        """Whether a proposed step is final; None: nobody can tell yet."""
        iteration = step.iteration.number
        if self._target is not None and iteration >= self._target.iteration.number:
            return self._target.may_include(step)
        if self._backlog.get(iteration) is not None or self._backlog.passes_over(iteration):
            return False
        # What comes next says what this one has to be.
        return True if self._backlog.after(iteration) is not None else None

    def _right(self, step: ReceivedAverage) -> bool:
        """Whether a step that others took for final has come to the same here, as far as is known.

        Asked before it is final here: a bit may have flipped in what came.
        """
        iteration = step.iteration.number
        wanted = ""
        if self._target is not None and iteration == self._target.iteration.number:
            wanted = self._target.parameter_hash
        elif (after := self._backlog.after(iteration)) is not None:
            wanted = after.base_hash
        return wanted in ("", self._proposed)

    def _conclude(self, step: ReceivedAverage, *, final: bool) -> None:
        """Keep the proposed step, or undo it."""
        assert self._proposed is not None
        job: Job = Retract()
        if final:
            job = CommitStep(step.iteration.number)
            assert self._state_at is not None
            assert step.base == self._state_at.number, "a step would be left out"
            self._state_at = step.iteration
            self._hash = self._proposed
        self._step = self._proposed = None
        self._context.compute.submit(job)

    # --- entering -----------------------------------------------------------------------------

    def enter(
        self, now_s: float, opening: Opening, view_version: int, parameter_hash: str
    ) -> Entry:
        """This node is in the view: hold what was committed, or get there.

        Args:
            now_s: The time.
            opening: With which it enters.
            view_version: Of the view that has committed; 0 if it is not known.
            parameter_hash: What the parameters must hash to; empty if it is not known.
        """
        committed = opening.anchor
        state_at = self._state_at
        if state_at is None or state_at.era != committed.era or state_at.number > committed.number:
            self.end()
            return Entry.LOST
        if state_at.number == committed.number and parameter_hash not in ("", self._hash):
            self.end()
            return Entry.LOST
        self._target = _Target(committed, view_version, parameter_hash)
        step = self._step
        if step is not None and not self._target.may_include(step):
            if self._job is not None:
                self._context.compute.abandon(self._job)
            # Behind the proposal in the device's queue, if that is still under way.
            self._context.compute.submit(Retract())
            self._step = self._proposed = self._job = None
        self._advance(now_s)
        if self.arrived:
            return Entry.READY
        if self._state_at is None or not self._choice.stays_in(opening.view):
            self.end()
            return Entry.LOST
        self.deadline_s = now_s + self._context.run.protocol.complete_timeout_s
        return Entry.WAITING

    @property
    def arrived(self) -> bool:
        """Whether this node, in the view by now, holds what was committed when it entered."""
        state_at = self._state_at
        target = self._target
        return (
            state_at is not None
            and target is not None
            and state_at.number == target.iteration.number
        )
