"""Jobs of a compute process: a message in, tensors read and written in the arena, a result out.

There is one method for each class of jobs.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from decod.errors import TrainingError
from decod.protocol.core import jobs
from decod.protocol.core.job_codec import runs
from decod.protocol.core.jobs import AverageKind, Configure, Configured, SetThreads
from decod.train.checkpoint.description import description_text, entry_json, parse_description
from decod.train.exchange import Exchange
from decod.train.executor import Sources, StageExecutor
from decod.train.reduction import cut
from decod.train.standing_out import Sketcher, error_between, means_standing_out
from decod.worker.arena_view import Arena
from decod.worker.configure import divided, facts_of_all, make_executor, share_of_threads
from decod.worker.memory import free_unused, ran_out
from decod.worker.pass_runner import PassRunner, R
from decod.worker.ranks.crew import Crew
from decod.worker.ranks.group import MakeReady
from decod.worker.runner import Request, malformed


class JobRunner(PassRunner):
    """The runner of jobs, one after another, on one executor.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._executor: StageExecutor | None = None
        self._other: StageExecutor | None = None
        """Another stage beside the own, for a judge."""
        self._crew: Crew | None = None
        """The other ranks, where this device is one of several."""

    @property
    @override
    def _num_phases(self) -> int:
        return self._ready.config.run.sync.num_phases

    @property
    def _ready(self) -> StageExecutor:
        if self._executor is None:
            raise malformed("no configure came before")
        return self._executor

    @property
    @override
    def _computing(self) -> StageExecutor | None:
        return self._executor

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
        self._executor = executor = make_executor(settings[0], device, self._watch)
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
        report = self._ready.build(request.job.stage_index)
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
        other.build(job.stage_index)
        entries = parse_description(job.manifest).entries
        with self._arena.state(request.inputs[0]) as blob:
            found = other.load(blob, entries, job.iteration)
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
        how = Sources(num_ahead, job.spec, job.ahead_spec, job.missed, job.missed_now)
        request.expect(num_ahead + num_parts, 0)
        ahead = executor.exchange(how.ahead_spec, ahead=True)
        parts = self._means(request.inputs[:num_ahead], ahead)
        parts += self._means(request.inputs[num_ahead:], executor.exchange(how.spec))
        digest = executor.propose(
            job.iteration,
            parts,
            weights_total=None if num_parts else job.weights_total,
            gradient_norm=job.gradient_norm,
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
        request.expect(1, 0)
        entries = parse_description(request.job.manifest).entries
        with self._arena.state(request.inputs[0]) as blob:
            return jobs.Built(self._ready.load(blob, entries, request.job.iteration))

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
