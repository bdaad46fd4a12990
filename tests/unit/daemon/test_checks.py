"""What is checked before anybody is asked to join: the data, and the weights of --init."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decod.daemon.checks import check_shards, manifest_of
from decod.data.dataset import Dataset
from decod.data.prepare import PrepareConfig, prepare
from decod.errors import ConfigError, DataError
from decod.model.hf import config_to_hf
from decod.model.shape import model_shapes
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig, Documents
from tests.support.exports import words_tokenizer
from tests.support.model_folders import write_folder

MODEL = ModelConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
RUN = RunConfig(model=MODEL, batch=BatchConfig(sequence_length=32))
NORM = "model.norm.weight"


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Returns 4001 tokens."""
    (tmp_path / "text.txt").write_text("0123456789abcdef" * 250)
    prepare(tmp_path / "corpus", [tmp_path / "text.txt"], PrepareConfig(shard_tokens=1000))
    return Dataset.open(tmp_path / "corpus")


@pytest.fixture
def init_dir(tmp_path: Path) -> Path:
    """Returns a folder with the model's weights."""
    weights = {name: torch.randn(shape) for name, shape in model_shapes(MODEL).items()}
    write_folder(tmp_path / "init", MODEL, weights)
    return tmp_path / "init"


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Gives tensors another value, or removes those that are None; `norm` is one of the names."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name.replace("norm", NORM)]
        else:
            weights[name.replace("norm", NORM)] = tensor
    save_file(weights, path)


def test_without_weights_a_run_starts_from_its_seed(dataset: Dataset) -> None:
    manifest = manifest_of(RUN, dataset, None)
    assert manifest.initial_weights == "seed"
    assert manifest.data_index_sha256 == dataset.index_sha256


def test_documents_are_read_apart_if_the_corpus_tells_where_they_begin(
    tmp_path: Path, dataset: Dataset
) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "0123456789abcdef"}\n' * 250)
    config = PrepareConfig(document_masks=True)
    prepare(tmp_path / "marked", [tmp_path / "lines.jsonl"], config)
    runs = {each: replace(RUN, batch=replace(RUN.batch, documents=each)) for each in [*Documents]}
    with Dataset.open(tmp_path / "marked") as marked:
        found = {each: manifest_of(run, marked, None).run.batch for each, run in runs.items()}
    assert found[Documents.AUTO] == found[Documents.APART] == runs[Documents.APART].batch
    assert found[Documents.TOGETHER] == runs[Documents.TOGETHER].batch
    plain = manifest_of(runs[Documents.AUTO], dataset, None)
    assert plain.run.batch.documents is Documents.TOGETHER
    with pytest.raises(DataError, match=r"E-DAT-026 .*does not tell where documents begin"):
        manifest_of(runs[Documents.APART], dataset, None)


def test_the_hash_of_given_weights_follows_every_byte(dataset: Dataset, init_dir: Path) -> None:
    before = manifest_of(RUN, dataset, init_dir).initial_weights
    assert len(before) == 64
    (init_dir / "notes.txt").write_text("not a weight")
    assert manifest_of(RUN, dataset, init_dir).initial_weights == before
    path = init_dir / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    after = manifest_of(RUN, dataset, init_dir).initial_weights
    assert after != before
    (init_dir / "other.safetensors").write_bytes(b"not one of the model's")
    assert manifest_of(RUN, dataset, init_dir).initial_weights != after


