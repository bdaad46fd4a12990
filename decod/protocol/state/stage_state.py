"""A stage's parameters as a node holds them: built, loaded from a member, handed to others.

A candidate builds its stage from the run's seed, or from what the leader has of it, before it
enters the view, and follows a member of its stage until it holds what is committed
(`protocol.state.replay`): others go on meanwhile, since a donor gives a copy that stands still. One
that enters without that fetches the state of the iteration that is committed from older members:
it stands still too, because no iteration can be committed before the newcomer has voted. All older
members are donors; newcomers begin with different ones.
A member that differs from most of its stage after a step fetches the state that it started from in
the same way, but only what its own differs in.
"""

from collections import deque
from collections.abc import Callable

from decod.ids import NodeId
from decod.protocol.core.context import Context
from decod.protocol.core.effects import (
    FetchState,
    RefuseState,
    ServeState,
    Stop,
    StopReason,
)
from decod.protocol.core.events import (
    JobFinished,
    Received,
    StateFetched,
    StateFetchFailed,
    StateRequested,
    Tensor,
)
from decod.protocol.core.jobs import (
    Built,
    Job,
    Load,
    ReturnToAnchor,
    Snapshot,
    SnapshotTaken,
)
from decod.protocol.core.messages import Differs, Leave

_NOBODY = "no member could give this node its stage's state"

EARLY_MAX = 64
"""A state may be asked for so many iterations before it is committed."""

_WAITING_MAX = 64
"""Requests for state that may wait for a commit or a copy."""


Loaded = Callable[[float], None]
"""Goes on with the iteration: the stage's committed state is there."""


