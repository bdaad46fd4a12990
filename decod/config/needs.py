"""What a stage of a run takes of its host, as far as the manifest tells before anything is made."""

import math
from dataclasses import dataclass

from decod.config.schema import RunConfig, moments_of
from decod.model.config import Architecture, ModelConfig, ModelDtype, stage_blocks
from decod.model.shape import LOSS_ROWS_MIN, stage_shapes
from decod.train.checkpoint.entries import DTYPE_BYTES, state_tensors

_GRADIENT = 1
_ADAMW = 3
"""Weights and two moments."""
_OUTER = 2
"""With DiLoCo: the weights after the last outer step, and the momentum."""


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """The needs of one stage. Memory is the least that it takes: torch and the system need more."""

    num_parameters: int
    state_bytes: int
    """Weights and common moments, as a newcomer fetches them and a disk keeps them."""
    weights_bytes: int
    """Memory of the device for the weights alone."""
    optimizer_bytes: int
    """The same for moments, next values of weights and moments, and the gradient."""
    loss_bytes: int
    """The same for the loss of one microbatch at a time, and its gradients. 0 for relays."""
    microbatch_bytes: int
    """Memory of the device for one microbatch between its forward and its backward pass."""

    @property
    def device_bytes(self) -> int:
        """Memory of the device for all of that, without microbatches in flight."""
        return self.weights_bytes + self.optimizer_bytes + self.loss_bytes

    def fits(self, memory_bytes: int, num_microbatches: int) -> bool:
        """Return whether that much memory may suffice for so many microbatches at a time."""
        return self.device_bytes + num_microbatches * self.microbatch_bytes <= memory_bytes


def stage_needs(run: RunConfig, stage_index: int) -> StageNeeds:
    """Return what a stage of a valid run needs."""
    model, sync = run.model, run.sync
    tensors = state_tensors(model, run.stages, stage_index, moments_of(run))
    num_parameters = sum(map(math.prod, stage_shapes(model, run.stages, stage_index).values()))
    wide_bytes = 8 if model.dtype is ModelDtype.FLOAT64 else 4
    # A bfloat16 model has weights of its own beside the wide ones.
    narrow_bytes = 0 if model.dtype.num_bytes == wide_bytes else model.dtype.num_bytes
    num_held = 2 * _ADAMW + _GRADIENT + (_OUTER if sync.steps_locally else 0)
    num_blocks = len(stage_blocks(model, run.stages)[stage_index])
    width = num_blocks * _kept_width(model)
    num_tokens = run.batch.tokens_per_microbatch
    return StageNeeds(
        num_parameters=num_parameters,
        state_bytes=sum(DTYPE_BYTES[kind] * math.prod(shape) for kind, shape in tensors.values()),
        weights_bytes=num_parameters * (wide_bytes + narrow_bytes),
        optimizer_bytes=num_parameters * (num_held - 1) * wide_bytes,
        loss_bytes=0 if stage_index else _loss_size(run) * (wide_bytes + narrow_bytes),
        microbatch_bytes=num_tokens * width * model.dtype.num_bytes,
    )


def _kept_width(model: ModelConfig) -> int:
    """Return how many numbers of each position a block keeps for its backward pass."""
    width, inner = model.hidden_size, model.intermediate_size
    if model.model_type is Architecture.GPT2:
        # Inputs and results of both norms; queries, keys and values; what attention has read; both
        # sides of GELU.
        return 8 * width + 2 * inner
    # Inputs of both halves; queries and what they have read; keys and values; gate and up. Norms of
    # queries and keys keep their inputs, too.
    heads = model.query_width + model.key_width
    return 2 * width + (3 if model.qk_norm else 2) * heads + 2 * inner


def _loss_size(run: RunConfig) -> int:
    """Return how many numbers the gradient of the head and the logits of some positions have."""
    num_rows = min(LOSS_ROWS_MIN, run.batch.tokens_per_microbatch)
    return run.model.vocab_size * (run.model.hidden_size + num_rows)
