"""Models must mean the same to decod and to transformers, in both directions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decod.model.hf_folder import read_weights
from decod.model.shape import model_shapes
from decod.model.stage import FirstStage, empty_model, initial_weight
from decod.model.weights import read_config
from decod.run.model_config import Architecture, ModelConfig
from tests.support.model_folders import write_folder

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": ModelConfig(**SMALL, num_key_value_heads=2, rope_theta=500.0),
    "llama tied": ModelConfig(**SMALL, tie_word_embeddings=True, norm_eps=1e-6),
    "qwen2": ModelConfig(**SMALL, attention_bias=True, num_key_value_heads=2),
    "gpt2": ModelConfig(**SMALL, model_type=Architecture.GPT2, tie_word_embeddings=True),
    "gpt2 untied": ModelConfig(**SMALL, model_type=Architecture.GPT2),
}
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 40, (2, 30)))


def random_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights that differ everywhere, biases and norms too, and are large enough to matter."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in model_shapes(model).items():
        weight = initial_weight(model, seed=0, name=name, shape=shape) * 5
        weights[name] = weight + 0.1 * torch.randn(shape, generator=generator)
    return weights


def loaded_module(folder: Path) -> FirstStage:
    model = read_config(folder)
    module = empty_model(model)
    module.place(dict(read_weights(folder, model)))
    return module


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_is_exported(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    write_folder(tmp_path, model, random_weights(model))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected = theirs.eval()(TOKENS).logits
        found = loaded_module(tmp_path)(TOKENS)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert read_config(tmp_path) == model


def their_models() -> dict[str, Any]:
    shape = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**shape, tie_word_embeddings=True)
        ),
        "mistral": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**shape, sliding_window=None)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=40,
                n_embd=32,
                n_layer=2,
                n_head=4,
                attn_pdrop=0.0,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        ),
    }


@pytest.mark.parametrize("name", their_models())
def test_a_model_saved_by_transformers_has_the_same_loss_here(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = their_models()[name]().eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    module = loaded_module(tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS, labels=TOKENS).loss
        found = module.loss(module.embed(TOKENS[:, :-1]), TOKENS[:, 1:])
    assert abs(float(found) - float(expected)) < 1e-5
