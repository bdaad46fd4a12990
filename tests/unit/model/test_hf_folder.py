"""Model folders that are damaged, foreign or dangerous are refused with the field or file named."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from decod import files as decod_files
from decod.errors import DataError
from decod.model.generate import LoadedModel
from decod.model.hf import config_to_hf
from decod.model.hf_folder import fill_weights, read_weights
from decod.model.sampling import Sampling
from decod.model.shape import model_shapes
from decod.model.stage import initial_weight
from decod.model.weights import read_config
from decod.model.writing import ModelWriter
from decod.run.model_config import FAMILIES, Architecture, ModelConfig, ModelDtype
from tests.support.model_folders import write_folder

SMALL = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA = ModelConfig(**SMALL)
QWEN2 = ModelConfig(**SMALL, attention_bias=True, num_key_value_heads=2, dtype=ModelDtype.BFLOAT16)
TIED = ModelConfig(**SMALL, tie_word_embeddings=True)
EMBEDDINGS = {family.embedding for family in FAMILIES.values()}
GPT2 = ModelConfig(**SMALL, model_type=Architecture.GPT2, tie_word_embeddings=True)


def weights_of(model: ModelConfig) -> dict[str, torch.Tensor]:
    return {
        name: initial_weight(model, seed=0, name=name, shape=shape)
        for name, shape in model_shapes(model).items()
    }


def test_only_the_wanted_weights_are_read(tmp_path: Path) -> None:
    weights = weights_of(LLAMA)
    write_folder(tmp_path, LLAMA, weights)
    wanted = ["model.norm.weight", "lm_head.weight"]
    found = dict(read_weights(tmp_path, LLAMA, wanted))
    assert list(found) == sorted(wanted)
    assert all(torch.equal(found[name], weights[name]) for name in wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("piece_bytes", [48, 4 << 20])
def test_weights_that_are_read_in_pieces_are_those_read_at_once(
    tmp_path: Path,
    stored: torch.dtype,
    dtype: torch.dtype,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_folder(tmp_path, LLAMA, weights_of(LLAMA))
    save_file(
        {k: v.to(stored) for k, v in weights_of(LLAMA).items()}, tmp_path / "model.safetensors"
    )
    monkeypatch.setattr(decod_files, "_PIECE_BYTES", piece_bytes)
    wanted = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    targets = {name: torch.empty(model_shapes(LLAMA)[name], dtype=dtype) for name in wanted}
    fill_weights(tmp_path, LLAMA, {name: target.view(-1) for name, target in targets.items()})
    for name, tensor in read_weights(tmp_path, LLAMA, wanted):
        assert tensor.dtype == stored
        assert torch.equal(targets[name], tensor.to(dtype)), name


@pytest.mark.parametrize("model", [LLAMA, QWEN2, GPT2], ids=["llama", "qwen2", "gpt2"])
def test_the_bytes_are_those_of_the_library(tmp_path: Path, model: ModelConfig) -> None:
    """decod writes the header itself, since the library wants all tensors in memory."""
    weights = weights_of(model)
    write_folder(tmp_path, model, weights)
    dtype = getattr(torch, model.dtype.value)
    tensors = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(tensors, tmp_path / "expected", metadata={"format": "pt"})
    found = (tmp_path / "model.safetensors").read_bytes()
    assert found == (tmp_path / "expected").read_bytes()


def test_a_model_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    with closing(ModelWriter(tmp_path / "model", LLAMA)) as writer:
        writer.write("model.norm.weight", memoryview(bytes(64)))
    assert list(tmp_path.iterdir()) == []


def test_names_of_the_bare_gpt2_checkpoint_are_understood(tmp_path: Path) -> None:
    """It has no prefix, and stores its causal mask as if that were learnt."""
    weights = weights_of(GPT2)
    short = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    short["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(short, tmp_path / "model.safetensors")
    found = dict(read_weights(tmp_path, GPT2))
    assert found.keys() == weights.keys()


def without_prefix(name: str) -> str:
    return name.removeprefix("model.").removeprefix("transformer.")


SPELLINGS: dict[str, Callable[[str], str]] = {
    "without": without_prefix,
    "twice": lambda name: f"{name.partition('.')[0]}.{name}",
    "mixed": lambda name: without_prefix(name) if "norm" in name or "ln_" in name else name,
    "the head's": lambda name: "lm_head.weight" if name in EMBEDDINGS else name,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("model", [LLAMA, TIED, GPT2], ids=["llama", "tied", "gpt2"])
def test_names_that_transformers_understands_are_understood(
    spelling: str, model: ModelConfig, tmp_path: Path
) -> None:
    if spelling == "the head's" and not model.tie_word_embeddings:
        return  # Then the two are different parameters.
    weights = {name: torch.randn(shape) for name, shape in model_shapes(model).items()}
    write_folder(tmp_path, model, weights)
    renamed = {
        name if name == "lm_head.weight" else SPELLINGS[spelling](name): weight
        for name, weight in weights.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = dict(read_weights(tmp_path, model))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = theirs.state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_names_that_transformers_does_not_understand_are_shown(prefix: str, tmp_path: Path) -> None:
    weights = {prefix + name: weight for name, weight in weights_of(LLAMA).items()}
    save_file(weights, tmp_path / "model.safetensors")
    told = (
        rf"E-DAT-013 .*lm_head\.weight is missing.*found were {prefix}lm_head\.weight, .* and 18 "
        r"more; config\.json implies lm_head\.weight, model\.embed_tokens\.weight, .* and 18 more"
    )
    with pytest.raises(DataError, match=told):
        list(read_weights(tmp_path, LLAMA))


def test_one_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    weights = weights_of(LLAMA) | {"norm.weight": torch.zeros(16)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.norm\.weight and norm\.weight are the same"):
        list(read_weights(tmp_path, LLAMA))


def test_an_output_head_beside_a_tied_embedding_must_be_the_same(tmp_path: Path) -> None:
    """transformers doesn't tie what differs in the file: to drop it would train another model."""
    weights = weights_of(GPT2)
    head = weights["transformer.wte.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in dict(read_weights(tmp_path, GPT2))
    head[3, 4] += 1
    save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"E-DAT-013 .*lm_head.weight that differs"):
        list(read_weights(tmp_path, GPT2))


