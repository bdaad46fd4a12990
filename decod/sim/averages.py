"""What averages of a simulated stage hold: the contents of their parts, and checks of them.

A part of the simulated compute process (`decod.sim.simulated_compute`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from decod.ids import MicrobatchId
from decod.limits import StageBlocks
from decod.protocol.core import jobs
from decod.protocol.core.average_spec import WHOLE, AverageSpec
from decod.protocol.core.era import StagePart
from decod.protocol.core.jobs import Snapshot


@dataclass(frozen=True, slots=True)
class SimulatedState:
    """Parameters and optimizer state of a stage."""

    stage_index: int
    iteration: int
    parameter_hash: str
    with_optimizer: bool = True
    """The whole state, and not only the parameters."""
    weights: str = ""
    pending: str = ""
    """Of a whole state where steps are late: the parameters, and what the next step comes from."""
    cut: StageBlocks = ()
    """The cut that the stage is of."""
    part: StagePart | None = None
    """It is no more than this of the stage."""


def manifest_of(blob: SimulatedState) -> str:
    """Return the description of a state, as JSON."""
    return json.dumps(
        {
            "stage_index": blob.stage_index,
            "iteration": blob.iteration,
            "parameter_hash": blob.parameter_hash,
            "with_optimizer": blob.with_optimizer,
            "weights": blob.weights,
            "pending": blob.pending,
            "blocks": blob.cut,
            "part": None if blob.part is None else [blob.part.cut, blob.part.stage_index],
        }
    )


Counts = tuple[tuple[MicrobatchId, int], ...]
"""A multiset of microbatches in canonical order."""


class MisuseError(AssertionError):
    """The core gave a job that makes no sense at this point. This is a bug in the core."""


@dataclass(frozen=True, slots=True)
class GradientPart:
    """One part of a node's own sum of gradients."""

    part: int
    num_parts: int
    counts: Counts
    phase: int = 0
    spec: AverageSpec = WHOLE
    source: int = 0
    """The node's device."""
    false: bool = field(default=False, compare=False)
    """The host lies: the part is not the sum of its gradients."""


@dataclass(frozen=True, slots=True)
class AveragedPart:
    """One part of the average over the roster."""

    part: int
    num_parts: int
    counts: Counts
    weights_total: int
    phase: int = 0
    spec: AverageSpec = WHOLE
    sources: frozenset[int] = frozenset()
    """The devices whose sums are in it."""
    told: float = field(default=0.0, compare=False)
    """What the part's sketch says; see `decod.sim.audited_work`."""


def canonical(sums: Counter[MicrobatchId]) -> Counts:
    """Return a multiset in canonical order: equal multisets give equal tuples."""
    return tuple(sorted(sums.items()))


def num_in(counts: Counts) -> int:
    """Return the number of microbatches in a multiset."""
    return sum(num for _, num in counts)


def most_of(parts: Sequence[Counts]) -> Counts:
    """Return what is in any of some parts."""
    found = Counter[MicrobatchId]()
    for counts in parts:
        found |= Counter(dict(counts))
    return canonical(found)


def reduced(job: jobs.Reduce, inputs: Sequence[object]) -> AveragedPart:
    """Return the average of one part."""
    total = Counter[MicrobatchId]()
    weights = list[int]()
    sources = set[int]()
    expected = (job.part, job.num_parts, job.phase, job.spec)
    for content in inputs:
        if (
            not isinstance(content, GradientPart)
            or (content.part, content.num_parts, content.phase, content.spec) != expected
        ):
            raise MisuseError(f"{job} on {content}")
        total.update(dict(content.counts))
        weights.append(num_in(content.counts))
        sources.add(content.source)
    if job.lenient and weights != [*job.weights]:
        raise MisuseError(f"{job}: the weights are not those of {inputs}")
    if sum(job.weights) < 1:
        raise MisuseError(f"{job}: nothing to divide by")
    weight = sum(job.weights)
    held = frozenset(sources)
    counts = canonical(total)
    return AveragedPart(job.part, job.num_parts, counts, weight, job.phase, job.spec, held)


