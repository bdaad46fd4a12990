"""What a machine wants done. The drivers carry these out, in order; none of them answers."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from decod.ids import JobId, NodeId, TensorId
from decod.limits import StageBlocks
from decod.protocol.core.bans import BanList
from decod.protocol.core.era import Kept, StagePart
from decod.protocol.core.events import Tensor
from decod.protocol.core.jobs import Job
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.scopes import Way
from decod.protocol.core.view import Member


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver a control message, or say `SendFailed`. Messages to one peer keep their order."""

    to: NodeId
    message: Message
    way: Way | None = None
    """The receiver is to pass it on, or this node does. None: neither."""


@dataclass(frozen=True, slots=True)
class SendTensor:
    """Deliver a bulk message with its tensor; then `TensorSent` or `SendFailed`.

    The machine still owns the tensor; the driver reads it until it has said how it ended.
    """

    to: NodeId
    message: Message
    tensor: TensorId
    way: Way | None = None
    """As of `Send`."""


@dataclass(frozen=True, slots=True)
class StartJob:
    """Give the compute process a job; jobs run one after another in this order. A job with
    `beside_device` runs at once in another process, whose end is not fatal."""

    job_id: JobId
    job: Job
    inputs: tuple[TensorId, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeTensor:
    """The machine needs this tensor no longer. The driver waits for a send in progress."""

    tensor: TensorId


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch a stage's state of `iteration` from these nodes, each of which may have it.

    Own id: this host's disk. Then `StateFetched`, or `StateFetchFailed` when all were tried.
    """

    donors: tuple[NodeId, ...]
    """Best first, which also says whose state counts if they differ."""
    stage_index: int
    iteration: int
    parameter_hash: str = ""
    """If given: what the state's parameters must hash to, as in `Ready.hashes`."""
    alike: bool = False
    """This node's own committed state is nearly that: what is the same in it is not fetched."""
    with_optimizer: bool = True
    """The whole state, and not only the parameters."""
    cut: StageBlocks = ()
    """The cut that the stage is of."""
    part: StagePart | None = None
    """Fetch no more than this of it."""


@dataclass(frozen=True, slots=True)
class ServeState:
    """Give the askers this state. The driver owns the tensor from now on, until all have it."""

    request_ids: tuple[int, ...]
    iteration: int
    manifest: str
    tensor: TensorId


@dataclass(frozen=True, slots=True)
class KeepState:
    """Write a copy of this node's own committed state to this host's disk, without the device
    waiting for it; then `StateKept`, or nothing. The driver owns the tensor from now on."""

    iteration: int
    parameter_hash: str
    manifest: str
    tensor: TensorId


@dataclass(frozen=True, slots=True)
class MirrorState:
    """Copy another stage's state from its members to this host's disk, at low priority; then
    `StateKept`, or nothing (a note says why)."""

    donors: tuple[NodeId, ...]
    stage_index: int
    iteration: int
    parameter_hash: str
    cut: StageBlocks = ()
    """The cut that the stage is of."""


@dataclass(frozen=True, slots=True)
class RefuseState:
    """This node does not have, and will not have, the state of that iteration."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeLink:
    """Time an exchange with `to`, and a transfer of so many bytes that mean nothing, beside the
    tensors: then `LinkMeasured` with both, or with neither if it failed."""

    to: NodeId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PersistVote:
    """Keep, beyond this process's life, whom this node votes for: then `VotePersisted`.

    If that can't be done, nothing: the node abstains. A vote is sent only when it is kept, or a
    node that restarts could vote twice in a term.
    """

    term: int
    candidate: NodeId


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """Leader: read every byte of this host's checkpoint of an iteration, and of older ones until
    one is whole. Answered by `CheckpointRead`."""

    iteration: int


@dataclass(frozen=True, slots=True)
class ReadKept:
    """Read every byte of these states on this host's disk: `StateForgotten` for each that is not
    whole, and `KeptRead` when all have been read."""

    states: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class UseMembers:
    """From now on these are the members: addresses to dial, peers to listen to."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class UseBans:
    """From now on these are the bans: keep them, talk to nobody who is banned, and answer nobody.

    `Bans` still goes to whom it bans.
    """

    bans: BanList


@dataclass(frozen=True, slots=True)
class ContestBans:
    """Leader: this list, from somebody who led before or elsewhere, bans this node. Make a later
    one that does not; then `BansMade`."""

    bans: BanList


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a log line or a metric. Simulator and daemon print the same trace."""

    event: str
    """`noun.participle`, registered in `decod.journal.event_specs`."""
    fields: tuple[tuple[str, object], ...] = ()


def noted(event: str, **fields: object) -> Note:
    """Return a note of an event."""
    return Note(event, tuple(fields.items()))


@dataclass(frozen=True, slots=True)
class BanLiar:
    """Leader: a member was found to lie. Ban it: the list of bans comes back with `BansMade`."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class CountWork:
    """An iteration is committed, and this is what it took, as far as this node knows."""

    iteration: int
    work: tuple[tuple[NodeId, int], ...]
    """Nodes, and how many microbatches each has worked on, itself included. A data node knows this
    of all relays that its share has passed; a relay only knows its own part."""


@dataclass(frozen=True, slots=True)
class CompleteRun:
    """Leader: the last iteration is committed, or the run can't go on, and nothing more will be
    committed. Keep the result, then let the members go with `DrainRequested`."""

    iteration: int


class StopReason(Enum):
    FINISHED = "finished"
    """All iterations are done."""
    DRAINED = "drained"
    """The operator asked, and what was held has been finished or handed over."""
    PAUSED = "paused"
    """As `DRAINED`, and the host's device is to be free until the operator resumes."""
    REFUSED = "refused"
    """The leader does not take this node."""
    BANNED = "banned"
    """The leader's operator has banned this node. The detail says why and until when."""
    REMOVED = "removed"
    """The run went on without this node; it may join again."""
    LEADER_LOST = "leader_lost"
    """Nobody leads the run any more."""
    SUPERSEDED = "superseded"
    """This node led; the others took it for dead and have elected another leader."""
    STATE_LOST = "state_lost"
    """Nobody has what the run has learnt any more. This node has never had it."""
    CRIPPLED = "crippled"
    """This node's compute process failed; the run goes on, and may be joined with another one."""
    FAILED = "failed"
    """The run can't go on."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The machine has ended: shut the daemon down and say why."""

    reason: StopReason
    detail: str


Effect = (
    Send
    | SendTensor
    | StartJob
    | FreeTensor
    | FetchState
    | ServeState
    | KeepState
    | MirrorState
    | RefuseState
    | ProbeLink
    | PersistVote
    | ReadCheckpoint
    | ReadKept
    | UseMembers
    | UseBans
    | ContestBans
    | BanLiar
    | Note
    | CountWork
    | CompleteRun
    | Stop
)

_E = TypeVar("_E")
_Wanted = TypeVar("_Wanted", contravariant=True)


class EffectSink(Generic[_Wanted]):
    """What a machine wants done, in the order in which its parts say it.

    All parts of a machine share one. Only the machine's `step` takes out what was said. A sink for
    what a peer may want is also one for plain effects: rooms that both cores use take the latter.
    """

    def __init__(self) -> None:
        self._said: list[Effect | _Wanted] = []

    def send(self, to: NodeId, message: Message) -> None:
        """Have a control message delivered."""
        self._said.append(Send(to, message))

    def send_all(self, nodes: Iterable[NodeId], message: Message) -> None:
        """Have a control message delivered to each of some nodes."""
        for node in nodes:
            self.send(node, message)

    def note(self, event: str, **fields: object) -> None:
        """Have an event noted."""
        self._said.append(noted(event, **fields))

    def put(self, *effects: Effect | _Wanted) -> None:
        """Have other effects carried out."""
        self._said += effects

    def free(self, tensor: Tensor | None) -> None:
        """Have a tensor freed that came with a message and is not taken. None: there is none."""
        if tensor is not None:
            self._said.append(FreeTensor(tensor.id))

    # A type variable that only goes in can't come out: hence another one.
    def taken(self: "EffectSink[_E]") -> list[Effect | _E]:
        """Return what was said since this was asked last, and forget it."""
        said = self._said
        self._said = []
        return said
