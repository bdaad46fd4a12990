"""Jobs that every device of a host has a part in: the passes of microbatches, and their timing."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from decod.data.block import Block
from decod.protocol.core import jobs
from decod.protocol.core.job_codec import Region, runs
from decod.protocol.core.jobs import GiveBlock, SetRecompute, SetThreads, SpreadStage
from decod.train.executor_config import joined
from decod.train.measure import Measurable, measure, synchronize
from decod.train.passes import Passes, TokenSource
from decod.worker.arena_view import Arena
from decod.worker.configure import (
    change_num_threads,
    device_facts,
    memory_max_bytes,
    parse_device,
)
from decod.worker.device import (
    CPU,
    ChosenDevice,
    DeviceClock,
    cap_memory,
    free_bytes,
    pinned_by_cuda,
    pinned_max_bytes,
    settle,
)
from decod.worker.runner import ExchangeRunner, Request, malformed

R = TypeVar("R")
"""The result of a job."""

logger = logging.getLogger("decod.worker")


class Computing(Measurable, Protocol):
    """What a device has of a stage: all of it, or a mirror."""

    tokens: TokenSource | None

    @property
    def passes(self) -> Passes:
        """The passes of the built stage."""


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

    @property
    @abstractmethod
    def _computing(self) -> Computing | None:
        """What the device has of a stage. None: no configure came."""

    @property
    def _device(self) -> Computing:
        if self._computing is None:
            raise malformed("no configure came before")
        return self._computing

    def _use_device(self, settings: Mapping[str, Any]) -> tuple[ChosenDevice, dict[str, Any]]:
        """Use the device that a host's settings name. Return it, and what is to be known."""
        device = parse_device(settings)
        memory_bytes = memory_max_bytes(settings)
        settle(device)
        cap_memory(device, memory_bytes)
        facts = device_facts(device, memory_bytes)
        self._free_bytes = partial(free_bytes, device, memory_bytes)
        if device.name != CPU:
            self._clock = DeviceClock(device.name)
            self._arena.pin(pinned_by_cuda(pinned_max_bytes()))
        return device, facts

    def _everywhere(self, request: Request[jobs.BaseJob], own: Callable[[], R]) -> list[R]:  # noqa: ARG002
        """Run a job on this device, and on others that have a part in it."""
        return [own()]

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
        if self._computing is None or self._clock is None:
            return
        self._clock.end()
        if not self._departures:
            synchronize(self._computing.config.device)

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
        device = self._device
        recompute = request.job.recompute

        def own() -> None:
            device.config = replace(device.config, recompute=recompute)

        self._everywhere(request, own)

    @runs(SpreadStage)
    def _spread_stage(self, request: Request[SpreadStage]) -> None:
        """Spread the stages that are built from now on over the devices, or copy them."""
        device = self._device
        sharded = request.job.sharded

        def own() -> None:
            device.config = replace(device.config, sharded=sharded)

        self._everywhere(request, own)

    @property
    @override
    def _ends_with_others(self) -> bool:
        return self._computing is not None and self._computing.config.sharded

    @runs(jobs.Measure)
    def _measure(self, request: Request[jobs.Measure]) -> jobs.Measured:
        def own() -> jobs.Measured:
            found = measure(self._device, num_repeats=1)
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
        return self._arena.tensor(region, *self._device.config.whole.activation_wire)

    def _pieces(self, region: Region) -> list[Tensor]:
        """Return the views of this device's rows of an activation or gradient in the arena."""
        config = self._device.config
        whole = self._activation(region)
        coding = config.activation_coding
        return [whole] if config.rows is None else config.rows.pieces(whole, coding)

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
            self._write_pieces(outputs, self._device.passes.embed(request.job.microbatch))

        self._make_ready(request)
        self._everywhere(request, own)

    @runs(jobs.Forward)
    def _forward(self, request: Request[jobs.Forward]) -> None:
        request.expect(1, 1)
        entry = joined(self._pieces(request.inputs[0]))
        outputs = self._pieces(request.outputs[0])

        def own() -> None:
            self._write_pieces(outputs, self._device.passes.forward(request.job.microbatch, entry))

        self._look_at(request, is_gradient=False)
        self._everywhere(request, own)

    @runs(jobs.Head)
    def _head(self, request: Request[jobs.Head]) -> jobs.Loss:
        request.expect(1, 1)
        entry = joined(self._pieces(request.inputs[0]))
        outputs = self._pieces(request.outputs[0])

        num_tokens = self._device.config.run.batch.tokens_per_microbatch

        def own() -> jobs.Loss:
            gradient, loss = self._device.passes.head(request.job.microbatch, entry)
            self._write_pieces(outputs, gradient)
            return jobs.Loss(loss, num_tokens)

        self._look_at(request, is_gradient=False)
        self._make_ready(request)
        return jobs.Loss(sum(each.loss for each in self._everywhere(request, own)), num_tokens)

    @runs(jobs.Backward)
    def _backward(self, request: Request[jobs.Backward]) -> None:
        request.expect(1, 1)
        gradient = joined(self._pieces(request.inputs[0]))
        outputs = self._pieces(request.outputs[0])

        def own() -> None:
            self._write_pieces(
                outputs, self._device.passes.backward(request.job.microbatch, gradient)
            )

        self._look_at(request, is_gradient=True)
        self._everywhere(request, own)

    @runs(jobs.EmbedBackward)
    def _embed_backward(self, request: Request[jobs.EmbedBackward]) -> None:
        request.expect(1, 0)
        gradient = joined(self._pieces(request.inputs[0]))

        def own() -> None:
            self._device.passes.embed_backward(request.job.microbatch, gradient)

        self._look_at(request, is_gradient=True)
        self._everywhere(request, own)

    @runs(jobs.Drop)
    def _drop(self, request: Request[jobs.Drop]) -> None:
        request.expect(0, 0)

        def own() -> None:
            self._device.passes.drop(request.job.microbatch)

        self._everywhere(request, own)

    @runs(GiveBlock)
    def _give_block(self, request: Request[GiveBlock]) -> None:
        """Take in a block of the data whose file on this host is damaged."""
        request.expect(1, 0)
        if self._device.tokens is None:
            raise malformed("a block of data for a node without data")
        tokens = self._device.tokens
        region = request.inputs[0]
        content = self._arena.tensor(region, torch.uint8, (region.num_bytes,)).numpy().tobytes()
        block = Block(request.job.shard_index, request.job.offset, region.num_bytes)

        def own() -> None:
            tokens.give(block, content)

        self._everywhere(request, own)
