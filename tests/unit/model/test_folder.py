"""Model folders that are damaged, foreign or dangerous are refused with the field or file named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from decod.errors import DataError
from decod.model.config import Architecture, ModelConfig, ModelDtype
from decod.model.folder import read_config, read_weights, write_folder
from decod.model.generate import generate
from decod.model.hf import config_from_hf, config_to_hf
from decod.model.initial import initial_weight
from decod.model.shape import model_shapes

SMALL = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA = ModelConfig(**SMALL)
QWEN2 = ModelConfig(**SMALL, attention_bias=True, num_key_value_heads=2, dtype=ModelDtype.BFLOAT16)
GPT2 = ModelConfig(**SMALL, model_type=Architecture.GPT2, tie_word_embeddings=True)


def weights_of(model: ModelConfig) -> dict[str, torch.Tensor]:
    return {
        name: initial_weight(model, seed=0, name=name, shape=shape)
        for name, shape in model_shapes(model).items()
    }


@pytest.mark.parametrize("model", [LLAMA, QWEN2, GPT2])
def test_a_configuration_survives_the_way_there_and_back(model: ModelConfig) -> None:
    fields = json.loads(json.dumps(config_to_hf(model)))
    assert config_from_hf(fields) == model
    assert config_from_hf(fields, dtype=ModelDtype.FLOAT64).dtype is ModelDtype.FLOAT64


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (LLAMA, "model_type", "mamba"),
        (LLAMA, "model_type", ["llama"]),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "attention_bias", True),
        (LLAMA, "mlp_bias", True),
        (LLAMA, "head_dim", 8),
        (LLAMA, "rope_scaling", {"rope_type": "llama3"}),
        (LLAMA, "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        (LLAMA, "rope_parameters", 3),
        (LLAMA, "hidden_size", "16"),
        (LLAMA, "hidden_size", None),
        (LLAMA, "num_attention_heads", 0),
        (LLAMA, "vocab_size", True),
        (LLAMA, "rms_norm_eps", -1.0),
        (LLAMA, "tie_word_embeddings", "yes"),
        (LLAMA, "quantization_config", {"bits": 4}),
        (LLAMA, "dtype", "float16"),
        (QWEN2, "use_sliding_window", True),
        (QWEN2, "layer_types", ["sliding_attention"]),
        (GPT2, "activation_function", "relu"),
        (GPT2, "add_cross_attention", True),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused_by_name(
    model: ModelConfig, field: str, value: Any
) -> None:
    with pytest.raises(DataError, match=re.escape(field)):
        config_from_hf(config_to_hf(model) | {field: value})


def test_only_the_wanted_weights_are_read(tmp_path: Path) -> None:
    weights = weights_of(LLAMA)
    write_folder(tmp_path, LLAMA, weights)
    wanted = ["model.norm.weight", "lm_head.weight"]
    found = dict(read_weights(tmp_path, LLAMA, wanted))
    assert list(found) == sorted(wanted)
    assert all(torch.equal(found[name], weights[name]) for name in wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_names_of_the_bare_gpt2_checkpoint_are_understood(tmp_path: Path) -> None:
    """It has no prefix, and stores its causal mask as if that were learnt."""
    weights = weights_of(GPT2)
    short = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    short["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(short, tmp_path / "model.safetensors")
    found = dict(read_weights(tmp_path, GPT2))
    assert found.keys() == weights.keys()


def test_an_output_head_beside_a_tied_embedding_is_ignored(tmp_path: Path) -> None:
    weights = weights_of(GPT2) | {"lm_head.weight": torch.zeros(19, 16)}
    save_file(weights, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in dict(read_weights(tmp_path, GPT2))


def test_foreign_weights_are_refused_before_any_is_read(tmp_path: Path) -> None:
    weights = weights_of(LLAMA)
    path = tmp_path / "model.safetensors"
    for damage, message in (
        ({"model.norm.weight": torch.ones(8)}, r"model.norm.weight is \(8,\), not \(16,\)"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, "is unknown"),
        ({"model.norm.weight": torch.ones(16, dtype=torch.int32)}, "int32"),
    ):
        save_file(weights | damage, path)
        with pytest.raises(DataError, match=message):
            list(read_weights(tmp_path, LLAMA))
    del weights["lm_head.weight"]
    save_file(weights, path)
    with pytest.raises(DataError, match=r"lm_head\.weight is missing"):
        list(read_weights(tmp_path, LLAMA))


@pytest.mark.parametrize("content", [b"", b"garbage" * 10, b"\xff" * 64])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DataError, match="E-DAT-012"):
        list(read_weights(tmp_path, LLAMA))
    with pytest.raises(DataError, match="E-DAT-012"):
        read_config(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, weights_of(LLAMA))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="E-DAT-012"):
        list(read_weights(tmp_path, LLAMA))


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(DataError, match="pickled"):
        list(read_weights(tmp_path, LLAMA))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", 3, "gone.safetensors"])
def test_an_index_cannot_point_elsewhere(name: str, tmp_path: Path) -> None:
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="E-DAT-012"):
        list(read_weights(tmp_path, LLAMA))


def test_an_incomplete_model_is_not_written(tmp_path: Path) -> None:
    weights = weights_of(LLAMA)
    del weights["lm_head.weight"]
    with pytest.raises(DataError, match=r"lm_head\.weight is missing"):
        write_folder(tmp_path, LLAMA, weights | {"foreign": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="E-DAT-014"):
        write_folder(tmp_path / "file", LLAMA, weights_of(LLAMA))


@pytest.mark.parametrize("prompt", [[], [19], [-1]])
def test_a_prompt_outside_of_the_vocabulary_is_refused(prompt: list[int], tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, weights_of(LLAMA))
    with pytest.raises(DataError, match="E-DAT-016"):
        generate(tmp_path, prompt, num_tokens=1, seed=0, temperature=1.0)
