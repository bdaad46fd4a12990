"""One peer of a collaborative run: the entry point to its core.

It stands between the training loop of its host, its averaging process and the other peers. What it
says to itself as coordinator goes the same way as what it says to others.
"""

from collections import deque
from dataclasses import dataclass

from decod.ids import NodeId
from decod.protocol.averaging.averager import TensorPort
from decod.protocol.collaboration.company import Company, Following
from decod.protocol.collaboration.coordinator import CoordinatorState
from decod.protocol.collaboration.loading import Loading, Past, after
from decod.protocol.collaboration.loop import (
    AnswerLoop,
    CopyRequested,
    CopyState,
    DeliverAverage,
    LeaveRequested,
    LoadRefused,
    LoopApplied,
    LoopContributed,
    LoopFailed,
    LoopLoaded,
    LoopStepped,
    PeerEffect,
    PeerEvent,
    PeerFound,
    PeerSink,
    RefuseCopy,
    RoundConfig,
    StateCame,
    StepAlone,
)
from decod.protocol.collaboration.own_work import OwnWork
from decod.protocol.collaboration.rounds import Rounds
from decod.protocol.core.compute_queue import ComputeQueue, TensorStore
from decod.protocol.core.effects import Send, Stop, StopReason
from decod.protocol.core.events import (
    DeadlinePassed,
    Fault,
    JobFailed,
    JobFinished,
    Received,
    SendFailed,
    TensorSent,
    Woke,
    earliest,
)
from decod.protocol.core.messages import Message, ReducedPart, ReducePart
from decod.protocol.core.messages.round_messages import (
    BeginRound,
    CloseRound,
    CommitRound,
    Farewell,
    Greeting,
    Height,
    PeerEntry,
    Progress,
    Roll,
    RoundClosed,
    RoundReady,
    Standing,
)

_FRESH_SHARE = 0.35
"""A peer waits for the average if the batch is full before this share of its next step is over."""

_ENDED = "the training loop has ended"
_NO_STATE = "nobody who has the run's state answers any more, and this host has not loaded it"


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What a peer knows of its run, for people."""

    round: int
    """The last one that is committed here."""
    level: bool
    """This peer has the run's state."""
    coordinator: NodeId
    num_peers: int
    num_samples: int
    """Outstanding at all peers."""
    samples_per_s: float
    """Of all peers."""
    averaging: bool