def parts_of(
    job: jobs.Propose, inputs: Sequence[object], spec: AverageSpec, total: int | None
) -> list[AveragedPart]:
    """Return the parts of one average, of all phases, in order.

    Args:
        job: The step.
        inputs: The parts.
        spec: What the average is of.
        total: The weight that they must have been divided by. None: that of all microbatches.
    """
    if total is not None and len(inputs) != job.num_parts:
        raise MisuseError(f"{job} with {len(inputs)} parts")
    found = [content for content in inputs if isinstance(content, AveragedPart)]
    num_phases = 1 + max((part.phase for part in found), default=0)
    num_parts = len(inputs) // num_phases
    for index, content in enumerate(inputs):
        phase, part = divmod(index, num_parts)
        if (
            not isinstance(content, AveragedPart)
            or (content.phase, content.part, content.num_parts) != (phase, part, num_parts)
            or content.weights_total != (num_in(content.counts) if total is None else total)
            or content.spec != spec
        ):
            raise MisuseError(f"{job} with {content} as part {part}")
    return found


def agreed_counts(job: jobs.Propose, parts: Sequence[AveragedPart]) -> Counts:
    """Return what all parts of an average hold."""
    if any(part.counts != parts[0].counts for part in parts):
        raise MisuseError(f"{job}: parts hold different microbatches")
    return parts[0].counts


def check_missed(
    job: jobs.Propose, parts: Sequence[AveragedPart], sent: Counts, source: int
) -> None:
    """Refuse a step that is wrong about the parts that lack this node's contribution.

    Others may have contributed the same microbatches, if they are trained on again.
    """
    for index, part in enumerate(parts):
        there = source in part.sources
        if sent and there == (index in job.missed):
            holds = "holds" if there else "lacks"
            raise MisuseError(f"{job}: part {index} {holds} what this node has sent")
        if there and Counter(dict(sent)) - Counter(dict(part.counts)):
            raise MisuseError(f"{job}: part {index} holds something else of this node")


def check_means(job: jobs.Gather, inputs: Sequence[object]) -> None:
    """Refuse to begin a phase without all means of the one before."""
    for part, content in enumerate(inputs):
        if (
            not isinstance(content, AveragedPart)
            or (content.phase, content.part) != (job.phase - 1, part)
            or (content.num_parts, content.spec) != (len(inputs), job.spec)
        ):
            raise MisuseError(f"{job} with {content} as mean {part}")
    if not inputs or job.num_parts not in (0, len(inputs)):
        raise MisuseError(f"{job} with {len(inputs)} means")


@dataclass(slots=True)
class LateSteps:
    """What a device holds after its last commit. The joint hash of it is voted on."""

    weights: str = ""
    """Hash of the parameters."""
    pending: str = ""
    """Hash of the average that the next step comes from. Empty: of none."""
    ahead: int = 0
    """The iteration whose step is known beforehand. 0: of none."""

    def begin(self, weights: str, pending: str = "") -> None:
        """Hold something else from now on."""
        self.weights = weights
        self.pending = pending
        self.ahead = 0

    @property
    def next_weights(self) -> str:
        """Hash of the parameters after the next iteration."""
        if not self.pending:
            return self.weights
        return hashlib.sha256(f"{self.weights} {self.pending}".encode()).hexdigest()

    def snapshot(self, job: Snapshot, blob: SimulatedState) -> SimulatedState:
        """Return what a job copies.

        Args:
            job: The job.
            blob: What it would copy if steps were not late.

        Raises:
            MisuseError: Nothing is known beforehand.
        """
        if job.ahead and self.ahead != blob.iteration + 1:
            raise MisuseError(f"{job} when {blob.iteration} iterations are committed")
        if job.ahead:
            return replace(blob, iteration=blob.iteration + 1, parameter_hash=self.next_weights)
        if not job.with_optimizer:
            return replace(blob, parameter_hash=self.weights)
        return replace(blob, weights=self.weights, pending=self.pending)
