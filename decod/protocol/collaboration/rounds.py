"""One peer's part in the rounds of a run, one after another, and in each attempt at an average."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from decod.ids import AveragingId, NodeId, TensorId
from decod.protocol.averaging.averager import (
    Averager,
    Averaging,
    AveragingState,
    TensorPort,
    Weight,
    added,
)
from decod.protocol.collaboration.groups import Groups
from decod.protocol.collaboration.loading import LaterAverage, Loading, Past, after
from decod.protocol.collaboration.loop import AnswerLoop, DeliverAverage, PeerSink
from decod.protocol.collaboration.own_work import OwnWork
from decod.protocol.core.effects import SendTensor
from decod.protocol.core.events import JobFinished, Received
from decod.protocol.core.jobs import AverageKind, Decode, Job, Proposed, Use
from decod.protocol.core.messages import Message, ReducedPart, ReducePart
from decod.protocol.core.messages.round_messages import (
    BeginRound,
    CloseRound,
    CommitRound,
    Height,
    RoundClosed,
    RoundReady,
)

ROWS = 1
COLUMNS = 2
"""Versions of the view in the names of a round's averages."""


class RoundState(Enum):
    ROW = "row"
    COLUMN = "column"
    DECODING = "decoding"
    READY = "ready"
    FAILED = "failed"


