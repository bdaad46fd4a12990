"""What nodes say to each other. `decod.wire` turns these into protobuf and validates every field.

Each message is idempotent: it names the round, view version or request that it belongs to, and a
repeat changes nothing. Messages of a later round or view than the receiver's are kept until the
receiver gets there; those of an earlier one are dropped.
"""

from dataclasses import dataclass, field

from decod.ids import FlowId, MicrobatchId, NodeId, Round
from decod.protocol.core.era import Hashes, Kept
from decod.protocol.core.messages.election import ElectionMessage
from decod.protocol.core.messages.forwarding import Passed
from decod.protocol.core.messages.negotiation import RoutingMessage
from decod.protocol.core.messages.replay import Average, FollowMessage
from decod.protocol.core.view import Member, Opening, Role, View

_NOTHING = Round(0, 0)


# --- membership -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A candidate offers itself to the leader. Repeated until answered."""

    address: str
    role: Role
    capacity: int
    """Microbatches that it can hold, at least 1."""
    stage_index: int | None
    """The stage it insists on, or None for the one that needs it most."""
    manifest_sha256: str
    incarnation: int
    """Drawn at each start of the daemon, 63 bits: tells a repeat from a restart."""
    name: str = ""
    kept: tuple[Kept, ...] = ()
    """States on its disk, from an earlier life in the run."""


@dataclass(frozen=True, slots=True)
class Assign:
    """The leader's answer: prepare this stage. Repeated answers to repeated joins are equal."""

    stage_index: int
    data_node_index: int
    """-1 for relays."""
    reason: str = field(default="", compare=False)
    """Why this stage, for people: another reason does not make another assignment."""
    begun: bool = field(default=False, compare=False)
    """The run has committed iterations: who enters has their state from members, and does not need
    the one that the run started from."""
    donors: tuple[Member, ...] = field(default=(), compare=False)
    """Members that hold the stage's state, best first, once the run has committed anything: the
    candidate fetches it from them, and follows one of them until it is level."""
    view_term: int = field(default=0, compare=False)
    view_version: int = field(default=0, compare=False)
    """Of the leader's view: the candidate enters with a later one."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The leader's other answer: the run does not take this candidate."""

    reason: str
    again_s: float = 0.0
    """After so long the reason has passed, or may have: ask again until then. 0: never."""
    over: bool = False
    """The run has ended, for everybody."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The candidate has built its stage and can enter the next view."""

    stage_index: int
    parameter_hash: str
    """Of the stage built from the seed: all members of a stage must agree on it."""
    held: Round = _NOTHING
    """The newest round whose step the candidate has taken, as a follower; or what it was built
    with, attempt 0."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live. Sent to the node's watchers."""

    round: Round
    """Where the sender is. A receiver that is behind asks the leader what it missed."""


SLOW = "no COMPLETE in time"
"""Why a node is suspected that was reached, but has not done its work yet."""

TOO_SLOW = "a tensor took too long"
"""Why a node is suspected to or from which a transfer fell short of the least rate."""

TENSOR_REFUSED = "it refuses a tensor"
"""Why a node is suspected that answers, but does not take what is sent to it."""

OF_TENSORS = (TOO_SLOW, TENSOR_REFUSED)
"""Reasons that say nothing of whether the node lives."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A watcher or a disappointed sender tells the leader that a node may be gone.

    Of itself: it can't get the state that the era begins with (`protocol.state.rollback`).
    """

    node_id: NodeId
    reason: str
    slack: float = 1.0
    """How many times as long as usual the sender has waited: the node is known to be irregular."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer at once. Also measures the link."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender asks to be left out of the next view; it finishes the round it is in."""

    reason: str
    at_once: bool = False
    """It can't finish the round (its compute process died): the round goes on without it."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """A member asks the leader for another capacity from the next opening on.

    Repeated until a view shows it, or the leader refuses.
    """

    request_id: int
    """Grows with each wish of the sender; a repeat gets the first answer again."""
    capacity: int
    """0: it wants no microbatches, and stays a member."""


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """The leader's answer to Capacity."""

    request_id: int
    refusal: str
    """Empty: agreed. Else why not; it may follow on an agreement that can't be kept."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The sender may have missed a commit or abort: the leader repeats the last one to it."""

    round: Round


# --- links ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The sender's end of equation (1): to neighbours, when it has changed (GWTF IV).

    Values that were not measured are the sender's estimates. A later report replaces an earlier.
    """

    view_version: int
    latency_s: float
    """Half of a round trip between the two."""
    bandwidth_bytes_per_s: float
    """From the sender to the receiver."""
    compute_s: float
    """c_i: the sender's time for one pass of a microbatch."""
    byways: tuple[tuple[NodeId, float], ...] = ()
    """Data nodes by way of which a tensor can come to the sender, if the direct link is slow, and
    the bandwidth of its links with them in bytes per second, as far as it was measured."""


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """With a tensor that means nothing: its way is timed. No machine ever sees one."""


