"""What the core asks of its host's other processes, and what comes back. Tensors are ids here.

Each kind of job says when it is run (`turn`) and what makes it stale (`scope`). A new kind needs a
class here, its words in `driver/jobs.py`, and its arithmetic in `worker/jobs.py` and
`sim/compute.py`. A job with `beside_device` needs no tensors: another process runs it, at once and
whatever the device does. Its arithmetic is in `worker/planning/` and `sim/device.py`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from decod.ids import MicrobatchId
from decod.planner.deciding import Decided, Unsettled
from decod.protocol.core.average_spec import WHOLE, AverageSpec


class Turn(Enum):
    """When a job is run, beside the others that wait."""

    ORDERED = "ordered"
    """Before all others, in the order of submission."""
    BACKWARD = "backward"
    """It frees memory: before forward passes, so that a node drains before it fills."""
    FORWARD = "forward"


class JobScope(Enum):
    """What makes a job stale."""

    BATCH = "batch"
    """The end of the iteration."""
    AVERAGING = "averaging"
    """The end of the iteration, or another roster."""
    STATE = "state"
    """Nothing: it is about what is committed."""


class _Job:
    """What all jobs say of themselves."""

    __slots__ = ()
    turn: ClassVar[Turn] = Turn.ORDERED
    scope: ClassVar[JobScope] = JobScope.BATCH
    beside_device: ClassVar[bool] = False


ACTIVATION_RECEIVED, GRADIENT_RECEIVED = "activation received", "gradient received"
"""What a device names if it refuses what another has sent."""


@dataclass(frozen=True, slots=True)
class Pass(_Job):
    """A pass of one microbatch through this node's stage, forward or backward."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Build(_Job):
    """Make the module and optimizer of a stage from the run's seed. -> `Built`."""

    scope = JobScope.STATE

    stage_index: int


@dataclass(frozen=True, slots=True)
class Embed(Pass):
    """Stage 0: read the microbatch's tokens and run the embedding. Outputs the activation."""

    turn = Turn.FORWARD


@dataclass(frozen=True, slots=True)
class Forward(Pass):
    """Relay: run the blocks on the activation (input 0). Outputs the activation."""

    turn = Turn.FORWARD


@dataclass(frozen=True, slots=True)
class Head(Pass):
    """Stage 0: loss of the last activation (input 0), and its gradient (output 0). -> `Loss`."""

    turn = Turn.BACKWARD


@dataclass(frozen=True, slots=True)
class Backward(Pass):
    """Relay: run backward from the gradient of the output (input 0) to that of the input."""

    turn = Turn.BACKWARD


@dataclass(frozen=True, slots=True)
class Inspect(_Job):
    """Look whether what a client has computed (input 0) can be used: it is finite."""

    turn = Turn.BACKWARD

    microbatch: MicrobatchId
    is_gradient: bool
    """Of the input, and not the output of the stage."""


@dataclass(frozen=True, slots=True)
class EmbedBackward(Pass):
    """Stage 0: end the backward pass. No output."""

    turn = Turn.BACKWARD


@dataclass(frozen=True, slots=True)
class Drop(_Job):
    """Forget what is held for one microbatch; nothing of it has been accumulated."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Reset(_Job):
    """Forget all microbatches and gradients, and undo a proposed step: the iteration is
    repeated.
    """

    scope = JobScope.STATE


@dataclass(frozen=True, slots=True)
class Retract(_Job):
    """Undo a proposed step, and nothing else: the reduction is repeated with another roster."""


@dataclass(frozen=True, slots=True)
class Gather(_Job):
    """Outputs this node's contribution in `num_parts` parts, in the wire's format.

    In the second phase of a compressed average, the inputs are all means of the first.
    """

    scope = JobScope.AVERAGING

    iteration: int
    """Which ends with the average."""
    num_parts: int
    """0: this node contributes nothing. Its device only begins the average."""
    phase: int = 0
    spec: AverageSpec = WHOLE
    """Of the average."""


@dataclass(frozen=True, slots=True)
class GatherAhead(Gather):
    """As `Gather`, of what this node had learnt when the iteration ended: it trains on."""

    scope = JobScope.STATE


@dataclass(frozen=True, slots=True)
class Reduce(_Job):
    """Sum one part over members (inputs in roster order), divided by their weight together.

    Outputs the average. -> `Squared`.
    """

    scope = JobScope.AVERAGING

    part: int
    num_parts: int
    weights: tuple[int, ...]
    """Of the inputs."""
    phase: int = 0
    spec: AverageSpec = WHOLE
    """Of the average."""
    lenient: bool = False
    """Leave out inputs that are not what they should be, instead of failing."""


@dataclass(frozen=True, slots=True)
class ReduceAhead(Reduce):
    """As `Reduce`, while members train on."""

    scope = JobScope.STATE


@dataclass(frozen=True, slots=True)
class GatherBetween(Gather):
    """As `Gather`, of what a group of members has come to: it travels as it is."""


@dataclass(frozen=True, slots=True)
class ReduceBetween(Reduce):
    """As `Reduce`, of what groups of members have come to."""


@dataclass(frozen=True, slots=True)
class Decode(_Job):
    """Outputs the whole average, from the means of all phases (inputs), in order. -> `Proposed`,
    with the hash of the output."""

    scope = JobScope.AVERAGING

    iteration: int
    spec: AverageSpec = WHOLE
    """Of the average."""
    between: bool = False
    """The average is of what groups have come to."""
    scale: int = 1
    """By which the output is multiplied: the weight of a group, for a sum over its members."""


@dataclass(frozen=True, slots=True)
class Use(_Job):
    """An average that was decoded counts: keep what it lacks of this node's contribution."""

    scope = JobScope.STATE

    num_parts: int
    """Of a phase."""
    spec: AverageSpec = WHOLE
    """Of the average."""
    missed: tuple[int, ...] = ()
    """Parts of all phases that lack this node's contribution."""