class StageState:
    """Whether this node holds its stage's committed state, and whom it gives copies to.

    Args:
        context: The node's.
        loaded: Called when a state that was fetched stands on the device.
    """

    def __init__(self, context: Context, loaded: Loaded) -> None:
        self._context = context
        self._out = context.out
        self._is_here = loaded
        self.iteration = context.facts.start_iteration
        """The committed iteration whose state this node holds, or is loading: one that ended with
        an average."""
        self.loaded = False
        self.moved_on = False
        """This node has stepped by itself since."""
        self.parameter_hash = ""
        """Of this node's committed parameters; empty if it is not known."""
        self.prepared = 0
        """The iteration in hand, if its parameters are known already. 0: they are not."""
        self._wanted_hash = ""
        self._donors: deque[NodeId] = deque()
        self._asked = False
        """A state is on its way here. What was asked for before, as a candidate, counts no more."""
        self._num_loads_left = 0
        """A blob that can't be loaded is fetched again, once from each donor first."""
        self._job: Job | None = None
        """Loads what was fetched."""
        self._odd: tuple[NodeId, ...] = ()
        """Members, this node among them, whose state is not that of most of the stage."""
        self._amended: int | None = None
        """The iteration whose state this node has fetched for that reason."""
        self._early: list[StateRequested] = []
        self._copying: list[tuple[Snapshot, list[StateRequested]]] = []
        """Requests that one copy will serve, for each copy in the making."""

    def enter(self, iteration: int, parameter_hash: str = "", *, pristine: bool = True) -> None:
        """The node takes part from now on; the run has committed `iteration`.

        Args:
            iteration: Whose state it needs.
            parameter_hash: Of that, if it is known: a disk may hold one of a future that was given
                up when the run went back.
            pristine: Whether its device still holds what the run began with.
        """
        self.iteration = iteration
        self._wanted_hash = parameter_hash
        if iteration == self._context.facts.start_iteration and pristine:
            self.loaded = True
        else:
            self.fetch_entered()

    def fetch_entered(self) -> None:
        """Fetch the state of the iteration that this node has entered with."""
        context = self._context
        iteration = self.iteration
        roster = context.view.roster(context.member.stage_index)
        donors = [m.node_id for m in roster if m.since_iteration < iteration]
        if iteration == context.facts.start_iteration:
            # Those that were there from the beginning.
            donors = [m.node_id for m in roster if m.node_id != context.node_id]
        newcomers = [m.node_id for m in roster if m.since_iteration >= iteration]
        start = newcomers.index(context.node_id) % len(donors) if donors else 0
        self._donors = deque(donors[start:] + donors[:start])
        self._num_loads_left = len(donors)
        self._fetch()

    def holds(self, iteration: int) -> None:
        """The node takes part from now on, and holds the state of the last commit already."""
        self.iteration = iteration
        self.loaded = True
        self._asked = False
        self._out.note("state.loaded", iteration=iteration)

    def lacks(self, iteration: int, parameter_hash: str) -> None:
        """The node takes part from now on, and is about to step to the state of `iteration`."""
        self.iteration = iteration
        self._wanted_hash = parameter_hash
        self.loaded = False
        self._asked = False

    def fetch_back(self, iteration: int) -> None:
        """This node has given up what it held, and could not go back: ask the others of its stage
        for what they hold."""
        context = self._context
        self.lacks(iteration, "")
        roster = context.view.roster(context.member.stage_index)
        self._donors = deque(m.node_id for m in roster if m.node_id != context.node_id)
        self._num_loads_left = len(self._donors)
        self._fetch()

    def _fetch(self) -> None:
        if not self._num_loads_left:
            self.give_up(_NOBODY)
            return
        donors = tuple(self._donors)
        stage = self._context.member.stage_index
        alike = self._amended == self.iteration
        self._asked = True
        self._out.note("state.requested", num_donors=len(donors), iteration=self.iteration)
        cut = self._context.view.cut
        self._out.put(
            FetchState(donors, stage, self.iteration, self._wanted_hash, alike=alike, cut=cut)
        )

    def give_up(self, reason: str) -> None:
        """This node can't get its stage's state: others must do without it."""
        leader = self._context.view.leader
        if leader != self._context.node_id:  # Else they find out, and elect another.
            self._out.send(leader, Leave(reason[:200], at_once=True))
        self._out.put(Stop(StopReason.REMOVED, reason))

    def _wants(self, event: StateFetched | StateFetchFailed) -> bool:
        member = self._context.view.by_id.get(self._context.node_id)
        cut = self._context.view.cut
        here = member is None or event.stage_index == member.stage_index
        same_stage = here and event.cut == cut and event.part is None
        lacking = self._asked and not self.loaded
        return same_stage and lacking and event.iteration == self.iteration

    def fetched(self, event: StateFetched) -> None:
        """A state has come: load it, if that is what this node lacks."""
        self._context.tensors.add(event.tensor)
        if self._wants(event):
            self._load(event)
        else:
            self._context.tensors.release(event.tensor.id)

    def _load(self, event: StateFetched) -> None:
        self._asked = False
        self._job = job = Load(event.iteration, (event.manifest,))
        self._context.compute.submit(job, self, [event.tensor.id])

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:
        """A state has been loaded, or copied."""
        match event.result:
            case SnapshotTaken() as taken:
                self.copied(job, taken, event.outputs[0])
            case Built(parameter_hash) if self._awaits(job):
                self.parameter_hash = parameter_hash
                self.moved_on = False
                self._is_here(now_s)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """A state could not be loaded, or not copied."""
        if isinstance(job, Snapshot):
            self._refuse(self._take(job), reason)
        elif self._awaits(job):
            self.load_failed(reason)

    def _awaits(self, job: Job) -> bool:
        """Whether a job loads what this node still wants."""
        return job is self._job and not self.loaded

    def unload(self, iteration: int) -> None:
        """The run goes back to `iteration`: its state is not here yet."""
        self.moved_on = False
        self.loaded = False
        self.iteration = iteration
        self._job = None
        self._asked = False
        self.prepared = 0
        self._odd = ()
        self._amended = None
        self._refuse(self._early, "the run has gone back to an earlier iteration")
        self._early = []

    def keeps_own(self, event: StateFetchFailed) -> bool:
        """Whether this node still has the state that it was to amend: better that than none."""
        return self._wants(event) and self._amended == self.iteration

    def give_up_own_steps(self) -> None:
        """This node keeps its state after all, but what it had learnt by itself counts as lost."""
        self.moved_on = False
        context = self._context
        if context.run.sync.steps_locally:
            context.compute.submit(ReturnToAnchor())

    def fetch_failed(self, event: StateFetchFailed) -> None:
        if self._wants(event):
            self.give_up(_NOBODY)

    def load_failed(self, reason: str) -> None:
        """The blob was not what a donor said, or not of this stage: others are asked first now."""
        self._num_loads_left -= 1
        self._donors.rotate(-1)
        self._out.note("state.failed", peer="", reason=reason)
        self._fetch()

    def received(self, now_s: float, received: Received) -> None:  # noqa: ARG002
        """Take in that this node has come to another result."""
        assert isinstance(received.message, Differs)
        self.differs(received.sender, received.message)

    def differs(self, sender: NodeId, message: Differs) -> None:
        """This node came to another result than most of its stage: the next opening amends that."""
        view = self._context.view
        own = self._context.node_id
        meant = own in view and own in message.nodes and message.base == self.iteration
        if meant and view.roster(self._context.member.stage_index)[0].node_id == sender:
            self._odd = message.nodes

    @property
    def is_odd(self) -> bool:
        """Whether this node was told that its last step is not that of most of its stage."""
        return bool(self._odd)

    def opened(self) -> None:
        """An iteration is opened: if this node's state is not its stage's, fetch that first."""
        odd = self._odd
        self._odd = ()
        if self._amends_in_vain():
            # Its own is the stage's now.
            self.give_up_own_steps()
            self.holds(self.iteration)
        elif odd and self.loaded and self._amended == self.iteration:
            self.give_up("its device computes other results than those of its stage")
        elif odd and self.loaded:
            self._amend(odd)

    def _amend(self, odd: tuple[NodeId, ...]) -> None:
        """Fetch what the members of the stage hold that are not `odd`, if there are any."""
        context = self._context
        stage = context.member.stage_index
        donors = [m.node_id for m in context.view.roster(stage) if m.node_id not in odd]
        if not donors:
            return
        self._amended = self.iteration
        self._wanted_hash = ""
        self.loaded = False
        self._job = None
        self._donors = deque(donors)
        self._num_loads_left = len(donors)
        context.why = "its state differed from that of its stage"
        self._out.note("state.differs", stage=stage, iteration=self.iteration)
        self._fetch()

    def _amends_in_vain(self) -> bool:
        """Whether all are gone of whom this node was to learn its stage's state."""
        waits = self._amended == self.iteration and not self.loaded and self._job is None
        return waits and not any(donor in self._context.view for donor in self._donors)

    def committed(self, iteration: int) -> None:
        """A step is final here: copies of it can be made.

        Args:
            iteration: The last that ended with an average. What came behind it stays on the device.
        """
        self.moved_on = iteration == self.iteration
        self.iteration = iteration
        self._odd = ()
        self.prepared = 0
        self._take_early()

    def requested(self, event: StateRequested) -> None:
        """Copy the state for somebody, if it is the one that this node holds, or will hold next."""
        num_waiting = len(self._early) + sum(len(batch) for _, batch in self._copying)
        member = self._context.view.by_id.get(self._context.node_id)
        if num_waiting >= _WAITING_MAX:
            self._refuse([event], "too many requests wait")
        elif member is None or event.stage_index != member.stage_index:
            self._refuse([event], f"does not serve stage {event.stage_index}")
        elif event.cut != self._context.view.cut:
            self._refuse([event], "the model is cut otherwise by now")
        elif self._knows_ahead(event) or (self.loaded and event.iteration == self.iteration):
            self._copy(event)
        elif self.iteration < event.iteration <= self.iteration + EARLY_MAX:
            self._early.append(event)
        else:
            doing = "holds" if self.loaded else "is loading"
            held = f"{doing} the state of iteration {self.iteration}, asked was {event.iteration}"
            self._refuse([event], held)

    def stepped_ahead(self, iteration: int) -> None:
        """The parameters after the iteration in hand are known: clients can have them."""
        self.prepared = iteration
        self._take_early()

    def _take_early(self) -> None:
        early = self._early
        self._early = []
        for request in early:
            self.requested(request)

    def _copy(self, event: StateRequested) -> None:
        """Have a copy made, or share one that is in the making."""
        for _, batch in self._copying:
            same = batch[0].with_optimizer == event.with_optimizer
            if same and batch[0].iteration == event.iteration:
                batch.append(event)
                return
        job = Snapshot(event.with_optimizer, ahead=self._knows_ahead(event))
        self._copying.append((job, [event]))
        self._context.compute.submit(job, self)

    def _knows_ahead(self, event: StateRequested) -> bool:
        """Whether somebody wants parameters that are known before their iteration is committed."""
        return 0 < self.prepared == event.iteration and not event.with_optimizer

    def _take(self, job: Job) -> list[StateRequested]:
        """Return the requests for a copy. Copies do not end in the order in which they began."""
        found = next(entry for entry in self._copying if entry[0] is job)
        self._copying.remove(found)
        return found[1]

    def copied(self, job: Job, result: SnapshotTaken, output: Tensor) -> None:
        """A copy has been made: give it to those that have asked for it."""
        batch = self._take(job)
        if result.iteration != batch[0].iteration:
            self._refuse(batch, "the state has moved on")
            self._context.tensors.release(output.id)
        else:
            self._context.tensors.hand_over(output.id)
            request_ids = tuple(request.request_id for request in batch)
            self._out.put(ServeState(request_ids, result.iteration, result.manifest, output.id))

    def _refuse(self, batch: list[StateRequested], reason: str) -> None:
        for request in batch:
            self._out.put(RefuseState(request.request_id, reason))
