"""One judgement of a model's folder, whichever command reads it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decod.cli.main import main
from decod.config.run_file import DataSource, load_run_file, render_run_file
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig
from tests.support.exports import MODEL, make_corpus, make_export, words_tokenizer

Answer = tuple[int, str, str]
RUN = RunConfig(model=MODEL, batch=BatchConfig(sequence_length=32, num_microbatches=1))
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 9999\n"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_export(tmp_path / "model", make_corpus(tmp_path / "corpus"))


@pytest.fixture
def ask(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[Path], list[Answer]]:
    """Gives a folder to each command that reads one: returns exit codes, outputs and errors."""

    def each(folder: Path) -> list[Answer]:
        (tmp_path / "run.toml").write_text(
            render_run_file(RUN, DataSource(path=str(tmp_path / "corpus")))
        )
        common = ("--state-dir", tmp_path / "state")
        answers = []
        for words in (
            ("evaluate", folder, tmp_path / "corpus", "--json"),
            ("generate", "--model", folder, "--max-tokens", 1, "the cat", *common),
            ("run", "check", tmp_path / "run.toml", "--init", folder),
            ("run", "init", "-", "--from", folder),
            ("leader", tmp_path / "run.toml", "--init", folder, "--listen", "127.0.0.1:0", *common),
        ):
            if words[0] == "leader" and answers[0][0] == 0:
                continue  # It would begin a run.
            code = main([str(word) for word in words])
            captured = capfd.readouterr()
            answers.append((code, captured.out, captured.err))
        return answers

    return each


def test_a_whole_folder_is_taken_by_all(model: Path, ask: Callable[[Path], list[Answer]]) -> None:
    for code, _, err in ask(model):
        assert code == 0, err
        assert "not checked" not in err


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (LFS, "it is a pointer of Git LFS. Try: run `git lfs pull`"),
        (b"<!DOCTYPE html>\n<html>", "it is a page of HTML"),
        (b"Access to model a/b is restricted.", "server's answer and not the file: Access to"),
        (b'{"error": "Repository not found"}', "server's answer and not the file"),
        (b"", "it is empty"),
        (bytes(4096), "it begins with zeros only"),
        (b"PK\x03\x04", "it is a zip archive, as torch.save writes pickled weights"),
        (b"GGUF\x03\0\0\0", "it is in the format GGUF"),
        ("half", "its download was cut off"),
    ],
)
def test_a_damaged_download_is_named_as_what_it_is(
    name: str,
    content: bytes | str,
    told: str,
    model: Path,
    ask: Callable[[Path], list[Answer]],
) -> None:
    path = model / name
    whole = path.read_bytes()
    path.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    for code, _, err in ask(model):
        assert code == 9, err
        assert told in err
        assert name in err


@pytest.mark.parametrize(
    ("content", "told"), [(LFS, "Git LFS"), (b"", "it is empty"), (b'{"model": ', "was cut off")]
)
def test_a_damaged_tokenizer_is_named_wherever_tokens_matter(
    content: bytes, told: str, model: Path, ask: Callable[[Path], list[Answer]]
) -> None:
    (model / "tokenizer.json").write_bytes(content)
    evaluate, generate, check, _, *_ = ask(model)
    for code, _, err in (evaluate, generate, check):
        assert code == 9, err
        assert told in err
        assert "tokenizer.json" in err


def shards(model: Path, *, index: bool) -> None:
    """Cuts the weights into two files."""
    tensors = load_file(model / WEIGHTS)
    names = sorted(tensors)
    (model / WEIGHTS).unlink()
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model / file)
        places |= dict.fromkeys(part, file)
    if index:
        (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def without_index(model: Path) -> str:
    shards(model, index=False)
    return f"other safetensors, no {INDEX} (model-00001-of-00002.safetensors and 1 more)"


def without_shard(model: Path) -> str:
    shards(model, index=True)
    (model / "model-00002-of-00002.safetensors").unlink()
    return "model-00002-of-00002.safetensors of the 2 files"


def with_a_pointer(model: Path) -> str:
    shards(model, index=True)
    (model / "model-00002-of-00002.safetensors").write_bytes(LFS)
    return "model-00002-of-00002.safetensors: it is a pointer of Git LFS"


def pickled(model: Path) -> str:
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    return "holds pickled weights (pytorch_model.bin)"


def adapter(model: Path) -> str:
    (model / WEIGHTS).rename(model / "adapter_model.safetensors")
    (model / "config.json").unlink()
    return "holds an adapter (adapter_model.safetensors)"


def gguf(model: Path) -> str:
    (model / WEIGHTS).rename(model / "model-q4.gguf")
    return "holds weights in another format (model-q4.gguf)"


def unfinished(model: Path) -> str:
    cache = model / ".cache/huggingface/download"
    cache.mkdir(parents=True)
    (model / WEIGHTS).rename(cache / "abc.incomplete")
    return "is not complete: abc.incomplete is there"


def broken_link(model: Path) -> str:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to("../blobs/abc")
    return "it leads to ../blobs/abc, which is not there"


def one_level_up(model: Path) -> str:
    (model / "snapshots").mkdir()
    for path in list(model.iterdir()):
        if path.is_file():
            path.rename(model / "snapshots" / path.name)
    return f"give {model / 'snapshots'}"


@pytest.mark.parametrize(
    "spoil",
    [
        without_index,
        without_shard,
        with_a_pointer,
        pickled,
        adapter,
        gguf,
        unfinished,
        broken_link,
        one_level_up,
    ],
)
def test_what_the_folder_holds_instead_is_said_by_all(
    spoil: Callable[[Path], str], model: Path, ask: Callable[[Path], list[Answer]]
) -> None:
    told = spoil(model)
    for code, _, err in ask(model):
        assert code == 9, err
        assert told in err


def test_shards_with_their_index_are_taken(
    model: Path, ask: Callable[[Path], list[Answer]]
) -> None:
    shards(model, index=True)
    assert [code for code, _, _ in ask(model)] == [0] * 4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("someone/some-model", "someone/some-model is not in the cache as a whole"),
        ("https://huggingface.co/someone/some-model", "give someone/some-model"),
        ("some-gpt2", "give OWNER/some-gpt2, as its page there names it"),
    ],
)
def test_what_could_be_on_the_hub_is_told_so(
    given: str, told: str, ask: Callable[[Path], list[Answer]], model: Path
) -> None:
    assert model.is_dir()
    for code, _, err in ask(Path(given)):
        assert code == 9
        assert told in err


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_of_the_folder_is_not_that_of_the_training(
    stored: torch.dtype, model: Path, ask: Callable[[Path], list[Answer]]
) -> None:
    """The run trains in float32."""
    weights = {name: tensor.to(stored) for name, tensor in load_file(model / WEIGHTS).items()}
    save_file(weights, model / WEIGHTS)
    fields = json.loads((model / "config.json").read_text())
    name = str(stored).removeprefix("torch.")
    del fields["dtype"]
    (model / "config.json").write_text(json.dumps(fields | {"torch_dtype": name}))
    for code, _, err in ask(model):
        assert code == 0, err


def test_a_corpus_of_another_tokenizer_is_refused_by_all_that_read_both(
    model: Path, tmp_path: Path, ask: Callable[[Path], list[Answer]]
) -> None:
    words_tokenizer(model / "tokenizer.json")
    evaluate, _, check, _, leader = ask(model)
    for code, out, err in (evaluate, check, leader):
        assert (code, out) == (9, "")
        assert "E-DAT-025" in err
        assert f"--tokenizer {model / 'tokenizer.json'}" in err


def test_a_comparison_that_can_not_be_made_is_told_by_all_that_would_make_it(
    model: Path, ask: Callable[[Path], list[Answer]]
) -> None:
    (model / "tokenizer.json").unlink()
    evaluate, _, check, *_ = ask(model)
    for code, _, err in (evaluate, check):
        assert code == 0
        assert "not checked: whether " in err
        assert "there is no such file" in err
    (text,) = json.loads(evaluate[1])["unchecked"]
    assert text.startswith("not checked: whether ")


def test_a_loss_that_is_not_finite_is_an_error_and_no_json(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`NaN` is no JSON."""
    weights = load_file(model / WEIGHTS)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, model / WEIGHTS)
    code = main(["evaluate", str(model), str(tmp_path / "corpus"), "--json"])
    captured = capfd.readouterr()
    assert (code, captured.out) == (9, "")
    assert "E-DAT-045" in captured.err