class RoundPart:
    """One peer's part in an attempt.

        ROW -> (COLUMN ->) DECODING -> READY -> (committed, or abandoned)
         `------- or FAILED

    If there are many peers, they average in rows first, and then in columns: see `groups`. Whoever
    has all means has the device decode the average, and tells the coordinator its hash. The average
    counts once the coordinator has heard the same hash from all who contribute.

    Args:
        node_id: This peer.
        begun: The coordinator's message.
        port: Tensors and device, and the contribution that this peer holds.
        own: What is in the contribution.
    """

    def __init__(self, node_id: NodeId, begun: BeginRound, port: TensorPort, own: Weight) -> None:
        self.begun = begun
        self._node_id = node_id
        self._port = port
        self._out = port.out
        self._own = own
        self.state = RoundState.ROW
        self.failure = ""
        self.unreachable: NodeId | None = None
        """Who has kept the average from coming, as it seems here."""
        self.average_hash = ""
        self.average: TensorId | None = None
        """Once it is ready."""
        self.is_orphaned = False
        """The coordinator was lost: it may have said that the average counts, or not."""
        self.committed_hash = ""
        """Of the average that counts, once the coordinator says so. It may not be ready here."""
        self._groups = groups = Groups.of(begun.roster, begun.num_rows, begun.listeners)
        self._row = groups.row_of(node_id)
        self.contributes = self._row is not None
        self._averager: Averager | None = None
        self._early: deque[Received] = deque()
        """What has come of the column while this peer's row averages."""
        self._row_sum: TensorId | None = None

    @property
    def round(self) -> int:
        return self.begun.averaging.iteration.number

    @property
    def num_own(self) -> int:
        """This peer's samples in the average."""
        return self._own.num

    @property
    def committed(self) -> bool:
        """Whether the coordinator has said that it counts."""
        return bool(self.committed_hash)

    @property
    def num_in_row(self) -> int:
        """Peers in this peer's row; 1 if it only listens."""
        return 1 if self._row is None else len(self._groups.rows[self._row])

    @property
    def total(self) -> Weight:
        """What all contributions are together."""
        return added([self._weight_of(row) for row in range(len(self._groups.rows))])

    def _weight_of(self, row: int) -> Weight:
        """Return what the contributions of a row are together."""
        begun = self.begun
        members = self._groups.rows[row]
        given = zip(begun.roster, begun.weights, begun.digests, strict=True)
        return added([Weight(num, digest) for node, num, digest in given if node in members])

    @property
    def awaited(self) -> set[NodeId]:
        """From whom something is to come."""
        running = self.state in (RoundState.ROW, RoundState.COLUMN)
        return self._averager.awaited if running and self._averager is not None else set()

    @property
    def _has_columns(self) -> bool:
        return len(self._groups.rows) > 1

    @property
    def num_early(self) -> int:
        """Tensors that have come too early. The driver still owns them."""
        return sum(event.tensor is not None for event in self._early)

    def begin(self) -> None:
        """Contribute, or wait for the average only."""
        if self._row is None:
            self._begin_column()
            return
        row = self._groups.rows[self._row]
        averaging = Averaging(self._id(ROWS), row)
        self._averager = averager = Averager(self._node_id, averaging, self._port, self)
        if not self._has_columns:
            averager.tell(self._groups.listeners)
        averager.begin(self._own, self._weight_of(self._row))

    def _begin_column(self) -> None:
        """Average what the rows have come to, or wait for that."""
        groups = self._groups
        self.state = RoundState.COLUMN if self._has_columns else RoundState.ROW
        if not self._has_columns:
            averaging = Averaging(self._id(ROWS), groups.rows[0])
            port = self._port
        else:
            index = groups.column_of(self._node_id)
            averaging = Averaging(self._id(COLUMNS), groups.column(index))
            port = replace(
                self._port,
                num_phases=1,
                compresses=False,
                contribution=self._row_sum,
                kind=AverageKind.BETWEEN,
            )
        self._averager = averager = Averager(self._node_id, averaging, port, self)
        if self._node_id not in averaging.roster:
            averager.listen()
        else:
            assert self._row is not None
            averager.tell(groups.audience(groups.column_of(self._node_id)))
            averager.begin(self._weight_of(self._row), self.total)
        while self._early:
            self.received(self._early.popleft())

    def _id(self, level: int) -> AveragingId:
        return AveragingId(self.begun.averaging.iteration, level)

    def received(self, event: Received) -> None:
        """Take a contribution, or a mean."""
        message = event.message
        averager = self._averager
        assert isinstance(message, ReducePart | ReducedPart)
        is_column = message.averaging.view_version == COLUMNS
        if is_column and self._has_columns and self.state is RoundState.ROW:
            self._early.append(event)
            return
        if averager is None or is_column != (self.state is RoundState.COLUMN):
            self._free(event)
            return
        match message:
            case ReducePart():
                averager.part(event.sender, message, event.tensor)
            case ReducedPart() if event.tensor is not None:
                averager.average(event.sender, message, event.tensor)

    def _free(self, event: Received) -> None:
        self._out.free(event.tensor)

    def give_up(self) -> None:
        """Nobody needs this attempt any more: release what it holds."""
        averager = self._averager
        tensors = self._port.tensors
        if averager is not None and averager.state is not AveragingState.AVERAGED:
            averager.abandon()
            averager.close()
        while self._early:
            self._free(self._early.popleft())
        held = [each for each in (self.average, self._row_sum) if each is not None]
        tensors.release(*held)
        self.average = self._row_sum = None
        self.state = RoundState.FAILED

    def fail_for(self, node: NodeId) -> None:
        """A peer does not take what it needs: the others have to average without it."""
        if node not in self.begun.roster:
            return
        self.unreachable = node
        self.failure = "a peer can't be reached"
        # Who has the average keeps it: it may count nevertheless.
        if self.state is not RoundState.READY:
            self.averaging_failed(self.failure)

    def take(self) -> TensorId:
        """Return the average. Its reference is the caller's."""
        average = self.average
        self.average = None
        assert average is not None
        return average

    # --- the averager's user ------------------------------------------------------------------

    def averaged(self) -> None:
        """All means are here: decode them."""
        averager = self._averager
        row = self._row
        assert averager is not None
        if self.state is RoundState.ROW and self._has_columns:
            assert row is not None
            job = Decode(self.round, scale=self._weight_of(row).num)
        else:
            job = Decode(self.round, between=self.state is RoundState.COLUMN)
            self.state = RoundState.DECODING
        self._port.compute.submit(job, self, averager.take())

    def lacking(self, found: Weight) -> None:
        """The contributions that came are others than the coordinator has counted."""
        self.averaging_failed(f"{found.num} samples came, and others were promised")

    def averaging_failed(self, reason: str) -> None:
        """The device has refused something."""
        self.failure = reason
        self.give_up()

    # --- jobs ---------------------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> None:  # noqa: ARG002
        """The average is decoded: of the row, or of all."""
        assert isinstance(event.result, Proposed), event
        (output,) = event.outputs
        if self.state is RoundState.ROW:
            self._row_sum = output.id
            self._begin_column()
            return
        if self.state is not RoundState.DECODING:
            self._port.tensors.release(output.id)
            return
        self.average = output.id
        self.average_hash = event.result.parameter_hash
        if self.committed_hash not in ("", self.average_hash):
            self.averaging_failed("the average differs from the one that counts")
            return
        self.state = RoundState.READY
        if self._row_sum is not None:
            self._port.tensors.release(self._row_sum)
            self._row_sum = None

    def job_failed(self, now_s: float, job: Job, reason: str) -> None:  # noqa: ARG002
        """The means don't make an average."""
        self.averaging_failed(reason)


