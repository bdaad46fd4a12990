"""Joining and leaving, whether a member lives, and how a candidate follows its stage.

What a candidate and the member that it follows say to each other (`decod.protocol.state.replay`) is
of no iteration: the candidate is in none yet.
"""

from dataclasses import dataclass, field
from typing import Annotated

from decod.ids import AveragingId, Iteration, NodeId
from decod.limits import (
    Address,
    AtMost,
    Count,
    DataNodeIndex,
    Duration,
    Index,
    Magnitude,
    NodeName,
    Number,
    NumFlows,
    Ordinal,
    ReasonText,
    Sha256,
    SomeFlows,
    SomeSha256,
    StageBlocks,
    StageIndex,
    blob,
    malformed,
    within,
)
from decod.protocol.core.average_spec import WHOLE, AverageSpec
from decod.protocol.core.era import KeptStates
from decod.protocol.core.messages.scopes import OfDataNodes, OfRun, WithTensor
from decod.protocol.core.view import Duty, Member, Reach, Role

DONORS_MAX = 8
"""Members that a candidate is told of: as many as it fetches a state from."""

_NOTHING = Iteration(0, 0)

SLACK_MAX = 6.0
"""A silence of so many times the fixed time is always suspected: a host that is gone for good must
be found even if it was irregular before."""

BANS_SIZE_MAX_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Join(OfRun):
    """A candidate offers itself to the leader. Repeated until answered."""

    address: Address
    """At which the candidate answers."""
    role: Role
    """What it wants to be."""
    capacity: SomeFlows
    """Microbatches that it can hold, at least 1."""
    stage_index: StageIndex | None
    """The stage it insists on, or None for the one that needs it most."""
    manifest_sha256: Sha256
    """Of the run's manifest."""
    incarnation: Number
    """Drawn at each start of the daemon, 63 bits: tells a repeat from a restart."""
    name: NodeName = ""
    """For people. May be empty."""
    kept: KeptStates = ()
    """States on its disk, from an earlier life in the run."""
    duty: Duty = Duty.NONE
    """The one that it insists on, as a server. None: that which its stage needs."""
    reach: Reach = Reach.DIALLED
    """Who can connect to it."""


@dataclass(frozen=True, slots=True)
class Assign(OfRun, OfDataNodes):
    """The leader's answer: prepare this stage. Repeated answers to repeated joins are equal."""

    stage_index: StageIndex
    data_node_index: DataNodeIndex
    """-1 for relays."""
    reason: ReasonText = field(default="", compare=False)
    """Why this stage, for people: another reason does not make another assignment."""
    begun: bool = field(default=False, compare=False)
    """The run has committed iterations: who enters has their state from members, and does not need
    the one that the run started from."""
    donors: Annotated[tuple[Member, ...], AtMost(DONORS_MAX)] = field(default=(), compare=False)
    """Members that hold the stage's state, best first, once the run has committed anything: the
    candidate fetches it from them, and follows one of them until it is level."""
    view_term: Ordinal = field(default=0, compare=False)
    """Of the leader's view, as is the version: the candidate enters with a later one."""
    view_version: Ordinal = field(default=0, compare=False)
    """Of the leader's view: the candidate enters with a later one."""
    cut: StageBlocks = ()
    """How the model is cut. None: as the run file says."""


@dataclass(frozen=True, slots=True)
class Refuse(OfRun, OfDataNodes):
    """The leader's other answer: the run does not take this candidate."""

    reason: ReasonText
    """For people."""
    again_s: Duration = 0.0
    """After so long the reason has passed, or may have: ask again until then. 0: never."""
    over: bool = False
    """The run has ended, for everybody."""


@dataclass(frozen=True, slots=True)
class Prepared(OfRun):
    """The candidate has built its stage and can enter the next view."""

    stage_index: StageIndex
    parameter_hash: Sha256
    """Of the stage built from the seed: all members of a stage must agree on it."""
    state_at: Iteration = _NOTHING
    """The newest iteration whose step the candidate has taken, as a follower; or what it was built
    with, attempt 0."""
    cut: StageBlocks = ()
    """The cut that the stage is of."""


@dataclass(frozen=True, slots=True)
class Heartbeat(OfRun):
    """I live. Sent to the node's watchers."""

    iteration: Iteration
    """Where the sender is. A receiver that is behind asks the leader what it missed."""
    bans: Number = 0
    """The version of the list of bans that the sender has."""
    view_version: Number = 0
    """The version of its view, which changes within an iteration when that is mended."""


@dataclass(frozen=True, slots=True)
class Bans(OfRun):
    """Who is banned from the run, as the leader has signed it. Later versions count."""

    version: Number
    """As in the statement."""
    statement: Annotated[bytes, blob(BANS_SIZE_MAX_BYTES)]
    """As in `protocol.core.bans`."""


SLOW = "no COMPLETE in time"
"""Why a node is suspected that was reached, but has not done its work yet."""


TOO_SLOW = "a tensor took too long"
"""Why a node is suspected to or from which a transfer fell short of the least rate."""


