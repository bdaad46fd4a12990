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
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, FetchState, Note, Send, UseMembers
from decod.protocol.core.events import JobFinished, StateFetched, StateFetchFailed, Tensor
from decod.protocol.core.jobs import (
    Built,
    CommitStep,
    Job,
    JobResult,
    Load,
    Propose,
    Proposed,
    Retract,
)
from decod.protocol.core.messages.replay import Average, Follow, Followed
from decod.protocol.core.view import Member, Opening

_SILENT_S = 10.0
"""How long the member that is followed may say nothing."""

_PAUSE_S = 1.0
_PAUSE_MAX_S = 300.0
"""Before another beginning; doubles each time."""

_SLOW_PAUSE_S = 30.0
"""Before the first new beginning of a candidate that could not keep up."""

_GAP_MAX = 3
"""Iterations whose averages may be here before an earlier one's."""


_OTHER_STATE = "it has come to other parameters than its stage"


class ReplayUser(Protocol):
    """Who needs the state that is replayed: a candidate, and then a member."""

    def progressed(self, now_s: float) -> list[Effect]:
        """A job of the replay has ended well."""
        ...

    def replay_failed(self, now_s: float, reason: str) -> list[Effect]:
        """One was refused."""
        ...


class Entry(Enum):
    """With what a candidate enters the view."""

    READY = "ready"
    """It holds what was committed."""
    WAITING = "waiting"
    """It will, when the last averages have come."""
    LOST = "lost"
    """It has nothing to build on."""


@dataclass(slots=True)
class _Step:
    """The averages of one iteration, as far as they have come."""

    averaging: AveragingId
    num_parts: int
    num_microbatches: int
    base_hash: str
    gradient_norm: float
    parts: dict[int, TensorId] = field(default_factory=dict)

    @property
    def iteration(self) -> Iteration:
        return self.averaging.iteration

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.num_parts


