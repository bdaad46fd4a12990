"""Jobs of a compute process: a message in, tensors read and written in the arena, a result out.

There is one method per kind of job.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from decod.errors import TrainingError
from decod.train.checkpoint.description import entry_json
from decod.train.checkpoint.entries import parse_entries
from decod.train.exchange import Exchange
from decod.train.executor import Sources, StageExecutor
from decod.train.reduction import cut
from decod.train.sketch import Sketcher, error_between
from decod.train.standing_out import means_standing_out
from decod.worker.arena import Arena
from decod.worker.configure import make_executor
from decod.worker.job import Job, Result, malformed
from decod.worker.memory import free_unused, ran_out
from decod.worker.pass_runner import PassRunner
from decod.worker.ranks.crew import Crew
from decod.worker.ranks.dividing import divided, facts_of_all, share_of_threads


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
        self._kinds |= {
            "configure": self._configure,
            "build": self._build,
            "inspect": self._inspect,
            "reset": self._reset,
            "retract": self._retract,
            "gather": self._gather,
            "reduce_part": self._reduce_part,
            "square": self._square,
            "propose": self._propose,
            "step_ahead": self._step_ahead,
            "step_locally": self._step_locally,
            "commit": self._commit,
            "return_to_anchor": self._return_to_anchor,
            "snapshot": self._snapshot,
            "load": self._load,
            "mix": self._mix,
            "sketch_part": self._sketch_part,
            "replay": self._replay_passes,
            "stand_in": self._stand_in,
        }

    @property
    @override
    def _num_phases(self) -> int:
        return self._ready.config.num_phases

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

    def _configure(self, job: Job) -> Result:
        messages = divided(job.message)
        # The device comes first: capacity and speed are measured on it.
        device, facts = self._use_device(messages[0])
        self._executor = executor = make_executor(messages[0], device, self._watch)
        devices = [str(message.get("device")) for message in messages]
        if self._crew is not None and self._crew.devices != devices:
            self.close()
        if len(messages) == 1:
            return facts
        if self._crew is None:
            self._crew = Crew(devices, self._arena.descriptor, self.ends)
        executor.ranks = self._crew
        others = self._crew.configure(messages[1:], device.name)
        facts["memory_bytes"] = self._free_bytes()
        return facts_of_all([facts, *others])

    # Several devices

    @override
    def _everywhere(self, job: Job, own: Callable[[], Result]) -> list[Result]:
        crew = self._crew
        if crew is None:
            return [own()]
        try:
            return crew.share(job.message, own, apart=not self._ends_with_others)
        except BaseException:
            if crew.disagrees:
                self._give_up(job, crew)
            raise

    def _give_up(self, job: Job, crew: Crew) -> None:
        """Deal with a pass that some devices have run, and others have not."""
        if self._kind in ("embed", "forward"):
            mb = job.message["mb"]
            self._ready.passes.drop(job.microbatch())
            crew.call("drop", mb=mb)
        elif self._kind in ("head", "backward", "embed_backward"):
            self._ready.passes.spoil(f"a device failed in the {self._kind} job of a microbatch")

    @override
    def _make_ready(self, job: Job) -> None:
        crew, mb = self._crew, job.microbatch()
        if crew is None or not self._ends_with_others:
            return

        def own() -> Result:
            self._ready.passes.make_ready(mb)
            return {}

        crew.share({"kind": "make_ready", "mb": job.message["mb"]}, own)

    @override
    def _look_at(self, job: Job, *, is_gradient: bool) -> None:
        if self._crew is not None:
            tensor = self._activation(job.inputs[0])
            self._ready.passes.look_at(tensor, is_gradient=is_gradient)

    @override
    def _set_threads(self, job: Job) -> Result:
        if self._crew is None:
            return super()._set_threads(job)
        share = share_of_threads(job.message, len(self._crew.devices))
        self._crew.call("set_threads", num_threads=share)
        return super()._set_threads(Job({**job.message, "num_threads": share}))

    def _build(self, job: Job) -> Result:
        report = self._ready.build(job.number("stage_index"))
        return {
            "num_parameters": report.num_parameters,
            "parameter_bytes": report.parameter_bytes,
            "hash": report.hash,
            "activation_bytes": report.activation_bytes,
        }

    def _inspect(self, job: Job) -> Result:
        """Refuse what a client has computed if it is not finite."""
        job.expect(1, 0)
        self._ready.passes.read(self._activation(job.inputs[0]), f"result for {job.microbatch()}")
        return {}

    # Audits of other members' work

    def _sketch_part(self, job: Job) -> Result:
        job.expect(None, 0)
        num_parts, part = job.number("num_parts", 1), job.number("part")
        if part >= num_parts:
            raise malformed(f"part is {part} of {num_parts}")
        exchange = self._ready.exchange()
        sizes_of = exchange.mean_sizes if job.flag("is_mean") else exchange.part_sizes
        dtype, sizes = sizes_of(0, num_parts)
        tensors = self._tensors(job.inputs, dtype, [sizes[part]] * len(job.inputs))
        sketcher = Sketcher(job.seed())
        return {"sketches": [sketcher.sketch(each).to_bytes().hex() for each in tensors]}

    def _stand_in(self, job: Job) -> Result:
        """Build another stage beside the own, on this device alone, if there is room."""
        job.expect(1, 0)
        self._other = None  # Free it before the next one's memory is taken.
        try:
            return self._build_beside(job)
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

    def _build_beside(self, job: Job) -> Result:
        config = replace(
            self._ready.config, is_client=not job.flag("whole"), sharded=False, rows=None
        )
        other = StageExecutor(config)
        other.build(job.number("stage_index"))
        entries = parse_entries(job.message.get("tensors"))
        with self._arena.state(job.inputs[0]) as blob:
            found = other.load(blob, entries, job.number("iteration"))
        self._other = other
        return {"hash": found}

    def _replay_passes(self, job: Job) -> Result:
        compared = job.flags("compared", 2)
        job.expect(2 + sum(compared), 0)
        activation, gradient, *sent = map(self._activation, job.inputs)
        beside, mb, sketcher = job.flag("beside"), job.microbatch(), Sketcher(job.seed())
        executor = self._other if beside else self._ready
        if executor is None:
            raise malformed("no other stage stands beside the own")
        found = list[Tensor]()

        def own() -> Result:
            found.extend(executor.passes.replay(mb, activation, gradient))
            return {}

        if executor.config.sharded:
            self._everywhere(job, own)
        else:
            own()
        *made, apart_P = found
        errors = [
            error_between(executor.passes.read(sent.pop(0)), tensor) if compares else 0.0
            for tensor, compares in zip(made, compared, strict=True)
        ]
        parts = cut(apart_P, job.number("num_parts", 1))
        sketches = [sketcher.sketch(part_N).to_bytes().hex() for part_N in parts]
        return {"errors": errors, "sketches": sketches}

    # Iterations

    def _reset(self, job: Job) -> Result:
        job.expect(0, 0)
        self._other = None
        self._ready.reset()
        return {}

    def _retract(self, job: Job) -> Result:
        job.expect(0, 0)
        self._ready.retract()
        return {}

    def _exchange(self, job: Job) -> Exchange:
        return self._ready.exchange(job.spec("spec"), ahead=job.flag("ahead"))

    def _gather(self, job: Job) -> Result:
        num_parts, phase = job.number("num_parts"), job.number("phase")
        exchange, iteration = self._exchange(job), job.number("iteration", 1)
        job.expect(None, num_parts)
        if num_parts and phase:
            parts = self._later_parts(job, exchange)
        else:
            ahead = job.flag("ahead")
            parts = self._ready.gather(num_parts, iteration, spec=job.spec("spec"), ahead=ahead)
        self._write_parts(job, exchange, parts)
        return {}

    def _reduce_part(self, job: Job) -> Result:
        audited = self._ready.config.audited
        mean, found = self._reduced(job, self._exchange(job), audited=audited)
        return {"square_sum": self._ready.square_sum(mean), **found}

    def _square(self, job: Job) -> Result:
        """Return the square sum of the gradient of a node that is alone in its stage."""
        job.expect(0, 0)
        mean = self._ready.own_mean(job.number("weights_total", 1), job.number("iteration", 1))
        return {"square_sum": self._ready.square_sum(mean)}

    def _propose(self, job: Job) -> Result:
        executor = self._ready
        num_parts, num_ahead = job.number("num_parts"), job.number("num_ahead")
        specs = job.spec("spec"), job.spec("ahead_spec")
        how = Sources(num_ahead, *specs, job.numbers("missed"), job.numbers("missed_now"))
        job.expect(num_ahead + num_parts, 0)
        weights_total = None if num_parts else job.number("weights_total")
        ahead = executor.exchange(how.ahead_spec, ahead=True)
        parts = self._means(job.inputs[:num_ahead], ahead)
        parts += self._means(job.inputs[num_ahead:], executor.exchange(how.spec))
        digest = executor.propose(
            job.number("iteration", 1),
            parts,
            weights_total=weights_total,
            gradient_norm=job.length("gradient_norm"),
            how=how,
        )
        odd: list[int] = []
        if executor.config.audited:
            odd = means_standing_out(parts, executor.passes.own_parts(num_parts))
        return {"hash": digest, "effective_rank": executor.effective_rank, "standing_out": odd}

    def _step_ahead(self, job: Job) -> Result:
        job.expect(0, 0)
        self._ready.step_ahead(job.number("iteration", 1))
        return {}

    def _step_locally(self, job: Job) -> Result:
        job.expect(0, 0)
        return {"hash": self._ready.step_locally(job.number("iteration", 1))}

    def _commit(self, job: Job) -> Result:
        job.expect(0, 0)
        self._other = None
        self._ready.commit(job.number("iteration", 1))
        return {}

    # State

    def _return_to_anchor(self, job: Job) -> Result:
        job.expect(0, 0)
        self._ready.return_to_anchor()
        return {}

    def _snapshot(self, job: Job) -> Result:
        """Return the size of a state. If the job has a region, write the state and describe it."""
        executor, ahead = self._ready, job.flag("ahead")
        iteration = executor.anchor + ahead
        snapshot = executor.snapshot(with_optimizer=job.flag("with_optimizer"), ahead=ahead)
        result: Result = {"num_bytes": snapshot.num_bytes, "iteration": iteration}
        if not job.outputs:
            return result
        job.expect(0, 1)
        region = job.outputs[0]
        if region.path is None:
            blob = self._arena.tensor(region, torch.uint8, (snapshot.num_bytes,))
            entries, chunks = snapshot.write(blob)
        else:
            entries, chunks = snapshot.write_file(region.path)
        tensors = [entry_json(entry) for entry in entries]
        return {**result, "tensors": tensors, "chunks": "".join(chunks)}

    def _load(self, job: Job) -> Result:
        job.expect(1, 0)
        entries = parse_entries(job.message.get("tensors"))
        with self._arena.state(job.inputs[0]) as blob:
            return {"hash": self._ready.load(blob, entries, job.number("iteration"))}

    def _mix(self, job: Job) -> Result:
        stages, described = job.message.get("stages"), job.message.get("tensors")
        if not isinstance(stages, list) or not isinstance(described, list):
            raise malformed("mix names no stages or no tensors")
        job.expect(len(stages), 0)
        with ExitStack() as stack:
            blobs = [stack.enter_context(self._arena.state(region)) for region in job.inputs]
            entries = [parse_entries(each) for each in described]
            donors = list(zip(stages, blobs, entries, strict=True))
            return {"hash": self._ready.mix(donors, job.number("iteration"))}
