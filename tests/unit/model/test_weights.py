"""Each family, saved in shards by transformers, has the same logits here, and in an export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decod.errors import DataError
from decod.model.hf_folder import read_weights
from decod.model.stage import FirstStage
from decod.model.weights import read_config
from decod.run.model_config import ModelDtype
from tests.support.model_folders import write_folder
from tests.support.oracle import (
    Float64Transformers,
    import_transformers,
    stage_logits,
    transformers_logits,
)

torch.set_num_threads(1)

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2: dict[str, Any] = {
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("Llama", {**SHAPE, "rope_parameters": LLAMA3}),
    "llama 3, tied": ("Llama", {**SHAPE, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, narrow heads": ("Llama", {**SHAPE, "head_dim": 6}),
    "qwen2": ("Qwen2", {**SHAPE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SHAPE, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, untied": ("Qwen3", {**SHAPE, "head_dim": 8}),
    "gpt2": ("GPT2", GPT2),
}
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, 300, (2, 33)))
INDEX = "model.safetensors.index.json"


def save(folder: Path, name: str) -> None:
    """Has transformers write a model in several files, no parameter of which is at its default."""
    transformers = import_transformers()
    kind, fields = FAMILIES[name]
    torch.manual_seed(5)
    ending = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, kind + ending)(getattr(transformers, f"{kind}Config")(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


@pytest.mark.parametrize("name", FAMILIES)
def test_shards_of_transformers_have_the_same_logits_here_and_when_exported(
    name: str, tmp_path: Path
) -> None:
    save(tmp_path / "theirs", name)
    expected = transformers_logits(tmp_path / "theirs", TOKENS)
    assert expected.std() > 0.5
    found = stage_logits(tmp_path / "theirs", TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    model = read_config(tmp_path / "theirs")
    write_folder(tmp_path / "ours", model, dict(read_weights(tmp_path / "theirs", model)))
    assert read_config(tmp_path / "ours") == model
    assert torch.equal(transformers_logits(tmp_path / "ours", TOKENS), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_in_float64(name: str, tmp_path: Path) -> None:
    """Of the modules that train: blocks that keep little, and the loss in chunks."""
    save(tmp_path, name)
    model = read_config(tmp_path, dtype=ModelDtype.FLOAT64)
    ours = FirstStage(model, range(model.num_hidden_layers))
    ours.place({key: value.double() for key, value in read_weights(tmp_path, model)})
    loss = ours.loss(ours.embed(TOKENS[:, :-1]), TOKENS[:, 1:])
    torch.autograd.backward([loss])
    theirs = Float64Transformers(tmp_path)
    logits = theirs(TOKENS[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.autograd.backward([expected])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    gradients = {key: value.grad for key, value in theirs.model.named_parameters()}
    for key, parameter in ours.parameters_by_name().items():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-10, atol=1e-12)


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def elsewhere(places: dict[str, str]) -> None:
    places["model.norm.weight"] = min(set(places.values()) - {places["model.norm.weight"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places: places.pop("model.norm.weight"), r"norm.weight is in .*but not in .*index"),
        (elsewhere, r"norm.weight is not in .*, where .*index.json has it"),
        (lambda places: places.update({"more": "new.safetensors"}), r"new.safetensors of the .*"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    change: Callable[[dict[str, str]], None], message: str, tmp_path: Path
) -> None:
    save(tmp_path, "qwen3")
    change_index(tmp_path, change)
    with pytest.raises(DataError, match=message):
        list(read_weights(tmp_path, read_config(tmp_path)))


def test_missing_shards_are_named_before_any_is_read(tmp_path: Path) -> None:
    save(tmp_path, "llama 3")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()
    second.unlink()
    with pytest.raises(DataError, match=f"E-DAT-012 {first.name} and 1 more of the "):
        list(read_weights(tmp_path, read_config(tmp_path)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_dim", 8, r"self_attn.k_norm.weight is \(16,\), not \(8,\)"),
        ("num_hidden_layers", 4, r"model.layers.3.input_layernorm.weight is missing"),
        ("num_hidden_layers", 2, r"model.layers.2.input_layernorm.weight is unknown"),
        ("attention_bias", True, r"model.layers.0.self_attn.k_proj.bias is missing"),
        ("attn_logit_softcapping", 30.0, "attn_logit_softcapping is 30.0"),
        ("model_type", "mamba", "model_type is mamba"),
    ],
)
def test_a_config_that_is_not_of_these_weights_is_refused(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    save(tmp_path, "qwen3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(DataError, match=message):
        list(read_weights(tmp_path, read_config(tmp_path)))


def test_a_width_of_heads_has_two_spellings(tmp_path: Path) -> None:
    save(tmp_path, "qwen3, untied")
    assert read_config(tmp_path).head_dim == 0
