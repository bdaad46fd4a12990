"""The definition of a model: the fields of a Hugging Face `config.json`.

A new family of models changes this file and adds one: a name in `Architecture`, a row in
`FAMILIES`, and the module that the row names. Models of other families are built by transformers:
their definition is the whole `config.json`, and their `Family` follows from it.

Imports no torch, because the node process reads it too.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any

from decod.errors import ConfigError
from decod.run.model_layout import (
    LENGTH_ROPES,
    TOGETHER_TYPES,
    ModelLayout,
    require_canonical,
    uncanonical,
)

Shapes = dict[str, tuple[int, ...]]
"""Parameter name to shape."""


class Architecture(StrEnum):
    """Model families built into decod. Peers choose one by name; code is never received."""

    LLAMA = "llama"
    """RMSNorm, rotary positions, SwiGLU, grouped-query attention: Llama, Mistral, Qwen2, Qwen3."""
    GPT2 = "gpt2"
    """LayerNorm, learnt positions, GELU, biases everywhere, tied embeddings by default."""
    TRANSFORMERS = "transformers"
    """What transformers builds from the model's `config.json`."""


NUM_LAYERS_MAX = 10_000


class ModelDtype(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        return {"float64": 8, "float32": 4, "bfloat16": 2}[self.value]


class RopeType(StrEnum):
    """Scaling of rotary angles for sequences that are longer than in the first training."""

    DEFAULT = "default"
    """No scaling."""
    LINEAR = "linear"
    """All angles grow `rope_factor` times more slowly (arXiv:2306.15595)."""
    LLAMA3 = "llama3"
    """Slow angles grow `rope_factor` times more slowly, fast angles as before, and those in between
    in part (Llama 3.1)."""


ROPE_NUMBERS: dict[RopeType, tuple[str, ...]] = {
    RopeType.DEFAULT: (),
    RopeType.LINEAR: ("factor",),
    RopeType.LLAMA3: (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""The numbers that each kind of scaling needs, named as in `config.json`. In `ModelConfig` their
names begin with `rope_`."""


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
"""Fields of `ModelConfig` that are positive numbers. The number of key heads may follow from those
before it."""


def _refuse(field: str, value: object, why: str, fix: str) -> ConfigError:
    return ConfigError(f"model.{field} is {value}", why=why, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One language model. Names are those of Llama's `config.json` for all families."""

    model_type: Architecture = Architecture.LLAMA
    """`llama` or `gpt2`, which decod has itself, or `transformers`: see config."""
    config: str = ""
    """The whole `config.json` of a model that transformers builds. Then the sizes follow from it.
    `decod run init FILE --from DIR` writes them. Empty for decod's own models."""
    dtype: ModelDtype = ModelDtype.FLOAT32
    """Of activations and weights. `bfloat16` keeps float32 masters; `float64` is for checks."""
    vocab_size: int = 257
    """Rows of the embedding. At least the tokenizer's size, which is 257 for plain bytes."""
    hidden_size: int = 128
    """Width. Divisible by num_attention_heads, unless head_dim is given."""
    intermediate_size: int = 384
    """Width inside the feed-forward network."""
    num_hidden_layers: int = 4
    """Blocks in all stages together."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: int = 4
    """Key and value heads; divides num_attention_heads. For gpt2: equal to it."""
    max_position_embeddings: int = 1024
    """Longest sequence. For gpt2 also the rows of the position table."""
    norm_eps: float = 1e-5
    """`rms_norm_eps` of Llama, `layer_norm_epsilon` of GPT-2."""
    rope_theta: float = 10000.0
    """Base of the rotary angles. No field of gpt2."""
    rope_type: RopeType = RopeType.DEFAULT
    """How rotary angles are scaled to reach beyond the sequences of the first training. No field of
    gpt2. `linear` slows all of them down. `llama3` slows down only those that turn slowly."""
    rope_factor: float = 0.0
    """How many times more slowly scaled angles grow: at least 1. 0 with `default`."""
    rope_low_freq_factor: float = 0.0
    """With `llama3`: an angle that turns fewer times than this within
    rope_original_max_position_embeddings is slowed down in full. Otherwise 0."""
    rope_high_freq_factor: float = 0.0
    """With `llama3`: an angle that turns more often than this within
    rope_original_max_position_embeddings stays as it is. Otherwise 0."""
    rope_original_max_position_embeddings: int = 0
    """With `llama3`: longest sequence of the first training. Otherwise 0."""
    tie_word_embeddings: bool = False
    """Head shares the embedding's weights; possible because stage 0 holds both."""
    attention_bias: bool = False
    """Biases on the query, key and value projections, as in Qwen2 (llama only)."""
    head_dim: int = 0
    """Width of an attention head, if all heads together are not hidden_size wide, as in Qwen3
    (llama only). 0: hidden_size / num_attention_heads."""
    qk_norm: bool = False
    """RMSNorm on every query and key, as in Qwen3 (llama only)."""

    @property
    def family(self) -> "Family":
        """What is common to the models of this type.

        Raises:
            ConfigError: transformers can't build the model on this host, or as the sizes say.
        """
        if self.is_built:
            return _built_family(self)
        return FAMILIES[self.model_type]

    @property
    def is_built(self) -> bool:
        """Whether transformers builds it."""
        return self.model_type is Architecture.TRANSFORMERS

    @property
    def can_read_apart(self) -> bool:
        """Whether the documents of a sequence can be kept apart."""
        if not self.is_built:
            return True
        depends = any(f'"{each}"' in self.config for each in LENGTH_ROPES)
        return not depends and json.loads(self.config)["model_type"] not in TOGETHER_TYPES

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_width

    @property
    def key_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_width

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise _refuse(name, getattr(self, name), "sizes are positive", "give at least 1")
        if self.num_hidden_layers > NUM_LAYERS_MAX:
            why = "no model has so many, and each takes time to describe"
            fix = f"give at most {NUM_LAYERS_MAX}"
            raise _refuse("num_hidden_layers", self.num_hidden_layers, why, fix)
        if self.head_dim < 0:
            raise _refuse("head_dim", self.head_dim, "it is a width", "give 0 or more")
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            raise _refuse(
                "hidden_size",
                self.hidden_size,
                f"it must divide into {self.num_attention_heads} attention heads",
                "give a multiple of model.num_attention_heads",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise _refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"it must divide the {self.num_attention_heads} query heads",
                "give a divisor of model.num_attention_heads",
            )
        if self.is_built:
            require_canonical(self.config)
        else:
            _check_family(self)
        _check_rope(self)


_OF_SOME: dict[str, object] = {
    "config": "",
    "rope_theta": 10000.0,
    "rope_type": RopeType.DEFAULT,
    "attention_bias": False,
    "head_dim": 0,
    "qk_norm": False,
}
"""Fields that only some families have, and their values in all others."""


def _check_family(model: ModelConfig) -> None:
    has = model.family.has
    for name, neutral in _OF_SOME.items():
        value = getattr(model, name)
        if name not in has and value != neutral:
            raise _refuse(name, value, f"{model.model_type} has no such thing", "leave it out")
    if model.qk_norm and model.attention_bias:
        why = "no family of models has that beside model.attention_bias"
        raise _refuse("qk_norm", model.qk_norm, why, "set one of them to false")
    if "rope_theta" in has and model.head_width % 2:
        name = "head_dim" if model.head_dim else "hidden_size"
        raise _refuse(
            name,
            getattr(model, name),
            "rotary positions turn pairs, so a head's width must be even",
            "give an even head width: hidden_size / num_attention_heads, or llama's head_dim",
        )
    num_heads = model.num_attention_heads
    if "num_key_value_heads" not in has and model.num_key_value_heads != num_heads:
        raise _refuse(
            "num_key_value_heads",
            model.num_key_value_heads,
            f"{model.model_type} has as many key and value heads as query heads",
            "give the same number as model.num_attention_heads",
        )


def _check_rope(model: ModelConfig) -> None:
    needed = ROPE_NUMBERS[model.rope_type]
    for name in ROPE_NUMBERS[RopeType.LLAMA3]:
        field = f"rope_{name}"
        value = getattr(model, field)
        if name not in needed and value != 0:
            why = f"rope_type {model.rope_type} has no such number"
            raise _refuse(field, value, why, "leave it out, or choose another model.rope_type")
        least = 1 if name == "factor" else 0
        if name in needed and (value < least or value == 0):
            range_ = "1 or more" if least else "more than 0"
            why = f"with rope_type {model.rope_type} it must be {range_}"
            raise _refuse(field, value, why, "give the number of the model's config.json")
    low = model.rope_low_freq_factor
    high = model.rope_high_freq_factor
    if model.rope_type is RopeType.LLAMA3 and low >= high:
        why = f"it must be more than model.rope_low_freq_factor, {low}"
        raise _refuse("rope_high_freq_factor", high, why, "give a higher number, usually 4.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfType:
    """How a `config.json` of one `model_type` says what a `ModelConfig` says."""

    architecture: str
    """The class of transformers with a head for language models."""
    means: Mapping[str, Any] = field(default_factory=dict)
    """Values of the model that the type alone says."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of absent fields in transformers where decod has none, or another."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that must hold one of these values if they are present: decod computes so."""
    built: frozenset[str] = frozenset()
    """Those of them whose other values make it a model that transformers builds."""
    ignored: frozenset[str] = frozenset()
    """Fields that change nothing while the neutral ones are neutral."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Fields of an exported model that do not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: names, shapes and memory. Its arithmetic is in the modules it names."""

    block: str
    """The module of a block, as `package:Class`. It is made from a `ModelConfig`, and called with
    the residual stream, rotary tables or None, and a cache of keys and values or None."""
    ends: str
    """The module of embedding and final norm, as `package:Class`. See `decod.model.stage.Ends`."""
    block_prefix: str
    """With what the names of a block's parameters begin, before its index."""
    ends_prefix: str
    """With what the names of the parameters outside the blocks begin, but for the head."""
    embedding: str
    """The name of the embedding's weights, which a tied head shares."""
    residual: tuple[str, ...]
    """Weights that write into the residual stream. Their initial values shrink with the depth."""
    has: Mapping[str, str]
    """Fields of `ModelConfig` that such a model has, and their names in `config.json`. A name is
    empty if the type says it (`HfType.means`), or the scaling of rotary positions."""
    inner_factor: int = 0
    """How many times as wide as the model its feed-forward network is, if `config.json` does not
    say. 0: it must say."""
    block_shapes: Callable[[ModelConfig, int], Shapes]
    """Shapes of the parameters of the block with an index, without the prefix."""
    ends_shapes: Callable[[ModelConfig], Shapes]
    """Shapes of all parameters outside the blocks but the head's weights."""
    layout: ModelLayout | None = None
    """Of a model that transformers builds."""
    num_active: int = 1
    """Experts that compute for a token, if some of a block's weights are of experts."""
    transposed: bool = False
    """Whether matrices are stored as (inputs, outputs)."""
    kept_numbers: Callable[[ModelConfig, int], tuple[int, int]]
    """What a block keeps of a position for its backward pass: numbers in the model's dtype, and
    numbers in float32 or wider."""
    types: Mapping[str, HfType]
    """By the `model_type` of `config.json`. An exported model has the first that means the same."""
    stage: str = "decod.model.stage:Stage"
    """The module of a relay's stage, as `package:Class`."""
    first_stage: str = "decod.model.stage:FirstStage"
    """The module of stage 0."""

    def matrices(self, model: ModelConfig, index: int) -> list[str]:
        """Return the names of a block's linear layers, in sorted order."""
        if self.layout is not None:
            return [*self.layout.blocks[index].linears]
        shapes = self.block_shapes(model, index)
        return sorted(name.removesuffix(".weight") for name in shapes if len(shapes[name]) > 1)


_LLAMA_HAS = {name: name for name in (*SIZES, "tie_word_embeddings", "rope_theta")} | {
    "norm_eps": "rms_norm_eps",
    "rope_type": "",
}
_LLAMA_ABSENT = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_LLAMA_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "pretraining_tp": (1, None),
    "rope_interleaved": (False, None),
}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False, None)}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {
    "layer_types": (None,),
    "use_sliding_window": (False, None),
}
_WINDOW_LENGTHS = frozenset({"sliding_window", "max_window_layers"})
_LLAMA_WRITTEN = {"hidden_act": "silu", "attention_dropout": 0.0}


def _llama_block_shapes(model: ModelConfig, _: int) -> Shapes:
    width = model.hidden_size
    inner = model.intermediate_size
    shapes: Shapes = {
        "self_attn.q_proj.weight": (model.query_width, width),
        "self_attn.k_proj.weight": (model.key_width, width),
        "self_attn.v_proj.weight": (model.key_width, width),
        "self_attn.o_proj.weight": (width, model.query_width),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if model.attention_bias:
        shapes["self_attn.q_proj.bias"] = (model.query_width,)
        shapes["self_attn.k_proj.bias"] = (model.key_width,)
        shapes["self_attn.v_proj.bias"] = (model.key_width,)
    if model.qk_norm:
        shapes["self_attn.q_norm.weight"] = (model.head_width,)
        shapes["self_attn.k_norm.weight"] = (model.head_width,)
    return shapes


def _llama_ends_shapes(model: ModelConfig) -> Shapes:
    return {
        "model.embed_tokens.weight": (model.vocab_size, model.hidden_size),
        "model.norm.weight": (model.hidden_size,),
    }


def _llama_kept_numbers(model: ModelConfig, _: int) -> tuple[int, int]:
    # Queries and what they have read, keys and values. Norms of queries and keys keep their inputs.
    heads = (3 if model.qk_norm else 2) * (model.query_width + model.key_width)
    # Inputs of both halves, and the two inner activations of the feed-forward network. Norms and
    # gates are computed again: see `decod.model.autograd`.
    numbers = 2 * model.hidden_size + heads + 2 * model.intermediate_size
    # The logarithm of each head's sum of weights.
    return numbers, model.num_attention_heads


def _gpt2_block_shapes(model: ModelConfig, _: int) -> Shapes:
    width = model.hidden_size
    inner = model.intermediate_size
    shapes: Shapes = {}
    # GPT-2 stores its projections as (inputs, outputs), the transpose of a linear layer's.
    for name, num_inputs, num_outputs in (
        ("attn.c_attn", width, 3 * width),
        ("attn.c_proj", width, width),
        ("mlp.c_fc", width, inner),
        ("mlp.c_proj", inner, width),
    ):
        shapes[f"{name}.weight"] = (num_inputs, num_outputs)
        shapes[f"{name}.bias"] = (num_outputs,)
    for name in ("ln_1", "ln_2"):
        shapes[f"{name}.weight"] = (width,)
        shapes[f"{name}.bias"] = (width,)
    return shapes


def _gpt2_ends_shapes(model: ModelConfig) -> Shapes:
    return {
        "transformer.wte.weight": (model.vocab_size, model.hidden_size),
        "transformer.wpe.weight": (model.max_position_embeddings, model.hidden_size),
        "transformer.ln_f.weight": (model.hidden_size,),
        "transformer.ln_f.bias": (model.hidden_size,),
    }


def _gpt2_kept_numbers(model: ModelConfig, _: int) -> tuple[int, int]:
    # As Llama's block. But GPT-2's is plain autograd, which also keeps the outputs of both norms,
    # and their means and scales.
    heads = 2 * (model.query_width + model.key_width)
    numbers = 4 * model.hidden_size + heads + 2 * model.intermediate_size
    return numbers, model.num_attention_heads + 4


FAMILIES: Mapping[Architecture, Family] = {
    Architecture.LLAMA: Family(
        block="decod.model.llama:LlamaBlock",
        ends="decod.model.llama:LlamaEnds",
        block_prefix="model.layers.",
        ends_prefix="model.",
        embedding="model.embed_tokens.weight",
        residual=("self_attn.o_proj.weight", "mlp.down_proj.weight"),
        has=_LLAMA_HAS | {"attention_bias": "", "head_dim": "head_dim", "qk_norm": ""},
        block_shapes=_llama_block_shapes,
        ends_shapes=_llama_ends_shapes,
        kept_numbers=_llama_kept_numbers,
        types={
            "llama": HfType(
                architecture="LlamaForCausalLM",
                means={"attention_bias": False, "qk_norm": False},
                absent=_LLAMA_ABSENT,
                neutral=_LLAMA_NEUTRAL | _NO_BIAS,
                built=frozenset({"attention_bias", "mlp_bias"}),
                written=_LLAMA_WRITTEN | {"attention_bias": False, "mlp_bias": False},
            ),
            # Llama's `attention_bias` would also add a bias to the output projection.
            "qwen2": HfType(
                architecture="Qwen2ForCausalLM",
                means={"attention_bias": True, "qk_norm": False},
                absent=_LLAMA_ABSENT | {"num_key_value_heads": 32},
                neutral=_LLAMA_NEUTRAL | _NO_WINDOW | {"attention_bias": (True, None)},
                built=frozenset(_NO_WINDOW),
                ignored=_WINDOW_LENGTHS,
                written=_LLAMA_WRITTEN | {"use_sliding_window": False},
            ),
            "qwen3": HfType(
                architecture="Qwen3ForCausalLM",
                means={"attention_bias": False, "qk_norm": True},
                absent=_LLAMA_ABSENT | {"num_key_value_heads": 32, "head_dim": 128},
                neutral=_LLAMA_NEUTRAL | _NO_WINDOW | _NO_BIAS,
                built=frozenset(_NO_WINDOW | _NO_BIAS),
                ignored=_WINDOW_LENGTHS,
                written=_LLAMA_WRITTEN | {"attention_bias": False, "use_sliding_window": False},
            ),
            "mistral": HfType(
                architecture="MistralForCausalLM",
                means={"attention_bias": False, "qk_norm": False},
                absent=_LLAMA_ABSENT | {"num_key_value_heads": 8, "sliding_window": 4096},
                neutral=_LLAMA_NEUTRAL | {"sliding_window": (None,)},
                built=frozenset({"sliding_window"}),
            ),
        },
    ),
    Architecture.GPT2: Family(
        block="decod.model.gpt2:Gpt2Block",
        ends="decod.model.gpt2:Gpt2Ends",
        block_prefix="transformer.h.",
        ends_prefix="transformer.",
        embedding="transformer.wte.weight",
        residual=("attn.c_proj.weight", "mlp.c_proj.weight"),
        transposed=True,
        has={
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "tie_word_embeddings": "tie_word_embeddings",
        },
        inner_factor=4,
        block_shapes=_gpt2_block_shapes,
        ends_shapes=_gpt2_ends_shapes,
        kept_numbers=_gpt2_kept_numbers,
        types={
            "gpt2": HfType(
                architecture="GPT2LMHeadModel",
                absent={
                    "layer_norm_epsilon": 1e-5,
                    "tie_word_embeddings": True,
                    "attn_pdrop": 0.1,
                    "embd_pdrop": 0.1,
                    "resid_pdrop": 0.1,
                },
                neutral={
                    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                    "scale_attn_weights": (True,),
                    "scale_attn_by_inverse_layer_idx": (False,),
                    "reorder_and_upcast_attn": (False,),
                },
                written={
                    "activation_function": "gelu_new",
                    "attn_pdrop": 0.0,
                    "embd_pdrop": 0.0,
                    "resid_pdrop": 0.0,
                },
            ),
        },
    ),
}
"""decod's own families. Peers choose one by name."""


@lru_cache(maxsize=16)
def _built_family(model: ModelConfig) -> Family:
    """Return the family of one model that transformers builds."""
    # Only transformers knows it. That is more than a settings object may ask for.
    layout: ModelLayout = resolve_name("decod.model.layouts:layout_of")(model.config)
    if layout.config != model.config:
        raise uncanonical(model.config)
    for name, value in layout.sizes.items():
        if getattr(model, name) != value:
            raise _refuse(name, getattr(model, name), f"model.config says {value}", "correct it")
    return Family(
        stage="decod.model.cut:CutStage",
        first_stage="decod.model.cut:CutFirstStage",
        layout=layout,
        num_active=layout.num_active,
        block="",
        ends="",
        block_prefix=layout.block_prefix,
        ends_prefix=layout.ends_prefix,
        embedding=layout.embedding,
        residual=(),
        has={},
        block_shapes=lambda _, index: dict(layout.blocks[index].shapes),
        ends_shapes=lambda _: {
            name: shape for name, shape in layout.ends.items() if name != "lm_head.weight"
        },
        kept_numbers=lambda model, index: (
            layout.blocks[index].kept,
            model.num_attention_heads,
        ),
        types={},
    )