def test_data_of_another_tokenizer_than_that_of_the_weights_are_refused(
    tmp_path: Path, dataset: Dataset, init_dir: Path
) -> None:
    """Their ids fit the vocabulary, and would train the model on nonsense."""
    words = words_tokenizer(init_dir / "tokenizer.json")
    with pytest.raises(DataError, match=r"E-DAT-025 .*--tokenizer .*tokenizer\.json"):
        manifest_of(RUN, dataset, init_dir)
    (tmp_path / "text.txt").write_text("the cat sat " * 1000)
    prepare(tmp_path / "words", [tmp_path / "text.txt"], PrepareConfig(tokenizer=str(words)))
    manifest_of(RUN, Dataset.open(tmp_path / "words"), init_dir)
    # An export of a run on bytes has a tokenizer of bytes.
    words.write_text(dataset.tokenizer.to_json())
    manifest_of(RUN, dataset, init_dir)
    told: list[str] = []
    manifest_of(RUN, dataset, init_dir, told.append)
    assert told == []
    words.write_text("not a tokenizer")
    manifest_of(RUN, dataset, init_dir, told.append)
    words.unlink()
    manifest_of(RUN, dataset, init_dir, told.append)
    assert [text.partition(":")[0] for text in told] == ["not checked", "not checked"]
    assert "it is not JSON" in told[0]
    assert "there is no such file" in told[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named(
    dataset: Dataset, init_dir: Path, dtype: torch.dtype, value: float
) -> None:
    norm = torch.full((16,), torch.finfo(dtype).max, dtype=dtype)
    change_weights(init_dir, norm=norm)
    manifest_of(RUN, dataset, init_dir)
    norm[11] = value
    change_weights(init_dir, norm=norm)
    with pytest.raises(DataError, match=rf"E-DAT-013 .*{NORM} is not finite"):
        manifest_of(RUN, dataset, init_dir)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (None, "is missing"),
        (torch.zeros(15), r"is \(15,\), not \(16,\)"),
        (torch.zeros(16, dtype=torch.int32), "is of type I32"),
        (torch.zeros(16).to(torch.float8_e4m3fn), "is of type F8_E4M3"),
    ],
)
def test_weights_of_another_form_are_named(
    dataset: Dataset, init_dir: Path, norm: torch.Tensor | None, message: str
) -> None:
    change_weights(init_dir, norm=norm)
    with pytest.raises(DataError, match=f"E-DAT-013 .*{NORM} {message}"):
        manifest_of(RUN, dataset, init_dir)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_file_of_weights_that_was_cut_off_is_named(
    dataset: Dataset, init_dir: Path, kept: int
) -> None:
    path = init_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"E-DAT-012 cannot read .*model\.safetensors"):
        manifest_of(RUN, dataset, init_dir)


@pytest.mark.parametrize(
    ("name", "code"), [("config.json", "E-DAT-043"), ("model.safetensors", "E-DAT-012")]
)
def test_a_file_that_is_not_there_is_named(
    dataset: Dataset, init_dir: Path, name: str, code: str
) -> None:
    (init_dir / name).unlink()
    with pytest.raises(DataError, match=f"{code} .*{name}"):
        manifest_of(RUN, dataset, init_dir)


@pytest.mark.parametrize(
    "changes", [{"max_position_embeddings": 64}, {"rope_theta": 5e5}, {"norm_eps": 0.5}]
)
def test_given_weights_of_another_model_are_refused_by_the_field(
    dataset: Dataset, init_dir: Path, changes: dict[str, Any]
) -> None:
    """Also where the shapes would fit: another epsilon is another model."""
    given = dataclasses.replace(MODEL, **changes)
    (init_dir / "config.json").write_text(json.dumps(config_to_hf(given)))
    with pytest.raises(DataError, match=f"E-DAT-017 model.{next(iter(changes))}"):
        manifest_of(RUN, dataset, init_dir)


def test_given_weights_with_a_name_twice_are_refused(dataset: Dataset, init_dir: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{}}'
    content = len(header).to_bytes(8, "little") + header
    (init_dir / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"E-DAT-012 .*'a' stands twice"):
        manifest_of(RUN, dataset, init_dir)


def test_a_description_that_is_no_json_is_refused(dataset: Dataset, init_dir: Path) -> None:
    (init_dir / "config.json").write_text("{")
    with pytest.raises(DataError, match="E-DAT-012"):
        manifest_of(RUN, dataset, init_dir)


def test_an_iteration_takes_no_sequence_twice(dataset: Dataset) -> None:
    """The corpus has 125 sequences of 32 tokens."""
    fits = BatchConfig(sequence_length=32, microbatch_size=5, num_microbatches=5, num_data_nodes=5)
    manifest_of(dataclasses.replace(RUN, batch=fits), dataset, None)
    for name in ("microbatch_size", "num_microbatches", "num_data_nodes"):
        larger = dataclasses.replace(fits, **{name: 6})
        with pytest.raises(
            DataError, match=r"E-DAT-024 .* 125 sequences, and one iteration .* 150"
        ):
            manifest_of(dataclasses.replace(RUN, batch=larger), dataset, None)


def test_a_vocabulary_that_is_too_small_is_refused(dataset: Dataset) -> None:
    run = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, vocab_size=256))
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 256.*has 257 tokens"):
        manifest_of(run, dataset, None)


def test_small_data_are_read_as_a_whole_and_large_ones_here_and_there(dataset: Dataset) -> None:
    assert check_shards(dataset) == "all of the data hold against their hashes"
    assert "the rest is read later" in check_shards(dataset, 5000)
    (Path(dataset.place) / "shard-00001.bin").write_bytes(bytes(2000))
    check_shards(dataset, 5000)
    with pytest.raises(DataError, match=r"shard-00001\.bin was altered"):
        check_shards(dataset)
