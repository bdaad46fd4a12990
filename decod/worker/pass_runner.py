"""Jobs that every device of a host has a part in: the passes of microbatches, and their timing."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from decod.data.block import Block
from decod.train.measure import Measurable, measure, synchronize
from decod.train.passes import Passes
from decod.train.rows import joined
from decod.train.token_source import TokenSource
from decod.worker.arena import Arena, Region
from decod.worker.configure import (
    change_num_threads,
    device_facts,
    memory_max_bytes,
    parse_device,
)
from decod.worker.device import (
    CPU,
    ChosenDevice,
    cap_memory,
    free_bytes,
    pinned_max_bytes,
    settle,
)
from decod.worker.device_clock import DeviceClock
from decod.worker.exchange_runner import ExchangeRunner
from decod.worker.job import Job, Result, malformed
from decod.worker.memory import ran_out
from decod.worker.pinned import pinned_by_cuda

logger = logging.getLogger("decod.worker")


class Computing(Measurable, Protocol):
    """What a device has of a stage: all of it, or a mirror."""

    tokens: TokenSource | None

    @property
    def passes(self) -> Passes:
        """The passes of the built stage."""

    def finish_backward(self) -> bool:
        """Compute what the last backward pass has put off. Return whether there was anything."""


class PassRunner(ExchangeRunner):
    """The runner of one device's passes.

    Args:
        arena: Memory of the inputs and outputs.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._clock: DeviceClock | None = None
        self._free_bytes: Callable[[], int] = lambda: 0
        """Measures the free memory of the device in use."""
        self._kinds |= {
            "set_threads": self._set_threads,
            "recompute": self._recompute,
            "spread_stage": self._spread_stage,
            "measure": self._measure,
            "embed": self._embed,
            "forward": self._forward,
            "head": self._head,
            "backward": self._backward,
            "embed_backward": self._embed_backward,
            "drop": self._drop,
            "give_block": self._give_block,
        }

    @property
    @abstractmethod
    def _computing(self) -> Computing | None:
        """What the device has of a stage. None: no configure came."""

    @property
    def _device(self) -> Computing:
        if self._computing is None:
            raise malformed("no configure came before")
        return self._computing

    def _use_device(self, message: Mapping[str, Any]) -> tuple[ChosenDevice, Result]:
        """Use the device that a `configure` message names. Return it, and what is to be known."""
        device, memory_bytes = parse_device(message), memory_max_bytes(message)
        settle(device)
        cap_memory(device, memory_bytes)
        facts = device_facts(device, memory_bytes)
        self._free_bytes = partial(free_bytes, device, memory_bytes)
        if device.name != CPU:
            self._clock = DeviceClock(device.name)
            self._arena.pin(pinned_by_cuda(pinned_max_bytes()))
        return device, facts

    def _everywhere(self, job: Job, own: Callable[[], Result]) -> list[Result]:  # noqa: ARG002
        """Run a job on this device, and on others that have a part in it."""
        return [own()]

    def _make_ready(self, job: Job) -> None:
        """Read a microbatch's tokens on all devices that wait for each other within a pass."""

    def _look_at(self, job: Job, *, is_gradient: bool) -> None:
        """Look at a job's input before the passes of several devices begin."""

    # Timing

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
        if self._computing is None:
            return False
        begun = None if self._clock is None else self._clock.mark()
        done = self._computing.finish_backward()
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
        if self._computing is None or self._clock is None:
            return
        self._clock.end()
        if self._departures:
            # The device goes on while the result travels.
            self._finish_backward()
        else:
            synchronize(self._computing.config.device)

    @override
    def _busy_s(self, wall_s: float, copy_s: float) -> float:
        if self._clock is None:
            return wall_s
        self._later_s |= self._clock.take_later_s()
        return self._clock.busy_s(wall_s, copy_s)

    # Settings

    def _set_threads(self, job: Job) -> Result:
        change_num_threads(job.message)
        return {}

    def _recompute(self, job: Job) -> Result:
        """Recompute forward passes, or not, in the stages that are built from now on."""
        device, recompute = self._device, job.flag("recompute")

        def own() -> Result:
            device.config = replace(device.config, recompute=recompute)
            return {}

        self._everywhere(job, own)
        return {}

    def _spread_stage(self, job: Job) -> Result:
        """Spread the stages that are built from now on over the devices, or copy them."""
        device, sharded = self._device, job.flag("sharded")

        def own() -> Result:
            device.config = replace(device.config, sharded=sharded)
            return {}

        self._everywhere(job, own)
        return {}

    @property
    @override
    def _ends_with_others(self) -> bool:
        return self._computing is not None and self._computing.config.sharded

    def _measure(self, job: Job) -> Result:
        def own() -> Result:
            found = measure(self._device, job.number("num_repeats", 1))
            return {
                "forward_s": found.forward_s,
                "backward_s": found.backward_s,
                "microbatch_memory_bytes": found.microbatch_memory_bytes,
                "recomputed_bytes": found.recomputed_bytes,
            }

        # The slowest device determines how long a pass takes, the largest share how many fit.
        found = self._everywhere(job, own)
        return {name: max(each[name] for each in found) for name in found[0]}

    # Microbatches. Output regions are checked before the work, so that a bad region costs nothing.

    def _activation(self, region: Region) -> Tensor:
        """Return an activation or gradient in the arena, as it travels, of all rows."""
        return self._arena.tensor(region, *self._device.config.whole.activation_wire)

    def _pieces(self, region: Region) -> list[Tensor]:
        """Return the views of this device's rows of an activation or gradient in the arena."""
        config, whole = self._device.config, self._activation(region)
        coding = config.activation_coding
        return [whole] if config.rows is None else config.rows.pieces(whole, coding)

    def _write_pieces(self, outputs: Sequence[Tensor], value: Tensor) -> None:
        """Copy a result, as it travels, into this device's rows."""
        if len(outputs) == 1:
            self._write(outputs[0], value)
            return
        for output, piece in zip(outputs, torch.split(value, [*map(len, outputs)]), strict=True):
            self._write(output, piece)

    def _embed(self, job: Job) -> Result:
        job.expect(0, 1)
        outputs = self._pieces(job.outputs[0])

        def own() -> Result:
            self._write_pieces(outputs, self._device.passes.embed(job.microbatch()))
            return {}

        self._make_ready(job)
        self._everywhere(job, own)
        return {}

    def _forward(self, job: Job) -> Result:
        job.expect(1, 1)
        entry, outputs = joined(self._pieces(job.inputs[0])), self._pieces(job.outputs[0])

        def own() -> Result:
            self._write_pieces(outputs, self._device.passes.forward(job.microbatch(), entry))
            return {}

        self._look_at(job, is_gradient=False)
        self._everywhere(job, own)
        return {}

    def _head(self, job: Job) -> Result:
        job.expect(1, 1)
        entry, outputs = joined(self._pieces(job.inputs[0])), self._pieces(job.outputs[0])

        def own() -> Result:
            gradient, loss = self._device.passes.head(job.microbatch(), entry)
            self._write_pieces(outputs, gradient)
            return {"loss": loss}

        self._look_at(job, is_gradient=False)
        self._make_ready(job)
        loss = sum(each["loss"] for each in self._everywhere(job, own))
        return {"loss": loss, "num_tokens": self._device.config.batch.tokens_per_microbatch}

    def _backward(self, job: Job) -> Result:
        job.expect(1, 1)
        gradient, outputs = joined(self._pieces(job.inputs[0])), self._pieces(job.outputs[0])

        def own() -> Result:
            self._write_pieces(outputs, self._device.passes.backward(job.microbatch(), gradient))
            return {}

        self._look_at(job, is_gradient=True)
        self._everywhere(job, own)
        return {}

    def _embed_backward(self, job: Job) -> Result:
        job.expect(1, 0)
        gradient = joined(self._pieces(job.inputs[0]))

        def own() -> Result:
            self._device.passes.embed_backward(job.microbatch(), gradient)
            return {}

        self._look_at(job, is_gradient=True)
        self._everywhere(job, own)
        return {}

    def _drop(self, job: Job) -> Result:
        job.expect(0, 0)

        def own() -> Result:
            self._device.passes.drop(job.microbatch())
            return {}

        self._everywhere(job, own)
        return {}

    def _give_block(self, job: Job) -> Result:
        """Take in a block of the data whose file on this host is damaged."""
        job.expect(1, 0)
        if self._device.tokens is None:
            raise malformed("a block of data for a node without data")
        tokens, region = self._device.tokens, job.inputs[0]
        content = self._arena.tensor(region, torch.uint8, (region.num_bytes,)).numpy().tobytes()
        block = Block(job.number("shard_index"), job.number("offset"), region.num_bytes)

        def own() -> Result:
            tokens.give(block, content)
            return {}

        self._everywhere(job, own)
        return {}
