"""What the core asks of its host's other processes, and what comes back. Tensors are ids here.

A job is described here alone: its fields, when it is run (`turn`), what makes it stale (`scope`),
and what comes back (`result`). It travels by its fields (`protocol/core/job_codec.py`). A new kind
needs a class here, and a method marked `@runs` in `worker/job_methods.py` and
`sim/simulated_compute.py`; if it has outputs, their sizes in `driver/arena.py`. A job with
`beside_device` needs no tensors: another process runs it, at once and whatever the device does
(`worker/planning_process.py`, `sim/simulated_device.py`).
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from decod.ids import MicrobatchId
from decod.limits import NUMBER_MAX, Magnitude, StageBlocks, exactly, within
from decod.planner.deciding import Decided, Unsettled
from decod.protocol.core.average_spec import WHOLE, AverageSpec
from decod.protocol.core.fingerprints import SEED_BYTES

# Whole numbers are at least 0, which the codec checks.
Positive = Annotated[int, within(1, NUMBER_MAX)]
Seed = Annotated[bytes, exactly(SEED_BYTES)]


class Turn(Enum):
    """When a job is run, beside the others that wait."""

    ORDERED = "ordered"
    """Before all others, in the order of submission."""
    BACKWARD = "backward"
    """A backward pass frees memory: it comes before forward passes, so that a node drains before it
    fills."""
    FORWARD = "forward"


class JobScope(Enum):
    """What makes a job stale."""

    BATCH = "batch"
    """The end of the iteration."""
    AVERAGING = "averaging"
    """The end of the iteration, or another roster."""
    STATE = "state"
    """Nothing: it is about what is committed."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """The job has no result beyond its outputs."""


@dataclass(frozen=True, slots=True)
class Built:
    """A stage stands ready."""

    parameter_hash: str
    num_parameters: int = 0
    activation_bytes: int = 0
    """Size of one microbatch's activation on its way between stages."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Mean loss over those of a microbatch's tokens that are learnt."""

    loss: float
    num_tokens: int
    """How many these are."""


@dataclass(frozen=True, slots=True)
class Squared:
    """The mean gradient, or a part of it, is there."""

    square_sum: float
    """Of the part's elements; 0 where no gradient is clipped."""
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
    metrics: tuple[tuple[str, float], ...] = ()
    """Numbers of the step for people, by their names in `decod.journal.step_metrics`."""


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
    """Empty if there was no output to copy it into."""
    num_bytes: int = 0
    """Size of the copy."""


@dataclass(frozen=True, slots=True)
class Measured:
    """How long each pass of a relay's microbatch takes."""

    forward_s: float
    backward_s: float
    microbatch_memory_bytes: int = 0
    """What one microbatch occupies between its forward and its backward pass."""
    recomputed_bytes: int = 0
    """What a backward pass fills first, where it computes the forward pass again."""


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


class BaseJob:
    """What all jobs say of themselves."""

    __slots__ = ()
    turn: ClassVar[Turn] = Turn.ORDERED
    scope: ClassVar[JobScope] = JobScope.BATCH
    beside_device: ClassVar[bool] = False
    result: ClassVar[type] = Nothing
    """The class of what comes back, beside the outputs."""

    @property
    def name(self) -> str:
        """How people and logs call the job."""
        return type(self).__name__


ACTIVATION_RECEIVED = "activation received"
GRADIENT_RECEIVED = "gradient received"
"""What a device names if it refuses what another has sent."""


@dataclass(frozen=True, slots=True)
class Pass(BaseJob):
    """A pass of one microbatch through this node's stage, forward or backward."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Build(BaseJob):
    """Make the module and optimizer of a stage from the run's seed."""

    scope = JobScope.STATE
    result = Built

    stage_index: int
    trial: bool = False
    """The stage is only to be measured: weights that are not trained are zeros."""
    cut: StageBlocks = ()
    """How the model is cut. None: as the run file says."""


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
    """Stage 0: loss of the last activation (input 0), and its gradient (output 0)."""

    turn = Turn.BACKWARD
    result = Loss


@dataclass(frozen=True, slots=True)
class Backward(Pass):
    """Relay: run backward from the gradient of the output (input 0) to that of the input."""

    turn = Turn.BACKWARD


@dataclass(frozen=True, slots=True)
class Inspect(BaseJob):
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
class Drop(BaseJob):
    """Forget what is held for one microbatch; nothing of it has been accumulated."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Reset(BaseJob):
    """Forget all microbatches and gradients, and undo a proposed step: the iteration is
    repeated.
    """

    scope = JobScope.STATE


@dataclass(frozen=True, slots=True)
class Retract(BaseJob):
    """Undo a proposed step, and nothing else: the reduction is repeated with another roster."""


class AverageKind(Enum):
    """Which of a run's averages a job is for."""

    NOW = "now"
    """At the end of an iteration: all members wait for it."""
    AHEAD = "ahead"
    """Of what members had learnt when the iteration ended: they train on."""
    BETWEEN = "between"
    """Of what groups of members have come to: it travels as it is."""


