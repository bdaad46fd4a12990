"""Model configuration <-> Hugging Face `config.json`. Imports no torch.

If a model silently loaded without one of its features, it would train badly for days. Each field of
a `config.json` therefore belongs to one of three groups, and any other field is refused by name:

- decod computes with the field (`Family.has`);
- the field has the one value with which decod's model computes the same (`HfType.neutral`);
- the field changes nothing in the training of a language model (`_IGNORED`).

An absent field counts as its default in transformers (`HfType.absent`).

A type that decod does not have itself, or a known field with another value than decod's, makes it a
model that transformers builds. Then transformers reads the file, and its checks are those that hold
(`decod.model.cut`).
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from decod.errors import ConfigError, DataError
from decod.model.layouts import layout_of
from decod.run.model_config import (
    FAMILIES,
    ROPE_NUMBERS,
    SIZES,
    Architecture,
    HfType,
    ModelConfig,
    ModelDtype,
    RopeType,
)
from decod.run.model_layout import (
    CUT_TYPES,
    NEUTRAL,
    canonical,
    installed_version,
    require_decoder,
    without_noise,
)

Fields = Mapping[str, Any]
"""A parsed `config.json`."""

_TYPES: dict[str, tuple[Architecture, HfType]] = {
    name: (architecture, kind)
    for architecture, family in FAMILIES.items()
    for name, kind in family.types.items()
}
"""Families and types by the `model_type` of a `config.json`."""

_READ_FOR_ALL = {"model_type", "dtype", "torch_dtype"}
_ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters"}

_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "resid_pdrop",
)
"""Shares of activations that transformers sets to 0 at random in training."""

_NEUTRAL_FOR_OWN: dict[str, tuple[Any, ...]] = {"auto_map": ({}, None), "layer_types": (None,)}
"""Fields that must hold one of these values in decod's own models, if they are present. Those that
no model of a run may have otherwise are in `NEUTRAL`."""

_SPECIAL_TOKENS = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
}
"""Special tokens. decod trains on all tokens alike, and never pads."""

_MANNER = {
    "use_cache",
    "gradient_checkpointing",
    "chunk_size_feed_forward",
    "attn_implementation",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "return_dict",
    "tie_last_hidden_states",
    "torchscript",
    "tf_legacy_loss",
    "use_bfloat16",
    "is_decoder",
    "tie_encoder_decoder",
}
"""Fields about memory, time, and outputs other than the logits."""

_ORIGIN = {
    "architectures",
    "transformers_version",
    "tokenizer_class",
    "name_or_path",
    "initializer_range",
    "prefix",
    "finetuning_task",
    "task_specific_params",
    "problem_type",
    "num_labels",
    "id2label",
    "label2id",
    "classifier_dropout",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "predict_special_tokens",
    "n_special",
    "transformers.js_config",
    "is_llama_config",
    "unsloth_fixed",
    "unsloth_version",
}
"""Fields about the model's origin, its initial weights, and its uses for other tasks."""

_LENGTHS = {"n_ctx", "max_sequence_length"}
"""Lengths that transformers no longer reads."""

_GENERATION = {
    "max_length",
    "min_length",
    "max_new_tokens",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
    "output_scores",
    "return_dict_in_generate",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
}
"""Settings of text generation."""

_IGNORED = _SPECIAL_TOKENS | _MANNER | _ORIGIN | _LENGTHS | _GENERATION
"""Fields that do not affect training. Names that begin with an underscore are ignored as well: they
are transformers' own notes."""

_MISSING = object()


def bad_field(
    name: str,
    value: object,
    why: str,
    fix: str = "choose a model without it, or correct the field if the file is damaged",
) -> DataError:
    """Return the error for a field."""
    return DataError(
        f"config.json: {name} is {str(value)[:100]}", why=why, fix=fix, code="E-DAT-011"
    )


class _NotOwnError(Exception):
    """decod does not have such a model itself."""

    def __init__(self, told: DataError) -> None:
        super().__init__()
        self.told = told


