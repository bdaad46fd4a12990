"""From files to a corpus: exact, repeatable, all or nothing."""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from decod.data.dataset import Dataset
from decod.data.index import Index, ShardFile, read_index
from decod.data.prepare import PrepareConfig, prepare, write_corpus
from decod.data.sources import Piece
from decod.data.tokenizer import BytesTokenizer, FileTokenizer, load_tokenizer
from decod.errors import DataError, HardwareError


def write_tokenizer(path: Path, *, eos: str = "<|endoftext|>", **changes: object) -> Path:
    """Write a tokenizer of whole words."""
    words = ["<unk>", "the", "cat", "sat", "."]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([eos])
    fields = json.loads(tokenizer.to_str())
    fields.update(changes)
    path.write_text(json.dumps(fields))
    return path


def read_all(folder: Path) -> list[int]:
    index = Dataset.open(folder, verify=True).index
    tokens: list[int] = []
    for shard in index.shards:
        dtype = np.dtype(index.dtype).newbyteorder("<")
        tokens += np.fromfile(folder / shard.file, dtype).tolist()
    return tokens


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "b.jsonl").write_text('{"text": "second"}\n{"text": ""}\n{"text": "žirafa"}\n')
    (folder / "a.txt").write_text("first")
    (folder / "empty.txt").write_text("")
    return folder


def test_documents_are_joined_with_the_end_token(tmp_path: Path, source: Path) -> None:
    index = prepare(tmp_path / "out", [source], PrepareConfig())
    expected = [*b"first", 256, *b"second", 256, *"žirafa".encode(), 256]
    assert read_all(tmp_path / "out") == expected
    assert index.num_tokens == len(expected)
    assert index.dtype == "uint16"


@given(
    documents=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=8),
    shard_tokens=st.integers(1, 40),
)
def test_any_text_comes_back_from_shards_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], shard_tokens: int
) -> None:
    out = tmp_path_factory.mktemp("out")
    config = PrepareConfig(shard_tokens=shard_tokens)
    with pytest.MonkeyPatch.context() as patch:
        # Waiting for the disk would make this property take minutes.
        patch.setattr(os, "fsync", lambda _descriptor: None)
        pieces = [Piece(text, ends_document=True) for text in documents]
        index = write_corpus(out, pieces, (BytesTokenizer(), None), config)
    tokens = [token for text in documents for token in (*text.encode(), 256)]
    assert read_all(out) == tokens
    sizes = [shard.num_tokens for shard in index.shards]
    assert sizes[:-1] == [shard_tokens] * (len(sizes) - 1)
    assert BytesTokenizer().decode(tokens) == "".join(documents)


def test_same_files_give_same_bytes(tmp_path: Path, source: Path) -> None:
    config = PrepareConfig(shard_tokens=7)
    for name in ("one", "two"):
        prepare(tmp_path / name, [source], config)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_words_are_tokenized_and_the_tokenizer_travels_along(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "words.json")
    (tmp_path / "a.txt").write_text("the cat sat. the dog <|endoftext|>")
    out = tmp_path / "out"
    index = prepare(out, [tmp_path / "a.txt"], PrepareConfig(tokenizer=str(path)))
    tokens = read_all(out)
    assert tokens[:7] == [1, 2, 3, 4, 1, 0, 0]
    # A text that spells the end token out must not end there.
    assert tokens.count(5) == 1
    assert tokens[-1] == 5
    assert (index.tokenizer.vocab_size, index.tokenizer.eos_id) == (6, 5)
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes()
    with Dataset.open(out, verify=True) as dataset:
        assert dataset.tokenizer.encode("the cat") == [1, 2]
        assert dataset.tokenizer.decode([1, 2, 5]) == "the cat"
        assert dataset.tokenizer.eos_id == 5


def test_truncation_and_padding_of_a_tokenizer_are_switched_off(tmp_path: Path) -> None:
    path = write_tokenizer(
        tmp_path / "words.json",
        truncation={
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
        },
        padding={
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>",
        },
    )  # fmt: skip
    tokenizer, _ = load_tokenizer(str(path))
    assert tokenizer.encode("the cat sat .") == [1, 2, 3, 4]


def test_vocabulary_with_holes_counts_to_its_largest_id(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "words.json")
    fields = json.loads(path.read_text())
    fields["model"]["vocab"]["sat"] = 70_000
    path.write_text(json.dumps(fields))
    (tmp_path / "a.txt").write_text("the cat sat")
    config = PrepareConfig(tokenizer=str(path))
    index = prepare(tmp_path / "out", [tmp_path / "a.txt"], config)
    assert (index.tokenizer.vocab_size, index.dtype) == (70_001, "uint32")
    assert read_all(tmp_path / "out")[:3] == [1, 2, 70_000]


def test_end_token_is_guessed_or_asked_for(tmp_path: Path) -> None:
    guessed, _ = load_tokenizer(str(write_tokenizer(tmp_path / "a.json", eos="</s>")))
    assert guessed.eos_id == 5
    path = write_tokenizer(tmp_path / "b.json", eos="[END]")
    with pytest.raises(DataError, match=r"no end-of-document token .*--eos TOKEN"):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), eos="[END]")[0].eos_id == 5
    with pytest.raises(DataError, match="end token '<eos>' was given for the bytes tokenizer"):
        load_tokenizer("bytes", eos="<eos>")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not JSON"),
        (b"\x80\x02}q\x00.", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"{}", "it has no `model` object"),
        (b'{"model": {"type": "Magic"}}', ""),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.1}}', "dropout"),
    ],
)
def test_bad_tokenizer_file_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=rf"E-DAT-015 tokenizer NAME cannot be used: .*{reason}"):
        FileTokenizer(content, eos=None, name="NAME")


