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
from decod.protocol.core.effects import CountWork, Stop, StopReason
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
    note_commit,
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
        self._out = context.out
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

    def received(self, received: Received) -> None:
        """Take in which microbatches count, once; pass the word on down the tree."""
        message = received.message
        context = self._context
        self._out.free(received.tensor)
        if isinstance(message, BeginAggregation) and self.begun is None:
            self.begun = message
            fanout = context.run.protocol.tree_fanout
            place = tree_place(context.view, context.node_id, fanout=fanout)
            self._out.send_all(place.children, message)

    def contribute(self, folded: Sequence[MicrobatchId]) -> None:
        """Send this node's sum to the servers, once: it is whole.

        Args:
            folded: What is in it.
        """
        begun = self.begun
        if begun is None or self.averager.state is not AveragingState.WAITING:
            return
        total = Weight(begun.num_committed, begun.digest)
        self._own = weight_of(folded)
        self.averager.begin(self._own, total)

    def contributions(self) -> None:
        """Note nothing: a client reduces no part."""

    def state_loaded(self) -> None:
        """Nothing has waited for the parameters."""

    def abandon(self) -> None:
        """Release all that is held for the average."""
        self.averager.abandon()

    # --- the average ------------------------------------------------------------------------------

    def averaged(self) -> None:
        """A client reads no average."""

    def lacking(self, found: Weight) -> None:
        """A client adds nothing up."""

    def averaging_failed(self, reason: str) -> None:
        """The device has refused its own sum: others do this node's work again."""
        self._out.send(self._context.view.leader, Leave(reason[:200], at_once=True))
        detail = f"its device has lost its gradients: {reason}"
        self._out.put(Stop(StopReason.REMOVED, detail))


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
        self._out = context.out
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

    def _overdue(self, now_s: float) -> None:
        for part in (self.frontal, self.backward, self.copy):
            if part is not None:
                part.overdue(now_s)

    # --- iterations -------------------------------------------------------------------------------

    def close(self, decision: messages.Open) -> bool:
        """End the context's iteration as a decision says: keep its step, or undo it."""
        opening = decision.opening
        facts = self.facts
        committed = facts.voted_for(opening.committed)
        begun = facts.begun
        self.copy.told(decision)
        step = self._step
        account = step.account if step is not None else ()
        if account and step is not None:
            step.contributions()
        note_commit(decision, begun, account, self._context, voted=committed)
        self._abandon_step()
        compute = self._context.compute
        if committed and begun is not None:
            facts.num_committed += len(self._folded)
            self._out.put(self._count_work(opening.committed.number))
            facts.positions.committed(begun)
            if self.home is not None:
                marked = opening.mark_of(opening.committed.number) is not None
                self.home.committed(marked=marked)
        stepped = committed and self._role is not Role.CLIENT
        if stepped:
            self.copy.stage.parameter_hash = facts.proposal
            compute.submit(CommitStep(opening.committed.number))
        elif step is not None:
            compute.reset()
        for part in self.parts:
            part.reset()
        if decision.ended:
            self.copy.end()
        return stepped

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

    def open(self, now_s: float, opening: Opening, *, renewed: bool) -> None:  # noqa: ARG002
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
        self.copy.opened(opening)
        self._begin_step()
        self._take_up()

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

    def _abandon_step(self) -> None:
        """Release all that is held for the step."""
        if self._step is not None:
            self._step.abandon()

    def _take_up(self) -> None:
        """Work on the iteration, if this node holds the parameters that it needs."""
        if not self.copy.loaded or self.facts.paused or self._offered or self._placement is None:
            return
        self._offered = True
        # Before all passes: others wait for what comes of it.
        self._step_ahead()
        if self.home is not None:
            self.home.open(self._placement)
        else:
            assert self.worker is not None
            self.worker.offer()

    def _step_ahead(self) -> None:
        """Compute what is known of the parameters after the iteration, if steps are late."""
        context = self._context
        if context.run.delay and self._role is not Role.CLIENT:
            context.compute.submit(StepAhead(context.iteration.number), self)

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """The parameters after the iteration are known."""
        assert isinstance(job, StepAhead)
        self.copy.stage.stepped_ahead(job.iteration)

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:
        """The squares can't be computed: so much will be found when the step is proposed."""

    def _state_loaded(self, now_s: float) -> None:  # noqa: ARG002
        """The state that this node lacked stands on its device."""
        # A client loads parameters in each iteration.
        event = "parameters.loaded" if self._role is Role.CLIENT else "state.loaded"
        self._out.note(event, iteration=self.copy.stage.iteration)
        self._take_up()
        if self._step is not None:
            self._step.state_loaded()

    def mend(self, now_s: float) -> None:  # noqa: ARG002
        """Go on with the iteration in the context's view, which some members are no more in."""
        before = self._view
        self._view = self._context.view
        self._abandon_step()
        if self.facts.aggregating:
            self._context.compute.retract()
        self.copy.mended()
        self._begin_step()
        if self._placement is None:
            return
        if self.worker is not None:
            self.worker.reopen()  # This node's servers may give it something at once.
        for part in self.parts:
            part.mend(before)

    # --- what happens between two openings --------------------------------------------------------

    def step(self, now_s: float, event: StrategyEvent) -> None:
        """Take in a message, what became of one, or a deadline that has passed."""
        match event:
            case Received():
                self._received(event)
            case SendFailed():
                self._undelivered(event)
            case TensorSent():
                if event.to in self._context.view:
                    self.facts.spent.sent(now_s, event.duration_s)
            case DeadlinePassed():
                self._overdue(now_s)

    def _received(self, received: Received) -> None:
        message = received.message
        tensor = received.tensor
        match message:
            case StageActivation() | StageGradient() if tensor is not None:
                if self._placement is None:
                    self._out.free(received.tensor)
                else:
                    self._arrived(received, self._context.tensors.add(tensor))
            case messages.BeginAggregation():
                self._begin_aggregation(received)
            case Settled(num_microbatches=num, digest=digest):
                self._settled[received.sender] = Weight(num, digest)
                self._contribute()
            case OfAveraging() if not isinstance(message, Holding):
                self._of_step(received)
            case _:
                self._of_work(received)

    def _of_step(self, received: Received) -> None:
        if self._step is not None:
            self._step.received(received)
        else:
            self._out.free(received.tensor)

    def _begin_aggregation(self, received: Received) -> None:
        self._of_step(received)
        if self.frontal is not None and self.backward is not None:
            self.frontal.begun()
            self.backward.begun()
        self._contribute()

    def _contribute(self) -> None:
        """Contribute to the average, as soon as nothing is left that this node is to fold in."""
        begun = self.facts.begun
        if begun is None:
            return
        assert self._step is not None
        if self.home is not None:
            if self.home.all_done:
                self._step.contribute(self.home.folded)
            return
        assert self.worker is not None
        batch = Weight(begun.num_committed, begun.digest)
        if self.worker.all_done and added(self._settled.values()) == batch:
            self.worker.close()
            self._step.contribute(self.worker.folded)

    def _arrived(self, received: Received, tensor: TensorId) -> None:
        """Take in an activation or a gradient, with one reference to it."""
        message = received.message
        sender = received.sender
        assert isinstance(message, (StageActivation, StageGradient))
        microbatch = message.microbatch
        leg = message.leg
        forward = isinstance(message, StageActivation)
        if self.home is not None and leg is Leg.ONWARD:
            take = self.home.activation if forward else self.home.gradient
            take(microbatch, tensor)
        elif self.worker is not None and leg is Leg.TASK:
            context = self._context
            elsewhere = context.view.by_id[sender].stage_index != context.member.stage_index
            if elsewhere or message.path_version < context.opening.view.version:
                context.tensors.release(tensor)  # It is for an earlier life of this node.
            elif isinstance(message, StageGradient):
                self.worker.gradient(message, tensor)
            else:
                self.worker.activation(microbatch, tensor)
        elif self.frontal is None or self.backward is None:
            self._context.tensors.release(tensor)
        elif leg is Leg.ONWARD:
            server = self.frontal.activation if forward else self.backward.gradient
            server(microbatch, tensor)
        else:
            inspection = self.backward.inspection if forward else self.frontal.inspection
            inspection.came(sender, microbatch, tensor)

    def _of_work(self, received: Received) -> None:
        """Take in what servers, workers and data nodes say of microbatches."""
        message = received.message
        sender = received.sender
        frontal = self.frontal
        backward = self.backward
        worker = self.worker
        match message:
            case Unable() if self.home is not None:
                self.home.unable(message.microbatch, message.reason)
            case Fetch() if self.home is not None:
                self.home.fetched(message.microbatch)
            case Taken() if worker is not None:
                if frontal is not None:
                    frontal.taken(message)
                worker.taken(message)
            case Revoke() if worker is not None:
                worker.revoke(sender, message)
            case _ if frontal is not None and backward is not None:
                _heard_by_server(frontal, backward, received, self._context)
            case _:
                self._out.free(received.tensor)

    def _undelivered(self, event: SendFailed) -> None:
        """A message or tensor did not arrive."""
        match message := event.message:
            case StageActivation(leg=Leg.TASK) if self.frontal is not None:
                self.frontal.undelivered(event.to, message.microbatch)
            case StageGradient(leg=Leg.TASK) if self.backward is not None:
                self.backward.undelivered(event.to, message.microbatch)


def _heard_by_server(
    frontal: FrontalServer, backward: BackwardServer, received: Received, context: Context
) -> None:
    """Take in what only servers hear."""
    message = received.message
    sender = received.sender
    match message:
        case Offer():
            frontal.offered(sender, message)
            backward.offered(sender, message)
        case Given(microbatch=microbatch, worker=given_to):
            backward.given(microbatch, given_to)
        case Fetch(microbatch=microbatch):
            if context.view.by_id[sender].stage_index != context.member.stage_index:
                backward.fetched(microbatch)
            else:
                frontal.fetched(sender, microbatch)
        case Folded(microbatch=microbatch):
            backward.folded(sender, microbatch)
        case Missing(microbatch=microbatch):
            frontal.missing(microbatch)
        case Unable(attempt=0):
            frontal.again(message.microbatch, sender)
        case Unable():
            backward.unable(sender, message)
        case Holding():
            backward.stood(sender, message)
        case _:
            context.out.free(received.tensor)