def _checked(fields: Fields, *, trains: bool = True) -> Fields:
    """Return the fields, with transformers' defaults for some absent ones.

    Args:
        fields: The parsed file.
        trains: Whether the model is to be trained. If not, dropout does not matter.

    Raises:
        DataError: A field is unknown.
        _NotOwnError: It asks for something that decod does not have.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _TYPES:
        told = bad_field(
            "model_type",
            model_type,
            f"decod trains {', '.join(_TYPES)} and {len(CUT_TYPES)} other types of models",
            "choose a model of a type that docs/models.md lists",
        )
        raise _NotOwnError(told)
    architecture, kind = _TYPES[model_type]
    fields = {**kind.absent, **fields}
    if trains:
        _check_dropout(fields)
    neutral = {**NEUTRAL, **_NEUTRAL_FOR_OWN, **kind.neutral}
    _check_neutral(model_type, neutral, fields, kind.built)
    has = FAMILIES[architecture].has
    read = _READ_FOR_ALL | {name for name in has.values() if name}
    if "rope_theta" in has:
        read |= _ROPE_FIELDS
    _check_known({*read, *neutral, *kind.ignored, *_DROPOUTS, *_IGNORED}, fields)
    return fields


def _check_neutral(
    model_type: str,
    neutral: Mapping[str, tuple[Any, ...]],
    fields: Fields,
    built: Collection[str],
) -> None:
    for name, allowed in neutral.items():
        value = fields.get(name, _MISSING)
        full = name == "layer_types" and isinstance(value, list)
        if full and all(kind == "full_attention" for kind in value):
            continue
        if value is not _MISSING and value not in allowed:
            wanted = " or ".join(str(option) for option in allowed if option not in (None, {}))
            why = f"decod's {model_type} has only {wanted}" if wanted else "decod has no such thing"
            told = bad_field(name, value, why)
            raise _NotOwnError(told) if name in built else told


def _check_known(known: set[str], fields: Fields) -> None:
    for name, value in fields.items():
        if name not in known and not name.startswith("_") and value is not None:
            raise bad_field(
                ascii(name)[1:-1][:100],
                value,
                "decod does not know this field, and it may change what the model computes",
                "remove the field if the model is the same without it, or choose another model",
            )


def _check_dropout(fields: Fields) -> None:
    found = {name: fields[name] for name in _DROPOUTS if fields.get(name) not in (0, None)}
    if found:
        listed = ", ".join(f"{name} is {str(value)[:40]}" for name, value in found.items())
        raise DataError(
            f"config.json: {listed}",
            why="decod trains without dropout, since a microbatch that is computed again on "
            "another host must give the same result",
            fix=f"set {', '.join(found)} to 0.0 in config.json to train the model without dropout",
            code="E-DAT-011",
        )


def built_model(
    fields: Fields, *, dtype: ModelDtype | None = None, trains: bool = True
) -> ModelConfig:
    """Return the configuration of a model that transformers builds. Arguments as `config_from_hf`.

    Raises:
        ConfigError: transformers is not installed, or can't build it, or it can't be cut.
        DataError: A field asks for something that no model of decod has.
    """
    if trains:
        _check_dropout(fields)
    # The release that builds it here, and not the one that has written the file.
    told = {**without_noise(fields), "transformers_version": installed_version()}
    try:
        text = canonical(told)
    except ValueError:
        raise bad_field("a number", "NaN or infinite", "no model has such a thing") from None
    require_decoder(told)
    layout = layout_of(text)
    return ModelConfig(
        model_type=Architecture.TRANSFORMERS,
        dtype=_dtype(fields) if dtype is None else dtype,
        config=layout.config,
        **layout.sizes,
    )


_BUILT_SCALINGS = ("yarn", "longrope")
"""Scalings of rotary positions that only models have which transformers builds."""

_FLOAT16 = ("float16", "half")


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a `config.json` with which transformers loads this model."""
    family = model.family
    if model.is_built:
        return {**json.loads(model.config), "dtype": model.dtype.value}
    model_type, kind = next(
        (name, kind)
        for name, kind in family.types.items()
        if all(getattr(model, field) == value for field, value in kind.means.items())
    )
    result: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [kind.architecture],
        "dtype": model.dtype.value,
        "initializer_range": 0.02,
        # The tokenizer knows the special tokens. Numbers here might lie outside this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    result |= {theirs: getattr(model, ours) for ours, theirs in family.has.items() if theirs}
    if "head_dim" in family.has:
        result["head_dim"] = model.head_width
    if "rope_theta" in family.has:
        scaling: dict[str, Any] = {"rope_type": model.rope_type.value}
        numbers = ROPE_NUMBERS[model.rope_type]
        scaling |= {name: getattr(model, f"rope_{name}") for name in numbers}
        # transformers 4 and earlier read this and `rope_theta`, 5 and later `rope_parameters`.
        result["rope_scaling"] = None if model.rope_type is RopeType.DEFAULT else scaling
        result["rope_parameters"] = scaling | {"rope_theta": model.rope_theta}
    return result | dict(kind.written)


