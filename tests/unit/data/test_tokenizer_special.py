"""Which tokens begin and end a document: what the folder states, and a guess only at the last."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from decod.cli.main import main
from decod.data.dataset import Dataset
from decod.data.encoding import cut_file
from decod.data.prepare import PrepareConfig, prepare
from decod.data.source_files import find_files
from decod.data.sources import PIECE_SIZE_MAX_CHARS, Piece, read_pieces
from decod.data.tokenizer import NO_BOS, FileTokenizer, load_tokenizer
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.run.training_config import BatchConfig
from tests.support.published_models import byte_tokenizer

SPECIAL = ("<bos>", "<eos>", "<|im_end|>")
BOS, EOS, TURN = 256, 257, 258


def write_folder(folder: Path, *, begins: str = "", **files: Any) -> Path:
    """Writes a tokenizer, and JSON files beside it: `config_json` is `config.json`."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(byte_tokenizer(SPECIAL, begins=begins))
    for name, value in files.items():
        (folder / name.replace("_json", ".json")).write_text(json.dumps(value))
    return folder


def found(folder: Path, **options: Any) -> FileTokenizer:
    tokenizer, _ = load_tokenizer(str(folder / "tokenizer.json"), **options)
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def test_the_end_token_is_the_one_that_the_folder_states(tmp_path: Path) -> None:
    for files, eos_id, origin in (
        ({"tokenizer_config_json": {"eos_token": "<|im_end|>"}}, TURN, "tokenizer_config.json"),
        (
            {"tokenizer_config_json": {"eos_token": {"content": "<bos>", "lstrip": False}}},
            BOS,
            "tokenizer_config.json",
        ),
        ({"special_tokens_map_json": {"eos_token": "<|im_end|>"}}, TURN, "special_tokens_map.json"),
        ({"generation_config_json": {"eos_token_id": [TURN, EOS]}}, TURN, "generation_config.json"),
        ({"config_json": {"eos_token_id": TURN}}, TURN, "config.json"),
    ):
        folder = tmp_path / f"{origin}-{eos_id}"
        tokenizer = found(write_folder(folder, **files))
        assert (tokenizer.eos_id, tokenizer.eos_origin) == (eos_id, f"as {origin} says")
        assert not tokenizer.eos_is_guess
        assert found(folder, eos="<eos>").eos_id == EOS, "what is given counts more"


def test_a_guess_is_a_special_token_and_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Gemma has the HTML tag `</s>`, and ends texts with `<eos>`."""
    folder = write_folder(tmp_path / "model")
    fields = json.loads((folder / "tokenizer.json").read_text())
    html = {"id": 259, "content": "</s>", "special": False, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    fields["added_tokens"].append(html | flags)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    assert found(folder).eos_is_guess
    assert found(folder).eos_id == EOS
    (tmp_path / "a.txt").write_text("one")
    arguments = [str(tmp_path / "corpus"), str(tmp_path / "a.txt"), "--tokenizer", str(folder)]
    assert main(["data", "prepare", *arguments]) == 0
    told = capfd.readouterr().err
    assert "documents begin with no token of their own and end with <eos> (id 257), a guess" in told
    assert "<eos> (id 257) is a guess by its spelling. Give another with --eos TOKEN" in told
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert main(["data", "prepare", "--force", *arguments]) == 0
    told = capfd.readouterr().err
    assert "end with <eos> (id 257), as tokenizer_config.json says" in told
    assert "guess" not in told


def test_a_stated_token_that_the_tokenizer_lacks_is_an_error(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config_json={"eos_token": "<end>"})
    with pytest.raises(DataError, match=r"E-DAT-015 .*no end-of-document token '<end>'"):
        found(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text('{"eos_token_id": 9999}')
    with pytest.raises(DataError, match=r"E-DAT-015 .*no end-of-document token with id 9999"):
        found(folder)
    (folder / "tokenizer_config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match=r"tokenizer_config\.json .*: it is a pointer of Git LFS"):
        found(folder)


@pytest.mark.parametrize("begins", ["", "<bos>"])
@pytest.mark.parametrize("adds", [None, True, False])
def test_documents_begin_as_texts_do_in_transformers(
    begins: str, adds: bool | None, tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    if adds is not None:
        config["add_bos_token"] = adds
    folder = write_folder(tmp_path / "model", begins=begins, tokenizer_config_json=config)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs("ab")["input_ids"]
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("ab")
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    prepare(tmp_path / "corpus", texts, PrepareConfig(tokenizer=str(folder)))
    with Dataset.open(tmp_path / "corpus") as dataset:
        batch = BatchConfig(sequence_length=dataset.num_tokens - 1, microbatch_size=1)
        tokens = dataset.microbatch(MicrobatchId(1, 0, 0), batch, seed=0)[0].tolist()
        assert tokens == [*expected, EOS, *expected, EOS]
        assert (dataset.index.tokenizer.bos_id is None) == (expected[0] != BOS)
        # An export of a run on it gives the same ids.
        (tmp_path / "out").mkdir()
        (tmp_path / "out/tokenizer.json").write_text(dataset.tokenizer.to_json())
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "out/tokenizer_config.json").write_text(json.dumps(plain))
    exported: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("ab")["input_ids"] == expected
    assert found(folder, bos=NO_BOS).bos_id is None
    assert found(folder, bos="<eos>").bos_id == EOS


def test_a_long_document_begins_once(tmp_path: Path) -> None:
    """Also if several tasks read it."""
    folder = write_folder(tmp_path / "model", begins="<bos>")
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for text in texts:
        text.write_text("abcdefg\n" * (PIECE_SIZE_MAX_CHARS // 2))
    prepare(tmp_path / "corpus", texts, PrepareConfig(tokenizer=str(folder), eos="<eos>"))
    with Dataset.open(tmp_path / "corpus") as dataset:
        assert dataset.num_tokens == sum(text.stat().st_size + 2 for text in texts)
    [file] = find_files([texts[0]])
    slices = cut_file(file, PIECE_SIZE_MAX_CHARS)
    assert len(slices) > 1
    pieces = [piece for each in slices for piece in read_pieces(each, text_field="")]
    assert [piece.begins_document for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert Piece("a", ends_document=True).begins_document


def test_an_index_without_a_beginning_keeps_its_hash_and_its_form(tmp_path: Path) -> None:
    """Runs go on with corpora of earlier releases, and earlier releases read those of this one."""
    (tmp_path / "a.txt").write_text("ab")
    index = prepare(tmp_path / "corpus", [tmp_path / "a.txt"], PrepareConfig())
    assert "bos_id" not in (tmp_path / "corpus/index.json").read_text()
    assert index.sha256 == "f42065e7ef971ada051f7eeee61f271e146a59b22dc84ffe0b6b4389a865c255"


def test_an_address_on_the_hub_is_answered_with_the_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="on the Hugging Face Hub, give someone/model"):
        load_tokenizer("https://huggingface.co/someone/model")
    for name in ("tokenizer.json", "no/tokenizer.json", "my-tokenizer.json"):
        with pytest.raises(DataError) as caught:
            load_tokenizer(name)
        assert "Hugging Face Hub" not in str(caught.value)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(DataError, match=r"only tokenizer\.model, .*save_pretrained"):
        load_tokenizer(str(tmp_path))