@dataclass(frozen=True, slots=True)
class Square(_Job):
    """Square this node's own sum over `weights_total`: it is alone in its stage. -> `Squared`."""

    scope = JobScope.AVERAGING

    iteration: int
    weights_total: int


@dataclass(frozen=True, slots=True)
class Propose(_Job):
    """Take the optimizer's step, undoably, from the reduced parts (inputs). -> `Proposed`.

    Without inputs the node is alone in its stage and uses its own sum over `weights_total`.
    """

    scope = JobScope.AVERAGING

    iteration: int
    num_parts: int
    weights_total: int
    gradient_norm: float = 0.0
    """Of the whole model's gradient, where that is clipped."""
    num_ahead: int = 0
    """The first so many inputs are of an average that has travelled since the last step. They come
    before the `num_parts` of this iteration's. With neither, nor weight, no average is used. Both
    count the means of all phases."""
    spec: AverageSpec = WHOLE
    """Of the iteration's average, whether it is used now or travels."""
    ahead_spec: AverageSpec = WHOLE
    """Of the average that has travelled."""
    missed: tuple[int, ...] = ()
    """Parts of that average, of all phases, that lack this node's contribution."""
    missed_now: tuple[int, ...] = ()
    """The same of the iteration's average."""


@dataclass(frozen=True, slots=True)
class StepAhead(_Job):
    """Compute the parameters after an iteration from the average before it, beside the committed
    state: where steps are late, they are known when the iteration begins."""

    iteration: int


@dataclass(frozen=True, slots=True)
class StepLocally(_Job):
    """End an iteration without an average, undoably, as the update rule says. -> `Proposed`.

    The hash is of what all members of the stage have in common.
    """

    scope = JobScope.AVERAGING

    iteration: int


@dataclass(frozen=True, slots=True)
class SketchPart(_Job):
    """Outputs sketches of contributions to a part of the average, or of its mean (inputs).
    -> `Sketched`."""

    scope = JobScope.AVERAGING

    part: int
    num_parts: int
    seed: bytes
    """Of the sketches."""
    is_mean: bool = False


@dataclass(frozen=True, slots=True)
class ReplayPasses(_Job):
    """Repeat a member's passes of one microbatch, and compare what it has made of them.
    -> `Replayed`.

    The first inputs are the activation and the gradient that it got. Then comes what it has sent:
    the activation, the gradient, both, or neither.
    """

    scope = JobScope.AVERAGING

    microbatch: MicrobatchId
    with_activation: bool
    """The activation that it has sent on is an input."""
    with_gradient: bool
    """The gradient that it has sent back is an input."""
    num_parts: int
    """Of the average. The gradient of the parameters is sketched part by part."""
    seed: bytes
    """Of these sketches."""
    beside: bool = False
    """With the stage that `StandIn` has built."""


@dataclass(frozen=True, slots=True)
class StandIn(_Job):
    """Build another stage beside the own, from a blob of its parameters (input 0), for replays.
    -> `Built`. It lasts until the iteration ends, or another is built."""

    scope = JobScope.AVERAGING

    stage_index: int
    iteration: int
    manifest: str
    """As in `Load`."""
    with_optimizer: bool
    """The blob holds the optimizer's state, too."""


