"""Presets have the shapes and the numbers of parameters that their models were published with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.config.needs import stage_needs
from decod.config.presets import MODEL_PRESETS
from decod.config.run_file import load_run_file, render_run_file
from decod.config.schema import count_parameters, validate
from decod.model.hf import config_from_hf
from decod.run.run_config import RunConfig

PARAMETERS = {
    "gpt2": 124_439_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
}
"""As transformers counts those of the published weights. Tied embeddings count once."""

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
_LLAMA3_ROPE = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_QWEN: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    # Dropout was 0.1, without which decod trains. The file names no dtype.
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.0,
        "bos_token_id": 50256,
        "embd_pdrop": 0.0,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 50257,
    },
    "qwen2.5-0.5b": {
        **_QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_mrope": False,
    },
    "qwen3-0.6b": {
        **_QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
    },
    "llama-1b": {
        **_LLAMA,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
}
"""Their `config.json`."""


def run_of(name: str) -> RunConfig:
    preset = MODEL_PRESETS[name]
    return RunConfig(model=preset.model, stages=preset.stages, batch=preset.batch)


def test_each_preset_is_compared_with_what_was_published() -> None:
    assert PARAMETERS.keys() == PUBLISHED.keys() == MODEL_PRESETS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_are_as_many_as_published(name: str) -> None:
    run = run_of(name)
    assert count_parameters(run.model) == PARAMETERS[name]
    stages = range(run.stages.num_relay_stages + 1)
    assert sum(stage_needs(run, stage).num_parameters for stage in stages) == PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shape_is_that_of_the_published_file(name: str) -> None:
    assert config_from_hf(PUBLISHED[name]).head_width == MODEL_PRESETS[name].model.head_width
    assert config_from_hf(PUBLISHED[name]) == MODEL_PRESETS[name].model


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_run_file_holds_a_preset_whose_relays_fit_16_gib(name: str, tmp_path: Path) -> None:
    path, run = tmp_path / "run.toml", run_of(name)
    path.write_text(render_run_file(run), encoding="utf-8")
    assert load_run_file(path).run == run
    for stage in range(1, run.stages.num_relay_stages + 1):
        assert stage_needs(run, stage).fits(16 << 30, 1)


@pytest.mark.parametrize("length", [8192, 32_768])
def test_a_preset_takes_longer_sequences(length: int) -> None:
    run = run_of("llama-8b")
    validate(replace(run, batch=replace(run.batch, sequence_length=length)))