_EARLY_MAX = 4096
"""Most contributions and means that are kept until the coordinator's word comes."""

_NOTHING = Weight(0, 0)


class Rounds:
    """One peer's part in one round after another.

    Args:
        node_id: This peer.
        past: This peer's state.
        own: What its loop has done.
        loading: Takes averages while the peer is not level.
        port: Its tensors and its averaging process.
        out: Where this peer says what it wants done.
    """

    def __init__(
        self,
        node_id: NodeId,
        past: Past,
        own: OwnWork,
        loading: Loading,
        port: TensorPort,
        out: PeerSink,
    ) -> None:
        self._node_id = node_id
        self._past = past
        self._own = own
        self._loading = loading
        self._port = port
        self._out = out
        self._tensors = port.tensors
        self._compute = port.compute
        self._parts: dict[AveragingId, RoundPart] = {}
        self._told: set[AveragingId] = set()
        """Attempts whose end the coordinator knows."""
        self._early: deque[Received] = deque()
        self._closing: AveragingId | None = None
        self.coordinator = node_id
        self._sent_again: set[tuple[NodeId, Message]] = set()
        """What was sent to whom for the second time in the attempt."""

    @property
    def awaited(self) -> tuple[NodeId, ...]:
        """From whom something of an average is to come."""
        found = set[NodeId]().union(*(part.awaited for part in self._parts.values()))
        return tuple(sorted(found))

    @property
    def is_busy(self) -> bool:
        """Whether a round closes, or an average is under way."""
        return self._closing is not None or self._is_averaging

    @property
    def _is_averaging(self) -> bool:
        return any(not (part.committed or part.is_orphaned) for part in self._parts.values())

    @property
    def is_in_doubt(self) -> bool:
        """Whether an average is here of which nobody has said yet whether it counts."""
        return any(part.is_orphaned and not part.committed for part in self._parts.values())

    def leads_to(self, height: Height) -> bool:
        """Whether averages that are committed, but not here yet, lead from this state to another.

        So does one that is here, and of which the commit has not been heard.
        """
        reached = self._past.height
        for _, part in sorted(self._parts.items()):
            if part.begun.height == reached and (part.committed or part.average_hash):
                reached = reached_by(part)
                if reached == height:
                    return True
        return False

    # --- closing ------------------------------------------------------------------------------

    def close(self, message: CloseRound) -> None:
        """The batch is full: have the loop contribute."""
        self.give_up_uncommitted(but_ready=True)
        self._closing = message.averaging
        self._out.note("round.closing", averaging=message.averaging)
        number = message.averaging.iteration.number
        own = self._own
        unfit = own.alone or own.is_stuck or self._loading.under_way or own.is_laden
        if number != self._past.height.round + 1 or unfit:
            self._say_closed(_NOTHING)
        elif own.held is None:
            own.ask()
        else:
            self.contributed()

    def contributed(self) -> None:
        """The loop has answered."""
        if self._closing is not None:
            self._say_closed(self._own.held.weight if self._own.held else _NOTHING)
            return
        in_use = any(not part.committed and part.num_own for part in self._parts.values())
        if not in_use:
            self._own.give_back()

    def _say_closed(self, weight: Weight) -> None:
        closing = self._closing
        self._closing = None
        assert closing is not None
        self._out.send(self.coordinator, RoundClosed(closing, weight.num, weight.digest))

    # --- averaging ----------------------------------------------------------------------------

    def begin(self, message: BeginRound) -> None:
        """An attempt begins."""
        if message.averaging in self._parts or self._is_over(message.averaging):
            return
        self._closing = None
        self.commit_reached(message.height)
        self.give_up_uncommitted()
        held = self._own.held
        self._sent_again.clear()
        counted = dict(zip(message.roster, message.weights, strict=True)).get(self._node_id, 0)
        given = held if counted else None
        port = replace(self._port, contribution=None if given is None else given.tensor)
        weight = _NOTHING if given is None else given.weight
        part = RoundPart(self._node_id, message, port, weight)
        self._parts[message.averaging] = part
        self._out.note("round.begun", averaging=message.averaging)
        if weight.num == counted:
            part.begin()
        else:
            reason = f"{weight.num} samples are held, and {counted} count"
            part.averaging_failed(reason)
        for event in [each for each in self._early if _round_of(each) == message.averaging]:
            self._early.remove(event)
            part.received(event)

    def received(self, event: Received) -> None:
        """A contribution or a mean has come."""
        averaging = _round_of(event)
        part = self._parts.get(averaging)
        if part is not None:
            part.received(event)
        elif self._is_over(averaging) or len(self._early) >= _EARLY_MAX:
            self._free(event)
        else:
            self._early.append(event)

    def send_again(
        self, to: NodeId, message: ReducePart | ReducedPart, tensor: TensorId | None
    ) -> None:
        """Something of an average has not reached a peer: send it once more. Then it is lost."""
        part = self._parts.get(attempt_of(message.averaging))
        runs = part is not None and part.state is not RoundState.FAILED
        if runs and (to, message) not in self._sent_again:
            self._sent_again.add((to, message))
            if tensor is None:
                self._out.send(to, message)
            else:
                self._out.put(SendTensor(to, message, tensor))
            return
        if tensor is not None:
            self._tensors.release(tensor)
        if part is not None and runs and not part.committed:
            part.fail_for(to)
            self._told.discard(attempt_of(message.averaging))

    def tell_again(self, averaging: AveragingId) -> None:
        """The coordinator has not heard how an attempt ended."""
        self._told.discard(averaging)

    def _is_over(self, averaging: AveragingId) -> bool:
        """Whether a later attempt of the same coordinator has begun. Others' terms tell nothing."""
        era = averaging.iteration.era
        return any(known.iteration.era == era and averaging < known for known in self._parts)

    @property
    def num_early(self) -> int:
        """Tensors that have come too early. The driver still owns them."""
        own = sum(event.tensor is not None for event in self._early)
        return own + sum(part.num_early for part in self._parts.values())

    def _free_early(self, is_over: Callable[[AveragingId], bool]) -> None:
        for event in [each for each in self._early if is_over(_round_of(each))]:
            self._early.remove(event)
            self._free(event)

    def _free(self, event: Received) -> None:
        if event.tensor is not None:
            self._tensors.release(self._tensors.add(event.tensor))

    def give_up_uncommitted(self, *, but_ready: bool = False) -> None:
        """Attempts that are under way don't count any more.

        Args:
            but_ready: Those whose average is here may have been committed by a coordinator that is
                lost.
        """
        running = False
        for averaging, part in list(self._parts.items()):
            if part.committed:
                continue
            if but_ready and part.state is RoundState.READY:
                part.is_orphaned = True
                continue
            running = True
            part.give_up()
            del self._parts[averaging]
            self._told.discard(averaging)
        if running:
            self._compute.retract()

    def resume(self) -> None:
        """The round begins anew, under another coordinator: the loop goes on meanwhile."""
        self._closing = None
        self.give_up_uncommitted(but_ready=True)
        if not self._parts:
            self._own.give_back()
        self._out.put(AnswerLoop(waits=False))

    def abandoned(self) -> None:
        """The coordinator does not average: an attempt that is under way here came to nothing."""
        if self._is_averaging and self._closing is None:
            self.resume()

    # --- the end of a round -------------------------------------------------------------------

    def look(self) -> None:
        """Say what has come of attempts, and use averages that are committed and here."""
        if self._early:
            present = self._past.height.round
            self._free_early(lambda each: each.iteration.number <= present)
        for averaging, part in sorted(self._parts.items()):
            ended = part.state in (RoundState.READY, RoundState.FAILED)
            # A coordinator commits no average that it does not have.
            is_asked = part.contributes or self.coordinator == self._node_id
            if ended and averaging not in self._told and is_asked:
                self._told.add(averaging)
                lost = (part.unreachable,) if part.unreachable is not None else ()
                ready = RoundReady(averaging, part.average_hash, part.failure[:200], lost)
                self._out.send(self.coordinator, ready)
            if part.committed and part.state is RoundState.READY:
                self._use(averaging, part)
            elif part.committed and part.state is RoundState.FAILED:
                self._forget(averaging)

    def commit(self, message: CommitRound) -> None:
        """An average counts."""
        part = self._parts.get(message.averaging)
        if part is None:
            return
        if part.average_hash and part.average_hash != message.average_hash:
            self._out.note("round.differs", averaging=message.averaging)
            part.give_up()
        else:
            part.committed_hash = message.average_hash

    def commit_reached(self, height: Height) -> None:
        """The run has come to a state: an average that leads there counts, if it is here."""
        part = self.ready_for(height)
        if part is not None and not part.committed:
            part.committed_hash = part.average_hash
            self.look()

    def ready_for(self, height: Height) -> RoundPart | None:
        """Return the attempt whose average leads to a state, if the average is here."""
        for part in self._parts.values():
            if part.state is RoundState.READY and reached_by(part) == height:
                return part
        return None

    def _use(self, averaging: AveragingId, part: RoundPart) -> None:
        """Use a committed average: the loop applies it now, or once it has the state before it."""
        begun = part.begun
        before = part.begun.height
        next_height = reached_by(part)
        own = part.num_own
        num_peers = sum(weight > 0 for weight in begun.weights)
        total = part.total.num
        average = DeliverAverage(part.round, part.take(), own, total, num_peers)
        self._compute.submit(Use(part.num_in_row))
        if own:
            self._own.count()
        else:
            self._own.give_back()
        # A loop that is about to step by itself, or to load a state, leaves the one before this.
        leaves = self._own.alone or self._loading.under_way
        if self._own.is_stuck and self.coordinator != self._node_id:
            # It falls behind, and loads the run's state once it steps again.
            self._tensors.release(average.tensor)
        elif before == self._past.height and not leaves:
            self._past.advance(next_height, total)
            self._own.deliver(average)
            self._out.note(
                "round.committed", round=part.round, samples=total, own=own, peers=num_peers
            )
        else:
            self._loading.keep(LaterAverage(before, next_height, average))
        self._forget(averaging)

    def _forget(self, averaging: AveragingId) -> None:
        del self._parts[averaging]
        self._told.discard(averaging)
        era = averaging.iteration.era
        self._free_early(lambda each: each.iteration.era == era and each <= averaging)

    def forget_until(self, round_number: int) -> None:
        """The loop has a state: averages that are in it are not needed any more."""
        for averaging, part in list(self._parts.items()):
            if part.committed and part.round <= round_number:
                part.give_up()
                self._forget(averaging)

    def enter(self, later: LaterAverage) -> None:
        """An average that came while the state was loaded can be applied."""
        assert later.before == self._past.height
        self._past.advance(later.after, later.average.total)
        self._own.deliver(later.average)


def reached_by(part: RoundPart) -> Height:
    """Return the state that an attempt's average leads to."""
    return after(part.begun.height, part.committed_hash or part.average_hash)


def _round_of(event: Received) -> AveragingId:
    """Return the name of the attempt of whose average something has come."""
    assert isinstance(event.message, ReducePart | ReducedPart)
    return attempt_of(event.message.averaging)


def attempt_of(averaging: AveragingId) -> AveragingId:
    """Return the name of the attempt to which an average belongs: that of its rows."""
    return AveragingId(averaging.iteration, ROWS)
