"""Model configuration <-> Hugging Face `config.json`. Imports no torch.

`decod.model.hf_fields` lists the known fields, and refuses those that decod can't train exactly.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from decod.errors import ConfigError, DataError
from decod.model.hf_fields import Fields, bad_field, checked
from decod.run.model_config import ROPE_NUMBERS, Architecture, ModelConfig, ModelDtype, RopeType

_FLOAT16 = ("float16", "half")


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a `config.json` with which transformers loads this model."""
    common: dict[str, Any] = {
        "dtype": model.dtype.value,
        "tie_word_embeddings": model.tie_word_embeddings,
        "vocab_size": model.vocab_size,
        "initializer_range": 0.02,
        # The tokenizer knows the special tokens. Numbers here might lie outside this vocabulary.
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
    scaling: dict[str, Any] = {"rope_type": model.rope_type.value}
    scaling |= {name: getattr(model, f"rope_{name}") for name in ROPE_NUMBERS[model.rope_type]}
    result = common | {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        # transformers 4 and earlier read the first two, 5 and later the third.
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_type is RopeType.DEFAULT else scaling,
        "rope_parameters": scaling | {"rope_theta": model.rope_theta},
    }
    if model.attention_bias:
        # Llama's `attention_bias` would also add a bias to the output projection.
        return result | {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
        }
    if model.qk_norm:
        return result | {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "use_sliding_window": False,
        }
    return result | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
    }


def config_from_hf(
    fields: Fields, *, dtype: ModelDtype | None = None, trains: bool = True
) -> ModelConfig:
    """Return the configuration that a `config.json` describes.

    Args:
        fields: The parsed file.
        dtype: The dtype to compute in. None: the file's own, or float32 for float16.
        trains: Whether the model is to be trained. If not, dropout does not matter.

    Raises:
        DataError: A field is missing, of another type, out of range, or asks for a feature that
            decod does not have. The message names the field.
    """
    fields = checked(fields, trains=trains)
    model_type: str = fields["model_type"]
    chosen = _dtype(fields) if dtype is None else dtype
    try:
        if model_type == "gpt2":
            return _gpt2_config(fields, chosen)
        return _llama_config(model_type, fields, chosen)
    except ConfigError as error:
        raise DataError(
            f"config.json does not describe a model: {error.what}", why=error.why, fix=error.fix
        ) from error


def _dtype(fields: Fields) -> ModelDtype:
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        if value is not None:
            short = value.removeprefix("torch.") if isinstance(value, str) else value
            if short in _FLOAT16:
                # Every float16 is a float32, with which decod computes at least as exactly.
                return ModelDtype.FLOAT32
            if short not in tuple(ModelDtype):
                raise bad_field(
                    name, value, "decod computes in float64, float32 or bfloat16: say which"
                )
            return ModelDtype(short)
    return ModelDtype.FLOAT32


def _int(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    return default if value is None and default is not None else _as_int(name, value)


def _as_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_field(name, value, "a positive whole number is needed there")
    return value


def _float(fields: Fields, name: str, default: float) -> float:
    return _as_float(name, fields.get(name, default))


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise bad_field(name, value, "a positive number is needed there")
    return float(value)


def _bool(fields: Fields, name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise bad_field(name, value, "true or false is needed there")
    return value


def _rope(fields: Fields) -> dict[str, Any]:
    """Return the model's fields about rotary positions, from either spelling of transformers.

    Up to transformers 4, the scaling is in `rope_scaling` and the base beside it. From 5 on, both
    are in `rope_parameters`.
    """
    found = [
        _rope_object(fields, name)
        for name in ("rope_scaling", "rope_parameters")
        if fields.get(name) not in (None, {})
    ]
    if not found:
        return {"rope_theta": _float(fields, "rope_theta", 10000.0)}
    if found[0] != found[-1]:
        raise bad_field(
            "rope_parameters", fields["rope_parameters"], "rope_scaling says something else"
        )
    return found[0]


def _rope_object(fields: Fields, where: str) -> dict[str, Any]:
    values = fields[where]
    if not isinstance(values, dict):
        raise bad_field(where, values, "an object is needed there")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in tuple(RopeType) or values.get("type", kind) != kind:
        raise bad_field(
            f"{where}.rope_type",
            kind,
            f"decod scales positions by {RopeType.LINEAR} or {RopeType.LLAMA3}, or not at all",
        )
    rope_type = RopeType(kind)
    names = ROPE_NUMBERS[rope_type]
    for name, value in values.items():
        known = name in {"rope_type", "type", "rope_theta", *names} or value is None
        if not known and (name, value) != ("partial_rotary_factor", 1):
            raise bad_field(
                f"{where}.{name}", value, f"decod's {kind} positions have no such field"
            )
    inner, outer = values.get("rope_theta"), fields.get("rope_theta")
    if None not in (inner, outer) and inner != outer:
        raise bad_field(f"{where}.rope_theta", inner, f"rope_theta beside {where} is {outer}")
    theta = next((value for value in (inner, outer) if value is not None), 10000.0)
    result: dict[str, Any] = {"rope_type": rope_type}
    result["rope_theta"] = _as_float(f"{where}.rope_theta", theta)
    for name in names:
        read = _as_int if name == "original_max_position_embeddings" else _as_float
        result[f"rope_{name}"] = read(f"{where}.{name}", values.get(name))
    return result


def _llama_config(model_type: str, fields: Fields, dtype: ModelDtype) -> ModelConfig:
    hidden_size = _int(fields, "hidden_size")
    num_heads = _int(fields, "num_attention_heads")
    head_dim = _int(fields, "head_dim") if fields.get("head_dim") is not None else 0
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
        **_rope(fields),
        tie_word_embeddings=_bool(fields, "tie_word_embeddings", default=False),
        attention_bias=model_type == "qwen2",
        head_dim=0 if head_dim * num_heads == hidden_size else head_dim,
        qk_norm=model_type == "qwen3",
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


def require_same(run: ModelConfig, given: ModelConfig, source: Path) -> None:
    """Check that weights on a disk belong to the model that a run trains.

    Args:
        run: The run's model.
        given: The model of the weights.
        source: The file that describes `given`.

    Raises:
        DataError: They differ. The message names the fields, and the run file's correct values.
    """
    names = [field.name for field in fields(ModelConfig) if field.name != "head_dim"]
    differing = [name for name in names if getattr(run, name) != getattr(given, name)]
    # The width of a head follows from other fields, unless the run file gives it.
    query_width = run.head_dim * given.num_attention_heads or given.hidden_size
    if query_width != given.query_width:
        differing.append("head_dim")
    if not differing:
        return
    first = differing[0]
    shown = "head_width" if first == "head_dim" else first
    wanted = [f"model.{name} = {json.dumps(getattr(given, name))}" for name in differing]
    raise DataError(
        f"model.{first} is {getattr(run, shown)} in the run file and {getattr(given, shown)} in "
        f"{source}",
        why="weights only fit the model that they were made for",
        fix=f"set {', '.join(wanted)} in the run file, or give another folder",
        code="E-DAT-017",
    )