# --- flows ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlowCost:
    """A node tells the previous stage what its unpaired outflows cost to the sink (GWTF V-C)."""

    view_version: int
    data_node: NodeId
    cost_s: float
    """Of its cheapest unpaired outflow to `data_node`; 0 at the sink itself."""
    num_unpaired: int
    """How many such outflows wait for an inflow. 0 withdraws the offer."""
    compute_s: float
    """The sender's time for one microbatch: c_j of equation (1)."""


@dataclass(frozen=True, slots=True)
class RequestFlow:
    """Asks a node of the next stage to pair one unpaired outflow with the sender."""

    view_version: int
    request_id: int
    """Unique per sender within the view; a repeat gets the first answer again."""
    data_node: NodeId
    cost_s: float
    """What the sender believes that outflow costs. It is refused if it costs more by now."""


@dataclass(frozen=True, slots=True)
class FlowAnswer:
    """The answer to RequestFlow."""

    view_version: int
    request_id: int
    flow_id: FlowId | None
    """The flow that was given, or None: refused."""
    cost_s: float
    """Cost to the sink of the flow given; on refusal the current cost (infinite if none)."""
    num_unpaired: int
    """What the answering node has left to that data node."""
    path: tuple[NodeId, ...] = ()
    """Relays that the given flow passes, the answering node first. None: it is the sink."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The requester gave up waiting: if that request was granted, the outflow is unpaired again."""

    view_version: int
    request_id: int


# --- microbatches ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardActivation:
    """With a tensor: an activation for the next stage (for the data node: the last one)."""

    round: Round
    microbatch: MicrobatchId
    flow_id: FlowId
    path: tuple[NodeId, ...]
    """The relays that it passes, one for each stage."""
    path_version: int = 0
    """0: the flow's own path. Else the version of the view in which its data node chose it."""


@dataclass(frozen=True, slots=True)
class BackwardGradient:
    """With a tensor: the gradient of the activation that the receiver sent."""

    round: Round
    microbatch: MicrobatchId
    flow_id: FlowId
    path: tuple[NodeId, ...]
    """The relays that it passes, one for each stage, the first stage's first."""
    path_version: int = 0
    """As in `ForwardActivation`."""


@dataclass(frozen=True, slots=True)
class Complete:
    """COMPLETE: the sender has computed the forward pass of what the receiver sent it."""

    round: Round
    microbatch: MicrobatchId
    compute_s: float
    """How long the sender's device took: the rest of the time was the link and the queue."""


@dataclass(frozen=True, slots=True)
class Deny:
    """DENY: the microbatch can't go on along this flow; goes upstream to the data node."""

    round: Round
    microbatch: MicrobatchId
    flow_id: FlowId
    reason: str


@dataclass(frozen=True, slots=True)
class Reroute:
    """From a data node: a microbatch of its takes another path, since a relay of it was lost.

    Goes to the relays that take a lost one's place and to those next to them.
    """

    round: Round
    microbatch: MicrobatchId
    flow_id: FlowId
    path: tuple[NodeId, ...]
    path_version: int
    """Of the view without the lost relay. A path of an earlier version no longer counts."""
    owing: tuple[NodeId, ...]
    """Relays of the path that must say `Mended`: they have taken a lost one's place."""


@dataclass(frozen=True, slots=True)
class Mended:
    """To the data node: what a lost relay had folded in, the sender has folded in instead."""

    round: Round
    microbatch: MicrobatchId


# --- aggregation ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """A data node tells the leader that its share of the batch is done."""

    round: Round
    num_committed: int
    digest: int
    """Order-free digest of the ids of the microbatches that came home."""
    num_deferred: int
    """Microbatches put off to the next iteration because no flow took them."""
    loss_sum: float
    """Sum over microbatches of their mean loss."""
    num_tokens: int
    view_version: int
    """Of the view of which all relays are done: not counted after a later one has lost some."""
    failure: str = ""
    """Not empty: this share can't be finished; the round must be repeated without it."""


@dataclass(frozen=True, slots=True)
class BeginAggregation:
    """BEGIN AGGREGATION: goes down the tree; the batch is what the digest says."""

    round: Round
    num_committed: int
    digest: int
    view_version: int
    """Of the view whose members reduce."""
    loss_sum: float = 0.0
    """Of all reports, like what follows: whoever has to finish the round can tell of it."""
    num_tokens: int = 0
    num_deferred: int = 0


@dataclass(frozen=True, slots=True)
class ReducePart:
    """With a tensor (none if `num_microbatches` is 0): one part of the sender's gradient sum."""

    round: Round
    part: int
    """Index in the roster of the receiver, which reduces this part."""
    num_microbatches: int
    digest: int
    view_version: int
    """Of the view whose members reduce."""


@dataclass(frozen=True, slots=True)
class ReducedPart:
    """With a tensor: the average of one part over the roster."""

    round: Round
    part: int
    view_version: int
    """Of the view whose members reduce."""
    square_sum: float = 0.0
    """Of the part's elements; 0 where no gradient is clipped."""