def test_a_run_file_is_written_from_a_folder(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads((model / "config.json").read_text())
    names = {"_name_or_path": "someone/model", "torch_dtype": "float16", "dtype": None}
    (model / "config.json").write_text(json.dumps(fields | names))
    path = tmp_path / "made" / "run.toml"
    path.parent.mkdir()
    assert main(["run", "init", str(path), "--from", str(model)]) == 0
    out = capfd.readouterr().out
    assert f"decod data prepare {tmp_path}/made/corpus PATH... --tokenizer {model}" in out
    assert f"decod leader {path} --init {model}" in out
    loaded = load_run_file(path)
    assert loaded.run.model.hidden_size == MODEL.hidden_size
    assert loaded.run.model.dtype == "bfloat16", "which loses nothing of a float16"
    assert loaded.run.batch.sequence_length == MODEL.max_position_embeddings
    assert loaded.run.stages.num_relay_stages == 2
    assert loaded.card.base_model == "someone/model"
    assert loaded.data.path == str(tmp_path / "made/corpus")
    (tmp_path / "a.txt").write_text("the cat sat " * 1000)
    made = ["data", "prepare", str(tmp_path / "made/corpus"), str(tmp_path / "a.txt")]
    assert main([*made, "--tokenizer", str(model)]) == 0
    assert main(["run", "check", str(path), "--init", str(model)]) == 0
    assert main(["run", "init", "-", "--from", str(model), "--preset", "gpt2"]) == 2
    assert main(["run", "init", "-", "--from", str(model), "--preset", "diloco"]) == 0
