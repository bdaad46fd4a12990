"""How long jobs take on a simulated device, and how large their tensors are."""

from dataclasses import dataclass, field
from functools import lru_cache

from decod.compression.plan import Plan
from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.jobs import Job
from decod.sim.averages import AveragedPart, GradientPart
from decod.sim.blobs import SimulatedState


@dataclass(frozen=True, slots=True)
class Activation:
    microbatch: MicrobatchId
    stage_index: int
    """The stage that computed it."""
    false: bool = field(default=False, compare=False)
    """Its host lies: it is not what the stage makes of what came."""
    made: int = field(default=0, compare=False, repr=False)
    """Which computation it comes from. Of two, the bits differ."""


@dataclass(frozen=True, slots=True)
class Gradient:
    microbatch: MicrobatchId
    stage_index: int
    """The stage that computed it; the head counts as the stage after the last."""
    false: bool = field(default=False, compare=False)
    """As of an activation."""
    made: int = field(default=0, compare=False, repr=False)
    """As of an activation."""


Content = Activation | Gradient | GradientPart | AveragedPart | SimulatedState


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProfile:
    """How long jobs take on a host of speed 1, and how large their tensors are."""

    forward_s: float = 0.1
    """A relay's forward pass of one microbatch."""
    backward_ratio: float = 2.0
    """Backward time over forward time, for a relay's blocks and for the embedding."""
    embed_s: float = 0.01
    head_s: float = 0.03
    """Final norm, head and loss, including their backward pass."""
    optimizer_s: float = 0.1
    """One optimizer step. Building, copying or loading a stage's state takes as long."""
    reduce_s: float = 0.01
    """Summing one part over a roster, or cutting a sum into parts."""
    decide_s: float = 0.2
    """Choosing flows, in the planning process, whatever the device's speed."""
    decide_failure_ratio: float = 0.0
    """Share of choices in which the planning process dies."""
    jitter_ratio: float = 0.05
    """Largest deviation of a job's time, as a share of it."""
    activation_bytes: int = 1_000_000
    parameter_bytes: int = 4_000_000
    """Size of a stage's gradients. Its parameters with optimizer state take three times as much."""
    plan: Plan | None = field(default=None, repr=False)
    """What averages send in each phase. None: `parameter_bytes`."""

    def seconds(self, job: Job) -> float:
        """Return the time of a job on a host of speed 1, in seconds."""
        match job:
            case jobs.Forward():
                return self.forward_s
            case jobs.Backward():
                return self.backward_ratio * self.forward_s
            case jobs.Measure() | jobs.ReplayPasses():
                return (1 + self.backward_ratio) * self.forward_s
            case jobs.Embed():
                return self.embed_s
            case jobs.EmbedBackward():
                return self.backward_ratio * self.embed_s
            case jobs.Head():
                return self.head_s
            case jobs.Gather() | jobs.Reduce() | jobs.Square():
                return self.reduce_s
            case (
                jobs.Build()
                | jobs.Propose()
                | jobs.StepAhead()
                | jobs.Snapshot()
                | jobs.Load()
                | jobs.Mix()
                | jobs.StandIn()
            ):
                return self.optimizer_s
            case jobs.DecideFlows():
                return self.decide_s
            case _:
                return 0.0  # It keeps or forgets what is there.

    def pass_s(self, *, data: bool) -> float:
        """Return c_i of GWTF's equation (1), in seconds: the mean time of a pass.

        For a data node this includes the head.
        """
        both = 1 + self.backward_ratio
        return (both * self.embed_s + self.head_s if data else both * self.forward_s) / 2

    def num_bytes(self, content: Content) -> int:
        """Return the size in bytes of a tensor with this content."""
        match content:
            case Activation() | Gradient():
                return self.activation_bytes
            case GradientPart() | AveragedPart() if self.plan is not None:
                return _part_bytes(self.plan, content.phase, content.num_parts)[content.part]
            case GradientPart(num_parts=num_parts) | AveragedPart(num_parts=num_parts):
                return -(-self.parameter_bytes // num_parts)
            case SimulatedState(with_optimizer=whole):
                return (3 if whole else 1) * self.parameter_bytes


@lru_cache(maxsize=256)
def _part_bytes(plan: Plan, phase: int, num_parts: int) -> list[int]:
    return plan.part_bytes(phase, num_parts)