@dataclass(frozen=True, slots=True)
class _OfAverage(BaseJob):
    """What the jobs of all kinds of averages say of themselves."""

    kind: AverageKind = field(default=AverageKind.NOW, kw_only=True)

    @property
    @override
    def scope(self) -> JobScope:  # type: ignore[override]  # Of all others, the class decides.
        """What makes the job stale."""
        ahead = self.kind is AverageKind.AHEAD
        return JobScope.STATE if ahead else JobScope.AVERAGING

    @property
    @override
    def name(self) -> str:
        """How people and logs call the job."""
        named = type(self).__name__
        return named if self.kind is AverageKind.NOW else f"{named}{self.kind.name.title()}"


@dataclass(frozen=True, slots=True)
class Gather(_OfAverage):
    """Outputs this node's contribution in `num_parts` parts, in the wire's format.

    In the second phase of a compressed average, the inputs are all means of the first.
    """

    iteration: Positive
    """Which ends with the average."""
    num_parts: int
    """0: this node contributes nothing. Its device only begins the average."""
    phase: int = 0
    spec: AverageSpec = WHOLE
    """Of the average."""


@dataclass(frozen=True, slots=True)
class Reduce(_OfAverage):
    """Sum one part over members (inputs in roster order), divided by their weight together.

    Outputs the average.
    """

    result = Squared

    part: int
    num_parts: Positive
    weights: tuple[int, ...]
    """Of the inputs."""
    phase: int = 0
    spec: AverageSpec = WHOLE
    """Of the average."""
    lenient: bool = False
    """Leave out inputs that are not what they should be, instead of failing."""


@dataclass(frozen=True, slots=True)
class Decode(BaseJob):
    """Outputs the whole average, from the means of all phases (inputs), in order. The hash that
    comes back is of the output."""

    scope = JobScope.AVERAGING
    result = Proposed

    iteration: Positive
    spec: AverageSpec = WHOLE
    """Of the average."""
    between: bool = False
    """The average is of what groups have come to."""
    scale: Positive = 1
    """By which the output is multiplied: the weight of a group, for a sum over its members."""


@dataclass(frozen=True, slots=True)
class Use(BaseJob):
    """An average that was decoded counts: keep what it lacks of this node's contribution."""

    scope = JobScope.STATE

    num_parts: Positive
    """Of a phase."""
    spec: AverageSpec = WHOLE
    """Of the average."""
    missed: tuple[int, ...] = ()
    """Parts of all phases that lack this node's contribution."""


@dataclass(frozen=True, slots=True)
class Square(BaseJob):
    """Square this node's own sum over `weights_total`: it is alone in its stage."""

    scope = JobScope.AVERAGING
    result = Squared

    iteration: Positive
    weights_total: Positive


@dataclass(frozen=True, slots=True)
class Propose(BaseJob):
    """Take the optimizer's step, undoably, from the reduced parts (inputs).

    Without inputs the node is alone in its stage and uses its own sum over `weights_total`.
    """

    scope = JobScope.AVERAGING
    result = Proposed

    iteration: Positive
    num_parts: int
    weights_total: int
    gradient_norm: Magnitude = 0.0
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
    num_targets: int = 0
    """Tokens of the batch that are learnt, over which the step's gradient is the mean. 0: all its
    positions."""
    ends_phase: bool = True
    """Where members step by themselves: whether their local phase ends. If not, only an average
    counts that has travelled, and what they have learnt since goes into the next."""

    def share(self, num_positions: int) -> float:
        """Return which part of the batch's positions have a target.

        Args:
            num_positions: Of a microbatch.
        """
        num_all = num_positions * self.weights_total
        return self.num_targets / num_all if self.num_targets and num_all else 1.0


@dataclass(frozen=True, slots=True)
class StepAhead(BaseJob):
    """Compute the parameters after an iteration from the average before it, beside the committed
    state: where steps are late, they are known when the iteration begins."""

    iteration: Positive


@dataclass(frozen=True, slots=True)
class StepLocally(BaseJob):
    """End an iteration without an average, undoably, as the update rule says.

    The hash is of what all members of the stage have in common.
    """

    scope = JobScope.AVERAGING
    result = Proposed

    iteration: Positive


@dataclass(frozen=True, slots=True)
class SketchPart(BaseJob):
    """Sketch contributions to a part of the average, or its mean (inputs)."""

    scope = JobScope.AVERAGING
    result = Sketched

    part: int
    num_parts: Positive
    seed: Seed
    """Of the sketches."""
    is_mean: bool = False