class PeerMachine:
    """One peer.

    Args:
        node_id: This peer.
        address: At which others dial it.
        height: The state of its training loop.
        config: Of the run, and of this peer.
        has_state: Whether the run may go on from that state. Not from a newcomer's own.
    """

    def __init__(
        self,
        node_id: NodeId,
        address: str,
        height: Height,
        config: RoundConfig,
        *,
        has_state: bool = True,
        name: str = "",
    ) -> None:
        self.node_id = node_id
        self._config = config
        self._out = PeerSink()
        self.tensors = TensorStore(self._out)
        self.compute = ComputeQueue(self.tensors, self._out)
        self.past = Past(height, has_state=has_state)
        self._has_begun = has_state
        """Whether the training loop has begun. A newcomer's waits for the run's state."""
        own = PeerEntry(node_id, address, level=True, name=name)
        self.company = Company(own, self.past, config, self._out)
        self.own = OwnWork(node_id, config, self.tensors, self._out)
        self.loading = Loading(config, self.tensors, self._out)
        port = TensorPort(
            self.tensors, self.compute, self._out, config.num_phases, config.compresses
        )
        self.rounds = Rounds(node_id, self.past, self.own, self.loading, port, self._out)
        self._applied = height.round
        """The last round whose average the loop has applied."""
        self._loopback: deque[Message] = deque()
        self._report_s = self._told_s = 0.0
        """When the next report to the coordinator is due, and when the last one was sent."""
        self._copies: deque[CopyRequested] = deque()
        self._waiting_s: float | None = None
        """Until when the loop waits for a batch that is nearly full. None: it does not."""
        self.stopped = False

    @property
    def compresses_by_factors(self) -> bool:
        """Whether averages travel as factors, whose start all peers have in common."""
        return self._config.num_phases > 1

    # --- what others see ----------------------------------------------------------------------

    def facts(self) -> PeerFacts:
        """Return what this peer knows of its run."""
        return _facts_of(self.past, self.company)

    @property
    def deadline_s(self) -> float | None:
        """When the machine wants to be woken."""
        if self.stopped:
            return None
        if self.company.coordinating is not None:
            coordinating_s = self.company.coordinating.deadline_s
            return earliest(coordinating_s, self._waiting_s, self.company.seeking_until_s)
        return earliest(
            self.company.silent_s, self._next_report_s, self.loading.next_s, self._waiting_s
        )

    @property
    def _next_report_s(self) -> float:
        if self.rounds.is_busy:
            return min(self._report_s, self._told_s + self._config.heartbeat_busy_s)
        return self._report_s

    # --- events -------------------------------------------------------------------------------

    def start(self, now_s: float) -> list[PeerEffect]:
        """Begin: nobody else is known yet."""
        self.company.coordinate(now_s, term=1)
        return self._finish(now_s)

    def step(self, now_s: float, event: PeerEvent) -> list[PeerEffect]:
        """Take an event; return what is to be done, in order."""
        if self.stopped:
            return []
        self._handle(now_s, event)
        return self._finish(now_s)

    def _finish(self, now_s: float) -> list[PeerEffect]:
        """Deliver what this peer says to itself, and what follows from the event."""
        done: list[PeerEffect] = []
        said = self._out.taken()
        while True:
            for effect in said:
                if isinstance(effect, Send) and effect.to == self.node_id:
                    self._loopback.append(effect.message)
                else:
                    done.append(effect)
            if self._loopback:
                self._received(now_s, self.node_id, self._loopback.popleft())
                said = self._out.taken()
            else:
                self.rounds.look()
                self.company.come_level()
                if self.past.has_state and not self._has_begun:
                    self._has_begun = True
                    self._out.put(AnswerLoop(waits=False))
                if self.company.take_moved():
                    self._follow_up(now_s)
                said = self._out.taken()
                if not said:
                    break
        has_state = self.past.has_state  # Without it, steps of the loop would count nowhere.
        done = [effect for effect in done if has_state or effect != AnswerLoop(waits=False)]
        for effect in done:
            if effect == AnswerLoop(waits=False) or isinstance(effect, DeliverAverage | StepAlone):
                self.own.goes_on(now_s)
        self._answer_copies()
        self.company.use_addresses()
        return done + self._out.taken()

    def _follow_up(self, now_s: float) -> None:
        """Another coordinator counts from now on."""
        self.rounds.coordinator = self.company.coordinator
        self.rounds.resume()
        self._report(now_s, news=False)
        self._load_if_behind()

    def _handle(self, now_s: float, event: PeerEvent) -> None:  # noqa: C901
        match event:
            case Received(message=ReducePart() | ReducedPart()):
                self.rounds.received(event)
            case Received(sender=sender, message=message):
                self._received(now_s, sender, message)
            case DeadlinePassed():
                self._overdue(now_s)
            case Woke():
                # A coordinator that has removed this peer says so in its answer.
                self._report(now_s, news=False)
            case JobFinished():
                self.compute.finished(now_s, event)
            case JobFailed():
                if not self.compute.failed(now_s, event):
                    self._stop(StopReason.CRIPPLED, event.reason)
            case TensorSent(tensor=tensor):
                self.tensors.release(tensor)
            case SendFailed():
                self._send_failed(now_s, event)
            case PeerFound(node, address):
                self.company.found(node, address)
            case LoopStepped():
                self._stepped(now_s, event)
            case LoopContributed():
                self.own.contributed(event)
                self.rounds.contributed()
            case LoopApplied(number):
                self._loop_applied(now_s, number)
            case LoopLoaded(height):
                self._loaded(now_s, height)
            case LoopFailed(reason):
                self._stop(StopReason.FAILED, reason)
            case CopyRequested():
                self._copies.append(event)
            case StateCame(height, failure) if failure:
                self.loading.failed(now_s, height, failure)
                self._go_on_unloaded()
            case LoadRefused(height, reason):
                self.loading.refused(now_s, height, reason)
                self._go_on_unloaded()
                if self.loading.is_hopeless:
                    self._stop(StopReason.FAILED, reason)
            case LeaveRequested():
                self.company.leave()
                self._stop(StopReason.DRAINED, _ENDED)

    def _received(  # noqa: C901 - one line a message.
        self, now_s: float, sender: NodeId, message: Message
    ) -> None:
        company = self.company
        coordinating = company.coordinating
        following = company.following
        from_above = sender == company.coordinator
        if from_above and following is not None:
            following.heard_s = now_s
        match message:
            case Greeting():
                company.greeted(now_s, sender, message)
            case Roll() if sender != self.node_id:
                company.took_roll(now_s, sender, message)
                self._load_if_behind()
            case Progress():
                self._progressed(now_s, sender, message)
            case Farewell():
                company.parted(now_s, sender, message)
            case Standing() if from_above and following is not None:
                self._standing(now_s, following, message)
            case CloseRound() if from_above:
                self.rounds.close(message)
            case BeginRound() if from_above:
                self.rounds.begin(message)
            case CommitRound() if from_above:
                self._committed(message)
            case RoundClosed() if coordinating is not None:
                coordinating.closed(now_s, sender, message)
            case RoundReady() if coordinating is not None:
                coordinating.ready(now_s, sender, message)

    # --- the loop -----------------------------------------------------------------------------

    def _stepped(self, now_s: float, event: LoopStepped) -> None:
        """The loop has ended a step, and asks whether to go on."""
        self.own.stepped(now_s, event)
        self._waiting_s = None
        self._report(now_s, news=True)
        self._step_alone_if_full()
        self._out.put(AnswerLoop(self._is_worth_waiting(now_s)))

    def _is_worth_waiting(self, now_s: float) -> bool:
        """Whether the next step would begin too late for the average that is coming."""
        own = self.own
        config = self._config
        if self.loading.under_way or not self.past.has_state:
            return True  # What it does meanwhile would count nowhere.
        if config.overlap or own.num_waiting or own.alone:
            return False
        if self.rounds.is_busy or (own.promised and not self.rounds.is_in_doubt):
            return True
        company = len(self.company.peers) > 1
        if config.share and company:
            return own.num_outstanding >= config.share
        closing_s = self.company.closing_in_s(now_s)
        if closing_s is None or not company or closing_s >= _FRESH_SHARE * own.step_s:
            return False
        self._waiting_s = now_s + max(own.step_s, config.heartbeat_min_s)
        return True

    def _step_alone_if_full(self) -> None:
        """Have the loop step by itself if nobody else is there, and the batch is full."""
        coordinating = self.company.coordinating
        own = self.own
        if coordinating is None or not coordinating.is_alone or own.promised or own.num_waiting:
            return
        if not self.past.has_state or self.rounds.is_busy:
            return
        if own.num_outstanding >= self._config.target_batch_size:
            own.step_alone(self.past.height.round + 1)

    def _loop_applied(self, now_s: float, number: int) -> None:
        alone = self.own.alone == number
        num_samples = self.own.num_outstanding
        self.own.applied(number)
        self._applied = max(self._applied, number)
        if not alone:
            return
        self.past.advance(after(self.past.height, f"{self.node_id} alone"), num_samples)
        if self.company.coordinating is not None:
            self.company.coordinating.stepped_alone(now_s)
        else:  # It has met others in the meantime. They go on without this step.
            self.company.strayed(num_samples)
        self._report(now_s, news=True)

    def _report(self, now_s: float, *, news: bool) -> None:
        """Tell the coordinator how far this peer is, if that is due or matters now."""
        config = self._config
        own = self.own
        if (
            self.company.following is not None
            and news
            and now_s - self._told_s < config.heartbeat_min_s
        ):
            closing_s = self.company.closing_in_s(now_s)
            if closing_s is not None and closing_s > 2 * own.step_s:
                return
        self._told_s = now_s
        busy = self.rounds.is_busy
        self._report_s = now_s + (config.heartbeat_busy_s if busy else config.heartbeat_max_s)
        term = self.company.term + self.company.is_courting
        progress = Progress(
            term,
            self.company.version,
            self.past.height,
            own.num_outstanding,
            own.samples_per_s,
            own.step_s,
            self.rounds.awaited,
        )
        self._out.send(self.company.coordinator, progress)

    # --- states -------------------------------------------------------------------------------

    def _load_if_behind(self) -> None:
        """Ask for the run's state if this peer has another one."""
        self.company.come_level()
        following = self.company.following
        if following is None or following.standing is None or self.company.level:
            return
        if self.own.is_stuck or self.rounds.leads_to(following.height):
            return
        averaging = following.standing.averaging
        self.loading.begin(following.height, self.company.donors, averaging=averaging)

    def _go_on_unloaded(self) -> None:
        """The loop keeps its state. Averages may have come that lead on from it."""
        if not self.own.alone:
            for each in self.loading.leading_on(self.past.height):
                self.rounds.enter(each)
        self._out.put(AnswerLoop(waits=False))

    def _loaded(self, now_s: float, height: Height) -> None:
        """The loop has a state: it applies what came meanwhile."""
        self.own.restart()
        self.past.restart(height)
        self._applied = height.round
        self.rounds.forget_until(height.round)
        later = self.loading.loaded(height)
        for each in later:
            self.rounds.enter(each)
        self._out.note("peer.loaded", round=height.round, behind=len(later))
        self._out.put(AnswerLoop(waits=False))
        self._report(now_s, news=False)
        self._load_if_behind()

    def _answer_copies(self) -> None:
        """Give copies of the state to those who ask for it, once the loop has it."""
        applied = self._applied
        for asked in [*self._copies]:
            number = asked.height.round
            if number < applied:
                self._refuse(asked, f"it is at round {applied}")
            elif number > self.past.height.round:
                self._refuse(asked, "it is not that far")
            elif asked.height != self.past.at(number):
                self._refuse(asked, f"it has another state of round {number}")
            elif number == applied:
                self._copies.remove(asked)
                self._out.put(CopyState(asked.request))
            elif self.own.num_waiting > 1:
                self._refuse(asked, "its loop stands still")

    def _refuse(self, asked: CopyRequested, reason: str) -> None:
        self._copies.remove(asked)
        self._out.put(RefuseCopy(asked.request, reason))

    # --- coordinators -------------------------------------------------------------------------

    def _progressed(self, now_s: float, sender: NodeId, message: Progress) -> None:
        coordinating = self.company.coordinating
        if coordinating is None:
            self.company.succeed_if_asked(now_s, sender, message)
        elif not self.past.has_state and sender != self.node_id:
            self._out.send(sender, Farewell())  # This peer has started anew.
        elif sender not in coordinating:
            self._out.send(sender, coordinating.roll())  # It does not know that it was removed.
        else:
            part = self.rounds.ready_for(message.height)
            if part is not None and message.height.round == self.past.height.round + 1:
                # The last coordinator has committed this, and was lost before it could tell all.
                commit = CommitRound(part.begun.averaging, part.average_hash)
                self._out.send_all(coordinating.peers, commit)
            coordinating.rests = bool(self.own.alone) or self.own.is_laden
            coordinating.progressed(now_s, sender, message)

    def _committed(self, message: CommitRound) -> None:
        before = self.past.height
        self.rounds.commit(message)
        self.rounds.look()
        if self.company.coordinating is not None and self.past.height != before:
            self.company.coordinating.advanced(before)
            if 2 * self.own.num_waiting >= self._config.backlog_max:
                self.company.hand_over()

    def _standing(self, now_s: float, following: Following, message: Standing) -> None:
        if message.term < following.term:
            return
        following.said(now_s, message)
        self.rounds.commit_reached(message.height)
        if not message.averaging:
            self.rounds.abandoned()
        self._load_if_behind()

    def _stop(self, reason: StopReason, detail: str) -> None:
        self.stopped = True
        self._out.put(Stop(reason, detail))

    # --- time ---------------------------------------------------------------------------------

    def _overdue(self, now_s: float) -> None:
        seeking_s = self.company.seeking_until_s
        if seeking_s is not None and seeking_s <= now_s:
            self._stop(StopReason.STATE_LOST, _NO_STATE)
            return
        if self._waiting_s is not None and self._waiting_s <= now_s:
            self._waiting_s = None
            if not self.own.promised and not self.rounds.is_busy:
                self._out.put(AnswerLoop(waits=False))
        silent_s = self.company.silent_s
        if self.company.coordinating is not None:
            self.company.coordinating.overdue(now_s)
            self._step_alone_if_full()
        elif silent_s is not None and silent_s <= now_s:
            self.company.succeed(now_s)
        else:
            if self._next_report_s <= now_s:
                self._report(now_s, news=False)
            self.loading.look(now_s)
            self._load_if_behind()

    def _send_failed(self, now_s: float, event: SendFailed) -> None:
        """Something has not reached a peer."""
        node = event.to
        message = event.message
        if event.fault is not Fault.NONE and isinstance(message, ReducePart | ReducedPart):
            self.rounds.send_again(node, message, event.tensor)
        elif event.tensor is not None:
            self.tensors.release(event.tensor)
        if event.fault is Fault.NONE:
            return
        self.company.unreached(now_s, node)
        if isinstance(message, RoundReady) and node == self.company.coordinator:
            self.rounds.tell_again(message.averaging)
        if isinstance(message, BeginRound) and self.company.coordinating is not None:
            self.company.coordinating.say_again(node, message)


def _facts_of(past: Past, company: Company) -> PeerFacts:
    coordinating = company.coordinating
    following = company.following
    standing = following.standing if following is not None else None
    num = 0
    rate = 0.0
    averaging = False
    if coordinating is not None:
        num = coordinating.num_samples
        rate = coordinating.samples_per_s
        averaging = coordinating.state is CoordinatorState.AVERAGING
    elif standing is not None:
        num = standing.num_samples
        rate = standing.samples_per_s
        averaging = standing.averaging
    return PeerFacts(
        round=past.height.round,
        level=company.level,
        coordinator=company.coordinator,
        num_peers=len(company.peers),
        num_samples=num,
        samples_per_s=rate,
        averaging=averaging,
    )
