"""The layout of a model that transformers builds: names and shapes of its parameters.

Only transformers knows it, so it is found where that is installed: see `decod.model.layouts`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from decod.errors import ConfigError

CONFIG_MAX_CHARACTERS = 64 * 1024
"""Longest `config.json` that a run may have."""

NOISE = frozenset(
    {
        "_attn_implementation",
        "_experts_implementation",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "dtype",
        "experts_implementation",
        "id2label",
        "label2id",
        "torch_dtype",
        "use_cache",
        "use_kernels",
    }
)
"""Fields of a `config.json` that don't change a language model, or by which transformers would
fetch code."""

CUT_TYPES: frozenset[str] = frozenset(
    {
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "smollm3",
        "granite",
        "qwen3_moe",
        "gpt_oss",
        "glm4",
        "qwen3_next",
        "gpt_neox",
    }
)
"""The values of `model_type` that are known to give the same model when they are cut
(`scripts/architectures.py`)."""


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
        if canonical(fields) != config or NOISE & fields.keys():
            raise uncanonical(config)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise uncanonical(config) from None
    if str(fields.get("model_type")) not in CUT_TYPES:
        raise unusable(str(fields.get("model_type")), "such models are not known to work in stages")


def canonical(fields: Mapping[str, Any]) -> str:
    """Return fields in the one form."""
    return json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
