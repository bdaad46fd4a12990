"""The sizes of what the core's jobs output."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from decod.compression.fragments import StagePlans
from decod.planner.partition import part_sizes
from decod.protocol.core import jobs
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.jobs import AverageKind, BaseJob

_PADDING_BYTES = 4096
"""Of blocks that are filled up."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes from which those of the jobs' outputs follow."""

    activation_bytes: int
    wire_element_bytes: int
    """Bytes of one gradient element on its way between members."""
    sum_element_bytes: int
    """Bytes of one element of an averaged gradient: float32, or float64 for models in float64."""
    num_parameters: int = 0
    """Parameters of this node's stage; 0 until it is built."""
    plans: StagePlans | None = None
    """How averages of this node's stage travel. None: it is not built."""
    of_stages: Mapping[int, StagePlans] = field(default_factory=dict)
    """How averages of every stage travel."""
    parameters_copy_bytes: int = 0
    """Of a copy of the stage's parameters, without the optimizer's state. 0 until one was made."""

    def of_stage(self, stage_index: int, num_parameters: int) -> "Sizes":
        """Return the sizes for a node that has built a stage."""
        plans = self.of_stages.get(stage_index)
        return replace(self, num_parameters=num_parameters, plans=plans, parameters_copy_bytes=0)

    def part_bytes(self, phase: int, num_parts: int, spec: AverageSpec) -> tuple[int, ...]:
        """Return the sizes of a contribution's parts on their way, in bytes."""
        return self._part_bytes(phase, num_parts, spec, self.wire_element_bytes)

    def mean_bytes(self, phase: int, num_parts: int, spec: AverageSpec) -> tuple[int, ...]:
        """Return the sizes of an average's parts, in bytes."""
        return self._part_bytes(phase, num_parts, spec, self.sum_element_bytes)

    def _part_bytes(
        self, phase: int, num_parts: int, spec: AverageSpec, element_bytes: int
    ) -> tuple[int, ...]:
        if not num_parts:
            return ()
        num_elements = self.num_parameters
        if self.plans is not None:
            if plan := self.plans.plan(spec.fragment, spec.rank, spec.bits):
                return tuple(plan.part_bytes(phase, num_parts))
            num_elements = self.plans.fragments[spec.fragment].num_elements
        return tuple(n * element_bytes for n in part_sizes(num_elements, num_parts))

    @property
    def as_they_are(self) -> "Sizes":
        """The sizes of averages whose numbers travel as they are."""
        return replace(self, plans=None, wire_element_bytes=self.sum_element_bytes)

    @property
    def part_bytes_max(self) -> int:
        """The most that a part from another node may have. No format makes a large part longer."""
        return self.num_parameters * self.sum_element_bytes + _PADDING_BYTES


def output_bytes(job: BaseJob, sizes: Sizes) -> tuple[int, ...]:
    """Return the sizes of a job's outputs."""
    match job:
        case jobs.Embed() | jobs.Forward() | jobs.Head() | jobs.Backward():
            return (sizes.activation_bytes,)
        case jobs.Gather(num_parts=num_parts, phase=phase, spec=spec):
            return _travelling(job, sizes).part_bytes(phase, num_parts, spec)
        case jobs.Reduce(part=part, num_parts=num_parts, phase=phase, spec=spec):
            return (_travelling(job, sizes).mean_bytes(phase, num_parts, spec)[part],)
        case jobs.Decode():
            return (sizes.num_parameters * sizes.sum_element_bytes,)
        case jobs.Snapshot(with_optimizer=False) if sizes.parameters_copy_bytes:
            return (sizes.parameters_copy_bytes,)
        case _:
            return ()


def _travelling(job: jobs.Gather | jobs.Reduce, sizes: Sizes) -> Sizes:
    return sizes.as_they_are if job.kind is AverageKind.BETWEEN else sizes