@dataclass(frozen=True, slots=True)
class ReplayPasses(BaseJob):
    """Repeat a member's passes of one microbatch, and compare what it has made of them.

    The first inputs are the activation and the gradient that it got. Then comes what it has sent:
    the activation, the gradient, both, or neither.
    """

    scope = JobScope.AVERAGING
    result = Replayed

    microbatch: MicrobatchId
    with_activation: bool
    """The activation that it has sent on is an input."""
    with_gradient: bool
    """The gradient that it has sent back is an input."""
    num_parts: Positive
    """Of the average. The gradient of the parameters is sketched part by part."""
    seed: Seed
    """Of these sketches."""
    beside: bool = False
    """With the stage that `StandIn` has built."""


@dataclass(frozen=True, slots=True)
class StandIn(BaseJob):
    """Build another stage beside the own, from a blob of its parameters (input 0), for replays. It
    lasts until the iteration ends, or another is built."""

    scope = JobScope.AVERAGING
    result = Built

    stage_index: int
    iteration: int
    manifest: str
    """As in `Load`."""
    with_optimizer: bool
    """The blob holds the optimizer's state, too."""
    cut: StageBlocks = ()
    """How the model is cut, as in `Build`."""


@dataclass(frozen=True, slots=True)
class CommitStep(BaseJob):
    """Make the proposed step final."""

    scope = JobScope.STATE

    iteration: Positive


@dataclass(frozen=True, slots=True)
class ReturnToAnchor(BaseJob):
    """Give up what this node has learnt by itself: it holds what its stage has in common."""

    scope = JobScope.STATE


@dataclass(frozen=True, slots=True)
class Snapshot(BaseJob):
    """Copy the last committed state into one blob (output 0), described by a manifest."""

    scope = JobScope.STATE
    result = SnapshotTaken

    with_optimizer: bool
    ahead: bool = False
    """Of the iteration in hand, instead: its `StepAhead` has been done."""


@dataclass(frozen=True, slots=True)
class Load(BaseJob):
    """Replace parameters and optimizer state by verified blobs (inputs), which together hold the
    stage."""

    scope = JobScope.STATE
    result = Built

    iteration: int
    manifests: tuple[str, ...]
    """What the donors said of each blob, as JSON; the compute process checks every hash."""


@dataclass(frozen=True, slots=True)
class Mix(BaseJob):
    """Replace parameters by the mean of two other stages', block by block, or by a copy of one's
    (inputs 0 and 1); the optimizer begins anew.

    Source: CheckFree (arXiv:2506.15461). Deviation: the two weigh the same.
    """

    scope = JobScope.STATE
    result = Built

    iteration: int
    stages: tuple[int, ...]
    """Of the inputs."""
    manifests: tuple[str, ...]
    """Of the inputs, as in `Load`."""


@dataclass(frozen=True, slots=True)
class Measure(BaseJob):
    """Time the passes of a microbatch that is made up; leaves no trace."""

    result = Measured


@dataclass(frozen=True, slots=True)
class DecideFlows(BaseJob):
    """Choose the flows of a settlement.

    It outlives its iteration. Its owner drops a result for which it no longer waits.
    """

    scope = JobScope.STATE
    beside_device = True
    result = FlowsDecided

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
    | Reduce
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


# --- what a daemon itself asks, beside the core ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Configured:
    """The process is ready for other jobs."""

    facts: dict[str, Any]
    """Of the device and of torch, for the daemon."""


@dataclass(frozen=True, slots=True)
class Configure(BaseJob):
    """The first job of each process: it describes the run and the device."""

    result = Configured

    settings: dict[str, Any]
    """See `decod.worker.configure`, which checks them."""


@dataclass(frozen=True, slots=True)
class DoNothing(BaseJob):
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class SetThreads(BaseJob):
    """Compute with so many threads from now on."""

    num_threads: Positive | None
    """None: as many as torch takes by itself."""


@dataclass(frozen=True, slots=True)
class SetRecompute(BaseJob):
    """Recompute forward passes, or not, in the stages that are built from now on."""

    recompute: bool


@dataclass(frozen=True, slots=True)
class SpreadStage(BaseJob):
    """Spread the stages that are built from now on over the devices, or copy them."""

    sharded: bool


@dataclass(frozen=True, slots=True)
class GiveBlock(BaseJob):
    """Take in a block of the data (input 0) whose file on this host is damaged."""

    shard_index: int
    offset: int


@dataclass(frozen=True, slots=True)
class Guide(BaseJob):
    """Of an averaging process: start low-rank factors from the newest average (input 0), or from
    none."""
