"""What the core asks of its host's compute process, and what comes back. Tensors are ids here."""

from dataclasses import dataclass

from decod.ids import MicrobatchId


@dataclass(frozen=True, slots=True)
class Build:
    """Make the module and optimizer of a stage from the run's seed. -> `Built`."""

    stage_index: int


@dataclass(frozen=True, slots=True)
class Embed:
    """Stage 0: read the microbatch's tokens and run the embedding. Outputs the activation."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Forward:
    """Relay: run the blocks on the activation (input 0). Outputs the activation."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Head:
    """Stage 0: loss of the last activation (input 0), and its gradient (output 0). -> `Loss`."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Backward:
    """Relay: run backward from the gradient of the output (input 0) to that of the input."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class EmbedBackward:
    """Stage 0: end the backward pass. No output."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget what is held for one microbatch; nothing of it has been accumulated."""

    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all microbatches and gradients, and undo a proposed step: the round is repeated."""


@dataclass(frozen=True, slots=True)
class Retract:
    """Undo a proposed step, and nothing else: the reduction is repeated with another roster."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Outputs the sum of gradients in `num_parts` parts, in the wire's format."""

    num_parts: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum one part over members (inputs in roster order), divided by the total weight.

    Outputs the average. -> `Squared`.
    """

    part: int
    num_parts: int
    weights_total: int


@dataclass(frozen=True, slots=True)
class Square:
    """Square this node's own sum over `weights_total`: it is alone in its stage. -> `Squared`."""

    weights_total: int


@dataclass(frozen=True, slots=True)
class Propose:
    """Take the optimizer's step, undoably, from the reduced parts (inputs). -> `Proposed`.

    Without inputs the node is alone in its stage and uses its own sum over `weights_total`.
    """

    iteration: int
    num_parts: int
    weights_total: int
    gradient_norm: float = 0.0
    """Of the whole model's gradient, where that is clipped."""


@dataclass(frozen=True, slots=True)
class CommitStep:
    """Make the proposed step final."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the last committed state into one blob (output 0), described by a manifest."""

    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Replace parameters and optimizer state by a verified blob (input 0). -> `Built`."""

    iteration: int
    manifest: str
    """What the donor said of the blob, as JSON; the compute process checks every hash."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Replace parameters by the mean of two other stages', block by block, or by a copy of one's
    (inputs 0 and 1); the optimizer begins anew. -> `Built`.

    Source: CheckFree (arXiv:2506.15461). Deviation: the two weigh the same.
    """

    iteration: int
    stages: tuple[int, ...]
    """Of the inputs."""
    manifests: tuple[str, ...]
    """Of the inputs, as in `Load`."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Time the passes of a microbatch that is made up; leaves no trace. -> `Measured`."""


Job = (
    Build
    | Embed
    | Forward
    | Head
    | Backward
    | EmbedBackward
    | Drop
    | Reset
    | Retract
    | Gather
    | Reduce
    | Square
    | Propose
    | CommitStep
    | Snapshot
    | Load
    | Mix
    | Measure
)

BACKWARD_JOBS = (Backward, Head, EmbedBackward)
"""Jobs that free memory: they go before forwards, so that a node drains before it fills."""

MICROBATCH_JOBS = (Embed, Forward, Head, Backward, EmbedBackward)
"""Passes of one microbatch."""

REDUCTION_JOBS = (Gather, Reduce, Square, Propose)
"""Jobs of one reduction: another roster makes them stale."""


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


@dataclass(frozen=True, slots=True)
class Proposed:
    """What the parameters would be after the step."""

    parameter_hash: str


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


JobResult = Nothing | Built | Loss | Squared | Proposed | SnapshotTaken | Measured
