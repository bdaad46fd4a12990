"""The meaning of each field of a Hugging Face `config.json` to decod. Imports no torch.

If a model silently loaded without one of its features, it would train badly for days. Each field
therefore belongs to one of three groups, and any other field is refused by name:

- decod computes with the field (`_READ`);
- the field has the one value with which decod's model computes the same (`_NEUTRAL`);
- the field changes nothing in the training of a language model (`_IGNORED`).

An absent field counts as its default in transformers.
"""

from collections.abc import Mapping
from typing import Any

from decod.errors import DataError

Fields = Mapping[str, Any]
"""A parsed `config.json`."""

_SAME_FOR_ALL = {"model_type", "dtype", "torch_dtype", "vocab_size", "tie_word_embeddings"}
_LLAMA_READ = _SAME_FOR_ALL | {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
}
# The two lengths matter only with a sliding window.
_QWEN_READ = _LLAMA_READ | {"sliding_window", "max_window_layers"}
_READ: dict[str, set[str]] = {
    "llama": _LLAMA_READ,
    "qwen2": _QWEN_READ,
    "qwen3": _QWEN_READ,
    "gpt2": _SAME_FOR_ALL
    | {"n_embd", "n_inner", "n_layer", "n_head", "n_positions", "layer_norm_epsilon"},
}
"""Fields that decod computes with, by model type."""

_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "resid_pdrop",
)
"""Shares of activations that transformers sets to 0 at random in training."""

_NEUTRAL_FOR_ALL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "auto_map": ({}, None),
    "cross_attention_hidden_size": (None,),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "layer_types": (None,),
    "per_layer_config": ({}, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
}
_LLAMA_NEUTRAL: dict[str, tuple[Any, ...]] = _NEUTRAL_FOR_ALL | {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "pretraining_tp": (1, None),
    "rope_interleaved": (False, None),
}
_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _LLAMA_NEUTRAL | {"attention_bias": (False, None)},
    "qwen2": _LLAMA_NEUTRAL | {"attention_bias": (True, None), "use_sliding_window": (False, None)},
    "qwen3": _LLAMA_NEUTRAL
    | {"attention_bias": (False, None), "use_sliding_window": (False, None)},
    "gpt2": _NEUTRAL_FOR_ALL
    | {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
}
"""Fields that must hold one of these values if they are present, by model type."""

_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
}
"""Defaults of absent fields in transformers where decod's differ, by model type."""

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


def checked(fields: Fields, *, trains: bool = True) -> Fields:
    """Return the fields, with transformers' defaults for some absent ones.

    Args:
        fields: The parsed file.
        trains: Whether the model is to be trained. If not, dropout does not matter.

    Raises:
        DataError: A field is unknown, or asks for something that decod does not have. The message
            names the field.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READ:
        raise bad_field(
            "model_type", model_type, "decod trains llama, qwen2, qwen3 and gpt2 models"
        )
    fields = {**_ABSENT[model_type], **fields}
    if trains:
        _check_dropout(fields)
    _check_neutral(model_type, fields)
    _check_known(model_type, fields)
    return fields


def _check_neutral(model_type: str, fields: Fields) -> None:
    for name, allowed in _NEUTRAL[model_type].items():
        value = fields.get(name, _MISSING)
        full = name == "layer_types" and isinstance(value, list)
        if full and all(kind == "full_attention" for kind in value):
            continue
        if value is not _MISSING and value not in allowed:
            wanted = " or ".join(str(option) for option in allowed if option not in (None, {}))
            why = f"decod's {model_type} has only {wanted}" if wanted else "decod has no such thing"
            raise bad_field(name, value, why)


def _check_known(model_type: str, fields: Fields) -> None:
    known = {*_READ[model_type], *_NEUTRAL[model_type], *_DROPOUTS, *_IGNORED}
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
