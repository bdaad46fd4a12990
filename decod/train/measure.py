"""Cost of a microbatch on this host: time forward and backward, and memory in between.

The planner weighs hosts by these numbers. They are therefore taken with the stage's real module,
shapes and dtype, on random input, and with recomputation if the passes are to use it. They leave no
trace in the state.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from decod.devices import device_named, device_of
from decod.errors import TrainingError
from decod.model.autograd import Output
from decod.model.stage import FirstStage, Stage
from decod.train.executor_config import ExecutorConfig


@dataclass(frozen=True, slots=True)
class Measurement:
    """Means over the repeats."""

    forward_s: float
    backward_s: float
    """Seconds of a backward pass. Those of stage 0 include the head, forward and backward."""
    microbatch_memory_bytes: int
    """Memory that one microbatch occupies between its forward and its backward pass."""
    recomputed_bytes: int
    """Memory that a backward pass fills first, where it computes the forward pass again; else 0."""


class Measurable(Protocol):
    """What a device has of a stage."""

    config: ExecutorConfig

    def measuring(self) -> AbstractContextManager[Stage]:
        """Lend the module for trial runs, whose gradients are thrown away."""


def measure(executor: Measurable, num_repeats: int) -> Measurement:
    """Time microbatches. One warm-up runs first, and measures the memory.

    Args:
        executor: Must have a stage and no proposed step. Gradients and held microbatches stay.
        num_repeats: At least 1.

    Raises:
        TrainingError: `num_repeats` is less than 1, or a step is proposed.
    """
    if num_repeats < 1:
        raise TrainingError(
            f"num_repeats is {num_repeats}", why="a mean needs a measurement", fix="give 1 or more"
        )
    config = executor.config
    device = config.device
    generator = torch.Generator().manual_seed(0)
    hidden_BTD = torch.randn(config.activation_shape, generator=generator)
    hidden_BTD = hidden_BTD.to(device, config.dtype)
    tokens_BT = torch.randint(
        config.run.model.vocab_size, config.activation_shape[:2], generator=generator
    ).to(device)
    places_BT = None
    if config.run.batch.reads_apart:
        # Two documents a row: kernels take another way than with one.
        middle = max(1, tokens_BT.shape[1] // 2)
        places_BT = (torch.arange(tokens_BT.shape[1]) % middle).expand_as(tokens_BT).to(device)
    with executor.measuring() as stage:

        def forward() -> Tensor:
            return _forward(stage, hidden_BTD, tokens_BT, places_BT)

        _backward(stage, forward(), hidden_BTD, tokens_BT)
        # After the warm-up, in which libraries take memory that they keep.
        num_bytes = held_bytes(forward, stage, hidden_BTD)
        stage.zero_grad(set_to_none=True)
        recomputes = config.recompute
        entry = tokens_BT if isinstance(stage, FirstStage) else hidden_BTD
        forward_s = backward_s = 0.0
        for _ in range(num_repeats):
            start_s = _now_s(device)
            with torch.set_grad_enabled(not recomputes):
                output_BTD = forward()
            middle_s = _now_s(device)
            if recomputes:
                output_BTD = forward()
            _backward(stage, output_BTD, hidden_BTD, tokens_BT)
            forward_s += middle_s - start_s
            backward_s += _now_s(device) - middle_s
            stage.zero_grad(set_to_none=True)
    return Measurement(
        forward_s / num_repeats,
        backward_s / num_repeats,
        entry.numel() * entry.element_size() if recomputes else num_bytes,
        num_bytes if recomputes else 0,
    )


def _now_s(device: str) -> float:
    device_named(device).synchronize()
    return perf_counter()


def _forward(
    stage: Stage, hidden_BTD: Tensor, tokens_BT: Tensor, places_BT: Tensor | None
) -> Tensor:
    if isinstance(stage, FirstStage):
        return stage.embed(tokens_BT, places_BT)
    return stage.run_blocks(hidden_BTD.clone().requires_grad_(), places_BT)


def _backward(stage: Stage, output_BTD: Tensor, hidden_BTD: Tensor, tokens_BT: Tensor) -> None:
    if isinstance(stage, FirstStage):
        torch.autograd.backward([stage.loss(hidden_BTD.clone().requires_grad_(), tokens_BT)])
    # Stage 0 without trained parameters has no backward pass of its own.
    if output_BTD.requires_grad:
        starts: Any = [Output(output_BTD).given(hidden_BTD)]
        torch.autograd.backward(starts)


def held_bytes(run: Callable[[], Tensor], stage: Stage, hidden_BTD: Tensor) -> int:
    """Return the bytes that autograd keeps after a forward pass, each storage counted once."""
    if not hidden_BTD.is_cpu:
        device = device_of(hidden_BTD)
        device.synchronize()
        before_bytes = device.allocated_bytes()
        output_BTD = run()
        after_bytes = device.allocated_bytes()
        return after_bytes - before_bytes - output_BTD.numel() * output_BTD.element_size()
    # A spread parameter has no memory of its own: its copy for a pass is freed after it.
    own = {
        each.untyped_storage().data_ptr()
        for each in (parameter.detach() for parameter in stage.parameters())
        if type(each) is Tensor
    }
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        # Keep the storage alive, so that no two tensors share an address. The tensor itself would
        # keep the graph that keeps this function, and no garbage collection sees such a cycle.
        alive.append(tensor.untyped_storage())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    storages = {each.data_ptr(): each.nbytes() for each in alive}
    return sum(num_bytes for address, num_bytes in storages.items() if address not in own)
