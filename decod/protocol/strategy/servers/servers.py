"""Training with servers: a stage's reliable members share its work out among whoever comes.

A microbatch passes through a stage like this:

    stage before -> frontal server -> worker -> backward server -> stage behind       (forward)
    stage before <- frontal server <- worker <- backward server <- stage behind       (backward)

Workers are the stage's clients, and its servers if they have a device. What a worker has folded
into its sum is lost with it, and others compute it again from what the servers keep. When the batch
is home, all workers contribute their sums; the servers average them, and step. Clients then fetch
the parameters.

A node has the parts that its role asks for: a data node `home`; a server `frontal`, `backward` and
`worker`; a client `worker` alone. Which server deals with which microbatch: `placement`.

Source: reliable and unreliable parameter servers, section 3.2.
"""

from collections.abc import Sequence
from random import Random

from typing_extensions import override

from decod.ids import MicrobatchId, NodeId, TensorId
from decod.protocol.averaging.averager import Averager, AveragingState, Weight, added, port_of
from decod.protocol.core import messages
from decod.protocol.core.context import Context
from decod.protocol.core.dispatch import released
from decod.protocol.core.effects import CountWork, Effect, Note, Send, Stop, StopReason
from decod.protocol.core.events import (
    DeadlinePassed,
    JobFinished,
    Received,
    SendFailed,
    TensorSent,
    earliest,
)
from decod.protocol.core.jobs import CommitStep, Job, StepAhead
from decod.protocol.core.messages import BeginAggregation, Leave
from decod.protocol.core.messages.scopes import OfAveraging
from decod.protocol.core.messages.server_messages import (
    Fetch,
    Folded,
    Given,
    Holding,
    Leg,
    Missing,
    Offer,
    Revoke,
    Settled,
    StageActivation,
    StageGradient,
    Taken,
    Unable,
)
from decod.protocol.core.view import Opening, Role, tree_place
from decod.protocol.state.client_copy import ClientCopy
from decod.protocol.state.stage_copy import StageCopy
from decod.protocol.strategy.servers.backward import BackwardServer
from decod.protocol.strategy.servers.frontal import FrontalServer
from decod.protocol.strategy.servers.home import HomeMicrobatches
from decod.protocol.strategy.servers.placement import Courier, KeptTensors, Placement, Room
from decod.protocol.strategy.servers.worker import Worker
from decod.protocol.strategy.step import (
    Account,
    Step,
    StepPolicy,
    account_of,
    averaging_of,
    commit_notes,
    weight_of,
)
from decod.protocol.strategy.strategy import StrategyEvent, StrategyFacts


class Contribution:
    """One client's contribution to one average.

    The client has no optimizer, and no vote. The servers average what all workers contribute, and
    step; the client then fetches the parameters.

    Args:
        context: The node's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.begun: BeginAggregation | None = None
        averaging = averaging_of(context)
        self._num_members = len(averaging.roster)
        self.averager = Averager(context.node_id, averaging, port_of(context), self)
        self._own: Weight | None = None
        """What is in this node's sum, once it is whole."""
        self.proposal = ""
        self.result: messages.Ready | None = None
        self.awaited = set[NodeId]()
        """Nobody: the servers have what they need, and the leader will say so."""

    @property
    def made(self) -> bool:
        """Whether this node's sum is whole, and goes to the servers."""
        return self.averager.state is not AveragingState.WAITING

    aggregating = made

    @property
    def account(self) -> Account:
        """What this node has contributed, as fields of a note: by them a run can be audited."""
        if self.begun is None or self._own is None:
            return ()
        return account_of(self._context, self.begun, self._own, num_members=self._num_members)

    def received(self, received: Received) -> list[Effect]:
        """Take in which microbatches count, once; pass the word on down the tree."""
        message = received.message
        context = self._context
        tensor = received.tensor
        if tensor is not None:
            context.tensors.add(tensor)
            return context.tensors.release(tensor.id)
        if not isinstance(message, BeginAggregation) or self.begun is not None:
            return []
        self.begun = message
        place = tree_place(context.view, context.node_id, fanout=context.run.protocol.tree_fanout)
        return [Send(child, message) for child in place.children]

    def contribute(self, folded: Sequence[MicrobatchId]) -> list[Effect]:
        """Send this node's sum to the servers, once: it is whole.

        Args:
            folded: What is in it.
        """
        begun = self.begun
        if begun is None or self.averager.state is not AveragingState.WAITING:
            return []
        total = Weight(begun.num_committed, begun.digest)
        self._own = weight_of(folded)
        return self.averager.begin(self._own, total)

    def contributions(self) -> list[Effect]:
        """Return nothing: a client reduces no part."""
        return []

    def state_loaded(self) -> list[Effect]:
        """Nothing has waited for the parameters."""
        return []

    def abandon(self) -> list[Effect]:
        """Release all that is held for the average."""
        return self.averager.abandon()

    # --- the average ------------------------------------------------------------------------------

    def averaged(self) -> list[Effect]:
        """A client reads no average."""
        return []

    def lacking(self, found: Weight) -> list[Effect]:  # noqa: ARG002
        """A client adds nothing up."""
        return []

    def averaging_failed(self, reason: str) -> list[Effect]:
        """The device has refused its own sum: others do this node's work again."""
        leave = Leave(reason[:200], at_once=True)
        stop = Stop(StopReason.REMOVED, f"its device has lost its gradients: {reason}")
        return [Send(self._context.view.leader, leave), stop]