def write_header(path: Path, text: str, num_bytes: int) -> None:
    content = text.encode()
    content += b" " * (-len(content) % 8)
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(num_bytes))


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two tensors is meant depends on who reads the file."""
    path = tmp_path / "model.safetensors"
    entry = '"lm_head.weight":{"dtype":"F32","shape":[19,16],"data_offsets":[0,1216]}'
    write_header(path, f"{{{entry},{entry}}}", 1216)
    with pytest.raises(DataError, match=r"E-DAT-012 .*'lm_head.weight' stands twice"):
        list(read_weights(tmp_path, LLAMA))
    write_header(path, '{"__metadata__":{"format":"pt","format":"tf"}}', 0)
    with pytest.raises(DataError, match="'format' stands twice"):
        list(read_weights(tmp_path, LLAMA))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    weights = weights_of(LLAMA)
    files = {name: f"{name}.safetensors" for name in weights}
    for name, weight in weights.items():
        extra = {"model.norm.weight": torch.zeros(16)} if name == "lm_head.weight" else {}
        save_file({name: weight, **extra}, tmp_path / files[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(DataError, match=r"E-DAT-013 .*model.norm.weight is in 2 files"):
        list(read_weights(tmp_path, LLAMA))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_key_that_stands_twice_in_a_description_is_refused(name: str, tmp_path: Path) -> None:
    fields = json.dumps(config_to_hf(LLAMA) | {"weight_map": {}})
    (tmp_path / name).write_text(fields.replace("{", '{"vocab_size": 20, ', 1))
    with pytest.raises(DataError, match=f"{name}: the key 'vocab_size' stands twice"):
        read_config(tmp_path) if name == "config.json" else list(read_weights(tmp_path, LLAMA))


def test_foreign_weights_are_refused_before_any_is_read(tmp_path: Path) -> None:
    weights = weights_of(LLAMA)
    path = tmp_path / "model.safetensors"
    for damage, message in (
        ({"model.norm.weight": torch.ones(8)}, r"model.norm.weight is \(8,\), not \(16,\)"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, "is unknown"),
        ({"model.norm.weight": torch.ones(16, dtype=torch.int32)}, "I32"),
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
        list(LoadedModel(tmp_path).continuation(prompt, Sampling(), num_tokens=1))
