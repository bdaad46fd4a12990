"""Translation of the core's jobs into requests to other processes, and of their replies."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from decod.ids import MicrobatchId
from decod.planner.deciding import decided_of, fields_of
from decod.planner.partition import part_sizes
from decod.protocol.core import jobs
from decod.train.checkpoint.description import description_text
from decod.train.compression.plan import Plan


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
    plan: Plan | None = None
    """How averages of this node's stage are compressed. None: they are not, or it is not built."""
    plans: Mapping[int, Plan] = field(default_factory=dict)
    """Of every stage, if averages are compressed."""

    def of_stage(self, stage_index: int, num_parameters: int) -> "Sizes":
        """Return the sizes for a node that has built a stage."""
        plan = self.plans.get(stage_index)
        return replace(self, num_parameters=num_parameters, plan=plan)

    def part_bytes(self, phase: int, num_parts: int) -> tuple[int, ...]:
        """Return the sizes of a contribution's parts on their way, in bytes."""
        return self._part_bytes(phase, num_parts, self.wire_element_bytes)

    def mean_bytes(self, phase: int, num_parts: int) -> tuple[int, ...]:
        """Return the sizes of an average's parts, in bytes."""
        return self._part_bytes(phase, num_parts, self.sum_element_bytes)

    def _part_bytes(self, phase: int, num_parts: int, element_bytes: int) -> tuple[int, ...]:
        if not num_parts:
            return ()
        if self.plan is not None:
            return tuple(self.plan.part_bytes(phase, num_parts))
        return tuple(n * element_bytes for n in part_sizes(self.num_parameters, num_parts))

    @property
    def part_bytes_max(self) -> int:
        """The largest part that another node may send."""
        phases = range(len(self.plan.phases)) if self.plan is not None else (0,)
        return max(max(*self.part_bytes(k, 1), *self.mean_bytes(k, 1)) for k in phases)


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
        case jobs.Drop(m):
            return Request("drop", _microbatch(m))
        case jobs.Reset() | jobs.Retract() | jobs.ReturnToAnchor():
            return Request(_PLAIN[type(job)], {})
        case jobs.Gather(iteration, num_parts, phase):
            named = {
                "iteration": iteration,
                "num_parts": num_parts,
                "phase": phase,
                "ahead": isinstance(job, jobs.GatherAhead),
            }
            return Request("gather", named, sizes.part_bytes(phase, num_parts))
        case jobs.Reduce(part, num_parts, weights_total, phase):
            named = {
                "part": part,
                "num_parts": num_parts,
                "weights_total": weights_total,
                "phase": phase,
                "ahead": isinstance(job, jobs.ReduceAhead),
            }
            return Request("reduce_part", named, (sizes.mean_bytes(phase, num_parts)[part],))
        case jobs.Square(iteration, weights_total):
            return Request("square", {"iteration": iteration, "weights_total": weights_total})
        case jobs.Propose(iteration, num_parts, weights_total, gradient_norm, num_ahead):
            return Request(
                "propose",
                {
                    "iteration": iteration,
                    "num_parts": num_parts,
                    "weights_total": weights_total,
                    "gradient_norm": gradient_norm,
                    "num_ahead": num_ahead,
                },
            )
        case jobs.StepLocally(iteration):
            return Request("step_locally", {"iteration": iteration})
        case jobs.CommitStep(iteration):
            return Request("commit", {"iteration": iteration})
        case jobs.Snapshot(with_optimizer):
            return Request("snapshot", {"with_optimizer": with_optimizer})
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


def manifest_of(result: dict[str, Any]) -> str:
    """Return the description of a state that the compute process has copied."""
    return description_text(result["tensors"], result["chunks"])


def result_of(job: jobs.Job, result: dict[str, Any]) -> jobs.JobResult:
    """Return the result of `job` in the core's form."""
    match job:
        case jobs.Build() | jobs.Load() | jobs.Mix():
            return jobs.Built(result["hash"])
        case jobs.Head():
            return jobs.Loss(result["loss"], result["num_tokens"])
        case jobs.Reduce() | jobs.Square():
            return jobs.Squared(result["square_sum"])
        case jobs.Propose() | jobs.StepLocally():
            return jobs.Proposed(result["hash"])
        case jobs.Snapshot():
            return jobs.SnapshotTaken(result["iteration"], manifest_of(result))
        case jobs.Measure():
            return jobs.Measured(result["forward_s"], result["backward_s"])
        case jobs.DecideFlows():
            return jobs.FlowsDecided(decided_of(result["flows"]))
        case _:
            return jobs.Nothing()
