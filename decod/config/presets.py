"""Settings and shapes of published methods and models, as a run file has them.

`decod run init --preset` writes one into a run file, key by key. Nothing else knows presets.
The shape of a model is that of its own `config.json` on the Hugging Face Hub. The cut into stages
keeps a relay below 16 GiB, by `decod run plan`. Sequences are shorter than the model's longest.
"""

from dataclasses import dataclass, field, replace
from typing import Final

from decod.compression.plan import Method
from decod.config.needs import stage_needs
from decod.config.schema import count_parameters
from decod.run.model_config import Architecture, ModelConfig, ModelDtype, RopeType
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    BatchConfig,
    OptimizerConfig,
    OptimizerName,
    SyncConfig,
    SyncMethod,
)


@dataclass(frozen=True, slots=True)
class SyncPreset:
    """The sections of a run file that say how members keep together."""

    sync: SyncConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


PRESETS: Final = {
    "all-reduce": SyncPreset(SyncConfig()),
    # Source: DiLoCo (arXiv:2311.08105), section 3. Nesterov's rates of 0.7 and 0.9 are defaults.
    "diloco": SyncPreset(SyncConfig(method=SyncMethod.DILOCO, every=500)),
    # Source: OpenDiLoCo (arXiv:2407.07852).
    "opendiloco": SyncPreset(
        SyncConfig(method=SyncMethod.DILOCO, every=500, compression=Method.FP16)
    ),
    # Source: MuLoCo (arXiv:2505.23725): H = 30, and 4 bits. The paper's averages don't overlap.
    # The outer rates are those that `scripts/bench_convergence.py --search` has found.
    "muloco": SyncPreset(
        SyncConfig(
            method=SyncMethod.DILOCO,
            every=30,
            overlap=True,
            compression=Method.INT4,
            outer_lr=0.7,
            outer_momentum=0.7,
        ),
        OptimizerConfig(name=OptimizerName.MUON, beta1=0.95),
    ),
    # Source: DiLoCoX (arXiv:2506.21263), section 4.1.3. Its rank, 2,048, is for 107 B parameters.
    # The paper doesn't name the outer optimizer's rates. These are stable with overlap.
    "dilocox": SyncPreset(
        SyncConfig(
            method=SyncMethod.DILOCO,
            every=125,
            overlap=True,
            compression=Method.LOWRANK_INT4,
            outer_lr=0.4,
            outer_momentum=0.5,
        )
    ),
    # Source: CocktailSGD (ICML 2023), with DiLoCoX's ratios for 1.3 B parameters.
    "cocktailsgd": SyncPreset(
        SyncConfig(compression=Method.COCKTAIL, random_ratio=0.1, top_ratio=0.08)
    ),
}
"""Known ways to keep the members of a stage together, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """The sections of a run file that depend on the size of its model."""

    model: ModelConfig
    stages: StagesConfig
    batch: BatchConfig = field(
        default_factory=lambda: BatchConfig(sequence_length=2048, microbatch_size=1)
    )


MODEL_PRESETS: Final = {
    # Source: openai-community/gpt2.
    "gpt2": ModelPreset(
        model=ModelConfig(
            model_type=Architecture.GPT2,
            dtype=ModelDtype.BFLOAT16,
            vocab_size=50_257,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=12,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        ),
        stages=StagesConfig(num_relay_stages=2),
        batch=BatchConfig(sequence_length=1024, microbatch_size=4),
    ),
    # Source: Qwen/Qwen2.5-0.5B.
    "qwen2.5-0.5b": ModelPreset(
        model=ModelConfig(
            dtype=ModelDtype.BFLOAT16,
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            norm_eps=1e-6,
            rope_theta=1e6,
            tie_word_embeddings=True,
            attention_bias=True,
        ),
        stages=StagesConfig(num_relay_stages=3),
    ),
    # Source: Qwen/Qwen3-0.6B.
    "qwen3-0.6b": ModelPreset(
        model=ModelConfig(
            dtype=ModelDtype.BFLOAT16,
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=40_960,
            norm_eps=1e-6,
            rope_theta=1e6,
            tie_word_embeddings=True,
            head_dim=128,
            qk_norm=True,
        ),
        stages=StagesConfig(num_relay_stages=4),
    ),
    # Source: meta-llama/Llama-3.2-1B.
    "llama-1b": ModelPreset(
        model=ModelConfig(
            dtype=ModelDtype.BFLOAT16,
            vocab_size=128_256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131_072,
            rope_theta=500_000.0,
            rope_type=RopeType.LLAMA3,
            rope_factor=32.0,
            rope_low_freq_factor=1.0,
            rope_high_freq_factor=4.0,
            rope_original_max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        stages=StagesConfig(num_relay_stages=4),
    ),
    # Source: meta-llama/Llama-3.1-8B.
    "llama-8b": ModelPreset(
        model=ModelConfig(
            dtype=ModelDtype.BFLOAT16,
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131_072,
            rope_theta=500_000.0,
            rope_type=RopeType.LLAMA3,
            rope_factor=8.0,
            rope_low_freq_factor=1.0,
            rope_high_freq_factor=4.0,
            rope_original_max_position_embeddings=8192,
        ),
        stages=StagesConfig(num_relay_stages=16),
    ),
}
"""The presets by name."""


_LARGE_PARAMETERS = 1 << 26
_RELAY_MEMORY_BYTES = 16 << 30


def preset_for(model: ModelConfig) -> ModelPreset:
    """Return the sections for a model of any size, cut as the presets above are."""
    run = RunConfig(model=model)
    large = count_parameters(model) >= _LARGE_PARAMETERS
    length, size = (2048, 1) if large else (run.batch.sequence_length, run.batch.microbatch_size)
    batch = BatchConfig(
        sequence_length=min(length, model.max_position_embeddings), microbatch_size=size
    )
    num_blocks = model.num_hidden_layers
    for num_stages in range(min(2, num_blocks), num_blocks + 1):
        run = replace(run, batch=batch, stages=StagesConfig(num_relay_stages=num_stages))
        # The first relay stage is the largest.
        if stage_needs(run, 1).memory_min_bytes < _RELAY_MEMORY_BYTES:
            break
    return ModelPreset(model=model, stages=run.stages, batch=batch)