def config_from_hf(
    fields: Fields, *, dtype: ModelDtype | None = None, trains: bool = True, built: bool = False
) -> ModelConfig:
    """Return the configuration that a `config.json` describes.

    Args:
        fields: The parsed file.
        dtype: The dtype to compute in. None: the file's own, or float32 for float16.
        trains: Whether the model is to be trained. If not, dropout does not matter.
        built: Whether transformers is to build it even if decod has such models itself.

    Raises:
        DataError: A field is missing, of another type, out of range, or asks for a feature that
            decod does not have. The message names the field.
    """
    try:
        try:
            if built:
                return built_model(fields, dtype=dtype, trains=trains)
            known = _checked(fields, trains=trains)
            return _model_of(known, _dtype(known) if dtype is None else dtype)
        except _NotOwnError as error:
            if str(fields.get("model_type")) not in CUT_TYPES:
                raise error.told from None
            return built_model(fields, dtype=dtype, trains=trains)
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


def _bool(fields: Fields, name: str) -> bool:
    value = fields.get(name)
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
        told = bad_field(
            f"{where}.rope_type",
            kind,
            f"decod scales positions by {RopeType.LINEAR} or {RopeType.LLAMA3}, or not at all",
        )
        raise _NotOwnError(told) if kind in _BUILT_SCALINGS else told
    rope_type = RopeType(kind)
    names = ROPE_NUMBERS[rope_type]
    for name, value in values.items():
        known = name in {"rope_type", "type", "rope_theta", *names} or value is None
        if not known and (name, value) != ("partial_rotary_factor", 1):
            raise bad_field(
                f"{where}.{name}", value, f"decod's {kind} positions have no such field"
            )
    inner = values.get("rope_theta")
    outer = fields.get("rope_theta")
    if None not in (inner, outer) and inner != outer:
        raise bad_field(f"{where}.rope_theta", inner, f"rope_theta beside {where} is {outer}")
    theta = next((value for value in (inner, outer) if value is not None), 10000.0)
    result: dict[str, Any] = {"rope_type": rope_type}
    result["rope_theta"] = _as_float(f"{where}.rope_theta", theta)
    for name in names:
        read = _as_int if name == "original_max_position_embeddings" else _as_float
        result[f"rope_{name}"] = read(f"{where}.{name}", values.get(name))
    return result


def _model_of(fields: Fields, dtype: ModelDtype) -> ModelConfig:
    architecture, kind = _TYPES[fields["model_type"]]
    family = FAMILIES[architecture]
    values: dict[str, Any] = {"model_type": architecture, "dtype": dtype, **kind.means}
    for name in SIZES:
        default = None
        if name == "intermediate_size" and family.inner_factor:
            default = family.inner_factor * values["hidden_size"]
        elif name == "num_key_value_heads":
            default = values["num_attention_heads"]
        values[name] = _int(fields, family.has.get(name, name), default)
    if "head_dim" in family.has and fields.get("head_dim") is not None:
        head_dim = _int(fields, "head_dim")
        same = head_dim * values["num_attention_heads"] == values["hidden_size"]
        values["head_dim"] = 0 if same else head_dim
    values["norm_eps"] = _as_float(family.has["norm_eps"], fields.get(family.has["norm_eps"]))
    values["tie_word_embeddings"] = _bool(fields, "tie_word_embeddings")
    if "rope_theta" in family.has:
        values |= _rope(fields)
    return ModelConfig(**values)


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
