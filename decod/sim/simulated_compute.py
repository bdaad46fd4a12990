"""A simulated compute process: every job of the core, on symbolic tensors.

The content of a real tensor shows only in its numbers; a symbolic tensor names its content. An
activation names its microbatch and the stage that computed it. A sum of gradients is the multiset
of its microbatches. Parameters are a hash over everything that was ever folded into them. "Each
microbatch exactly once, the same at every stage" (I2) and "bit-identical parameters" (I3) can
therefore be checked exactly. A wrong job, which real arithmetic would run without notice, is
refused with a message.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from decod.ids import MicrobatchId
from decod.limits import StageBlocks
from decod.protocol.core import jobs
from decod.protocol.core.average_spec import WHOLE
from decod.protocol.core.job_codec import methods_of, runs
from decod.protocol.core.jobs import AverageKind, Job, JobResult
from decod.protocol.state.rollback import same_stage
from decod.run.run_config import RunConfig
from decod.sim.audited_work import SimulatedWitness
from decod.sim.averages import (
    Counts,
    GradientPart,
    LateSteps,
    MisuseError,
    SimulatedState,
    agreed_counts,
    canonical,
    check_means,
    check_missed,
    manifest_of,
    most_of,
    parts_of,
    reduced,
)
from decod.sim.profile import Activation, Content, Gradient

_T = TypeVar("_T")

_SOURCES = itertools.count(1)
"""Numbers of devices, by which the parts of their sums are told apart."""

_COMPUTED = itertools.count(1)
"""Numbers of computations. No two give the same bits."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A proposed optimizer step, and the microbatches in it."""

    iteration: int
    counts: Counts
    """Of the iteration: of the whole batch, or this node's share if nodes step by themselves."""
    weights_total: int
    """-1: the iteration ends without an average."""
    parameter_hash: str
    weights: str = ""
    pending: str = ""
    """Where steps are late: the parameters, and what the next step comes from."""
    averaged: Counts = ()
    """If nodes step by themselves: all that is in the average; empty if there is none."""
    contributed: Counts = ()
    """What of that is this node's, or what it puts into the next average, if averages overlap."""
    delayed: Counts = ()
    """All that is in the average that has travelled since the last outer step."""
    sent: Counts = ()
    """What of that is this node's."""
    missed_all: bool = False
    """This node's came too late for each part of it."""
    fragment: int = 0
    """Of the parameters whose local phase it ends."""
    ends_phase: bool = True


