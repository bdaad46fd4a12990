"""What a model is: the fields of a Hugging Face `config.json`, and how it is cut into stages.

Imports no torch: the node process reads it too.
"""

from dataclasses import dataclass
from enum import StrEnum

from decod.errors import ConfigError


class Architecture(StrEnum):
    """Model families built into decod. Peers choose one by name; code is never received."""

    LLAMA = "llama"
    """RMSNorm, rotary positions, SwiGLU, grouped-query attention (Llama; Qwen2 with qkv bias)."""
    GPT2 = "gpt2"
    """LayerNorm, learnt positions, GELU, biases everywhere, tied embeddings by default."""


class ModelDtype(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        return {"float64": 8, "float32": 4, "bfloat16": 2}[self.value]


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
    """Width. Divisible by num_attention_heads."""
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
    tie_word_embeddings: bool = False
    """Head shares the embedding's weights; possible because stage 0 holds both."""
    attention_bias: bool = False
    """Biases on the query, key and value projections, as in Qwen2 (llama only)."""

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
        if self.hidden_size % self.num_attention_heads:
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
        if self.model_type is Architecture.LLAMA and (
            self.hidden_size // self.num_attention_heads % 2
        ):
            raise _refuse(
                "hidden_size",
                self.hidden_size,
                "rotary positions turn pairs, so a head's width must be even",
                "give a width that is an even multiple of model.num_attention_heads",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesConfig:
    """How the blocks are cut. Stage 0 (data nodes) also holds embedding, final norm and head."""

    num_relay_stages: int = 2
    """Stages of relays, 1 or more. More stages: smaller memory per host, more hops."""
    num_first_blocks: int = 0
    """Blocks that stage 0 runs itself, before the relays'."""


def stage_blocks(model: ModelConfig, stages: StagesConfig) -> tuple[range, ...]:
    """Return the blocks of every stage, stage 0 first; contiguous, and relays differ by at most 1.

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
