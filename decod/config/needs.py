"""The needs of a stage of a run on its host, as far as the manifest tells before anything is
made."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace

from decod.model.shape import (
    block_shapes,
    frozen_bytes,
    frozen_shapes,
    input_bytes,
    kept_bytes,
    loss_bytes,
    trained_shapes,
    whole_matrices,
)
from decod.run.model_config import ModelDtype
from decod.run.run_config import RunConfig
from decod.run.stages_config import stage_blocks
from decod.train.checkpoint.entries import DTYPE_BYTES, state_tensors

_GRADIENT = 1
_GATHERED = 3
"""Whole weights of a block while it computes: its own, those of the next, and as they came."""
_OUTER = 2
"""With DiLoCo: the weights after the last outer step, and the momentum."""
_TRAVELLING = 2
"""While an average travels: the weights with which the local phase began, and what is sent."""


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """The needs of one stage. Memory is the least that it takes: torch and the system need more."""

    num_parameters: int
    """Parameters that are trained."""
    state_bytes: int
    """Weights and common moments, as a newcomer fetches them and a disk keeps them."""
    weights_bytes: int
    """Memory of the device for the weights alone, trained or not."""
    optimizer_bytes: int
    """The same for moments, next values of weights and moments, and the gradient."""
    gradient_bytes: int
    """Its part for the gradient."""
    loss_bytes: int
    """Memory of the device for one microbatch's loss at a time, with gradients. 0 for relays."""
    microbatch_bytes: int
    """Memory of the device for one microbatch between its forward and its backward pass."""
    input_bytes: int
    """The same with recomputation, which keeps a microbatch's input alone."""
    base_bytes: int = 0
    """Weights that are not trained, as a newcomer fetches them and a disk keeps them."""
    host_bytes: int = 0
    """Memory of the host for the state, its next values and the sum of gradients of a stage that is
    spread over several devices. 0: all of that is on the device."""

    @property
    def sharded(self) -> bool:
        """Return whether the stage is spread over several devices."""
        return self.host_bytes > 0

    @property
    def device_bytes(self) -> int:
        """Memory of the device for all of that, without microbatches in flight."""
        return self.weights_bytes + self.optimizer_bytes + self.loss_bytes

    @property
    def memory_min_bytes(self) -> int:
        """The same with one microbatch."""
        return self.device_bytes + self.microbatch_bytes

    def held_bytes(self, num_microbatches: int, *, recompute: bool = False) -> int:
        """Return the memory for so many microbatches at a time.

        With recomputation, one of them at a time takes as much as without.
        """
        others_bytes = self.input_bytes if recompute else self.microbatch_bytes
        return self.microbatch_bytes + max(0, num_microbatches - 1) * others_bytes

    def fits(self, memory_bytes: int, num_microbatches: int, *, recompute: bool = False) -> bool:
        """Return whether that much memory may suffice for so many microbatches at a time."""
        held_bytes = self.held_bytes(num_microbatches, recompute=recompute)
        return self.device_bytes + held_bytes <= memory_bytes


def stage_needs(
    run: RunConfig, stage_index: int, num_devices: int = 1, *, sharded: bool = False
) -> StageNeeds:
    """Return what a stage of a valid run needs.

    Args:
        run: The run.
        stage_index: The stage.
        num_devices: Devices that divide the sequences of a microbatch. Memory is of the first,
            which needs most.
        sharded: The stage is spread over them.
    """
    model = run.model
    sync = run.sync
    tensors = state_tensors(run, stage_index)
    shapes = trained_shapes(run, stage_index)
    num_parameters = sum(map(math.prod, shapes.values()))
    frozen = frozen_shapes(run, stage_index)
    wide_bytes = 8 if model.dtype is ModelDtype.FLOAT64 else 4
    # A bfloat16 model has weights of its own beside the wide ones.
    narrow_bytes = 0 if model.dtype.num_bytes == wide_bytes else model.dtype.num_bytes
    # Matrices that are stepped as a whole have the first moment alone.
    num_whole = sum(math.prod(shapes[name]) for name in whole_matrices(run, stage_index))
    num_seconds = len(run.optimizer.name.moments) - 1
    num_moments = num_parameters + num_seconds * (num_parameters - num_whole)
    num_held = 2 * (num_parameters + num_moments)
    num_held += num_parameters * (
        _GRADIENT + (_OUTER if sync.steps_locally else 0) + (_TRAVELLING if sync.overlap else 0)
    )
    blocks = stage_blocks(model, run.stages)[stage_index]
    batch = run.batch
    is_first = stage_index == 0
    trains = run.trains_all
    num_tokens = math.ceil(batch.microbatch_size / num_devices) * batch.sequence_length
    # All blocks share one mask: a number for each pair of positions.
    mask_bytes = num_tokens * batch.sequence_length * model.dtype.num_bytes
    needs = StageNeeds(
        num_parameters=num_parameters,
        state_bytes=sum(DTYPE_BYTES[kind] * math.prod(shape) for kind, shape in tensors.values()),
        base_bytes=model.dtype.num_bytes * sum(map(math.prod, frozen.values())),
        weights_bytes=num_parameters * (wide_bytes + narrow_bytes) + frozen_bytes(run, stage_index),
        optimizer_bytes=(num_held - num_parameters) * wide_bytes,
        gradient_bytes=num_parameters * _GRADIENT * wide_bytes,
        loss_bytes=loss_bytes(model, num_tokens, trains_head=trains) if is_first else 0,
        microbatch_bytes=kept_bytes(
            model, num_tokens, blocks=blocks, is_first=is_first, adapter=run.adapter
        )
        + (mask_bytes if batch.reads_apart and blocks else 0),
        input_bytes=input_bytes(model, num_tokens, is_first=is_first),
    )
    return _spread(needs, run, stage_index, num_devices) if sharded else needs


def _spread(needs: StageNeeds, run: RunConfig, stage_index: int, num_devices: int) -> StageNeeds:
    """Return what each device needs of a stage that is spread over several by FSDP2.

    A device has its part of weights and sums of gradients. In passes it also has whole weights and
    gradients: those of one block, or of all that is no block. The state is in the host's memory.
    """
    model = run.model
    sizes = Counter[str]()
    for name, shape in trained_shapes(run, stage_index).items():
        block = re.search(r"\.\d+\.", name)
        sizes[block[0] if block else ""] += math.prod(shape)
    largest = max(sizes.values())
    own = math.ceil(needs.num_parameters / num_devices)
    wide_bytes = 8 if model.dtype is ModelDtype.FLOAT64 else 4
    gradient_bytes = own * wide_bytes + largest * (model.dtype.num_bytes + wide_bytes)
    return replace(
        needs,
        weights_bytes=(own + _GATHERED * largest) * model.dtype.num_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=gradient_bytes,
        host_bytes=needs.num_parameters * wide_bytes + needs.optimizer_bytes,
    )


def layer_flops(run: RunConfig) -> float:
    """Return the operations of one block for one microbatch, forward and backward.

    A pass forward takes two operations for each weight and token, and four for each pair of tokens
    and element of all query heads. A pass backward takes twice as many.
    """
    model = run.model
    batch = run.batch
    shapes = block_shapes(model, 0).values()
    num_weights = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    # Of experts, a token passes a few.
    of_expert = sum(math.prod(shape[1:]) for shape in shapes if len(shape) == 3)
    num_weights += model.family.num_active * of_expert
    pairs = 12 * batch.sequence_length * model.query_width
    return float(batch.tokens_per_microbatch * (6 * num_weights + pairs))
