"""Model configuration <-> Hugging Face `config.json`. Imports no torch.

What decod cannot train exactly is refused by name when it is read: a model that loads with one
feature quietly missing would train, badly, for days.
"""

from collections.abc import Mapping
from typing import Any

from decod.errors import ConfigError, DataError
from decod.model.config import Architecture, ModelConfig, ModelDtype

Fields = Mapping[str, Any]
"""A parsed `config.json`."""

_REQUIRED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_scaling": (None,),
    },
    "qwen2": {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "rope_scaling": (None,),
    },
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
}
"""Per model type: fields that, where present, must hold one of these values."""

_MISSING = object()


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` with which transformers loads this model."""
    common: dict[str, Any] = {
        "dtype": model.dtype.value,
        "tie_word_embeddings": model.tie_word_embeddings,
        "vocab_size": model.vocab_size,
        "initializer_range": 0.02,
        # The tokenizer knows special tokens; numbers here might lie outside this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.model_type is Architecture.GPT2:
        return common | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": model.hidden_size,
            "n_inner": model.intermediate_size,
            "n_layer": model.num_hidden_layers,
            "n_head": model.num_attention_heads,
            "n_positions": model.max_position_embeddings,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    result = common | {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        # Readers up to transformers 4 look at the first, from 5 on at the second.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
    }
    if model.attention_bias:
        # Llama's `attention_bias` would also put a bias on the output projection.
        return result | {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
        }
    return result | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": model.hidden_size // model.num_attention_heads,
        "attention_bias": False,
        "mlp_bias": False,
    }


def config_from_hf(fields: Fields, *, dtype: ModelDtype | None = None) -> ModelConfig:
    """Return the configuration that a `config.json` describes.

    Args:
        fields: The parsed file. Fields that do not change the arithmetic are ignored.
        dtype: What to train in; None takes the file's own dtype.

    Raises:
        DataError: A field is missing, of another type, out of range, or asks for a feature that
            decod does not have. The message names the field.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _REQUIRED_VALUES:
        raise _bad_field("model_type", model_type, "decod trains llama, qwen2 and gpt2 models")
    _check_features(model_type, fields)
    chosen = _dtype(fields) if dtype is None else dtype
    try:
        if model_type == "gpt2":
            return _gpt2_config(fields, chosen)
        return _llama_config(model_type, fields, chosen)
    except ConfigError as error:
        raise DataError(
            f"config.json does not describe a model: {error.what}", why=error.why, fix=error.fix
        ) from error


def _bad_field(name: str, value: object, why: str) -> DataError:
    return DataError(
        f"config.json: {name} is {str(value)[:100]}",
        why=why,
        fix="choose a model without it, or correct the field if the file is damaged",
        code="E-DAT-011",
    )


def _check_features(model_type: str, fields: Fields) -> None:
    for name, allowed in _REQUIRED_VALUES[model_type].items():
        value = fields.get(name, _MISSING)
        if value is not _MISSING and value not in allowed:
            wanted = " or ".join(str(option) for option in allowed)
            raise _bad_field(name, value, f"decod's {model_type} has only {wanted}")
    if fields.get("quantization_config") is not None:
        raise _bad_field(
            "quantization_config", "set", "quantized weights cannot be trained on directly"
        )
    layer_types = fields.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise _bad_field("layer_types", layer_types, "decod has only full_attention layers")


def _dtype(fields: Fields) -> ModelDtype:
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        if value is not None:
            if value not in tuple(ModelDtype):
                raise _bad_field(
                    name, value, "decod trains in float64, float32 or bfloat16: say which"
                )
            return ModelDtype(value)
    return ModelDtype.FLOAT32


def _int(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad_field(name, value, "a positive whole number is needed there")
    return value


def _float(fields: Fields, name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise _bad_field(name, value, "a positive number is needed there")
    return float(value)


def _bool(fields: Fields, name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise _bad_field(name, value, "true or false is needed there")
    return value


def _rope_theta(fields: Fields) -> float:
    parameters = fields.get("rope_parameters")
    if parameters is None:
        return _float(fields, "rope_theta", 10000.0)
    if not isinstance(parameters, dict):
        raise _bad_field("rope_parameters", parameters, "an object is needed there")
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise _bad_field("rope_parameters.rope_type", kind, "decod has only unscaled positions")
    return _float(parameters, "rope_theta", 10000.0)


def _llama_config(model_type: str, fields: Fields, dtype: ModelDtype) -> ModelConfig:
    hidden_size = _int(fields, "hidden_size")
    num_heads = _int(fields, "num_attention_heads")
    head_width = _int(fields, "head_dim", hidden_size // num_heads)
    if head_width * num_heads != hidden_size:
        raise _bad_field(
            "head_dim", head_width, f"{num_heads} heads of it must fill hidden_size {hidden_size}"
        )
    return ModelConfig(
        model_type=Architecture.LLAMA,
        dtype=dtype,
        vocab_size=_int(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(fields, "intermediate_size"),
        num_hidden_layers=_int(fields, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=_int(fields, "num_key_value_heads", num_heads),
        max_position_embeddings=_int(fields, "max_position_embeddings"),
        norm_eps=_float(fields, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(fields),
        tie_word_embeddings=_bool(fields, "tie_word_embeddings", default=False),
        attention_bias=model_type == "qwen2",
    )


def _gpt2_config(fields: Fields, dtype: ModelDtype) -> ModelConfig:
    hidden_size, num_heads = _int(fields, "n_embd"), _int(fields, "n_head")
    return ModelConfig(
        model_type=Architecture.GPT2,
        dtype=dtype,
        vocab_size=_int(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(fields, "n_inner", 4 * hidden_size),
        num_hidden_layers=_int(fields, "n_layer"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=_int(fields, "n_positions"),
        norm_eps=_float(fields, "layer_norm_epsilon", 1e-5),
        tie_word_embeddings=_bool(fields, "tie_word_embeddings", default=True),
    )