TENSOR_REFUSED = "it refuses a tensor"
"""Why a node is suspected that answers, but does not take what is sent to it."""


NOT_FINITE = "what it computes is not finite"
"""Why a member is suspected that lives, and whose work can't be used: its receiver says so."""


STANDS_STILL = "its compute process stands still"
"""Why a member suspects itself: others should do its work."""


OF_TENSORS = (TOO_SLOW, TENSOR_REFUSED)
"""Reasons that say nothing of whether the node lives."""


@dataclass(frozen=True, slots=True)
class Suspect(OfRun):
    """A watcher or a disappointed sender tells the leader that a node may be gone.

    Of itself: its compute process stands still, or it can't get the state that the era begins with
    (`protocol.state.rollback`).
    """

    node_id: NodeId
    """The node in doubt."""
    reason: ReasonText
    """What was noticed."""
    slack: Annotated[float, within(1.0, SLACK_MAX)] = 1.0
    """How many times as long as usual the sender has waited: the node is known to be irregular."""


@dataclass(frozen=True, slots=True)
class Ping(OfRun):
    """Answer at once. Also measures the link."""

    nonce: Number
    """Returned in the Pong."""


@dataclass(frozen=True, slots=True)
class Pong(OfRun):
    """Answers a Ping."""

    nonce: Number
    """Of the Ping."""


@dataclass(frozen=True, slots=True)
class Leave(OfRun):
    """The sender asks to be left out of the next view; it finishes the iteration it is in."""

    reason: ReasonText
    """For people."""
    at_once: bool = False
    """It can't finish the iteration (its compute process died): the iteration goes on without
    it."""


@dataclass(frozen=True, slots=True)
class Capacity(OfRun):
    """A member asks the leader for another capacity from the next opening on.

    Repeated until a view shows it, or the leader refuses.
    """

    request_id: Number
    """Grows with each wish of the sender; a repeat gets the first answer again."""
    capacity: NumFlows
    """0: it wants no microbatches, and stays a member."""


@dataclass(frozen=True, slots=True)
class CapacityAnswer(OfRun, OfDataNodes):
    """The leader's answer to Capacity."""

    request_id: Number
    """Of the Capacity."""
    refusal: ReasonText
    """Empty: agreed. Else why not; it may follow on an agreement that can't be kept."""


@dataclass(frozen=True, slots=True)
class CatchUp(OfRun):
    """The sender may have missed a commit or abort: the leader repeats the last one to it."""

    iteration: Iteration
    """Where the sender is."""
    view_hash: SomeSha256 = ""
    """Of its view: what is repeated may change that. Empty: it needs the whole view."""


@dataclass(frozen=True, slots=True)
class Follow(OfRun):
    """A candidate wants its stage's averages from a member, so that it can take the steps itself.

    Repeated while it follows; the receiver forgets who is silent.
    """

    request_id: Number
    """Another for each new beginning, and for each life, of the sender. A repeat gets the first
    answer again."""
    stage_index: StageIndex
    address: Address
    """Where the sender can be reached: it is no member."""
    reach: Reach = Reach.DIALLED
    """Whether it can be dialled there."""


@dataclass(frozen=True, slots=True)
class Followed(OfRun):
    """The answer to Follow."""

    request_id: Number
    """Of the Follow."""
    stage_index: StageIndex
    committed: Iteration
    """Attempt 0: the state after this iteration is the one to fetch. The averages of all iterations
    behind it are sent as they are made."""
    refusal: ReasonText = ""
    """Not empty: none are sent, or no more."""


@dataclass(frozen=True, slots=True)
class Average(OfRun, WithTensor):
    """With a tensor: one part of the mean gradient of an iteration, to a follower.

    Sent when the members take the step, so it may still be undone: then another of the same
    iteration follows.
    """

    averaging: AveragingId
    """The average that it belongs to."""
    part: Index
    """Less than `num_parts`; 0 if there is none."""
    num_parts: Count
    """0: the iteration's step is taken without an average, and no tensor comes."""
    num_microbatches: Count
    """In the mean."""
    base_hash: SomeSha256
    """SHA-256 of the parameters that the step starts from; empty if the sender does not know."""
    gradient_norm: Magnitude = 0.0
    """With which the members take the step, where the gradient is clipped."""
    num_local: Number = 0
    """Iterations without an average that lie between the state and the step."""
    num_ahead: Index = 0
    """So many parts, the first ones, are of an average that travelled during these iterations."""
    spec: AverageSpec = WHOLE
    """Of the iteration's average."""
    ahead_spec: AverageSpec = WHOLE
    """Of the average that travelled."""
    num_targets: Number = 0
    """Tokens over which the members take the mean; 0: all positions."""

    def verify(self) -> None:
        """Raise `MalformedMessageError` if there is no such part."""
        if self.part >= max(self.num_parts, 1):
            raise malformed("part", self.part, allowed="less than num_parts")


FollowMessage = Follow | Followed | Average
