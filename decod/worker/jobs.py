"""Jobs of a compute process: a message in, tensors read and written in the arena, a result out.

There is one method per kind of job.
"""

import logging
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor
from typing_extensions import override

from decod.data.block import Block
from decod.protocol.core.sketch import ERROR_MAX
from decod.train.checkpoint.description import entry_json
from decod.train.checkpoint.entries import TensorEntry, parse_entries
from decod.train.exchange import Exchange
from decod.train.executor import Sources, StageExecutor
from decod.train.measure import measure, synchronize
from decod.train.reduction import cut
from decod.train.sketch import Sketcher, error_in
from decod.train.standing_out import means_standing_out
from decod.worker.arena import Arena, Region
from decod.worker.configure import (
    change_num_threads,
    device_facts,
    make_executor,
    memory_max_bytes,
    parse_device,
)
from decod.worker.device import CPU, cap_memory, pinned_max_bytes, settle
from decod.worker.device_clock import DeviceClock
from decod.worker.exchange_runner import ExchangeRunner
from decod.worker.job import Job, Result, malformed
from decod.worker.memory import ran_out
from decod.worker.pinned import pinned_by_cuda

logger = logging.getLogger("decod.worker")


class JobRunner(ExchangeRunner):
    """The runner of jobs, one after another, on one executor.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._executor: StageExecutor | None = None
        self._clock: DeviceClock | None = None
        self._kinds |= {
            "configure": self._configure,
            "set_threads": self._set_threads,
            "recompute": self._recompute,
            "build": self._build,
            "measure": self._measure,
            "embed": self._embed,
            "forward": self._forward,
            "head": self._head,
            "backward": self._backward,
            "embed_backward": self._embed_backward,
            "inspect": self._inspect,
            "drop": self._drop,
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
            "give_block": self._give_block,
            "sketch_pass": self._sketch_pass,
            "sketch_part": self._sketch_part,
            "replay": self._replay_passes,
        }

    @override
    def finish(self) -> None:
        """Do the work that the last job has put off until after its reply.

        The reply to the next job of that kind includes its duration. If it fails, the next job that
        needs the sum of gradients reports that.
        """
        start_s = perf_counter()
        try:
            if self._finish_backward() and self._clock is None:
                self._later_s[self._kind] = perf_counter() - start_s
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            logger.warning("compute.out_of_memory %s", error)

    def _finish_backward(self) -> bool:
        """Compute what a backward pass has put off, or let the device begin with it."""
        if self._executor is None:
            return False
        begun = None if self._clock is None else self._clock.mark()
        done = self._executor.finish_backward()
        if done and self._clock is not None and begun is not None:
            self._clock.went_on(self._kind, begun)
        return done

    @override
    def _begin(self) -> None:
        if self._clock is not None:
            self._await_results()  # Of a job that failed.
            self._clock.begin()

    @override
    def _all_told(self) -> None:
        if self._executor is None or self._clock is None:
            return
        self._clock.end()
        if self._departures:
            # The device goes on while the result travels.
            self._finish_backward()
        else:
            synchronize(self._executor.config.device)

    @override
    def _busy_s(self, wall_s: float, copy_s: float) -> float:
        if self._clock is None:
            return wall_s
        self._later_s |= self._clock.take_later_s()
        return self._clock.busy_s(wall_s, copy_s)

    @property
    @override
    def _num_phases(self) -> int:
        return self._ready.config.num_phases

    @property
    def _ready(self) -> StageExecutor:
        if self._executor is None:
            raise malformed("no configure came before")
        return self._executor

    def _configure(self, job: Job) -> Result:
        # The device comes first: capacity and speed are measured on it.
        device, memory_bytes = parse_device(job.message), memory_max_bytes(job.message)
        settle(device)
        cap_memory(device, memory_bytes)
        facts = device_facts(device, memory_bytes)
        self._executor = make_executor(job.message, device, self._watch)
        if device.name != CPU:
            self._clock = DeviceClock(device.name)
            self._arena.pin(pinned_by_cuda(pinned_max_bytes()))
        return facts

    def _set_threads(self, job: Job) -> Result:
        change_num_threads(job.message)
        return {}

    def _recompute(self, job: Job) -> Result:
        """Recompute forward passes, or not, in the stages that are built from now on."""
        executor = self._ready
        executor.config = replace(executor.config, recompute=job.flag("recompute"))
        return {}

    def _build(self, job: Job) -> Result:
        report = self._ready.build(job.number("stage_index"))
        return {
            "num_parameters": report.num_parameters,
            "parameter_bytes": report.parameter_bytes,
            "hash": report.hash,
            "activation_bytes": report.activation_bytes,
        }

    def _measure(self, job: Job) -> Result:
        found = measure(self._ready, job.number("num_repeats", 1))
        return {
            "forward_s": found.forward_s,
            "backward_s": found.backward_s,
            "microbatch_memory_bytes": found.microbatch_memory_bytes,
            "recomputed_bytes": found.recomputed_bytes,
        }

    # Microbatches. Output regions are checked before the work, so that a bad region costs nothing.

    def _activation(self, region: Region) -> Tensor:
        """Return an activation or gradient in the arena, as it travels."""
        return self._arena.tensor(region, *self._ready.config.activation_wire)

    def _embed(self, job: Job) -> Result:
        job.expect(0, 1)
        output = self._activation(job.outputs[0])
        self._write(output, self._ready.passes.embed(job.microbatch()))
        return {}

    def _forward(self, job: Job) -> Result:
        job.expect(1, 1)
        output = self._activation(job.outputs[0])
        entry = self._activation(job.inputs[0])
        self._write(output, self._ready.passes.forward(job.microbatch(), entry))
        return {}

    def _head(self, job: Job) -> Result:
        job.expect(1, 1)
        output = self._activation(job.outputs[0])
        gradient, loss = self._ready.passes.head(job.microbatch(), self._activation(job.inputs[0]))
        self._write(output, gradient)
        return {"loss": loss, "num_tokens": self._ready.config.batch.tokens_per_microbatch}

    def _backward(self, job: Job) -> Result:
        job.expect(1, 1)
        output = self._activation(job.outputs[0])
        gradient = self._activation(job.inputs[0])
        self._write(output, self._ready.passes.backward(job.microbatch(), gradient))
        return {}

    def _embed_backward(self, job: Job) -> Result:
        job.expect(1, 0)
        self._ready.passes.embed_backward(job.microbatch(), self._activation(job.inputs[0]))
        return {}

    def _inspect(self, job: Job) -> Result:
        """Refuse what a client has computed if it is not finite."""
        job.expect(1, 0)
        self._ready.passes.read(self._activation(job.inputs[0]), f"result for {job.microbatch()}")
        return {}

    def _give_block(self, job: Job) -> Result:
        """Take in a block of the data whose file on this host is damaged."""
        job.expect(1, 0)
        if self._ready.tokens is None:
            raise malformed("a block of data for a node without data")
        region = job.inputs[0]
        content = self._arena.tensor(region, torch.uint8, (region.num_bytes,)).numpy().tobytes()
        block = Block(job.number("shard_index"), job.number("offset"), region.num_bytes)
        self._ready.tokens.give(block, content)
        return {}

    # Audits of other members' work

    def _sketch_pass(self, job: Job) -> Result:
        job.expect(0, 0)
        witness = self._ready.passes.witness
        sketch = witness.of_pass(job.microbatch(), is_gradient=job.flag("is_gradient"))
        return {"sketches": [sketch.to_bytes().hex()]}

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

    def _replay_passes(self, job: Job) -> Result:
        job.expect(2, 0)
        activation, gradient = map(self._activation, job.inputs)
        told, got, sketcher = job.sketches("told"), job.sketches("got"), Sketcher(job.seed())
        executor, mb = self._ready, job.microbatch()
        if not len(told) == len(got) == len(job.inputs):
            raise malformed(f"{len(told)} and {len(got)} sketches of a relay's passes")
        *made, apart_P = executor.passes.replay(mb, activation, gradient)
        errors = [
            error_in(tensor, sketch) if sketch else ERROR_MAX
            for tensor, sketch in zip(made, told, strict=True)
        ]
        # Where the relay says nothing, it does not doubt what others say.
        errors += [
            error_in(executor.passes.read(tensor), sketch) if sketch else 0.0
            for tensor, sketch in zip((activation, gradient), got, strict=True)
        ]
        parts = cut(apart_P, job.number("num_parts", 1))
        sketches = [sketcher.sketch(part_N).to_bytes().hex() for part_N in parts]
        return {"errors": errors, "sketches": sketches}

    # Iterations

    def _drop(self, job: Job) -> Result:
        job.expect(0, 0)
        self._ready.passes.drop(job.microbatch())
        return {}

    def _reset(self, job: Job) -> Result:
        job.expect(0, 0)
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
        blob = self._arena.tensor(job.outputs[0], torch.uint8, (snapshot.num_bytes,))
        entries, chunks = snapshot.write(blob)
        tensors = [entry_json(entry) for entry in entries]
        return {**result, "tensors": tensors, "chunks": "".join(chunks)}

    def _load(self, job: Job) -> Result:
        job.expect(1, 0)
        entries = parse_entries(job.message.get("tensors"))
        region = job.inputs[0]
        blob = self._arena.tensor(region, torch.uint8, (region.num_bytes,))
        return {"hash": self._ready.load(blob, entries, job.number("iteration"))}

    def _mix(self, job: Job) -> Result:
        stages, described = job.message.get("stages"), job.message.get("tensors")
        if not isinstance(stages, list) or not isinstance(described, list):
            raise malformed("mix names no stages or no tensors")
        job.expect(len(stages), 0)
        executor, donors = self._ready, list[tuple[int, Tensor, list[TensorEntry]]]()
        for stage_index, region, entries in zip(stages, job.inputs, described, strict=True):
            blob = self._arena.tensor(region, torch.uint8, (region.num_bytes,))
            donors.append((stage_index, blob, parse_entries(entries)))
        return {"hash": executor.mix(donors, job.number("iteration"))}
