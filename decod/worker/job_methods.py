"""Jobs of a compute process: a message in, tensors read and written in the arena, a result out.

There is one method for each class of jobs. `PassRunner` has the jobs that every device of a host
has a part in: the passes of microbatches, and their timing. `JobRunner` has all jobs of a node.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from decod.data.block import Block
from decod.devices import CPU, device_named, ran_out
from decod.errors import TrainingError
from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.fingerprints import ERROR_MAX
from decod.protocol.core.job_codec import Region, Request, runs
from decod.protocol.core.jobs import (
    AverageKind,
    Configure,
    Configured,
    GiveBlock,
    SetRecompute,
    SetThreads,
    SpreadStage,
)
from decod.system import give_back_memory
from decod.train.checkpoint.description import description_text, entry_json, parse_description
from decod.train.exchange import Exchange
from decod.train.executor import Sources, StageExecutor
from decod.train.measure import Measurable, measure
from decod.train.passes import Passes, mean_loss
from decod.train.reduction import cut
from decod.train.standing_out import Sketcher, error_between, means_standing_out
from decod.train.token_source import TokenSource
from decod.worker.configure import (
    change_num_threads,
    device_facts,
    divided,
    facts_of_all,
    make_executor,
    memory_max_bytes,
    parse_device,
    share_of_threads,
)
from decod.worker.device import (
    Arena,
    ChosenDevice,
    DeviceClock,
    cap_memory,
    free_bytes,
    pinned_prefix,
)
from decod.worker.ranks.crew import Crew
from decod.worker.ranks.group import MakeReady
from decod.worker.runner import Runner, free_unused, malformed

R = TypeVar("R")
"""The result of a job."""


class Computing(Measurable, Protocol):
    """What a device has of a stage: all of it, or a mirror."""

    tokens: TokenSource | None

    @property
    def passes(self) -> Passes:
        """The passes of the built stage."""


ComputingT = TypeVar("ComputingT", bound=Computing)


class PassRunner(Runner[ComputingT]):
    """The runner of one device's passes.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._clock: DeviceClock | None = None
        self._free_bytes: Callable[[], int] = lambda: 0
        """Measures the free memory of the device in use."""

    def _use_device(self, settings: Mapping[str, Any]) -> tuple[ChosenDevice, dict[str, Any]]:
        """Use the device that a host's settings name. Return it, and what is to be known."""
        chosen = parse_device(settings)
        device = chosen.device
        memory_bytes = memory_max_bytes(settings)
        device.settle()
        cap_memory(device, memory_bytes)
        facts = device_facts(chosen, memory_bytes)
        self._free_bytes = partial(free_bytes, device, memory_bytes)
        if device.name != CPU:
            self._clock = DeviceClock(device.instant)
            self._arena.pin(pinned_prefix(device))
        return chosen, facts

    def _everywhere(self, request: Request[jobs.BaseJob], own: Callable[[], R]) -> list[R]:  # noqa: ARG002
        """Run a job on this device, and on others that have a part in it."""
        return [own()]

    def _loss_of(self, parts: Sequence[jobs.Loss]) -> jobs.Loss:
        """Return what devices tell of a microbatch's loss: here, this one's part of it."""
        (part,) = parts
        return part

    def _make_ready(self, request: Request[jobs.Pass]) -> None:
        """Read a microbatch's tokens on all devices that wait for each other within a pass."""

    def _look_at(self, request: Request[jobs.Pass], *, is_gradient: bool) -> None:
        """Look at a job's input before the passes of several devices begin."""

    # Timing

    @override
    def _begin(self) -> None:
        if self._clock is not None:
            self._await_results()  # Of a job that failed.
            self._clock.begin()

    @override
    def _all_told(self) -> None:
        if self._configured is None or self._clock is None:
            return
        self._clock.end()
        if not self._departures:
            device_named(self._configured.config.device).synchronize()

    @override
    def _busy_s(self, wall_s: float, copy_s: float) -> float:
        if self._clock is None:
            return wall_s
        return self._clock.busy_s(wall_s, copy_s)

    # Settings

    @runs(SetThreads)
    def _set_threads(self, request: Request[SetThreads]) -> None:
        change_num_threads(request.job.num_threads)

    @runs(SetRecompute)
    def _recompute(self, request: Request[SetRecompute]) -> None:
        """Recompute forward passes, or not, in the stages that are built from now on."""
        ready = self._ready
        recompute = request.job.recompute

        def own() -> None:
            ready.config = replace(ready.config, recompute=recompute)

        self._everywhere(request, own)

    @runs(SpreadStage)
    def _spread_stage(self, request: Request[SpreadStage]) -> None:
        """Spread the stages that are built from now on over the devices, or copy them."""
        ready = self._ready
        sharded = request.job.sharded

        def own() -> None:
            ready.config = replace(ready.config, sharded=sharded)

        self._everywhere(request, own)

    @property
    @override
    def _ends_with_others(self) -> bool:
        return self._configured is not None and self._configured.config.sharded

    @runs(jobs.Measure)
    def _measure(self, request: Request[jobs.Measure]) -> jobs.Measured:
        def own() -> jobs.Measured:
            found = measure(self._ready, num_repeats=1)
            return jobs.Measured(
                found.forward_s,
                found.backward_s,
                found.microbatch_memory_bytes,
                found.recomputed_bytes,
            )

        # The slowest device determines how long a pass takes, the largest share how many fit.
        found = self._everywhere(request, own)
        return jobs.Measured(*map(max, zip(*map(astuple, found), strict=True)))

    # Microbatches. Output regions are checked before the work, so that a bad region costs nothing.

    def _activation(self, region: Region) -> Tensor:
        """Return an activation or gradient in the arena, as it travels, of all rows."""
        return self._arena.tensor(region, *self._ready.config.whole.activation_wire)

    def _pieces(self, region: Region) -> list[Tensor]:
        """Return the views of this device's rows of an activation or gradient in the arena."""
        config = self._ready.config
        whole = self._activation(region)
        if config.rows is None:
            return [whole]
        return config.rows.pieces(whole, config.whole.activation_runs)

    def _own_rows(self, region: Region) -> Tensor:
        """Return this device's rows of an activation or gradient, as they travel."""
        pieces = self._pieces(region)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _write_pieces(self, outputs: Sequence[Tensor], value: Tensor) -> None:
        """Copy a result, as it travels, into this device's rows."""
        if len(outputs) == 1:
            self._write(outputs[0], value)
            return
        for output, piece in zip(outputs, torch.split(value, [*map(len, outputs)]), strict=True):
            self._write(output, piece)

    @runs(jobs.Embed)
    def _embed(self, request: Request[jobs.Embed]) -> None:
        request.expect(0, 1)
        outputs = self._pieces(request.outputs[0])

        def own() -> None:
            self._write_pieces(outputs, self._ready.passes.embed(request.job.microbatch))

        self._make_ready(request)
        self._everywhere(request, own)

    @runs(jobs.Forward)
    def _forward(self, request: Request[jobs.Forward]) -> None:
        self._run_pass(request, self._ready.passes.forward, is_gradient=False)

    @runs(jobs.Backward)
    def _backward(self, request: Request[jobs.Backward]) -> None:
        self._run_pass(request, self._ready.passes.backward, is_gradient=True)

    def _run_pass(
        self,
        request: Request[jobs.Pass],
        run: Callable[[MicrobatchId, Tensor], Tensor],
        *,
        is_gradient: bool,
    ) -> None:
        """Run a pass that makes one tensor of another."""
        request.expect(1, 1)
        tensor = self._own_rows(request.inputs[0])
        outputs = self._pieces(request.outputs[0])

        def own() -> None:
            self._write_pieces(outputs, run(request.job.microbatch, tensor))

        self._look_at(request, is_gradient=is_gradient)
        self._everywhere(request, own)

    @runs(jobs.Head)
    def _head(self, request: Request[jobs.Head]) -> jobs.Loss:
        request.expect(1, 1)
        activation = self._own_rows(request.inputs[0])
        outputs = self._pieces(request.outputs[0])

        def own() -> jobs.Loss:
            passes = self._ready.passes
            microbatch = request.job.microbatch
            gradient, loss = passes.head(microbatch, activation)
            self._write_pieces(outputs, gradient)
            return jobs.Loss(loss, passes.num_targets(microbatch))

        self._look_at(request, is_gradient=False)
        self._make_ready(request)
        return self._loss_of(self._everywhere(request, own))

    @runs(jobs.EmbedBackward)
    def _embed_backward(self, request: Request[jobs.EmbedBackward]) -> None:
        request.expect(1, 0)
        gradient = self._own_rows(request.inputs[0])

        def own() -> None:
            self._ready.passes.embed_backward(request.job.microbatch, gradient)

        self._look_at(request, is_gradient=True)
        self._everywhere(request, own)

    @runs(jobs.Drop)
    def _drop(self, request: Request[jobs.Drop]) -> None:
        request.expect(0, 0)

        def own() -> None:
            self._ready.passes.drop(request.job.microbatch)

        self._everywhere(request, own)

    @runs(GiveBlock)
    def _give_block(self, request: Request[GiveBlock]) -> None:
        """Take in a block of the data whose file on this host is damaged."""
        request.expect(1, 0)
        if self._ready.tokens is None:
            raise malformed("a block of data for a node without data")
        tokens = self._ready.tokens
        region = request.inputs[0]
        content = self._arena.tensor(region, torch.uint8, (region.num_bytes,)).numpy().tobytes()
        block = Block(request.job.shard_index, request.job.offset, region.num_bytes)

        def own() -> None:
            tokens.give(block, content)

        self._everywhere(request, own)


