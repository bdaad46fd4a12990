"""One peer's part in one attempt at a round's average.

    ROW -> (COLUMN ->) DECODING -> READY -> (committed, or abandoned)
     `------- or FAILED

If there are many peers, they average in rows first, and then in columns: see `groups`. Whoever has
all means has the device decode the average, and tells the coordinator its hash. The average counts
once the coordinator has heard the same hash from all who contribute.
"""

from collections import deque
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
from decod.protocol.core.effects import Effect
from decod.protocol.core.events import JobFinished, Received
from decod.protocol.core.jobs import AverageKind, Decode, Job, Proposed
from decod.protocol.core.messages import ReducedPart, ReducePart
from decod.protocol.core.messages.round_messages import BeginRound

ROWS, COLUMNS = 1, 2
"""Versions of the view in the names of a round's averages."""


class RoundState(Enum):
    ROW = "row"
    COLUMN = "column"
    DECODING = "decoding"
    READY = "ready"
    FAILED = "failed"


class RoundPart:
    """One peer's part in an attempt.

    Args:
        node_id: This peer.
        begun: The coordinator's message.
        port: Tensors and device, and the contribution that this peer holds.
        own: What is in the contribution.
    """

    def __init__(self, node_id: NodeId, begun: BeginRound, port: TensorPort, own: Weight) -> None:
        self.begun, self._node_id, self._port, self._own = begun, node_id, port, own
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
        begun, members = self.begun, self._groups.rows[row]
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

    def begin(self) -> list[Effect]:
        """Contribute, or wait for the average only."""
        if self._row is None:
            return self._begin_column()
        row = self._groups.rows[self._row]
        averaging = Averaging(self._id(ROWS), row)
        self._averager = averager = Averager(self._node_id, averaging, self._port, self)
        told = [] if self._has_columns else averager.tell(self._groups.listeners)
        return told + averager.begin(self._own, self._weight_of(self._row))

    def _begin_column(self) -> list[Effect]:
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
            effects = averager.listen()
        else:
            assert self._row is not None
            effects = averager.tell(groups.audience(groups.column_of(self._node_id)))
            effects += averager.begin(self._weight_of(self._row), self.total)
        while self._early:
            effects += self.received(self._early.popleft())
        return effects

    def _id(self, level: int) -> AveragingId:
        return AveragingId(self.begun.averaging.iteration, level)

    def received(self, event: Received) -> list[Effect]:
        """Take a contribution, or a mean."""
        message, averager = event.message, self._averager
        assert isinstance(message, ReducePart | ReducedPart)
        is_column = message.averaging.view_version == COLUMNS
        if is_column and self._has_columns and self.state is RoundState.ROW:
            self._early.append(event)
            return []
        if averager is None or is_column != (self.state is RoundState.COLUMN):
            return self._free(event)
        match message:
            case ReducePart():
                return averager.part(event.sender, message, event.tensor)
            case ReducedPart() if event.tensor is not None:
                return averager.average(event.sender, message, event.tensor)
            case _:
                return []

    def _free(self, event: Received) -> list[Effect]:
        if event.tensor is None:
            return []
        return self._port.tensors.release(self._port.tensors.add(event.tensor))

    def give_up(self) -> list[Effect]:
        """Nobody needs this attempt any more: release what it holds."""
        effects: list[Effect] = []
        averager, tensors = self._averager, self._port.tensors
        if averager is not None and averager.state is not AveragingState.AVERAGED:
            effects += averager.abandon()
            averager.close()
        while self._early:
            effects += self._free(self._early.popleft())
        held = [each for each in (self.average, self._row_sum) if each is not None]
        effects += tensors.release(*held)
        self.average = self._row_sum = None
        self.state = RoundState.FAILED
        return effects

    def fail_for(self, node: NodeId) -> list[Effect]:
        """A peer does not take what it needs: the others have to average without it."""
        if node not in self.begun.roster:
            return []
        self.unreachable, self.failure = node, "a peer can't be reached"
        # Who has the average keeps it: it may count nevertheless.
        return [] if self.state is RoundState.READY else self.averaging_failed(self.failure)

    def take(self) -> TensorId:
        """Return the average. Its reference is the caller's."""
        average, self.average = self.average, None
        assert average is not None
        return average

    # --- the averager's user ------------------------------------------------------------------

    def part_squared(self, part: int, square_sum: float) -> list[Effect]:  # noqa: ARG002
        """Nobody asks how long the average is."""
        return []

    def averaged(self) -> list[Effect]:
        """All means are here: decode them."""
        averager, row = self._averager, self._row
        assert averager is not None
        if self.state is RoundState.ROW and self._has_columns:
            assert row is not None
            job = Decode(self.round, scale=self._weight_of(row).num)
        else:
            job = Decode(self.round, between=self.state is RoundState.COLUMN)
            self.state = RoundState.DECODING
        return self._port.compute.submit(job, self, averager.take())

    def stand_out(self, nodes: tuple[NodeId, ...]) -> list[Effect]:  # noqa: ARG002
        """Nobody audits contributions here."""
        return []

    def lacking(self, found: Weight) -> list[Effect]:
        """The contributions that came are others than the coordinator has counted."""
        return self.averaging_failed(f"{found.num} samples came, and others were promised")

    def averaging_failed(self, reason: str) -> list[Effect]:
        """The device has refused something."""
        self.failure = reason
        return self.give_up()

    # --- jobs ---------------------------------------------------------------------------------

    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:  # noqa: ARG002
        """The average is decoded: of the row, or of all."""
        assert isinstance(event.result, Proposed), event
        (output,) = event.outputs
        if self.state is RoundState.ROW:
            self._row_sum = output.id
            return self._begin_column()
        if self.state is not RoundState.DECODING:
            return self._port.tensors.release(output.id)
        self.average, self.average_hash = output.id, event.result.parameter_hash
        if self.committed_hash not in ("", self.average_hash):
            return self.averaging_failed("the average differs from the one that counts")
        self.state = RoundState.READY
        if self._row_sum is None:
            return []
        row_sum, self._row_sum = self._row_sum, None
        return self._port.tensors.release(row_sum)

    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:  # noqa: ARG002
        """The means don't make an average."""
        return self.averaging_failed(reason)
