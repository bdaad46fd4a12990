"""Jobs of a compute process: a message in, tensors read and written in the arena, a result out.

There is one method per kind of job. `Job` reads the fields of a message and checks them. The sender
is our own node process, but a slip there must end in an error and not in a wrong tensor.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from decod.data.block import Block, BlockError
from decod.errors import DecodError, HardwareError, TrainingError
from decod.ids import MicrobatchId
from decod.model.folder import write_folder
from decod.model.shape import stage_shapes
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.sketch import ERROR_MAX, SEED_BYTES, Sketch
from decod.stopwatch import Stopwatch
from decod.train.checkpoint.description import entry_json
from decod.train.checkpoint.entries import TensorEntry, parse_entries
from decod.train.exchange import Exchange, Place, reduce_leniently
from decod.train.executor import Sources, StageExecutor
from decod.train.layout import Layout
from decod.train.measure import measure, synchronize
from decod.train.reduction import cut
from decod.train.sketch import Sketcher, error_in
from decod.train.snapshot import read_state
from decod.train.standing_out import means_standing_out, standing_out
from decod.worker.arena import Arena, Region
from decod.worker.configure import device_facts, make_executor, parse_device

Result = dict[str, Any]

_SEED = re.compile(f"[0-9a-f]{{{2 * SEED_BYTES}}}")

logger = logging.getLogger("decod.worker")


def malformed(what: str) -> TrainingError:
    """Return the error for a message that no node of this version sends."""
    return TrainingError(
        what,
        why="the node process sent a job that this compute process does not understand",
        fix="report it with both logs: this is an error in decod",
        code="E-INT-003",
    )


class Job:
    """One request, with checked access to its fields."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.message = message
        self.inputs = self._regions("inputs")
        self.outputs = self._regions("outputs")

    def _regions(self, name: str) -> list[Region]:
        values = self.message.get(name, [])
        if not isinstance(values, list):
            raise malformed(f"{name} is no list")
        return [Region.parse(value) for value in values]

    def number(self, name: str, minimum: int = 0) -> int:
        """Return a whole number of at least `minimum`."""
        value = self.message.get(name)
        if type(value) is not int or value < minimum:
            raise malformed(f"{name} is {str(value)[:100]}")
        return value

    def length(self, name: str) -> float:
        """Return a number that is finite and at least 0."""
        value: Any = self.message.get(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise malformed(f"{name} is {str(value)[:100]}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a truth value."""
        value = self.message.get(name)
        if type(value) is not bool:
            raise malformed(f"{name} is {str(value)[:100]}")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return whole numbers of at least 0."""
        values = self.message.get(name)
        if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
            raise malformed(f"{name} is {str(values)[:100]}")
        return tuple(values)

    def spec(self, name: str) -> AverageSpec:
        """Return what an average is of, and how it travels."""
        value = self.message.get(name)
        names = tuple(each.name for each in fields(AverageSpec))
        if not isinstance(value, dict) or not all(
            type(value.get(each)) is int and value[each] >= 0 for each in names
        ):
            raise malformed(f"{name} is {str(value)[:100]}")
        return AverageSpec(*(value[each] for each in names))

    def sketches(self, name: str) -> list[Sketch | None]:
        """Return sketches of tensors that other nodes have made. None: one is missing.

        Raises:
            TrainingError: They are none.
        """
        values = self.message.get(name)
        try:
            found = [Sketch.from_bytes(bytes.fromhex(v)) if v else None for v in values or ()]
        except (TypeError, ValueError) as error:
            raise malformed(f"{name} is {str(values)[:100]}") from error
        return found

    def seed(self) -> bytes:
        """Return the seed of a sketch."""
        value = self.message.get("seed")
        if not isinstance(value, str) or not _SEED.fullmatch(value):
            raise malformed(f"seed is {str(value)[:100]}")
        return bytes.fromhex(value)

    def microbatch(self) -> MicrobatchId:
        """Return the microbatch that the job is about."""
        value = self.message.get("mb")
        names = ("iteration", "data_node_index", "index")
        if not isinstance(value, dict) or not all(
            type(value.get(name)) is int and value[name] >= 0 for name in names
        ):
            raise malformed(f"mb is {str(value)[:100]}")
        return MicrobatchId(*(value[name] for name in names))

    def expect(self, num_inputs: int | None, num_outputs: int) -> None:
        """Refuse a job with another number of regions. None allows any number of inputs."""
        if num_inputs not in (None, len(self.inputs)) or num_outputs != len(self.outputs):
            raise malformed(f"{len(self.inputs)} inputs and {len(self.outputs)} outputs")


class JobRunner:
    """The runner of jobs, one after another, on one executor.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._executor: StageExecutor | None = None
        self._watch = Stopwatch()
        self._last_kind = ""
        self._later_s: dict[str, float] = {}
        """For each kind, how long the last job went on after its reply."""
        self._kinds: dict[str, Callable[[Job], Result]] = {
            "configure": self._configure,
            "ping": lambda _: {},
            "build": self._build,
            "measure": self._measure,
            "embed": self._embed,
            "forward": self._forward,
            "head": self._head,
            "backward": self._backward,
            "embed_backward": self._embed_backward,
            "drop": self._drop,
            "reset": self._reset,
            "retract": self._retract,
            "gather": self._gather,
            "reduce_part": self._reduce_part,
            "square": self._square,
            "propose": self._propose,
            "step_locally": self._step_locally,
            "commit": self._commit,
            "return_to_anchor": self._return_to_anchor,
            "snapshot": self._snapshot,
            "load": self._load,
            "mix": self._mix,
            "initial": self._initial,
            "export": self._export,
            "give_block": self._give_block,
            "sketch_pass": self._sketch_pass,
            "sketch_part": self._sketch_part,
            "replay": self._replay_passes,
        }

    def run(self, message: Mapping[str, Any]) -> Result:
        """Return the reply to one request. Raises only errors that are bugs, not DecodErrors."""
        job_id = message.get("job")
        try:
            kind = message.get("kind")
            if type(job_id) is not int or not isinstance(kind, str) or kind not in self._kinds:
                raise malformed(f"job {str(job_id)[:20]} is of kind {str(kind)[:100]}")
            job = Job(message)
            start_s, copied_s = perf_counter(), self._watch.seconds["copy"]
            try:
                result = self._kinds[kind](job)
                if self._executor is not None:
                    synchronize(self._executor.config.device)
            except torch.OutOfMemoryError as error:
                raise HardwareError(
                    f"out of memory in a {kind} job",
                    why=str(error).split("\n", maxsplit=1)[0],
                    fix="lower batch.microbatch_size, or this node's capacity",
                    code="E-HW-003",
                ) from error
            seconds = perf_counter() - start_s + self._later_s.get(kind, 0.0)
            self._last_kind = kind
        except DecodError as error:
            return error_reply(job_id, error)
        copy_seconds = self._watch.seconds["copy"] - copied_s
        times = {"seconds": seconds, "copy_seconds": copy_seconds}
        return {"job": job_id, "ok": True, **times, "result": result}

    def finish(self) -> None:
        """Do the work that the last job has put off until after its reply.

        The reply to the next job of that kind includes its duration. If it fails, the next job that
        needs the sum of gradients reports that.
        """
        start_s = perf_counter()
        try:
            if self._executor is None or not self._executor.finish_backward():
                return
            synchronize(self._executor.config.device)
        except torch.OutOfMemoryError as error:
            logger.warning("compute.out_of_memory %s", error)
        self._later_s[self._last_kind] = perf_counter() - start_s

    @property
    def _ready(self) -> StageExecutor:
        if self._executor is None:
            raise malformed("no configure came before")
        return self._executor

    def _configure(self, job: Job) -> Result:
        # The device comes first: capacity and speed are measured on it.
        device = parse_device(job.message)
        self._executor = make_executor(job.message, device, self._watch)
        return device_facts(device)

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
        }

    # Microbatches. Output regions are checked before the work, so that a bad region costs nothing.

    def _activation(self, region: Region) -> Tensor:
        """Return an activation or gradient in the arena, as it travels."""
        return self._arena.tensor(region, *self._ready.config.activation_wire)

    def _write(self, output: Tensor, value: Tensor) -> None:
        """Copy a result from the device into the arena."""
        # Otherwise the copy would include the wait for the device.
        synchronize(str(value.device))
        with self._watch.measure("copy"):
            output.copy_(value)

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
        if not num_parts or not phase:
            ahead = job.flag("ahead")
            parts = self._ready.gather(num_parts, iteration, spec=job.spec("spec"), ahead=ahead)
        else:
            before = exchange.mean_sizes(phase - 1, num_parts)
            parts = exchange.parts(phase, num_parts, self._tensors(job.inputs, *before))
        outputs = self._tensors(job.outputs, *exchange.part_sizes(phase, num_parts or 1))
        for output, part in zip(outputs, parts, strict=True):
            self._write(output, part)
        return {}

    def _tensors(
        self, regions: Sequence[Region], dtype: torch.dtype, sizes: Sequence[int]
    ) -> list[Tensor]:
        """Return the flat tensors in some regions."""
        pairs = zip(regions, sizes, strict=bool(regions))
        return [self._arena.tensor(region, dtype, (size,)) for region, size in pairs]

    def _reduce_part(self, job: Job) -> Result:
        job.expect(None, 1)
        num_parts, part, phase = job.number("num_parts", 1), job.number("part"), job.number("phase")
        if part >= num_parts:
            raise malformed(f"part is {part} of {num_parts}")
        exchange, weights = self._exchange(job), job.numbers("weights")
        if len(weights) != len(job.inputs):
            raise malformed(f"{len(weights)} weights of {len(job.inputs)} inputs")
        dtype, sizes = exchange.mean_sizes(phase, num_parts)
        (output,) = self._tensors(job.outputs, dtype, [sizes[part]])
        dtype, sizes = exchange.part_sizes(phase, num_parts)
        place, refused = Place(part, num_parts, phase), dict[int, str]()
        if job.flag("lenient"):
            size = sizes[part]
            right = [region.num_bytes == size * dtype.itemsize for region in job.inputs]
            chosen = [
                self._arena.tensor(region, dtype, (size,)) if fits else None
                for region, fits in zip(job.inputs, right, strict=True)
            ]
            mean, refused = reduce_leniently(exchange, chosen, place, weights)
            odd = []
        else:
            inputs = self._tensors(job.inputs, dtype, [sizes[part]] * len(job.inputs))
            mean = exchange.reduce(inputs, place, weights)
            odd = standing_out(inputs, weights) if self._ready.config.audited else []
        self._write(output, mean)
        reason = next(iter(refused.values()), "")
        square_sum = self._ready.square_sum(mean)
        found = {"refused": [*refused], "reason": reason, "standing_out": odd}
        return {"square_sum": square_sum, **found}

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

    def _means(self, regions: Sequence[Region], exchange: Exchange) -> list[Tensor]:
        """Return the means of all phases of an average."""
        num_phases = self._ready.config.num_phases
        num_parts, found = len(regions) // num_phases, list[Tensor]()
        for phase in range(num_phases if num_parts else 0):
            of_phase = regions[phase * num_parts : (phase + 1) * num_parts]
            found += self._tensors(of_phase, *exchange.mean_sizes(phase, num_parts))
        return found

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
        return self._copy(self._ready, job, with_optimizer=job.flag("with_optimizer"))

    def _initial(self, job: Job) -> Result:
        """Copy another stage's initial state, which this host has and that stage's members lack."""
        own = self._ready
        other = StageExecutor(own.config, init_dir=own.init_dir, checkpoint=own.checkpoint)
        other.build(job.number("stage_index"))
        return self._copy(other, job, with_optimizer=own.checkpoint is not None)

    def _copy(self, executor: StageExecutor, job: Job, *, with_optimizer: bool) -> Result:
        """Return the size of a state. If the job has a region, write the state and describe it."""
        snapshot = executor.snapshot(with_optimizer=with_optimizer)
        result: Result = {"num_bytes": snapshot.num_bytes, "iteration": executor.anchor}
        if not job.outputs:
            return result
        job.expect(0, 1)
        blob = self._arena.tensor(job.outputs[0], torch.uint8, (snapshot.num_bytes,))
        entries, chunks = snapshot.write(blob)
        tensors = [entry_json(entry) for entry in entries]
        return {**result, "tensors": tensors, "chunks": "".join(chunks)}

    def _export(self, job: Job) -> Result:
        """Write a model folder from the states of all stages, one blob each."""
        config, stages = self._ready.config, job.message.get("stages")
        path = job.message.get("path")
        if not isinstance(stages, list) or not isinstance(path, str):
            raise malformed("export names no stages or no path")
        job.expect(len(stages), 0)
        weights: dict[str, Tensor] = {}
        for stage, region in zip(stages, job.inputs, strict=True):
            blob = self._arena.tensor(region, torch.uint8, (region.num_bytes,))
            layout = Layout(stage_shapes(config.model, config.stages, stage["stage_index"]))
            dtype: torch.dtype = getattr(torch, config.model.dtype.value)
            state = read_state(
                blob, parse_entries(stage["tensors"]), layout, dtype, self._ready.rule.prefixes
            )
            weights.update(layout.views(state.weights))
        write_folder(Path(path), config.model, weights)
        return {"num_tensors": len(weights)}

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


def error_reply(job_id: object, error: DecodError) -> Result:
    """Return the reply that reports a failed job."""
    fields = {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    blocks = error.blocks if isinstance(error, BlockError) else ()
    return {
        "job": job_id if type(job_id) is int else -1,
        "ok": False,
        "error": fields,
        "blocks": [[block.shard_index, block.offset, block.num_bytes] for block in blocks],
    }