class Replay:
    """What one candidate knows of the stage that it follows.

    Args:
        context: The node's.
        address: Where the member can reach this node.
        user: Told how it goes.
        incarnation: Of this node. Its requests are numbered from there: a member may still know a
            wish of an earlier life, and would answer an equal number as a repeat of that.
    """

    def __init__(
        self, context: Context, address: str, user: ReplayUser, *, incarnation: int
    ) -> None:
        self._context = context
        self.user = user
        self._address = address
        self._stage = 0
        self._donors: tuple[Member, ...] = ()
        self._choice = 0
        self._request_id = incarnation // 2  # Half: so that there are numbers behind it.
        self._followed: NodeId | None = None
        self._since = 0
        """The iteration with which that member was admitted."""
        self._heard_s = 0.0
        self._base: Iteration | None = None
        """Whose state is fetched."""
        self._log: dict[int, _Step] = {}
        """Averages that wait, by iteration."""
        self._num_bytes = 0
        self._job: Job | None = None
        self._state_at: Iteration | None = None
        """The last iteration whose step is final here."""
        self._hash = ""
        """Of the parameters after it."""
        self._step: _Step | None = None
        """What is being proposed, or has been."""
        self._proposed: str | None = None
        self._again_s = -math.inf
        self._pause_s = 0.0
        self._target: tuple[Iteration, int] | None = None
        """What was committed when this node entered, and in which view (0: not known)."""
        self._wanted = ""
        """The hash of the parameters after that; empty if it is not known."""
        self.pristine = True
        """The compute process holds what was built, and no later state."""
        self.deadline_s: float | None = None
        """When a member that still lacks averages gives up waiting for them."""
        self.reason = ""
        """Why the last try has failed, for people."""

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

    @property
    def num_behind(self) -> int:
        """Iterations whose averages wait here."""
        return len(self._log)

    # --- beginning and ending -----------------------------------------------------------------

    def aim(self, stage_index: int, donors: tuple[Member, ...]) -> list[Effect]:
        """Say which stage this node is to serve, and which members hold its state."""
        donors = tuple(m for m in donors if m.node_id != self._context.node_id)
        effects: list[Effect] = []
        if stage_index != self._stage or not donors:
            effects += self.end()
        new = donors != self._donors
        self._stage, self._donors = stage_index, donors
        return [*effects, UseMembers(donors)] if new and donors else effects

    def knock(self, now_s: float) -> list[Effect]:
        """Begin, if it is time; say that this node still follows."""
        if not self._donors or now_s < self._again_s:
            return []
        if self._followed is not None and now_s - self._heard_s > _SILENT_S:
            return self._restart(now_s, f"{self._followed[:8]} says nothing")
        if self._followed is None:
            donor = self._donors[self._choice % len(self._donors)]
            self._followed, self._since = donor.node_id, donor.since_iteration
            self._request_id += 1
            self._heard_s = now_s
        return [Send(self._followed, Follow(self._request_id, self._stage, self._address))]

    def end(self) -> list[Effect]:
        """Let go of everything. What a job still gives is not taken."""
        released = [part for step in self._log.values() for part in step.parts.values()]
        effects = [] if self._job is None else self._context.compute.abandon(self._job)
        self._log.clear()
        self._num_bytes = 0
        self._followed = self._base = self._state_at = self._step = self._proposed = None
        self._job = self._target = self.deadline_s = None
        return effects + self._context.tensors.release(*released)

    def built(self) -> list[Effect]:
        """The compute process has built a stage: what it had before is gone."""
        self.pristine = True
        return self.end()

    def _restart(self, now_s: float, reason: str, *, slow: bool = False) -> list[Effect]:
        least_s = _SLOW_PAUSE_S if slow else _PAUSE_S
        self._pause_s = min(_PAUSE_MAX_S, max(least_s, 2 * self._pause_s))
        self._again_s = now_s + self._pause_s
        self._choice += 1
        self.reason = reason
        fields = (
            ("stage", self._stage),
            ("reason", reason),
            ("pause_s", round(self._pause_s)),
        )
        return [Note("replay.failed", fields), *self.end()]

    # --- messages -----------------------------------------------------------------------------

    def answered(self, now_s: float, sender: NodeId, message: Followed) -> list[Effect]:
        """The member says from where on it sends averages, or that it does not."""
        if (sender, message.request_id) != (self._followed, self._request_id):
            return []
        self._heard_s = now_s
        if message.refusal:
            # Who names the base has sent averages, and left this node behind.
            slow = self._base is not None and message.committed == self._base
            return self._restart(now_s, message.refusal, slow=slow)
        if self._base is not None:
            if self._target is None and message.committed != self._base:
                return self._restart(now_s, f"{sender[:8]} has started again")
            return []
        self._base = base = message.committed
        early = [i for i, step in self._log.items() if not _is_behind(base, step.iteration)]
        effects = [effect for iteration in early for effect in self._drop(iteration)]
        ids = [member.node_id for member in self._donors]
        first = ids.index(sender) if sender in ids else 0
        donors = tuple(ids[first:] + ids[:first])
        fields = (("num_donors", len(donors)), ("iteration", base.number))
        wanted = FetchState(donors, self._stage, base.number)
        return [*effects, Note("state.requested", fields), wanted]

    def unreachable(self, now_s: float, node: NodeId, reason: str) -> list[Effect]:
        """A `Follow` could not be delivered."""
        return self._restart(now_s, reason) if node == self._followed else []

    def average(
        self, now_s: float, sender: NodeId, message: Average, tensor: Tensor
    ) -> list[Effect]:
        """One part of an average has come."""
        self._context.tensors.add(tensor)
        taken, effects = self._keep(sender, message, tensor)
        if not taken:
            return effects + self._context.tensors.release(tensor.id)
        self._heard_s = now_s
        if self._num_bytes > self._context.config.keep_max_bytes:
            what = f"{self._num_bytes >> 20} MiB of averages came before its state did"
            return effects + self._restart(now_s, what, slow=True)
        return effects + self._advance(now_s)

    def _keep(self, sender: NodeId, message: Average, tensor: Tensor) -> tuple[bool, list[Effect]]:
        """Return whether a part is kept, and what that makes superfluous."""
        base, averaging, effects = self._state_at or self._base, message.averaging, list[Effect]()
        # Of what overtakes the answer to `Follow` nobody knows yet whether it is needed.
        ahead = base is None or _is_behind(base, averaging.iteration)
        if sender != self._followed or not ahead:
            return False, []
        iteration = averaging.iteration.number
        if self._step is not None and averaging <= self._step.averaging:
            return False, []
        step = self._log.get(iteration)
        if step is not None and step.averaging < averaging:
            effects += self._drop(iteration)
            step = None
        if step is None:
            step = self._log[iteration] = _Step(
                averaging,
                message.num_parts,
                message.num_microbatches,
                message.base_hash,
                message.gradient_norm,
            )
        alike = (step.averaging, step.num_parts) == (averaging, message.num_parts)
        if not alike or message.part in step.parts:
            return False, effects
        step.parts[message.part] = tensor.id
        self._num_bytes += tensor.size_bytes
        return True, effects

    def _drop(self, iteration: int) -> list[Effect]:
        return self._context.tensors.release(*self._taken(iteration).parts.values())

    def _taken(self, iteration: int) -> _Step:
        """Return what has come of an iteration; it waits no longer."""
        step, tensors = self._log.pop(iteration), self._context.tensors
        self._num_bytes -= sum(tensors.size_of(part) for part in step.parts.values())
        return step

    # --- the state ----------------------------------------------------------------------------

    def takes(self, event: StateFetched | StateFetchFailed) -> bool:
        """Whether an event is about the state that this node has asked for as a follower."""
        wanted = self._base is not None and self._state_at is None and self._job is None
        place = (self._stage, self._base.number if self._base is not None else -1)
        return wanted and (event.stage_index, event.iteration) == place

    def fetched(self, event: StateFetched) -> list[Effect]:
        self._context.tensors.add(event.tensor)
        self._job = job = Load(event.iteration, event.manifest)
        self.pristine = False
        return self._context.compute.submit(job, self, [event.tensor.id])

    def fetch_failed(self, now_s: float, event: StateFetchFailed) -> list[Effect]:
        return self._restart(now_s, event.reason)

    # --- jobs ---------------------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:
        """The state has been loaded, or a step proposed."""
        if job is not self._job:
            return []
        return self._done(now_s, event.result) + self.user.progressed(now_s)

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect] | None:
        """One of these was refused."""
        return self.user.replay_failed(now_s, reason) if job is self._job else None

    def _done(self, now_s: float, result: JobResult) -> list[Effect]:
        self._job = None
        match result:
            case Built(parameter_hash):
                self._state_at, self._hash = self._base, parameter_hash
                note = Note("state.loaded", (("iteration", self._base_iteration),))
                return [note, *self._advance(now_s)]
            case Proposed(parameter_hash):
                self._proposed = parameter_hash
        return self._advance(now_s)

    @property
    def _base_iteration(self) -> int:
        return self._base.number if self._base is not None else 0

    def restart(self, now_s: float, reason: str) -> list[Effect]:
        """What was begun can't be ended: begin again after a pause."""
        return self._restart(now_s, reason)

    def _advance(self, now_s: float) -> list[Effect]:
        """Take the steps that can be taken: one job at a time."""
        effects: list[Effect] = []
        if self._state_at is None or self._job is not None:
            return effects
        if self._step is not None:
            final = self._final(self._step)
            if final is None:
                return effects
            if final and not self._right(self._step):
                return effects + self._restart(now_s, _OTHER_STATE)
            effects += self._conclude(self._step, final=final)
        state_at = self._state_at
        if self._target is not None and state_at.number >= self._target[0].number:
            return effects
        step = self._log.get(state_at.number + 1)
        if step is not None and self._target is not None and not self._may_be(step):
            effects += self._drop(state_at.number + 1)
            return effects
        if step is None or not step.complete:
            ahead = max(self._log, default=0) - state_at.number
            lost = ahead > _GAP_MAX and any(s.complete for s in self._log.values())
            return effects + (self._restart(now_s, "an average is missing") if lost else [])
        if step.base_hash and step.base_hash != self._hash:
            return effects + self._restart(now_s, _OTHER_STATE)
        self._pause_s, self.reason = 0.0, ""
        return effects + self._propose(self._taken(state_at.number + 1))

    def _propose(self, step: _Step) -> list[Effect]:
        assert self._step is None, "the device keeps one proposed step"
        self._step, self._proposed = step, None
        inputs = [step.parts[part] for part in range(step.num_parts)]
        self._job = job = Propose(
            step.iteration.number, len(inputs), step.num_microbatches, step.gradient_norm
        )
        return self._context.compute.submit(job, self, inputs)

    def _may_be(self, step: _Step) -> bool:
        """Whether a step may be the one that was committed when this node entered."""
        assert self._target is not None
        committed, view_version = self._target
        if step.iteration.number != committed.number:
            return step.iteration.number < committed.number
        return step.iteration == committed and view_version in (0, step.averaging.view_version)

    def _final(self, step: _Step) -> bool | None:
        """Whether a proposed step is final; None: nobody can tell yet."""
        iteration = step.iteration.number
        if self._target is not None and iteration >= self._target[0].number:
            return self._may_be(step)
        if iteration in self._log:
            return False
        # What comes next says what this one has to be.
        return True if iteration + 1 in self._log else None

    def _right(self, step: _Step) -> bool:
        """Whether a step that others took for final has come to the same here, as far as is known.

        Asked before it is final here: a bit may have flipped in what came.
        """
        iteration, wanted = step.iteration.number, ""
        if self._target is not None and iteration == self._target[0].number:
            wanted = self._wanted
        elif (after := self._log.get(iteration + 1)) is not None:
            wanted = after.base_hash
        return wanted in ("", self._proposed)

    def _conclude(self, step: _Step, *, final: bool) -> list[Effect]:
        """Keep the proposed step, or undo it."""
        assert self._proposed is not None
        job: Job = Retract()
        if final:
            job = CommitStep(step.iteration.number)
            assert self._state_at is not None
            assert step.iteration.number == self._state_at.number + 1, "a step would be left out"
            self._state_at, self._hash = step.iteration, self._proposed
        self._step = self._proposed = None
        return self._context.compute.submit(job)

    # --- entering -----------------------------------------------------------------------------

    def enter(
        self, now_s: float, opening: Opening, view_version: int, parameter_hash: str
    ) -> tuple[Entry, list[Effect]]:
        """This node is in the view: hold what was committed, or get there.

        Args:
            now_s: The time.
            opening: With which it enters.
            view_version: Of the view that has committed; 0 if it is not known.
            parameter_hash: What the parameters must hash to; empty if it is not known.
        """
        committed, state_at = opening.committed, self._state_at
        if state_at is None or state_at.era != committed.era or state_at.number > committed.number:
            return Entry.LOST, self.end()
        if state_at.number == committed.number and parameter_hash not in ("", self._hash):
            return Entry.LOST, self.end()
        self._target, self._wanted = (committed, view_version), parameter_hash
        effects: list[Effect] = []
        step = self._step
        if step is not None and not self._may_be(step):
            if self._job is not None:
                effects += self._context.compute.abandon(self._job)
            # Behind the proposal in the device's queue, if that is still under way.
            effects += self._context.compute.submit(Retract())
            self._step = self._proposed = self._job = None
        effects += self._advance(now_s)
        if self.arrived:
            return Entry.READY, effects
        donor = None if self._followed is None else opening.view.by_id.get(self._followed)
        # One that was admitted again has started again: it knows of no follower.
        if self._state_at is None or donor is None or donor.since_iteration != self._since:
            return Entry.LOST, effects + self.end()
        self.deadline_s = now_s + self._context.config.complete_timeout_s
        return Entry.WAITING, effects

    @property
    def arrived(self) -> bool:
        """Whether this node, in the view by now, holds what was committed when it entered."""
        state_at, target = self._state_at, self._target
        return state_at is not None and target is not None and state_at.number == target[0].number


def _is_behind(base: Iteration, iteration: Iteration) -> bool:
    """Whether an iteration's step is one of those that are taken from a state."""
    return iteration.era == base.era and iteration.number > base.number
