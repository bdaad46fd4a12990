"""Names and shapes of a model's parameters, whole or per stage, and the memory of a microbatch.

Nothing here needs torch, so that a host can tell whether a stage fits before it loads anything. The
oracle of what a microbatch keeps between its passes is what autograd keeps on a CPU
(`decod.train.measure`). Other devices choose other kernels for attention, and may keep a little
more or less. If several query heads share a key head, CPUs keep keys and values once for every
query head (`decod.model.attention`). Estimates count them once for every key head, so that no stage
is refused that fits.
"""

from decod.run.model_config import ModelConfig, ModelDtype, Shapes, StagesConfig, stage_blocks

LOSS_ROWS_MIN = 128
"""Positions whose logits exist at a time. Fewer would make the matrix products slow."""


def block_shapes(model: ModelConfig, index: int) -> Shapes:
    """Return names and shapes of one block's parameters."""
    family = model.family
    shapes = family.block_shapes(model)
    return {f"{family.block_prefix}{index}.{name}": shape for name, shape in shapes.items()}


def outer_shapes(model: ModelConfig) -> Shapes:
    """Return names and shapes of the parameters outside the blocks: embedding, final norm, head."""
    family = model.family
    shapes = {family.ends_prefix + name: shape for name, shape in family.ends_shapes(model).items()}
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return shapes


def model_shapes(model: ModelConfig) -> Shapes:
    """Return names and shapes of all parameters, in sorted order of names."""
    shapes = outer_shapes(model)
    for index in range(model.num_hidden_layers):
        shapes.update(block_shapes(model, index))
    return dict(sorted(shapes.items()))


def stage_shapes(model: ModelConfig, stages: StagesConfig, stage_index: int) -> Shapes:
    """Return names and shapes of one stage's parameters, in sorted order of names.

    Stage 0 holds embedding, final norm, head and its own first blocks.
    """
    shapes = outer_shapes(model) if stage_index == 0 else {}
    for index in stage_blocks(model, stages)[stage_index]:
        shapes.update(block_shapes(model, index))
    return dict(sorted(shapes.items()))


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
    when that is multiplied into the gradient of the head. See `decod.model.autograd`.
    """
    num_rows = min(LOSS_ROWS_MIN, num_tokens)
    width = model.hidden_size
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
    numbers, wide_numbers = model.family.kept_numbers(model)
    return numbers * model.dtype.num_bytes + wide_numbers * _wide_bytes(model)