class JobRunner(PassRunner[StageExecutor]):
    """The runner of jobs, one after another, on one executor.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._other: StageExecutor | None = None
        """Another stage beside the own, for a judge."""
        self._crew: Crew | None = None
        """The other ranks, where this device is one of several."""

    @property
    @override
    def _num_phases(self) -> int:
        return self._ready.config.run.sync.num_phases

    @override
    def close(self) -> None:
        """End the other ranks."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    @runs(Configure)
    def _configure(self, request: Request[Configure]) -> Configured:
        settings = divided(request.job.settings)
        # The device comes first: capacity and speed are measured on it.
        device, facts = self._use_device(settings[0])
        self._configured = executor = make_executor(settings[0], device, self._watch)
        devices = [str(each.get("device")) for each in settings]
        if self._crew is not None and self._crew.devices != devices:
            self.close()
        if len(settings) == 1:
            return Configured(facts)
        if self._crew is None:
            self._crew = Crew(devices, self._arena.descriptor, self.ends)
        executor.ranks = self._crew
        others = self._crew.configure(settings[1:], device.name)
        facts["memory_bytes"] = self._free_bytes()
        return Configured(facts_of_all([facts, *others]))

    # Several devices

    @override
    def _everywhere(self, request: Request[jobs.BaseJob], own: Callable[[], R]) -> list[R]:
        crew = self._crew
        if crew is None:
            return [own()]
        try:
            return crew.share(request, own, apart=not self._ends_with_others)
        except BaseException:
            if crew.disagrees:
                self._give_up(request.job, crew)
            raise

    @override
    def _loss_of(self, parts: Sequence[jobs.Loss]) -> jobs.Loss:
        return mean_loss(parts, self._ready.config.run.batch.tokens_per_microbatch)

    def _give_up(self, job: jobs.BaseJob, crew: Crew) -> None:
        """Deal with a pass that some devices have run, and others have not."""
        match job:
            case jobs.Embed(microbatch) | jobs.Forward(microbatch):
                self._ready.passes.drop(microbatch)
                crew.call(jobs.Drop(microbatch))
            case jobs.Pass():
                self._ready.passes.spoil(f"a device failed in the {self._kind} job of a microbatch")

    @override
    def _make_ready(self, request: Request[jobs.Pass]) -> None:
        crew = self._crew
        microbatch = request.job.microbatch
        if crew is None or not self._ends_with_others:
            return

        def own() -> None:
            self._ready.passes.make_ready(microbatch)

        crew.share(Request(MakeReady(microbatch)), own)

    @override
    def _look_at(self, request: Request[jobs.Pass], *, is_gradient: bool) -> None:
        if self._crew is not None:
            tensor = self._activation(request.inputs[0])
            self._ready.passes.look_at(tensor, is_gradient=is_gradient)

    @override
    def _set_threads(self, request: Request[SetThreads]) -> None:
        if self._crew is None:
            super()._set_threads(request)
            return
        named = {"num_threads": request.job.num_threads}
        share = SetThreads(share_of_threads(named, len(self._crew.devices)))
        self._crew.call(share)
        super()._set_threads(Request(share))

    @runs(jobs.Build)
    def _build(self, request: Request[jobs.Build]) -> jobs.Built:
        job = request.job
        report = self._ready.build(job.stage_index, trial=job.trial, blocks=job.cut)
        give_back_memory()
        return jobs.Built(report.hash, report.num_parameters, report.activation_bytes)

    @runs(jobs.Inspect)
    def _inspect(self, request: Request[jobs.Inspect]) -> None:
        """Refuse what a client has computed if it is not finite."""
        request.expect(1, 0)
        self._ready.passes.read(
            self._activation(request.inputs[0]), f"result for {request.job.microbatch}"
        )

    # Audits of other members' work

    @runs(jobs.SketchPart)
    def _sketch_part(self, request: Request[jobs.SketchPart]) -> jobs.Sketched:
        request.expect(None, 0)
        num_parts = request.job.num_parts
        part = request.job.part
        if part >= num_parts:
            raise malformed(f"part is {part} of {num_parts}")
        exchange = self._ready.exchange()
        sizes_of = exchange.mean_sizes if request.job.is_mean else exchange.part_sizes
        dtype, sizes = sizes_of(0, num_parts)
        tensors = self._tensors(request.inputs, dtype, [sizes[part]] * len(request.inputs))
        return jobs.Sketched(_sketches(request.job.seed, tensors))

    @runs(jobs.StandIn)
    def _stand_in(self, request: Request[jobs.StandIn]) -> jobs.Built:
        """Build another stage beside the own, on this device alone, if there is room."""
        request.expect(1, 0)
        self._other = None  # Free it before the next one's memory is taken.
        try:
            return self._build_beside(request)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            reason = str(error).partition("\n")[0]
        # This node can do its own work all the same.
        free_unused()
        raise TrainingError(
            "there is no room for another stage beside the own",
            why=reason[:100],
            fix="nothing: the audit ends without a judge",
        )

    def _build_beside(self, request: Request[jobs.StandIn]) -> jobs.Built:
        job = request.job
        config = replace(
            self._ready.config, is_client=not job.with_optimizer, sharded=False, rows=None
        )
        other = StageExecutor(config)
        other.build(job.stage_index, blocks=job.cut)
        entries = parse_description(job.manifest).entries
        with self._arena.state(request.inputs[0]) as blob:
            found = other.load([(blob, entries)], job.iteration)
        self._other = other
        return jobs.Built(found)

    @runs(jobs.ReplayPasses)
    def _replay_passes(self, request: Request[jobs.ReplayPasses]) -> jobs.Replayed:
        job = request.job
        compared = job.with_activation, job.with_gradient
        request.expect(2 + sum(compared), 0)
        activation, gradient, *sent = map(self._activation, request.inputs)
        executor = self._other if job.beside else self._ready
        if executor is None:
            raise malformed("no other stage stands beside the own")
        misplaced_documents = job.with_activation and not executor.passes.same_documents(
            activation, sent[0]
        )
        found = list[Tensor]()

        def own() -> None:
            found.extend(executor.passes.replay(job.microbatch, activation, gradient))

        if executor.config.sharded:
            self._everywhere(request, own)
        else:
            own()
        *made, apart_P = found
        on, back = [
            error_between(executor.passes.read(sent.pop(0)), tensor) if compares else 0.0
            for tensor, compares in zip(made, compared, strict=True)
        ]
        parts = cut(apart_P, job.num_parts)
        if misplaced_documents:
            on = ERROR_MAX
        return jobs.Replayed(on, back, _sketches(job.seed, parts))

    # Iterations

    @runs(jobs.Reset)
    def _reset(self, request: Request[jobs.Reset]) -> None:
        request.expect(0, 0)
        self._other = None
        self._ready.reset()

    @runs(jobs.Retract)
    def _retract(self, request: Request[jobs.Retract]) -> None:
        request.expect(0, 0)
        self._ready.retract()

    def _exchange(self, job: jobs.Gather | jobs.Reduce) -> Exchange:
        return self._ready.exchange(job.spec, ahead=job.kind is AverageKind.AHEAD)

    @runs(jobs.Gather)
    def _gather(self, request: Request[jobs.Gather]) -> None:
        job = request.job
        exchange = self._exchange(request.job)
        request.expect(None, job.num_parts)
        if job.num_parts and job.phase:
            parts = self._later_parts(request, exchange)
        else:
            ahead = job.kind is AverageKind.AHEAD
            parts = self._ready.gather(job.num_parts, job.iteration, spec=job.spec, ahead=ahead)
        self._write_parts(request, exchange, parts)

    @runs(jobs.Reduce)
    def _reduce(self, request: Request[jobs.Reduce]) -> jobs.Squared:
        executor = self._ready
        exchange = self._exchange(request.job)
        audited = executor.config.run.audited
        return self._reduced(request, exchange, executor.square_sum, audited=audited)

    @runs(jobs.Square)
    def _square(self, request: Request[jobs.Square]) -> jobs.Squared:
        """Return the square sum of the gradient of a node that is alone in its stage."""
        request.expect(0, 0)
        mean = self._ready.own_mean(request.job.weights_total, request.job.iteration)
        return jobs.Squared(self._ready.square_sum(mean))

    @runs(jobs.Propose)
    def _propose(self, request: Request[jobs.Propose]) -> jobs.Proposed:
        executor = self._ready
        job = request.job
        num_parts = job.num_parts
        num_ahead = job.num_ahead
        specs = (job.spec, job.ahead_spec)
        how = Sources(num_ahead, *specs, job.missed, job.missed_now, ends_phase=job.ends_phase)
        request.expect(num_ahead + num_parts, 0)
        ahead = executor.exchange(how.ahead_spec, ahead=True)
        parts = self._means(request.inputs[:num_ahead], ahead)
        parts += self._means(request.inputs[num_ahead:], executor.exchange(how.spec))
        digest = executor.propose(
            job.iteration,
            parts,
            weights_total=None if num_parts else job.weights_total,
            gradient_norm=job.gradient_norm,
            share=job.share(executor.config.run.batch.tokens_per_microbatch),
            how=how,
        )
        odd: list[int] = []
        if executor.config.run.audited:
            odd = means_standing_out(parts, executor.passes.own_parts(num_parts))
        metrics = tuple(executor.metrics.items())
        return jobs.Proposed(digest, executor.effective_rank, tuple(odd), metrics)

    @runs(jobs.StepAhead)
    def _step_ahead(self, request: Request[jobs.StepAhead]) -> None:
        request.expect(0, 0)
        self._ready.step_ahead(request.job.iteration)

    @runs(jobs.StepLocally)
    def _step_locally(self, request: Request[jobs.StepLocally]) -> jobs.Proposed:
        request.expect(0, 0)
        digest = self._ready.step_locally(request.job.iteration)
        return jobs.Proposed(digest, metrics=tuple(self._ready.metrics.items()))

    @runs(jobs.CommitStep)
    def _commit(self, request: Request[jobs.CommitStep]) -> None:
        request.expect(0, 0)
        self._other = None
        self._ready.commit(request.job.iteration)

    # State

    @runs(jobs.ReturnToAnchor)
    def _return_to_anchor(self, request: Request[jobs.ReturnToAnchor]) -> None:
        request.expect(0, 0)
        self._ready.return_to_anchor()

    @runs(jobs.Snapshot)
    def _snapshot(self, request: Request[jobs.Snapshot]) -> jobs.SnapshotTaken:
        """Return the size of a state. If the job has a region, write the state and describe it."""
        executor = self._ready
        job = request.job
        iteration = executor.anchor + job.ahead
        snapshot = executor.snapshot(with_optimizer=job.with_optimizer, ahead=job.ahead)
        if not request.outputs:
            return jobs.SnapshotTaken(iteration, "", snapshot.num_bytes)
        request.expect(0, 1)
        region = request.outputs[0]
        if not region.path:
            blob = self._arena.tensor(region, torch.uint8, (snapshot.num_bytes,))
            entries, chunks = snapshot.write(blob)
        else:
            entries, chunks = snapshot.write_file(Path(region.path))
        manifest = description_text([entry_json(entry) for entry in entries], "".join(chunks))
        return jobs.SnapshotTaken(iteration, manifest, snapshot.num_bytes)

    @runs(jobs.Load)
    def _load(self, request: Request[jobs.Load]) -> jobs.Built:
        job = request.job
        request.expect(len(job.manifests), 0)
        with ExitStack() as stack:
            blobs = [stack.enter_context(self._arena.state(region)) for region in request.inputs]
            entries = [parse_description(each).entries for each in job.manifests]
            parts = list(zip(blobs, entries, strict=True))
            return jobs.Built(self._ready.load(parts, job.iteration))

    @runs(jobs.Mix)
    def _mix(self, request: Request[jobs.Mix]) -> jobs.Built:
        job = request.job
        request.expect(len(job.stages), 0)
        with ExitStack() as stack:
            blobs = [stack.enter_context(self._arena.state(region)) for region in request.inputs]
            entries = [parse_description(each).entries for each in job.manifests]
            donors = list(zip(job.stages, blobs, entries, strict=True))
            return jobs.Built(self._ready.mix(donors, job.iteration))


def _sketches(seed: bytes, tensors: Iterable[Tensor]) -> tuple[bytes, ...]:
    sketcher = Sketcher(seed)
    return tuple(sketcher.sketch(each).to_bytes() for each in tensors)
