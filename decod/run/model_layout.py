"""The layout of a model that transformers builds: names and shapes of its parameters.

Only transformers knows it, so it is found where that is installed: see `decod.model.layouts`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from decod.errors import ConfigError

CONFIG_MAX_CHARACTERS = 64 * 1024
"""Longest `config.json` that a run may have."""

NOISE = frozenset(
    {
        "attn_implementation",
        "attribute_map",
        "auto_map",
        "dtype",
        "experts_implementation",
        "id2label",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torch_dtype",
        "torchscript",
        "use_cache",
        "use_kernels",
        "use_return_dict",
    }
)
"""Fields of a `config.json` that don't change a language model, or by which transformers would
fetch code. So are all whose names begin with an underscore."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "audio_config": (None,),
    "cross_attention_hidden_size": (None,),
    "fusion_config": (None,),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "per_layer_config": ({}, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "text_config": (None,),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False, None),
    "vision_config": (None,),
}
"""Fields that must hold one of these values if they are present, whoever builds the model: it is a
decoder of text, whose weights are numbers of their own."""

_BLOCKS_MAX = 1000
_SIZE_MAX = 1 << 24
"""Largest width or vocabulary. What is larger may be the base of rotary angles."""
_RELEASE = re.compile(r"\d{1,4}\.\d{1,4}\Z")

CUT_TYPES = frozenset(
    """
    arcee aria_text bailing_hybrid beam biogpt bitnet bloom codegen cohere cohere2
    cohere2_moe cwm deepseek_v2 deepseek_v3 diffllama doge ernie4_5 exaone4 exaone_moe
    flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox
    gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoeshared helium hy_v3 hyperclovax inkling_text internlm3 iquestcoder jais2 jamba
    jetmoe kolibri1 lfm2 lfm3 llama mellum mimo_v2_flash minicpm3 minimax_m2
    minimax_m3_vl_text ministral3 mistral mixtral moshi mpt nemotron olmo2 olmo3 olmo_hybrid
    olmoe openai-gpt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma
    """.split()  # noqa: SIM905 - a line for each would hide the rest of the file.
)
"""The values of `model_type` that are known to give the same model when they are cut
(`scripts/architectures.py`)."""

TOGETHER_TYPES = frozenset(
    """
    bailing_hybrid biogpt bloom inkling_text jamba lfm2 lfm3 mpt olmo_hybrid openai-gpt
    qwen3_5_moe_text qwen3_5_text qwen3_next
    """.split()  # noqa: SIM905
)
"""Those of them that can't read the documents of a sequence apart: their blocks carry a state from
one to the next, or transformers gives them no mask."""

LENGTH_ROPES = ("dynamic", "longrope")
"""Rotary positions whose angles depend on the longest document of a batch, in transformers."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""The fields of `ModelConfig` that follow from a layout."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The parameters of one block, without the prefix."""

    shapes: Mapping[str, tuple[int, ...]]
    linears: tuple[str, ...]
    """Its linear layers."""
    stored: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]]
    """How files hold parameters that have another name there, or are in several tensors: names,
    with `{}` for the prefix, and shapes. The tensors' elements follow each other."""
    kept: int
    """Numbers that it keeps of a position for its backward pass, about."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The parameters of a model, and where it can be cut."""

    config: str
    """Its `config.json` in one fixed form."""
    sizes: Mapping[str, Any]
    """The fields of `ModelConfig` that follow from it."""
    block_prefix: str
    ends_prefix: str
    embedding: str
    ends: Mapping[str, tuple[int, ...]]
    """The parameters outside the blocks, with their whole names."""
    stored: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]]
    """As for blocks, of the parameters outside them."""
    blocks: tuple[BlockLayout, ...]
    """Of every block."""
    num_active: int
    """Experts that compute for a position."""


def installed_version() -> str:
    """Return the release of transformers on this host: the first two numbers of its version.

    Raises:
        ConfigError: There is none.
    """
    try:
        return ".".join(version("transformers").split(".")[:2])
    except PackageNotFoundError:
        raise ConfigError(
            "this model needs transformers, which is not installed",
            why="decod does not have such models itself",
            fix="pip install transformers",
        ) from None


def unusable(model_type: str, why: str) -> ConfigError:
    """Return the error for a model that decod can't train."""
    return ConfigError(
        f"model.config is of type {ascii(model_type)[1:-1][:60]}",
        why=" ".join(why.split())[:300],
        fix="choose a model of another type: docs/models.md lists those that work",
    )


def uncanonical(config: str) -> ConfigError:
    """Return the error for a configuration that is not in the one form."""
    return ConfigError(
        f"model.config is {ascii(config)[:60]}",
        why="it is the config.json of a model that transformers builds, in one fixed form",
        fix="let `decod run init FILE --from DIR` write the section",
    )


def require_canonical(config: str) -> None:
    """Raise ConfigError unless a text may be a configuration in the one form.

    It may come from a peer, so nothing is in it by which transformers would fetch code.
    """
    try:
        fields = json.loads(config) if len(config) <= CONFIG_MAX_CHARACTERS else {}
        if canonical(without_noise(fields)) != config:
            raise uncanonical(config)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise uncanonical(config) from None
    require_decoder(fields)
    if str(fields.get("model_type")) not in CUT_TYPES:
        raise unusable(str(fields.get("model_type")), "such models are not known to work in stages")


def without_noise(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that define a language model."""
    return {
        name: value
        for name, value in fields.items()
        if name not in NOISE and not name.startswith("_")
    }


def require_decoder(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError if a configuration is not of a decoder, or of an absurd size."""
    model_type = str(fields.get("model_type"))
    for name, value in fields.items():
        if value not in NEUTRAL.get(name, (value,)):
            raise unusable(model_type, f"{name} is {ascii(value)[:40]}")
        if type(value) is int:
            most = _BLOCKS_MAX if "layer" in name else _SIZE_MAX
            if value > most and not name.startswith("rope"):
                raise unusable(model_type, f"{ascii(name)[1:-1][:40]} is {value}")
    if not _RELEASE.match(str(fields.get("transformers_version"))):
        raise unusable(model_type, "it names no release of transformers")


def canonical(fields: Mapping[str, Any]) -> str:
    """Return fields in the one form."""
    return json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), allow_nan=False)
