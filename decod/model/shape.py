"""Names and shapes of a model's parameters, whole or per stage, and the memory of a microbatch.

Nothing here needs torch, so that a host can tell whether a stage fits before it loads anything. The
oracle of what a microbatch keeps between its passes is what autograd keeps on a CPU
(`decod.train.measure`). Other devices choose other kernels for attention, and may keep a little
more or less. If several query heads share a key head, CPUs keep keys and values once for every
query head (`decod.model.attention`). Estimates count them once for every key head, so that no stage
is refused that fits.
"""

from decod.run.model_config import Architecture, ModelConfig, ModelDtype, StagesConfig, stage_blocks

Shapes = dict[str, tuple[int, ...]]
"""Parameter name to shape."""

EMBEDDINGS = {
    Architecture.LLAMA: "model.embed_tokens.weight",
    Architecture.GPT2: "transformer.wte.weight",
}
"""Names of the embeddings' weights, which a tied head shares."""

LOSS_ROWS_MIN = 128
"""Positions whose logits exist at a time. Fewer would make the matrix products slow."""


def block_shapes(model: ModelConfig, index: int) -> Shapes:
    """Return names and shapes of one block's parameters."""
    if model.model_type is Architecture.GPT2:
        return _gpt2_block_shapes(model, index)
    return _llama_block_shapes(model, index)


def _llama_block_shapes(model: ModelConfig, index: int) -> Shapes:
    width = model.hidden_size
    inner = model.intermediate_size
    query_width = model.query_width
    key_width = model.key_width
    prefix = f"model.layers.{index}."
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (width,),
        f"{prefix}self_attn.q_proj.weight": (query_width, width),
        f"{prefix}self_attn.k_proj.weight": (key_width, width),
        f"{prefix}self_attn.v_proj.weight": (key_width, width),
        f"{prefix}self_attn.o_proj.weight": (width, query_width),
        f"{prefix}post_attention_layernorm.weight": (width,),
        f"{prefix}mlp.gate_proj.weight": (inner, width),
        f"{prefix}mlp.up_proj.weight": (inner, width),
        f"{prefix}mlp.down_proj.weight": (width, inner),
    }
    if model.attention_bias:
        shapes[f"{prefix}self_attn.q_proj.bias"] = (query_width,)
        shapes[f"{prefix}self_attn.k_proj.bias"] = (key_width,)
        shapes[f"{prefix}self_attn.v_proj.bias"] = (key_width,)
    if model.qk_norm:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (model.head_width,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (model.head_width,)
    return shapes


def _gpt2_block_shapes(model: ModelConfig, index: int) -> Shapes:
    width = model.hidden_size
    inner = model.intermediate_size
    prefix = f"transformer.h.{index}."
    shapes: Shapes = {}
    # GPT-2 stores its projections as (inputs, outputs), the transpose of a linear layer's.
    for name, num_inputs, num_outputs in (
        ("attn.c_attn", width, 3 * width),
        ("attn.c_proj", width, width),
        ("mlp.c_fc", width, inner),
        ("mlp.c_proj", inner, width),
    ):
        shapes[f"{prefix}{name}.weight"] = (num_inputs, num_outputs)
        shapes[f"{prefix}{name}.bias"] = (num_outputs,)
    for name in ("ln_1", "ln_2"):
        shapes[f"{prefix}{name}.weight"] = (width,)
        shapes[f"{prefix}{name}.bias"] = (width,)
    return shapes


def outer_shapes(model: ModelConfig) -> Shapes:
    """Return names and shapes of the parameters outside the blocks: embedding, final norm, head."""
    table = (model.vocab_size, model.hidden_size)
    if model.model_type is Architecture.GPT2:
        shapes: Shapes = {
            EMBEDDINGS[model.model_type]: table,
            "transformer.wpe.weight": (model.max_position_embeddings, model.hidden_size),
            "transformer.ln_f.weight": (model.hidden_size,),
            "transformer.ln_f.bias": (model.hidden_size,),
        }
    else:
        shapes = {
            EMBEDDINGS[model.model_type]: table,
            "model.norm.weight": (model.hidden_size,),
        }
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = table
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
