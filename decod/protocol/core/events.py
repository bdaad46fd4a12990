"""What can happen to a machine. The drivers turn the world into these."""

import math
from dataclasses import dataclass
from enum import Enum

from decod.ids import JobId, NodeId, TensorId
from decod.limits import StageBlocks
from decod.protocol.core.bans import BanList
from decod.protocol.core.era import Kept, StagePart
from decod.protocol.core.jobs import JobResult
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.scopes import Way


def earliest(*deadlines_s: float | None) -> float | None:
    """Return the first of some instants; None if there is none."""
    first: float | None = None
    for deadline_s in deadlines_s:
        if deadline_s is not None and (first is None or deadline_s < first):
            first = deadline_s
    return first


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that this node now holds. The machine owns it until it frees or sends it."""

    id: TensorId
    size_bytes: int
    digest: bytes = b""
    """SHA-256 of its bytes, of one that came and that audits need to know. Else empty."""


@dataclass(frozen=True, slots=True)
class Received:
    """A validated message of a peer has arrived, with its whole tensor if it carries one."""

    sender: NodeId
    """Who says the message. Who has passed it on is not told."""
    message: Message
    tensor: Tensor | None = None
    term: int = 0
    """Of the sender's view; 0 if it is not known, and then it is not looked at."""
    way: Way | None = None
    """The message came by way of another member, or this node is to pass it on."""


ASLEEP_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """`deadline_s` has been reached."""


@dataclass(frozen=True, slots=True)
class Woke:
    """This process has not run for longer than `ASLEEP_LEAST_S`: its host slept, or was busy."""

    asleep_s: float
    """How long. The clock does not count that time."""


@dataclass(frozen=True, slots=True)
class JobFinished:
    job_id: JobId
    result: JobResult
    outputs: tuple[Tensor, ...]
    duration_s: float
    """Time on the device, without waiting."""


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The compute process refused this job, or died."""

    job_id: JobId
    reason: str
    fatal: bool
    """The compute process is gone: nothing that it held exists any more."""
    out_of_memory: bool = False
    """The device had no memory for it."""


@dataclass(frozen=True, slots=True)
class TensorSent:
    """A `SendTensor` effect has ended well: the receiver has the whole tensor."""

    to: NodeId
    tensor: TensorId
    size_bytes: int
    duration_s: float
    """From the tensor's first byte to the receiver's acknowledgement; waiting for its turn not
    counted."""
    share: float = 1.0
    """Mean share of the link that it had beside other tensors to the same peer, (0, 1]."""


class Fault(Enum):
    """What has kept a message or tensor from its receiver."""

    LINK = "link"
    """Nothing gets through, or nobody answers there."""
    RATE = "rate"
    """The tensor travelled more slowly than the least rate of a transfer."""
    NONE = "none"
    """This says nothing of the link: the receiver has answered, or nothing was sent."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A message or tensor did not reach its receiver, after the transport's own retries.

    The receiver is unreachable, or answered no more. The core reports it to the leader, who
    finds out; it never concludes by itself that a node is dead.
    """

    to: NodeId
    message: Message
    reason: str
    tensor: TensorId | None = None
    """The tensor that was to go with it; the machine owns it again."""
    way: Way | None = None
    """As in the effect that sent the message."""
    fault: Fault = Fault.LINK
    gone: bool = False
    """Nobody listens at the receiver's address, or another node or run does."""


@dataclass(frozen=True, slots=True)
class TensorLate:
    """A tensor that was on its way here was given up: it came too slowly."""

    sender: NodeId


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """What a timed exchange said of a link. None: not measured this time.

    Ends a `ProbeLink`, if both are there (it went well) or neither is (it failed).
    """

    peer: NodeId
    latency_s: float | None = None
    """One way: half of a round trip."""
    bandwidth_bytes_per_s: float | None = None
    """Towards the peer."""


@dataclass(frozen=True, slots=True)
class VotePersisted:
    """A `PersistVote` effect has ended well: the vote may be sent."""

    term: int
    candidate: NodeId


