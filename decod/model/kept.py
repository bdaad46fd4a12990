"""What autograd keeps of a microbatch between its forward and its backward pass, in numbers.

Nothing here needs torch, so that a host can tell whether a stage fits before it loads anything.
The oracle is what autograd keeps on a CPU (`decod.train.measure`). Other devices choose other
kernels for attention, and may keep a little more or less.
"""

from decod.model.config import Architecture, ModelConfig, ModelDtype

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


def _of_block(model: ModelConfig) -> int:
    """Return the bytes that one block keeps of one token."""
    width, heads = model.hidden_size, model.num_attention_heads
    key_width = width // heads * model.num_key_value_heads
    # Inputs of both halves, queries, keys, values, attention's result, and the two inner
    # activations of the feed-forward network. See `decod.model.lean`.
    numbers = 4 * width + 2 * key_width + 2 * model.intermediate_size
    # The logarithm of each head's sum of weights, in float32 or wider.
    num_wide = heads
    if model.model_type is Architecture.GPT2:
        # GPT-2's blocks are plain autograd, which also keeps the outputs of both norms, and their
        # means and scales.
        numbers += 2 * width
        num_wide += 4
    wide_bytes = 8 if model.dtype is ModelDtype.FLOAT64 else 4
    return numbers * model.dtype.num_bytes + num_wide * wide_bytes