class ServersFacts(StrategyFacts):
    """What others ask about a member where stages have servers."""

    def __init__(self, context: Context, servers: "Servers") -> None:
        super().__init__(context)
        self._servers = servers

    @property
    @override
    def awaited(self) -> set[NodeId]:
        found = {node for part in self._servers.parts for node in part.awaited}
        return (found | super().awaited) - {self._context.node_id}

    @property
    @override
    def num_flows(self) -> int:
        worker = self._servers.worker
        return len(worker.tasks) if worker is not None else 0


class Servers:
    """One member's work in a run whose stages are organised as servers.

    Args:
        context: The node's.
        role: Decides which parts it has.
        rng: Not used: nothing here is random.
    """

    def __init__(
        self,
        context: Context,
        role: Role,
        rng: Random,  # noqa: ARG002 - as every strategy is made.
    ) -> None:
        self._context = context
        self._role = role
        is_client = role is Role.CLIENT
        room = Room()
        courier = Courier(context, self._arrived)
        self.copy: StageCopy = (ClientCopy if is_client else StageCopy)(context, self._state_loaded)
        self.home: HomeMicrobatches | None = None
        self.frontal: FrontalServer | None = None
        self.backward: BackwardServer | None = None
        self.worker: Worker | None = None
        if role is Role.DATA:
            self.home = HomeMicrobatches(
                context,
                courier,
                KeptTensors(context, room),
                self._contribute,
                num_microbatches=context.run.batch.num_microbatches,
            )
        else:
            self.worker = Worker(context, courier, KeptTensors(context, room))
        if role is Role.RELAY:
            self.frontal = FrontalServer(context, courier, KeptTensors(context, room))
            self.backward = BackwardServer(context, courier, KeptTensors(context, room))
        parts = (self.home, self.frontal, self.backward, self.worker)
        self.parts = [part for part in parts if part is not None]
        self._policy = StepPolicy()
        self._step: Step | Contribution | None = None
        self.facts = ServersFacts(context, self)
        self._settled: dict[NodeId, Weight] = {}
        """What backward servers know to be in their workers' sums."""
        self._placement: Placement | None = None
        self._view = context.view
        """The one by which this node's parts work."""
        self._offered = False
        """Whether this node's servers know that it takes microbatches of the iteration."""

    @property
    def deadline_s(self) -> float | None:
        frontal_s = self.frontal.deadline_s if self.frontal is not None else None
        backward_s = self.backward.deadline_s if self.backward is not None else None
        return earliest(frontal_s, backward_s, self.copy.deadline_s)

    def _overdue(self, now_s: float) -> list[Effect]:
        effects = self.frontal.overdue(now_s) if self.frontal is not None else []
        effects += self.backward.overdue(now_s) if self.backward is not None else []
        return effects + self.copy.overdue(now_s)

    # --- iterations -------------------------------------------------------------------------------

    def close(self, decision: messages.Open) -> tuple[bool, list[Effect]]:
        """End the context's iteration as a decision says: keep its step, or undo it."""
        opening = decision.opening
        facts = self.facts
        committed = facts.voted_for(opening.committed)
        begun = facts.begun
        self.copy.told(decision)
        step = self._step
        account = step.account if step is not None else ()
        effects = step.contributions() if account and step is not None else []
        effects += commit_notes(decision, begun, account, self._context, voted=committed)
        effects += self._abandon_step()
        compute = self._context.compute
        if committed and begun is not None:
            facts.num_committed += len(self._folded)
            effects.append(self._count_work(opening.committed.number))
            facts.positions.committed(begun)
            if self.home is not None:
                marked = opening.mark_of(opening.committed.number) is not None
                self.home.committed(marked=marked)
        stepped = committed and self._role is not Role.CLIENT
        if stepped:
            self.copy.stage.parameter_hash = facts.proposal
            effects += compute.submit(CommitStep(opening.committed.number))
        elif step is not None:
            effects += compute.reset()
        effects += self._reset()
        return stepped, effects + (self._end() if decision.ended else [])

    def _reset(self) -> list[Effect]:
        return [effect for part in self.parts for effect in part.reset()]

    @property
    def _folded(self) -> list[object]:
        part = self.home if self.home is not None else self.worker
        return [*part.folded] if part is not None else []

    def _count_work(self, iteration: int) -> CountWork:
        """Say who has worked on the microbatches of an iteration that is committed."""
        work = {self._context.node_id: len(self._folded)}
        if self.backward is not None:
            for worker, num in self.backward.work().items():
                work[worker] = max(num, work.get(worker, 0))
        return CountWork(iteration, tuple(sorted(work.items())))

    def open(self, now_s: float, opening: Opening, *, renewed: bool) -> list[Effect]:  # noqa: ARG002
        """Begin the context's iteration; `renewed` if its view is a new one."""
        context = self._context
        returns = self.facts.opened(opening)
        if returns and self.home is not None:
            self.home.go_back(opening.committed.number)
        self._offered = False
        self._view = context.view
        self._placement = Placement(
            context.view,
            num_microbatches=context.run.batch.num_microbatches,
            num_shares=context.run.batch.num_data_nodes,
        )
        for part in (self.frontal, self.backward, self.worker):
            if part is not None:
                part.open(self._placement)
        effects = self.copy.opened(opening)
        self._begin_step()
        return effects + self._take_up()

    def _begin_step(self) -> None:
        """Begin the step of an iteration, or begin it again with other members."""
        self._settled.clear()
        step: Step | Contribution
        if self._role is Role.CLIENT:
            step = Contribution(self._context)
        else:
            source = self.copy.replay_source
            step = Step(self._context, self._policy, source, loaded=self.copy.loaded)
        self._step = self.facts.step = step

    def _abandon_step(self) -> list[Effect]:
        """Release all that is held for the step."""
        return self._step.abandon() if self._step is not None else []

    def _take_up(self) -> list[Effect]:
        """Work on the iteration, if this node holds the parameters that it needs."""
        if not self.copy.loaded or self.facts.paused or self._offered or self._placement is None:
            return []
        self._offered = True
        # Before all passes: others wait for what comes of it.
        ahead = self._step_ahead()
        if self.home is not None:
            return ahead + self.home.open(self._placement)
        assert self.worker is not None
        return ahead + self.worker.offer()

    def _step_ahead(self) -> list[Effect]:
        """Compute what is known of the parameters after the iteration, if steps are late."""
        if not self._context.run.delay or self._role is Role.CLIENT:
            return []
        return self._context.compute.submit(StepAhead(self._context.iteration.number), self)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """The parameters after the iteration are known."""
        assert isinstance(job, StepAhead)
        return self.copy.stage.stepped_ahead(job.iteration)

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """The squares can't be computed: so much will be found when the step is proposed."""
        return []

    def _state_loaded(self, now_s: float) -> list[Effect]:  # noqa: ARG002
        """The state that this node lacked stands on its device."""
        # A client loads parameters in each iteration.
        event = "parameters.loaded" if self._role is Role.CLIENT else "state.loaded"
        note = Note(event, (("iteration", self.copy.stage.iteration),))
        effects = [note, *self._take_up()]
        return effects + (self._step.state_loaded() if self._step is not None else [])

    def mend(self, now_s: float) -> list[Effect]:  # noqa: ARG002
        """Go on with the iteration in the context's view, which some members are no more in."""
        before = self._view
        self._view = self._context.view
        effects = self._abandon_step()
        if self.facts.aggregating:
            effects += self._context.compute.retract()
        effects += self.copy.mended()
        self._begin_step()
        if self._placement is None:
            return effects
        if self.worker is not None:
            self.worker.reopen()  # This node's servers may give it something at once.
        for part in self.parts:
            effects += part.mend(before)
        return effects

    def _end(self) -> list[Effect]:
        """The run is over: let go of what is held for an iteration that this node may still be
        in.
        """
        return self._abandon_step() + self.copy.end() + self._reset()

    # --- what happens between two openings --------------------------------------------------------

    def step(self, now_s: float, event: StrategyEvent) -> list[Effect]:
        """Take in a message, what became of one, or a deadline that has passed."""
        match event:
            case Received():
                return self._received(event)
            case SendFailed():
                return self._undelivered(event)
            case TensorSent():
                if event.to in self._context.view:
                    self.facts.spent.sent(now_s, event.duration_s)
                return []
            case DeadlinePassed():
                return self._overdue(now_s)

    def _received(self, received: Received) -> list[Effect]:
        message = received.message
        tensor = received.tensor
        match message:
            case StageActivation() | StageGradient() if tensor is not None:
                if self._placement is None:
                    return released(received)
                return self._arrived(received, self._context.tensors.add(tensor))
            case messages.BeginAggregation():
                return self._begin_aggregation(received)
            case Settled(num_microbatches=num, digest=digest):
                self._settled[received.sender] = Weight(num, digest)
                return self._contribute()
            case OfAveraging() if not isinstance(message, Holding):
                return self._of_step(received)
        return self._of_work(received)

    def _of_step(self, received: Received) -> list[Effect]:
        return self._step.received(received) if self._step is not None else released(received)

    def _begin_aggregation(self, received: Received) -> list[Effect]:
        effects = self._of_step(received)
        if self.frontal is not None and self.backward is not None:
            self.frontal.begun()
            effects += self.backward.begun()
        return effects + self._contribute()

    def _contribute(self) -> list[Effect]:
        """Contribute to the average, as soon as nothing is left that this node is to fold in."""
        begun = self.facts.begun
        if begun is None:
            return []
        assert self._step is not None
        if self.home is not None:
            return self._step.contribute(self.home.folded) if self.home.all_done else []
        assert self.worker is not None
        batch = Weight(begun.num_committed, begun.digest)
        if not self.worker.all_done or added(self._settled.values()) != batch:
            return []
        return self.worker.close() + self._step.contribute(self.worker.folded)

    def _arrived(self, received: Received, tensor: TensorId) -> list[Effect]:
        """Take in an activation or a gradient, with one reference to it."""
        message = received.message
        sender = received.sender
        assert isinstance(message, (StageActivation, StageGradient))
        microbatch = message.microbatch
        leg = message.leg
        forward = isinstance(message, StageActivation)
        if self.home is not None and leg is Leg.ONWARD:
            take = self.home.activation if forward else self.home.gradient
            return take(microbatch, tensor)
        if self.worker is not None and leg is Leg.TASK:
            if isinstance(message, StageGradient):
                return self.worker.gradient(message, tensor)
            return self.worker.activation(microbatch, tensor)
        if self.frontal is None or self.backward is None:
            return self._context.tensors.release(tensor)
        if leg is Leg.ONWARD:
            server = self.frontal.activation if forward else self.backward.gradient
            return server(microbatch, tensor)
        inspection = self.backward.inspection if forward else self.frontal.inspection
        return inspection.came(sender, microbatch, tensor)

    def _of_work(self, received: Received) -> list[Effect]:
        """Take in what servers, workers and data nodes say of microbatches."""
        message = received.message
        sender = received.sender
        frontal = self.frontal
        backward = self.backward
        worker = self.worker
        match message:
            case Unable() if self.home is not None:
                return self.home.unable(message.microbatch, message.reason)
            case Fetch() if self.home is not None:
                return self.home.fetched(message.microbatch)
            case Taken() if worker is not None:
                passed = frontal.taken(message) if frontal is not None else []
                return passed + worker.taken(message)
            case Revoke() if worker is not None:
                return worker.revoke(sender, message)
        if frontal is None or backward is None:
            return released(received)
        return _heard_by_server(frontal, backward, received, self._context)

    def _undelivered(self, event: SendFailed) -> list[Effect]:
        """A message or tensor did not arrive."""
        message = event.message
        match message:
            case StageActivation(leg=Leg.TASK) if self.frontal is not None:
                return self.frontal.undelivered(event.to, message.microbatch)
            case StageGradient(leg=Leg.TASK) if self.backward is not None:
                return self.backward.undelivered(event.to, message.microbatch)
        return []


def _heard_by_server(
    frontal: FrontalServer, backward: BackwardServer, received: Received, context: Context
) -> list[Effect]:
    """Take in what only servers hear."""
    message = received.message
    sender = received.sender
    match message:
        case Offer():
            return frontal.offered(sender, message) + backward.offered(sender, message)
        case Given(microbatch=microbatch, worker=given_to):
            return backward.given(microbatch, given_to)
        case Fetch(microbatch=microbatch):
            if context.view.by_id[sender].stage_index != context.member.stage_index:
                return backward.fetched(microbatch)
            return frontal.fetched(sender, microbatch)
        case Folded(microbatch=microbatch):
            return backward.folded(sender, microbatch)
        case Missing(microbatch=microbatch):
            return frontal.missing(microbatch)
        case Unable(attempt=0):
            return frontal.again(message.microbatch, sender)
        case Unable():
            return backward.unable(sender, message)
        case Holding():
            return backward.stood(sender, message)
    return released(received)
