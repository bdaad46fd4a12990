"""Translation of the core's jobs into requests to other processes, and of their replies."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from decod.ids import MicrobatchId
from decod.planner.deciding import decided_of, fields_of
from decod.planner.partition import part_sizes
from decod.protocol.core import jobs
from decod.protocol.core.average_spec import AverageSpec
from decod.train.checkpoint.description import description_text
from decod.train.compression.fragments import StagePlans

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


@dataclass(frozen=True, slots=True)
class Request:
    """One job in the form that the compute or planning process takes."""

    kind: str
    fields: dict[str, Any]
    output_bytes: tuple[int, ...] = ()


def _microbatch(microbatch: MicrobatchId) -> dict[str, Any]:
    return {
        "mb": {
            "iteration": microbatch.iteration,
            "data_node_index": microbatch.data_node_index,
            "index": microbatch.index,
        }
    }


_PLAIN: Mapping[type[jobs.Job], str] = {
    jobs.Reset: "reset",
    jobs.Retract: "retract",
    jobs.ReturnToAnchor: "return_to_anchor",
}
"""Jobs without fields."""


def request_of(job: jobs.Job, sizes: Sizes) -> Request:  # noqa: C901 - one line a job.
    """Return the request for `job`."""
    activation = (sizes.activation_bytes,)
    match job:
        case jobs.Build(stage_index):
            return Request("build", {"stage_index": stage_index})
        case jobs.Embed(m):
            return Request("embed", _microbatch(m), activation)
        case jobs.Forward(m):
            return Request("forward", _microbatch(m), activation)
        case jobs.Head(m):
            return Request("head", _microbatch(m), activation)
        case jobs.Backward(m):
            return Request("backward", _microbatch(m), activation)
        case jobs.EmbedBackward(m):
            return Request("embed_backward", _microbatch(m))
        case jobs.Inspect(m):
            return Request("inspect", _microbatch(m))
        case jobs.Drop(m):
            return Request("drop", _microbatch(m))
        case jobs.Reset() | jobs.Retract() | jobs.ReturnToAnchor():
            return Request(_PLAIN[type(job)], {})
        case jobs.Gather() | jobs.Reduce() | jobs.Decode() | jobs.Use():
            return _of_average(job, sizes)
        case jobs.Square(iteration, weights_total):
            return Request("square", {"iteration": iteration, "weights_total": weights_total})
        case jobs.Propose():
            return Request("propose", asdict(job))
        case jobs.StepAhead(iteration):
            return Request("step_ahead", {"iteration": iteration})
        case jobs.StepLocally(iteration):
            return Request("step_locally", {"iteration": iteration})
        case jobs.SketchPart(seed=seed):
            return Request("sketch_part", {**asdict(job), "seed": seed.hex()})
        case jobs.ReplayPasses(m):
            compared = [job.with_activation, job.with_gradient]
            of_parts = {"num_parts": job.num_parts, "seed": job.seed.hex(), "beside": job.beside}
            return Request("replay", {**_microbatch(m), "compared": compared, **of_parts})
        case jobs.StandIn(stage_index, iteration, manifest):
            tensors = json.loads(manifest)["tensors"]
            of = {"iteration": iteration, "whole": job.with_optimizer}
            return Request("stand_in", {"stage_index": stage_index, "tensors": tensors, **of})
        case jobs.CommitStep(iteration):
            return Request("commit", {"iteration": iteration})
        case jobs.Snapshot(with_optimizer):
            known = 0 if with_optimizer else sizes.parameters_copy_bytes
            return Request("snapshot", asdict(job), (known,) if known else ())
        case jobs.Load(iteration, manifest):
            tensors = json.loads(manifest)["tensors"]
            return Request("load", {"iteration": iteration, "tensors": tensors})
        case jobs.Mix(iteration, stages, manifests):
            described = [json.loads(manifest)["tensors"] for manifest in manifests]
            return Request(
                "mix", {"iteration": iteration, "stages": [*stages], "tensors": described}
            )
        case jobs.Measure():
            return Request("measure", {"num_repeats": 1})
        case jobs.DecideFlows(unsettled):
            return Request("decide_flows", fields_of(unsettled))


def _of_average(job: jobs.Gather | jobs.Reduce | jobs.Decode | jobs.Use, sizes: Sizes) -> Request:
    """Return the request for a job of an average."""
    between = isinstance(job, jobs.GatherBetween | jobs.ReduceBetween)
    travelling = sizes.as_they_are if between else sizes
    match job:
        case jobs.Gather(num_parts=num_parts, phase=phase, spec=spec):
            ahead = isinstance(job, jobs.GatherAhead)
            named = {**asdict(job), "ahead": ahead, "between": between, "weight": num_parts}
            return Request("gather", named, travelling.part_bytes(phase, num_parts, spec))
        case jobs.Reduce(part, num_parts, phase=phase, spec=spec):
            named = {**asdict(job), "ahead": isinstance(job, jobs.ReduceAhead), "between": between}
            num_bytes = travelling.mean_bytes(phase, num_parts, spec)[part]
            return Request("reduce_part", named, (num_bytes,))
        case jobs.Decode():
            num_bytes = sizes.num_parameters * sizes.sum_element_bytes
            return Request("average", asdict(job), (num_bytes,))
        case jobs.Use():
            return Request("used", asdict(job))


def manifest_of(result: dict[str, Any]) -> str:
    """Return the description of a state that the compute process has copied."""
    return description_text(result["tensors"], result["chunks"])


def result_of(  # noqa: C901 - one line a job.
    job: jobs.Job, result: dict[str, Any]
) -> jobs.JobResult:
    """Return the result of `job` in the core's form."""
    match job:
        case jobs.Build() | jobs.Load() | jobs.Mix() | jobs.StandIn():
            return jobs.Built(result["hash"])
        case jobs.Head():
            return jobs.Loss(result["loss"], result["num_tokens"])
        case jobs.Reduce():
            refused = tuple(result["refused"])
            odd = tuple(result["standing_out"])
            return jobs.Squared(result["square_sum"], refused, result["reason"], odd)
        case jobs.Square():
            return jobs.Squared(result["square_sum"])
        case jobs.Propose():
            odd = tuple(result["standing_out"])
            return jobs.Proposed(result["hash"], result["effective_rank"], odd)
        case jobs.StepLocally() | jobs.Decode():
            return jobs.Proposed(result["hash"])
        case jobs.SketchPart():
            return jobs.Sketched(tuple(bytes.fromhex(each) for each in result["sketches"]))
        case jobs.ReplayPasses():
            sketches = tuple(bytes.fromhex(sketch) for sketch in result["sketches"])
            on, back = result["errors"]
            return jobs.Replayed(on, back, sketches)
        case jobs.Snapshot():
            return jobs.SnapshotTaken(result["iteration"], manifest_of(result))
        case jobs.Measure():
            return jobs.Measured(result["forward_s"], result["backward_s"])
        case jobs.DecideFlows():
            return jobs.FlowsDecided(decided_of(result["flows"]))
        case _:
            return jobs.Nothing()