@dataclass(frozen=True, slots=True)
class GradientSquares:
    """From the first of a stage, up the tree: how long its stage's mean gradient is, squared, and
    those of the stages below it."""

    round: Round
    square_sums: tuple[tuple[int, float], ...]
    """(stage index, sum of the mean gradient's squares), in order."""
    view_version: int
    """Of the view whose members reduce."""


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """Down the tree: the norm of the mean gradient over all stages. Now the step can be taken."""

    round: Round
    gradient_norm: float
    view_version: int
    """Of the view whose members reduce."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Goes up the tree: the sender's subtree has its next parameters, or why it has not."""

    round: Round
    hashes: Hashes
    """(stage index, SHA-256 of the proposed parameters), one for each stage in the subtree."""
    view_version: int
    """Of the view whose members reduce."""
    failure: str = ""
    """Empty if all is well. A stage whose members differ in hash is a failure too."""
    votes: tuple[tuple[NodeId, str], ...] = ()
    """Each member's hash, if those of the sender's stage in its subtree differ: the first of the
    stage finds out who is right."""


@dataclass(frozen=True, slots=True)
class Differs:
    """From the first of a stage: these members came to other parameters than most of it.

    They started from the same state, or thought so: they fetch it anew from the others.
    """

    iteration: int
    """Whose state that is."""
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Goes down the tree of the *new* view: the step is final. Decided once, by the leader."""

    round: Round
    opening: Opening
    loss: float
    """Mean over the iteration's committed microbatches. 0 for the opening of the run."""
    num_tokens: int
    """Trained on in the iteration."""
    view_version: int = 0
    """Of the view whose members have voted. Who voted in another one has reduced otherwise."""
    view_term: int = 0
    """Of that view: two leaders may count rounds and views alike."""
    hashes: Hashes = ()
    """Of all stages' parameters after the step, as in `Ready`: who enters compares its own."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Goes down the tree of the *new* view: the round never happened; the opening repeats it."""

    round: Round
    opening: Opening
    reason: str
    hashes: Hashes = ()
    """Of what is committed, as in `Commit`."""


@dataclass(frozen=True, slots=True)
class Mend:
    """Goes down the tree of the *new* view: the round goes on without relays that were lost.

    What they carried is done again by others of their stage, from what their neighbours kept.
    """

    round: Round
    view: View
    reason: str


@dataclass(frozen=True, slots=True)
class CanTake:
    """CAN TAKE: the sender and all behind it have committed and take microbatches of `round`."""

    round: Round


# --- utilisation ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """How busy one member is."""

    node_id: NodeId
    num_flows: int
    """Complete flows through it."""
    capacity: int
    num_microbatches: int
    """Microbatches that it has finished and the run has committed, since it joined."""
    state: str
    """One of the node states that `decod status` shows."""
    kept: tuple[Kept, ...] = ()
    """States on its disk, if the query asks for them."""
    awaited: tuple[NodeId, ...] = ()
    """Members for whom it has waited for longer than for a heartbeat, the longest first."""


@dataclass(frozen=True, slots=True)
class UtilisationQuery:
    """The leader's flooding query (GWTF V-B); goes down the tree."""

    query_id: int
    round: Round
    with_kept: bool = False
    """A stage is lost: which states does each member's host keep?"""


@dataclass(frozen=True, slots=True)
class UtilisationAnswer:
    """Goes back up the tree, gathered on the way: one load for each member of the subtree."""

    query_id: int
    round: Round
    loads: tuple[NodeLoad, ...]


Message = (
    Join
    | Assign
    | Refuse
    | Prepared
    | FollowMessage
    | Heartbeat
    | Suspect
    | Passed
    | Ping
    | Pong
    | Leave
    | Capacity
    | CapacityAnswer
    | CatchUp
    | Differs
    | LinkReport
    | LinkProbe
    | FlowCost
    | RequestFlow
    | FlowAnswer
    | Withdraw
    | RoutingMessage
    | ForwardActivation
    | BackwardGradient
    | Complete
    | Deny
    | Reroute
    | Mended
    | Report
    | BeginAggregation
    | ReducePart
    | ReducedPart
    | GradientSquares
    | GradientNorm
    | Ready
    | Commit
    | Abort
    | Mend
    | CanTake
    | UtilisationQuery
    | UtilisationAnswer
    | ElectionMessage
)

OF_ROUND_AND_VIEW = (
    BeginAggregation | ReducePart | ReducedPart | GradientSquares | GradientNorm | Ready
)
"""Messages of a round that mean a certain roster: of one view, whatever the round."""

OF_CHANGED_PATH = ForwardActivation | Reroute
"""Messages of a round that may rest on a later view: kept until the receiver knows it."""

VIEW_MESSAGES = LinkReport | FlowCost | RequestFlow | FlowAnswer | Withdraw | RoutingMessage
"""Messages that belong to a version of the view, whatever its round."""

BULK_MESSAGES = (ForwardActivation, BackwardGradient, ReducePart, ReducedPart, Average, LinkProbe)
"""Messages that come with a tensor and travel on the bulk channel; all others are control."""
