"""Names and shapes of a model's parameters, whole or per stage. Imports no torch.

Names are those of Hugging Face checkpoints, so nothing is renamed between training, the wire and a
file. Tied weights appear once, under the embedding's name.
"""

from decod.run.model_config import Architecture, ModelConfig, StagesConfig, stage_blocks

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
    width, inner = model.hidden_size, model.intermediate_size
    query_width, key_width = model.query_width, model.key_width
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
    width, inner = model.hidden_size, model.intermediate_size
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