@dataclass(frozen=True, slots=True)
class LeaderFound:
    """Another node leads the run than this one was told, as it seems: a candidate offers itself
    there, and a leader that has no quorum gives up."""

    leader: NodeId
    term: int


@dataclass(frozen=True, slots=True)
class StateRequested:
    """A peer, or this host's operator, wants a consistent copy of this stage's state."""

    request_id: int
    stage_index: int
    """What the asker takes for this node's stage."""
    iteration: int
    with_optimizer: bool
    cut: StageBlocks = ()
    """The cut that the stage is of."""


@dataclass(frozen=True, slots=True)
class StateFetched:
    """The effect `FetchState` has ended well. The machine owns the tensor."""

    stage_index: int
    iteration: int
    manifest: str
    tensor: Tensor
    cut: StageBlocks = ()
    """As in the effect, as is the part."""
    part: StagePart | None = None


@dataclass(frozen=True, slots=True)
class StateFetchFailed:
    """No donor gave what `FetchState` asked for; notes have told of each of them."""

    stage_index: int
    iteration: int
    reason: str
    """What the last one said."""
    cut: StageBlocks = ()
    """As in the effect, as is the part."""
    part: StagePart | None = None


@dataclass(frozen=True, slots=True)
class StateKept:
    """A state is whole on this host's disk: it was written, or found there at the start."""

    stage_index: int
    iteration: int
    parameter_hash: str


@dataclass(frozen=True, slots=True)
class StateForgotten:
    """A state is no longer on this host's disk: newer ones have taken its place, or it is
    unreadable."""

    stage_index: int
    iteration: int


@dataclass(frozen=True, slots=True)
class KeptRead:
    """What `ReadKept` asked for has been read; those of it that are still kept are whole."""

    states: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """Leader: a checkpoint of all stages is whole on this host's disk."""

    iteration: int
    cut: StageBlocks
    """The cut that these stages are of."""


@dataclass(frozen=True, slots=True)
class CheckpointRead:
    """Leader: what `ReadCheckpoint` has found."""

    iteration: int
    """That was asked for."""
    newest: int | None
    """Of the newest checkpoint up to there that is whole; None if none is."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The operator wants this node to finish what it holds and leave. A leader hands over first, or
    ends the run if there is nobody to take it."""

    timeout_s: float = math.inf
    """When so much time has passed, it leaves at once."""
    ends_run: bool = False
    """At the leader: end the run for everybody, whoever could take it over."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The operator wants this node to take no microbatches, or to take them again."""

    paused: bool
    frees_device: bool = False
    """The node leaves the run as soon as it is paused, and joins again when its host is told to
    resume: without its compute process it can't keep its stage's state in step."""


@dataclass(frozen=True, slots=True)
class AverageRequested:
    """Leader: the run is about to end. Let an average come first, or two if averages travel.

    Only for members that step by themselves. Ends with the note `learning.shared`.
    """


@dataclass(frozen=True, slots=True)
class RecutRequested:
    """Leader: cut the model anew. Ends with the note `run.recut` or `recut.failed`."""

    cut: StageBlocks


@dataclass(frozen=True, slots=True)
class BansMade:
    """This node's host has another list of bans: at the leader, one that was made there."""

    bans: BanList


@dataclass(frozen=True, slots=True)
class BlockCommits:
    """Leader: do not decide the next commit (blocked), or decide again.

    An export needs every stage's state of one iteration; commits wait until all have copied it.
    """

    blocked: bool


Event = (
    Received
    | DeadlinePassed
    | Woke
    | JobFinished
    | JobFailed
    | TensorSent
    | SendFailed
    | TensorLate
    | LinkMeasured
    | VotePersisted
    | LeaderFound
    | StateRequested
    | StateFetched
    | StateFetchFailed
    | StateKept
    | StateForgotten
    | KeptRead
    | CheckpointWritten
    | CheckpointRead
    | DrainRequested
    | PauseRequested
    | AverageRequested
    | RecutRequested
    | BansMade
    | BlockCommits
)
