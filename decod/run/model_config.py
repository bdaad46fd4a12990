"""The definition of a model: the fields of a Hugging Face `config.json`, and its cut into stages.

Imports no torch, because the node process reads it too.
"""

from dataclasses import dataclass
from enum import StrEnum

from decod.errors import ConfigError


class Architecture(StrEnum):
    """Model families built into decod. Peers choose one by name; code is never received."""

    LLAMA = "llama"
    """RMSNorm, rotary positions, SwiGLU, grouped-query attention: Llama, Qwen2 and Qwen3."""
    GPT2 = "gpt2"
    """LayerNorm, learnt positions, GELU, biases everywhere, tied embeddings by default."""


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


_LLAMA_ONLY: dict[str, object] = {
    "rope_theta": 10000.0,
    "rope_type": RopeType.DEFAULT,
    "attention_bias": False,
    "head_dim": 0,
    "qk_norm": False,
}
"""Fields that only llama uses, and their defaults."""


def _refuse(field: str, value: object, why: str, fix: str) -> ConfigError:
    return ConfigError(f"model.{field} is {value}", why=why, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One language model. Names are those of Llama's `config.json` for both families."""

    model_type: Architecture = Architecture.LLAMA
    """`llama` or `gpt2`."""
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
    """Base of the rotary angles (llama only)."""
    rope_type: RopeType = RopeType.DEFAULT
    """How rotary angles are scaled to reach beyond the sequences of the first training (llama
    only). `linear` slows all of them down. `llama3` slows down only those that turn slowly."""
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
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            if getattr(self, field) < 1:
                raise _refuse(field, getattr(self, field), "sizes are positive", "give at least 1")
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
        if self.model_type is Architecture.LLAMA and self.head_width % 2:
            field = "head_dim" if self.head_dim else "hidden_size"
            raise _refuse(
                field,
                getattr(self, field),
                "rotary positions turn pairs, so a head's width must be even",
                "give an even model.head_dim, or a hidden_size that is an even multiple of "
                "model.num_attention_heads",
            )
        if self.model_type is Architecture.GPT2 and (
            self.num_key_value_heads != self.num_attention_heads
        ):
            raise _refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                "GPT-2 has as many key and value heads as query heads",
                "give the same number as model.num_attention_heads",
            )
        _check_llama_only(self)
        _check_rope(self)


def _check_llama_only(model: ModelConfig) -> None:
    for field, neutral in _LLAMA_ONLY.items():
        value = getattr(model, field)
        if model.model_type is not Architecture.LLAMA and value != neutral:
            raise _refuse(field, value, "only llama has it", "leave it out")
    if model.qk_norm and model.attention_bias:
        why = "no family of models has that beside model.attention_bias"
        raise _refuse("qk_norm", model.qk_norm, why, "set one of them to false")


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
class StagesConfig:
    """The cut into stages. Stage 0 (data nodes) also holds embedding, final norm and head."""

    num_relay_stages: int = 2
    """Stages of relays, 1 or more. More stages: smaller memory per host, more hops."""
    num_first_blocks: int = 0
    """Blocks that stage 0 runs itself, before the relays'."""


def stage_blocks(model: ModelConfig, stages: StagesConfig) -> tuple[range, ...]:
    """Return the blocks of every stage, stage 0 first. Relay stages differ by at most one block.

    Raises:
        ConfigError: A relay stage would hold no block.
    """
    left = model.num_hidden_layers - stages.num_first_blocks
    num_stages = stages.num_relay_stages
    if num_stages < 1 or stages.num_first_blocks < 0 or left < num_stages:
        raise ConfigError(
            f"stages.num_relay_stages is {num_stages} with {left} blocks left for them",
            why="every relay stage runs at least one block",
            fix="raise model.num_hidden_layers or lower the number of stages",
        )
    result = [range(stages.num_first_blocks)]
    start = stages.num_first_blocks
    for index in range(stages.num_relay_stages):
        size = left // stages.num_relay_stages + (index < left % stages.num_relay_stages)
        result.append(range(start, start + size))
        start += size
    return tuple(result)