class _Held(Enum):
    """Progress of a held microbatch."""

    FORWARD_DONE = "forward done"
    HEAD_DONE = "head done"


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The outcome of a job."""

    result: JobResult
    outputs: tuple[Content, ...] = ()
    committed: SimulatedStep | None = None
    """The step that this job made final."""


class StageModel:
    """The state of one compute process: its stage, held microbatches and gradient sum.

    Args:
        run: The run's settings. Their seed determines each stage's initial parameters.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self.num_stages = run.stages.num_relay_stages + 1
        """In the view of the host's machine."""
        self._num_before = self.num_stages
        """In another view before."""
        self.is_client = False
        """The host holds parameters only."""
        self._late = LateSteps()
        self._source = next(_SOURCES)
        self.stage_index = -1
        self.cut: StageBlocks = ()
        self.iteration = self.anchor = 0
        """The last committed iteration, and the last with an average."""
        self.learnt = [Counter[MicrobatchId]() for _ in range(run.sync.fragments)]
        """What this node has trained on by itself since each fragment's last average."""
        self.sending: Counts = ()
        """What this node puts into the average that travels."""
        self.parameter_hash = ""
        self.proposed: SimulatedStep | None = None
        self.held: dict[MicrobatchId, _Held] = {}
        self.sums: Counter[MicrobatchId] = Counter()
        """How often each microbatch is in this node's sum of gradients."""
        self.num_dropped = 0
        self.witness = SimulatedWitness()
        self.used_hash = ""
        """Of the parameters that the last forward pass was computed with."""
        self.rotten = ""
        """A bit to flip in the next average from other members, which changes the step."""
        self._methods: dict[type, Callable[..., JobOutcome]] = methods_of(self)

    def run(self, job: Job, inputs: tuple[Content, ...]) -> JobOutcome:
        """Run a job.

        Raises:
            MisuseError: The job makes no sense now, or its inputs are wrong.
        """
        if self.stage_index < 0 and not isinstance(job, jobs.Build):
            raise MisuseError(f"{job} before any stage was built")
        outcome: JobOutcome = self._methods[type(job)](job, inputs)
        return outcome

    def same(self, theirs: StageBlocks, own: StageBlocks, stage_index: int) -> bool:
        """Return whether a stage has the same blocks in two cuts."""
        return same_stage(self._run, theirs, own, stage_index)

    @property
    def _place(self) -> str:
        """The stage, whatever the cut that it is of."""
        index = self.stage_index
        same = self.same((), self.cut, index)
        return str(index if same else self._run.stage_blocks(self.cut)[index])

    def use(self, num_stages: int) -> None:
        """Reckon with so many stages. Jobs of a view before may still come."""
        if num_stages != self.num_stages:
            self._num_before, self.num_stages = self.num_stages, num_stages

    # --- state --------------------------------------------------------------------------------

    def flip(self) -> None:
        """Flip a bit of the committed parameters, without notice."""
        self.parameter_hash = _sha256(f"{self.parameter_hash} flipped")

    @runs(jobs.Build)
    def _build(self, job: jobs.Build, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        if job.cut:
            self.use(len(job.cut) + 1)
        if not 0 <= job.stage_index < self.num_stages:
            raise MisuseError(f"stage {job.stage_index} of {self.num_stages} stages")
        self._forget()
        self.stage_index = job.stage_index
        self.cut = job.cut
        self._begin_at(0)
        self.parameter_hash = _sha256(f"seed {self._run.seed} stage {self._place}")
        self._late.begin(self.parameter_hash)
        return JobOutcome(jobs.Built(self.parameter_hash))

    @runs(jobs.Snapshot)
    def _snapshot(self, job: jobs.Snapshot, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        if self.is_client:
            raise MisuseError(f"{job}: a client has nothing to give")
        place = self.stage_index, self.anchor, self.parameter_hash
        blob = SimulatedState(*place, job.with_optimizer, cut=self.cut)
        blob = self._late.snapshot(job, blob) if self._run.delay else blob
        return JobOutcome(jobs.SnapshotTaken(blob.iteration, manifest_of(blob)), (blob,))

    @runs(jobs.Load)
    def _load(self, job: jobs.Load, inputs: tuple[Content, ...]) -> JobOutcome:
        if len(inputs) > 1 or (isinstance(inputs[0], SimulatedState) and inputs[0].part):
            return self._load_parts(job, inputs)
        blob = _only(job, inputs, SimulatedState)
        if (manifest_of(blob),) != job.manifests or blob.iteration != job.iteration:
            raise MisuseError(f"{job} with the blob {blob}")
        same = self.same(blob.cut, self.cut, self.stage_index)
        if blob.stage_index != self.stage_index or not same:
            raise MisuseError(f"{job} at stage {self.stage_index} with the blob {blob}")
        if not (blob.with_optimizer or self.is_client):
            raise MisuseError(f"{job} with parameters only")
        self._forget()
        self._begin_at(blob.iteration)
        self.parameter_hash = blob.parameter_hash
        self._late.begin(blob.weights, blob.pending)
        return JobOutcome(jobs.Built(self.parameter_hash))

    def _load_parts(self, job: jobs.Load, inputs: tuple[Content, ...]) -> JobOutcome:
        """Put the stage together from what stages of another cut had of it."""
        blobs = [blob for blob in inputs if isinstance(blob, SimulatedState)]
        own = (self.cut, self.stage_index)
        part = blobs[0].part
        if tuple(map(manifest_of, blobs)) != job.manifests or part is None:
            raise MisuseError(f"{job} with {inputs}")
        if any(b.part != part or b.iteration != job.iteration for b in blobs):
            raise MisuseError(f"{job} at stage {self.stage_index} with {inputs}")
        if part.stage_index != self.stage_index or not self.same(part.cut, *own):
            raise MisuseError(f"{job} at stage {own} with {inputs}")
        wanted = self._run.stage_blocks(self.cut)[self.stage_index]
        places = [self._run.stage_blocks(blob.cut)[blob.stage_index] for blob in blobs]
        found = [block for blocks in places for block in blocks if block in wanted]
        if found != [*wanted] or not all({*wanted} & {*blocks} for blocks in places):
            raise MisuseError(f"{job} of blocks {found} at stage {own}")
        self._forget()
        self._begin_at(job.iteration)

        def joined(values: Iterable[str]) -> str:
            return _sha256(" ".join(("part", self._place, *values)))

        self.parameter_hash = joined(blob.parameter_hash for blob in blobs)
        if self._run.delay:
            weights = joined(blob.weights for blob in blobs)
            self._late.begin(weights, joined(blob.pending for blob in blobs))
        return JobOutcome(jobs.Built(self.parameter_hash))

    @runs(jobs.ReturnToAnchor)
    def _return_to_anchor(self, job: Job, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        if not self._run.sync.steps_locally:
            raise MisuseError(f"{job}: it has learnt nothing by itself")
        self._forget()
        self._begin_at(self.anchor)
        return JobOutcome(jobs.Nothing())

    def _begin_at(self, iteration: int) -> None:
        """Hold what all nodes of a stage have in common after an iteration."""
        self.iteration = self.anchor = iteration
        for learnt in self.learnt:
            learnt.clear()
        self.sending = ()

    @runs(jobs.Mix)
    def _mix(self, job: jobs.Mix, inputs: tuple[Content, ...]) -> JobOutcome:
        blobs = [blob for blob in inputs if isinstance(blob, SimulatedState)]
        stages = tuple(blob.stage_index for blob in blobs)
        if tuple(map(manifest_of, blobs)) != job.manifests or stages != job.stages:
            raise MisuseError(f"{job} with {inputs}")
        if any(b.iteration != job.iteration or b.stage_index == self.stage_index for b in blobs):
            raise MisuseError(f"{job} at stage {self.stage_index} with {inputs}")
        self._forget()
        self._begin_at(job.iteration)
        self.parameter_hash = _sha256(" ".join(("mix", *(b.parameter_hash for b in blobs))))
        self._late.begin(self.parameter_hash)
        return JobOutcome(jobs.Built(self.parameter_hash))

    @runs(jobs.Reset)
    def _reset(self, job: jobs.Reset, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        self._forget()
        return JobOutcome(jobs.Nothing())

    @runs(jobs.Retract)
    def _retract(self, job: jobs.Retract, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        self.proposed = None
        return JobOutcome(jobs.Nothing())

    def _forget(self) -> None:
        self.held.clear()
        self.sums.clear()
        self.witness.clear()
        self.proposed = None

    # --- microbatches -------------------------------------------------------------------------

    @runs(jobs.Embed, jobs.Forward)
    def _forward(self, job: jobs.Embed | jobs.Forward, inputs: tuple[Content, ...]) -> JobOutcome:
        microbatch = job.microbatch
        self._check_fresh(job, microbatch)
        if isinstance(job, jobs.Embed):
            _no_input(job, inputs)
            self._check_data_node(job)
        else:
            self._check_relay(job)
            activation = _only(job, inputs, Activation)
            if activation != Activation(microbatch, self.stage_index - 1):
                raise MisuseError(f"{job} at stage {self.stage_index} on {activation}")
        self.held[microbatch] = _Held.FORWARD_DONE
        self.used_hash = self.parameter_hash
        false = self.witness.makes_false(microbatch)
        output = Activation(microbatch, self.stage_index, false, next(_COMPUTED))
        return JobOutcome(jobs.Nothing(), (output,))

    @runs(jobs.Backward, jobs.EmbedBackward)
    def _backward(
        self, job: jobs.Backward | jobs.EmbedBackward, inputs: tuple[Content, ...]
    ) -> JobOutcome:
        microbatch = job.microbatch
        last = isinstance(job, jobs.EmbedBackward)
        if last:
            self._check_data_node(job)
        else:
            self._check_relay(job)
        self._check_held(job, microbatch, _Held.HEAD_DONE if last else _Held.FORWARD_DONE)
        gradient = _only(job, inputs, Gradient)
        if gradient != Gradient(microbatch, self.stage_index + 1):
            raise MisuseError(f"{job} at stage {self.stage_index} on {gradient}")
        del self.held[microbatch]
        self.sums[microbatch] += 1
        false = self.witness.makes_false(microbatch)
        made = Gradient(microbatch, self.stage_index, false, next(_COMPUTED))
        outputs = () if last else (made,)
        return JobOutcome(jobs.Nothing(), outputs)

    @runs(jobs.Head)
    def _head(self, job: jobs.Head, inputs: tuple[Content, ...]) -> JobOutcome:
        self._check_data_node(job)
        self._check_held(job, job.microbatch, _Held.FORWARD_DONE)
        activation = _only(job, inputs, Activation)
        lasts = [num - 1 for num in (self.num_stages, self._num_before)]
        if activation not in [Activation(job.microbatch, last) for last in lasts]:
            raise MisuseError(f"{job} on {activation}")
        self.held[job.microbatch] = _Held.HEAD_DONE
        # Any number will do if it is the same on every host that computes this microbatch.
        loss = 1.0 + 1.0 / (1 + self.iteration)
        gradient = Gradient(job.microbatch, self.num_stages, made=next(_COMPUTED))
        return JobOutcome(jobs.Loss(loss, 1), (gradient,))

    @runs(jobs.Drop)
    def _drop(self, job: jobs.Drop, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        if job.microbatch in self.sums:
            raise MisuseError(f"drop of {job.microbatch}, which is in the sum of gradients")
        self.num_dropped += self.held.pop(job.microbatch, None) is not None
        return JobOutcome(jobs.Nothing())

    def _check_fresh(self, job: Job, microbatch: MicrobatchId) -> None:
        if self.proposed is not None:
            raise MisuseError(f"{job} while a step is proposed: parameters may change under it")
        if microbatch in self.held or microbatch in self.sums:
            raise MisuseError(f"{job}, but this microbatch is here already")
        # A deferred microbatch keeps the iteration that it was drawn for in its id.
        if microbatch.iteration > self.iteration + 1 and not self._run.sync.steps_locally:
            raise MisuseError(f"{job} when {self.iteration} iterations are committed")

    def _check_held(self, job: Job, microbatch: MicrobatchId, stage: _Held) -> None:
        if self.held.get(microbatch) is not stage:
            raise MisuseError(f"{job}, but what is held of it is {self.held.get(microbatch)}")
        if self.proposed is not None:
            raise MisuseError(f"{job} while a step is proposed")

    def _check_data_node(self, job: Job) -> None:
        if self.stage_index != 0:
            raise MisuseError(f"{job} at stage {self.stage_index}")

    def _check_relay(self, job: Job) -> None:
        if self.stage_index < 1:
            raise MisuseError(f"{job} at a data node")

    # --- aggregation --------------------------------------------------------------------------

    @runs(jobs.Gather)
    def _gather(self, job: jobs.Gather, inputs: tuple[Content, ...]) -> JobOutcome:
        num_parts = job.num_parts
        if job.phase:
            check_means(job, inputs)
        else:
            _no_input(job, inputs)
        if num_parts < 1 and not self._run.sync.steps_locally:
            raise MisuseError(f"gather in {num_parts} parts")
        ahead = job.kind is AverageKind.AHEAD
        counts = self.sending if ahead else self._contribution(job.spec.fragment)
        if ahead and job.iteration != self.anchor:
            raise MisuseError(f"{job} when {self.anchor} is what the nodes have in common")
        parts = tuple(
            GradientPart(
                part, num_parts, counts, job.phase, job.spec, self._source, self.witness.lies
            )
            for part in range(num_parts)
        )
        return JobOutcome(jobs.Nothing(), parts)

    def _contribution(self, fragment: int) -> Counts:
        """Return what this node has trained on since a fragment's last average."""
        longest = max(self.learnt, key=Counter.total)
        return canonical(self.sums + (self.learnt[fragment - 1] if fragment else longest))

    @runs(jobs.Reduce)
    def _reduce(self, job: jobs.Reduce, inputs: tuple[Content, ...]) -> JobOutcome:
        average = self.witness.averaged(reduced(job, inputs), inputs)
        # Part 0 carries the whole sum, so adding up the parts is exact.
        num = len(average.counts) if job.part == 0 else 0
        return JobOutcome(jobs.Squared(self._square_sum(num)), (average,))

    @runs(jobs.Square)
    def _square(self, job: jobs.Square, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        if not self._run.clips or self.sums.total() != job.weights_total:
            raise MisuseError(f"{job} on {self.sums.total()} microbatches")
        return JobOutcome(jobs.Squared(self._square_sum(job.weights_total)))

    def _square_sum(self, num_microbatches: int) -> float:
        """Return a sum in which each stage has its own weight.

        A total that lacks a stage, or counts one twice, is then visibly wrong.
        """
        return 4.0**self.stage_index * num_microbatches if self._run.clips else 0.0

    @runs(jobs.Propose)
    def _propose(self, job: jobs.Propose, inputs: tuple[Content, ...]) -> JobOutcome:
        if self.is_client:
            raise MisuseError(f"{job}: a client has no optimizer")
        if self.proposed is not None:
            raise MisuseError(f"{job} on top of {self.proposed.iteration}, which is not final")
        _check_next(job, self.iteration, steps_locally=self._run.sync.steps_locally)
        _check_norm(job, {self.num_stages, self._num_before}, clips=self._run.clips)
        ahead = inputs[: job.num_ahead]
        own = inputs[job.num_ahead :]
        contributed = self._contribution(job.spec.fragment)
        travelled = parts_of(job, ahead, job.ahead_spec, None) if ahead else []
        check_missed(job, travelled, self.sending, self._source)
        delayed = most_of([part.counts for part in travelled])
        counts = contributed
        if own:
            counts = agreed_counts(job, parts_of(job, own, job.spec, job.weights_total))
        counts = counts if job.weights_total else ()
        parts = [part.counts for part in travelled]
        held = [delayed] if all(part == delayed for part in parts) else parts
        text = " ".join(
            f"{microbatch}*{num}" for part in (*held, counts) for microbatch, num in part
        )
        if WHOLE not in (job.spec, job.ahead_spec):
            text += f" {job.spec} {job.ahead_spec}"
        # A single part comes from a stage's only member: no other could notice a flipped bit.
        shared = len(inputs) > 1
        rot = self.rotten if shared else ""
        self.rotten = "" if shared else self.rotten
        norm = f" {job.gradient_norm}" if self._run.clips else ""
        parameter_hash = _sha256(f"{self.parameter_hash} {text} {job.weights_total}{norm}{rot}")
        if not text and self._run.sync.steps_locally:
            parameter_hash = self.parameter_hash
        weights = pending = ""
        if self._run.delay:
            weights = self._late.next_weights
            pending = _sha256(f"{text}{norm}{rot}")
            parameter_hash = _sha256(f"{weights} {pending}")
        step = (job.iteration, counts, job.weights_total, parameter_hash)
        self.proposed = SimulatedStep(*step, weights, pending)
        if self._run.sync.steps_locally:
            self.proposed = replace(
                self.proposed,
                counts=canonical(self.sums),
                averaged=counts,
                contributed=contributed if job.ends_phase else (),
                delayed=delayed,
                sent=self.sending,
                missed_all=len(job.missed) == len(travelled),
                fragment=job.spec.fragment,
                ends_phase=job.ends_phase,
            )
        return JobOutcome(jobs.Proposed(parameter_hash))

    @runs(jobs.StepLocally)
    def _step_locally(self, job: jobs.StepLocally, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        if self.proposed is not None or not self._run.sync.steps_locally:
            raise MisuseError(f"{job} when {self.proposed} is proposed")
        _check_next(job, self.iteration, steps_locally=self._run.sync.steps_locally)
        counts = canonical(self.sums)
        parameter_hash = self.parameter_hash
        self.proposed = SimulatedStep(job.iteration, counts, -1, parameter_hash)
        return JobOutcome(jobs.Proposed(parameter_hash))

    @runs(jobs.SketchPart)
    def _sketch_part(self, job: jobs.SketchPart, inputs: tuple[Content, ...]) -> JobOutcome:
        return JobOutcome(self.witness.sketch_part(job, inputs))

    @runs(jobs.ReplayPasses)
    def _replay(self, job: jobs.ReplayPasses, inputs: tuple[Content, ...]) -> JobOutcome:
        if not job.beside:
            self._check_relay(job)
        return JobOutcome(self.witness.replay(job, self.stage_index, inputs))

    @runs(jobs.StandIn)
    def _stand_in(self, job: jobs.StandIn, inputs: tuple[Content, ...]) -> JobOutcome:
        blob = _only(job, inputs, SimulatedState)
        return JobOutcome(self.witness.stand_in(job, blob, self.iteration))

    @runs(jobs.CommitStep)
    def _commit(self, job: jobs.CommitStep, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        step = self.proposed
        iteration = job.iteration
        if step is None or step.iteration != iteration:
            raise MisuseError(f"commit of {iteration} when what is proposed is {step}")
        self.iteration = iteration
        ends_phase = step.weights_total >= 0 and step.ends_phase
        if step.weights_total >= 0:
            self.anchor = iteration
            self.sending = step.contributed if ends_phase else ()
        for fragment, learnt in enumerate(self.learnt, 1):
            learnt.update(self.sums)
            if ends_phase and step.fragment in (0, fragment):
                learnt.clear()
        self._forget()
        self.parameter_hash = step.parameter_hash
        self._late.begin(step.weights, step.pending)
        return JobOutcome(jobs.Nothing(), committed=step)

    @runs(jobs.StepAhead)
    def _step_ahead(self, job: jobs.StepAhead, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        if self.is_client or not self._run.delay or job.iteration != self.iteration + 1:
            raise MisuseError(f"{job} when {self.iteration} iterations are committed")
        self._late.ahead = job.iteration
        return JobOutcome(jobs.Nothing())

    @runs(jobs.Inspect)
    def _inspect(self, job: jobs.Inspect, inputs: tuple[Content, ...]) -> JobOutcome:
        result = inputs[0]
        if not isinstance(result, Activation | Gradient) or result.microbatch != job.microbatch:
            raise MisuseError(f"{job} on {inputs}")
        return JobOutcome(jobs.Nothing())

    @runs(jobs.Measure)
    def _measure(self, job: jobs.Measure, inputs: tuple[Content, ...]) -> JobOutcome:
        _no_input(job, inputs)
        return JobOutcome(jobs.Measured(0.0, 0.0))  # Only the host knows how long it took.


def _check_norm(job: jobs.Propose, nums_stages: set[int], *, clips: bool) -> None:
    sums = [sum(4.0**stage for stage in range(num)) * job.weights_total for num in nums_stages]
    norms = [math.sqrt(whole) for whole in sums]
    if job.gradient_norm not in (norms if clips else [0.0]):
        raise MisuseError(f"{job}: the norm over all stages is {norms}")


def _check_next(
    job: jobs.Propose | jobs.StepLocally, iteration: int, *, steps_locally: bool
) -> None:
    """Refuse the step of an iteration that is not the next.

    Who replays its stage's steps takes only those that come from averages.
    """
    early = job.iteration <= iteration
    if early or (job.iteration > iteration + 1 and not steps_locally):
        raise MisuseError(f"{job} when {iteration} iterations are committed")


def _only(job: Job, inputs: tuple[Content, ...], kind: type[_T]) -> _T:
    if len(inputs) != 1 or not isinstance(inputs[0], kind):
        raise MisuseError(f"{job} on {inputs}: it takes one {kind.__name__}")
    return inputs[0]


def _no_input(job: Job, inputs: tuple[Content, ...]) -> None:
    if inputs:
        raise MisuseError(f"{job} on {inputs}: it takes no input")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