@dataclass(frozen=True, slots=True)
class CommitStep(_Job):
    """Make the proposed step final."""

    scope = JobScope.STATE

    iteration: int


@dataclass(frozen=True, slots=True)
class ReturnToAnchor(_Job):
    """Give up what this node has learnt by itself: it holds what its stage has in common."""

    scope = JobScope.STATE


@dataclass(frozen=True, slots=True)
class Snapshot(_Job):
    """Copy the last committed state into one blob (output 0), described by a manifest."""

    scope = JobScope.STATE

    with_optimizer: bool
    ahead: bool = False
    """Of the iteration in hand, instead: its `StepAhead` has been done."""


@dataclass(frozen=True, slots=True)
class Load(_Job):
    """Replace parameters and optimizer state by a verified blob (input 0). -> `Built`."""

    scope = JobScope.STATE

    iteration: int
    manifest: str
    """What the donor said of the blob, as JSON; the compute process checks every hash."""


@dataclass(frozen=True, slots=True)
class Mix(_Job):
    """Replace parameters by the mean of two other stages', block by block, or by a copy of one's
    (inputs 0 and 1); the optimizer begins anew. -> `Built`.

    Source: CheckFree (arXiv:2506.15461). Deviation: the two weigh the same.
    """

    scope = JobScope.STATE

    iteration: int
    stages: tuple[int, ...]
    """Of the inputs."""
    manifests: tuple[str, ...]
    """Of the inputs, as in `Load`."""


@dataclass(frozen=True, slots=True)
class Measure(_Job):
    """Time the passes of a microbatch that is made up; leaves no trace. -> `Measured`."""


@dataclass(frozen=True, slots=True)
class DecideFlows(_Job):
    """Choose the flows of a settlement. -> `FlowsDecided`.

    It outlives its iteration. Its owner drops a result for which it no longer waits.
    """

    scope = JobScope.STATE
    beside_device = True

    unsettled: Unsettled


Job = (
    Build
    | Embed
    | Forward
    | Head
    | Backward
    | EmbedBackward
    | Inspect
    | Drop
    | Reset
    | Retract
    | Gather
    | GatherAhead
    | Reduce
    | ReduceAhead
    | GatherBetween
    | ReduceBetween
    | Decode
    | Use
    | Square
    | Propose
    | StepAhead
    | StepLocally
    | SketchPart
    | ReplayPasses
    | StandIn
    | CommitStep
    | ReturnToAnchor
    | Snapshot
    | Load
    | Mix
    | Measure
    | DecideFlows
)


@dataclass(frozen=True, slots=True)
class Nothing:
    """The job has no result beyond its outputs."""


@dataclass(frozen=True, slots=True)
class Built:
    """A stage stands ready."""

    parameter_hash: str


@dataclass(frozen=True, slots=True)
class Loss:
    """Mean loss over a microbatch's tokens."""

    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Squared:
    """The mean gradient, or a part of it, is there."""

    square_sum: float
    """Of its elements; 0 where no gradient is clipped."""
    refused: tuple[int, ...] = ()
    """Inputs that were left out, by their position."""
    reason: str = ""
    """Why, for people."""
    standing_out: tuple[int, ...] = ()
    """Inputs that stand out from the others, by their position."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """What the parameters would be after the step."""

    parameter_hash: str
    effective_rank: float = 0.0
    """Directions that the newest average has, as a mean over its matrices. 0: not known."""
    standing_out: tuple[int, ...] = ()
    """Parts of the average that stand out from the others, beside what this node has contributed to
    each."""


@dataclass(frozen=True, slots=True)
class Sketched:
    """The sketches of some tensors."""

    sketches: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far what a member has sent is from what it should have sent. 0: not at all, or it was not
    compared."""

    activation_error: float
    gradient_error: float
    sketches: tuple[bytes, ...]
    """Of the gradient of the parameters, part by part."""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """State of the last committed iteration."""

    iteration: int
    manifest: str


@dataclass(frozen=True, slots=True)
class Measured:
    """How long each pass of a relay's microbatch takes."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class FlowsDecided:
    """The flows of all data nodes."""

    flows: tuple[Decided, ...]


JobResult = (
    Nothing
    | Built
    | Loss
    | Squared
    | Proposed
    | Sketched
    | Replayed
    | SnapshotTaken
    | Measured
    | FlowsDecided
)
