"""What autograd keeps of a microbatch between its forward and its backward pass, in numbers.

Nothing here needs torch, so that a host can tell whether a stage fits before it loads anything.
The oracle is what autograd keeps on a CPU (`decod.train.measure`). Other devices choose other
kernels for attention, and may keep a little more or less. If several query heads share a key head,
CPUs keep keys and values once for every query head (`decod.model.attention`). Estimates count them
once for every key head, so that no stage is refused that fits.
"""

from decod.model.shape import LOSS_ROWS_MIN
from decod.run.model_config import Architecture, ModelConfig, ModelDtype

_TOKEN_BYTES = 8
"""Token ids are int64."""


def input_bytes(model: ModelConfig, num_tokens: int, *, is_first: bool) -> int:
    """Return the size of a stage's input for one microbatch.

    Args:
        model: The whole model.
        num_tokens: Of a microbatch.
        is_first: For stage 0, which reads tokens. Other stages get activations.
    """
    each_bytes = _TOKEN_BYTES if is_first else model.hidden_size * model.dtype.num_bytes
    return num_tokens * each_bytes


def kept_bytes(model: ModelConfig, num_tokens: int, *, num_blocks: int, is_first: bool) -> int:
    """Return what a stage keeps of one microbatch. Arguments as for `input_bytes`.

    The blocks' inputs are part of it, and so is the stage's own.
    """
    tokens_bytes = num_tokens * _TOKEN_BYTES if is_first else 0
    return tokens_bytes + num_blocks * num_tokens * _of_block(model)


def loss_bytes(model: ModelConfig, num_tokens: int) -> int:
    """Return what the loss of a microbatch takes, with the gradient of the head.

    That is the most of two instants: when the logits of some positions become their gradient, and
    when that is multiplied into the gradient of the head. See `decod.model.loss`.
    """
    num_rows, width = min(LOSS_ROWS_MIN, num_tokens), model.hidden_size
    wide_bytes = _wide_bytes(model)
    # Narrow models have logits, and the head's gradient, in their own dtype beside the wide one.
    narrow_bytes = 0 if model.dtype.num_bytes == wide_bytes else model.dtype.num_bytes
    both_bytes = wide_bytes + narrow_bytes
    of_logits = num_rows * both_bytes + width * wide_bytes
    of_product = num_rows * model.dtype.num_bytes + width * both_bytes
    return model.vocab_size * max(of_logits, of_product)


def _wide_bytes(model: ModelConfig) -> int:
    return 8 if model.dtype is ModelDtype.FLOAT64 else 4


def _of_block(model: ModelConfig) -> int:
    """Return the bytes that one block keeps of one token."""
    width = model.hidden_size
    # Queries and what they have read, keys and values. Norms of queries and keys keep their inputs.
    heads = (3 if model.qk_norm else 2) * (model.query_width + model.key_width)
    # Inputs of both halves, and the two inner activations of the feed-forward network. Norms and
    # gates are computed again: see `decod.model.autograd`.
    numbers = 2 * width + heads + 2 * model.intermediate_size
    # The logarithm of each head's sum of weights, in float32 or wider.
    num_wide = model.num_attention_heads
    if model.model_type is Architecture.GPT2:
        # GPT-2's blocks are plain autograd, which also keeps the outputs of both norms, and their
        # means and scales.
        numbers += 2 * width
        num_wide += 4
    wide_bytes = _wide_bytes(model)
    return numbers * model.dtype.num_bytes + num_wide * wide_bytes