def test_missing_tokenizer_file_is_refused_before_anything_is_written(
    tmp_path: Path, source: Path
) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        prepare(tmp_path / "out", [source], PrepareConfig(tokenizer="no/tokenizer.json"))
    assert not (tmp_path / "out").exists()


def test_corpus_is_not_overwritten_unless_forced(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    prepare(out, [source], PrepareConfig(shard_tokens=3))
    before = contents(out)
    with pytest.raises(DataError, match=r"already holds a corpus\. Try: pass --force"):
        prepare(out, [source], PrepareConfig())
    assert contents(out) == before
    prepare(out, [source], PrepareConfig(force=True))
    assert sorted(contents(out)) == ["index.json", "shard-00000.bin"]


def test_folder_with_other_files_is_not_touched(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"it holds other files \(tokenizer\.json\)"):
        prepare(tmp_path / "out", [source], PrepareConfig())


def test_failed_preparation_leaves_the_earlier_corpus(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    prepare(out, [source], PrepareConfig())
    before = contents(out)
    (source / "z.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="line 1 is not UTF-8"):
        prepare(out, [source], PrepareConfig(shard_tokens=2, force=True))
    assert contents(out) == before


def test_interrupted_preparation_leaves_no_index(tmp_path: Path) -> None:
    def pieces() -> Iterator[Piece]:
        yield Piece("x" * 2**21, ends_document=True)
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_corpus(out, pieces(), (BytesTokenizer(), None), PrepareConfig())
    with pytest.raises(DataError, match="not a prepared corpus, or its preparation was inter"):
        Dataset.open(out)
    assert contents(out) == {}


def test_death_while_files_move_leaves_no_index(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old index must be gone before the first new shard appears."""
    out = tmp_path / "out"
    prepare(out, [source], PrepareConfig())

    def die(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, [source], PrepareConfig(force=True))
    with pytest.raises(DataError, match=r"has no index\.json"):
        Dataset.open(out)


def test_leftovers_of_a_killed_preparation_are_no_obstacle(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out" / ".preparing").mkdir(parents=True)
    (tmp_path / "out" / ".preparing" / "shard-00000.bin").write_text("old")
    prepare(tmp_path / "out", [source], PrepareConfig())
    assert sorted(contents(tmp_path / "out")) == ["index.json", "shard-00000.bin"]


def test_second_preparation_of_a_folder_is_refused(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="another preparation is writing to it"):
        prepare(out, [source], PrepareConfig())
    os.close(descriptor)


def test_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="E-DAT-017 there is no text"):
        prepare(tmp_path / "out", [tmp_path / "a.txt"], PrepareConfig())


def test_records_that_are_all_skipped_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 3)
    config = PrepareConfig(skip_bad=True)
    with pytest.raises(
        DataError, match=r"E-DAT-017 .*all records were skipped \(3\): .*line 1: it"
    ):
        prepare(tmp_path / "out", [tmp_path / "a.jsonl"], config)


def test_what_was_skipped_stands_in_the_index_and_not_in_its_hash(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + "[]\n" * 12)
    index = prepare(tmp_path / "out", [tmp_path / "a.jsonl"], PrepareConfig(skip_bad=True))
    assert index.skipped is not None
    assert index.skipped.num_records == 12
    places = [f"{tmp_path}/a.jsonl, line {n}: it is not a JSON object" for n in range(2, 12)]
    assert list(index.skipped.first) == places
    assert read_index(tmp_path / "out") == index
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    clean = prepare(tmp_path / "clean", [tmp_path / "a.jsonl"], PrepareConfig())
    assert clean.sha256 == index.sha256
    assert "skipped" not in json.loads((tmp_path / "clean" / "index.json").read_text())


def test_files_that_are_no_text_are_refused_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "c.db").write_bytes(b"SQLite format 3\0")
    monkeypatch.setattr("decod.data.prepare.encode_part", None)
    with pytest.raises(DataError, match=r"b\.png is an image, and 1 more file of 3 are no text"):
        prepare(tmp_path.parent / "out", [tmp_path], PrepareConfig())


def test_output_inside_the_input_is_refused(tmp_path: Path, source: Path) -> None:
    for out in (source, source / "out"):
        with pytest.raises(DataError, match="whose text is to be read"):
            prepare(out, [source], PrepareConfig(force=True))


def test_links_in_a_circle_are_refused_as_input_and_as_output(tmp_path: Path, source: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(circle)
    with pytest.raises(DataError, match="cannot be read: Too many levels of symbolic links"):
        prepare(tmp_path / "out", [circle], PrepareConfig())
    with pytest.raises(DataError, match="cannot take the corpus: Too many levels of symbolic"):
        prepare(circle / "out", [source], PrepareConfig())
    with pytest.raises(DataError, match=r"cannot be read \(Too many levels of symbolic links\)"):
        read_index(circle)
    with pytest.raises(DataError, match=r"cannot be read \(Too many levels of symbolic links\)"):
        load_tokenizer(str(circle), eos=None)


def test_full_disk_is_an_error_of_the_host(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ShardFile, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "write", fail)
        with pytest.raises(HardwareError, match=r"No space left on device.*it goes on where"):
            prepare(tmp_path / "out", [source], PrepareConfig())
    with pytest.raises(DataError, match=r"has no index\.json"):
        Dataset.open(tmp_path / "out")
    prepare(tmp_path / "out", [source], PrepareConfig())
    assert sorted(contents(tmp_path / "out")) == ["index.json", "shard-00000.bin"]


def test_index_file_is_what_was_returned(tmp_path: Path, source: Path) -> None:
    index = prepare(tmp_path / "out", [source], PrepareConfig())
    assert Index.model_validate_json((tmp_path / "out" / "index.json").read_bytes()) == index
