"""Marks beside tokens: what training predicts, and where documents begin."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.data.block import BlockError
from decod.data.dataset import Dataset
from decod.data.encoding import cut_file, encode, group
from decod.data.index import BEGINS, MARK_SHIFT, TARGET, read_index
from decod.data.order import microbatch_windows
from decod.data.prepare import PrepareConfig, prepare
from decod.data.readers import CacheReader, FolderReader, keep_description
from decod.data.source_files import find_files
from decod.data.sources import read_pieces, split_document
from decod.data.tokenizer import BytesTokenizer
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.run.training_config import BatchConfig

TEXTS = ["first", "second text", "ž", "and a last one that is longer than a window"]
BATCH = BatchConfig(sequence_length=8, microbatch_size=3, num_microbatches=2)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(tmp_path / "out", [source], PrepareConfig(document_masks=True, shard_tokens=11))
    return tmp_path / "out"


def expected() -> tuple[list[int], list[int]]:
    """The tokens and marks of `TEXTS`, by definition."""
    tokens = [[*text.encode(), 256] for text in TEXTS]
    marks = [[BEGINS] + [TARGET] * (len(each) - 1) for each in tokens]
    return list(chain.from_iterable(tokens)), list(chain.from_iterable(marks))


def test_a_document_begins_with_a_token_that_is_no_target(corpus: Path) -> None:
    tokens, marks = expected()
    index = read_index(corpus)
    assert (index.format_version, index.dtype) == (3, "uint32")
    assert index.marks is not None
    assert index.marks.num_targets == len(tokens) - len(TEXTS)
    with Dataset.open(corpus, verify=True) as dataset:
        for iteration in range(1, 5):
            mb = MicrobatchId(iteration, 0, 1)
            windows = microbatch_windows(mb, batch=BATCH, num_tokens=len(tokens), seed=3)
            found = dataset.microbatch(mb, BATCH, 3)
            assert found.tolist() == [tokens[w * 8 : w * 8 + 9] for w in windows]
            assert found.dtype == np.int64
            wanted = [marks[w * 8 : w * 8 + 9] for w in windows]
            for row in wanted:
                row[0] |= BEGINS
            assert dataset.marks(mb, BATCH, 3).tolist() == wanted
            assert dataset.marks(mb, BATCH, 3).dtype == np.uint8
            # Whoever changes what it was given changes nothing for the next.
            dataset.microbatch(mb, BATCH, 3)[:] = 0
            assert (dataset.microbatch(mb, BATCH, 3) == found).all()


def test_marks_of_a_microbatch_are_not_read_again(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that another node gave count for one read, and the file stays bad."""
    with Dataset.open(corpus) as dataset:
        dataset.microbatch(MicrobatchId(1, 0, 0), BATCH, 0)
        monkeypatch.setattr(dataset.blocks, "tokens", None)
        dataset.marks(MicrobatchId(1, 0, 0), BATCH, 0)


def test_tokens_without_marks_are_all_targets_and_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 50)
    prepare(tmp_path / "out", [tmp_path / "a.txt"], PrepareConfig())
    assert "marks" not in json.loads((tmp_path / "out" / "index.json").read_text())
    with Dataset.open(tmp_path / "out") as dataset:
        (tmp_path / "out" / "shard-00000.bin").unlink()
        marks = dataset.marks(MicrobatchId(1, 0, 0), BATCH, 0)
    assert marks.tolist() == [[TARGET | BEGINS] + [TARGET] * 8] * 3


def test_a_changed_mark_is_found_and_can_be_given(corpus: Path, tmp_path: Path) -> None:
    good = {path.name: path.read_bytes() for path in corpus.glob("shard-*.bin")}
    for path in corpus.glob("shard-*.bin"):
        content = bytearray(path.read_bytes())
        content[3] ^= TARGET
        path.write_bytes(content)
    index = read_index(corpus)
    cache = tmp_path / "cache" / "corpus"
    keep_description(cache, (corpus / "index.json").read_bytes(), None)
    for reader in (FolderReader(corpus, index), CacheReader(cache, index)):
        dataset = Dataset(reader, index)
        with pytest.raises(BlockError) as caught:
            dataset.marks(MicrobatchId(1, 0, 0), BATCH, 0)
        for block in caught.value.blocks:
            dataset.give(block, good[index.shards[block.shard_index].file])
        assert dataset.marks(MicrobatchId(1, 0, 0), BATCH, 0)[:, 1:].any()


def test_the_hash_tells_marked_tokens_from_others(corpus: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "plain", [tmp_path / "a.jsonl"], PrepareConfig())
    assert read_index(corpus).sha256 != read_index(tmp_path / "plain").sha256
    fields = json.loads((corpus / "index.json").read_text())
    for change in ({"format_version": 2}, {"dtype": "uint16"}, {"marks": {"num_targets": 0}}):
        (corpus / "index.json").write_text(json.dumps(fields | change))
        with pytest.raises(DataError, match=r"E-DAT-020 .*is not a valid index"):
            read_index(corpus)
    (corpus / "index.json").write_text(json.dumps(fields | {"format_version": 4, "new": 1}))
    with pytest.raises(DataError, match=r"format version 4, and this release reads up to 3"):
        read_index(corpus)


@given(st.lists(st.text(min_size=1, max_size=400), min_size=1, max_size=8))
def test_a_document_in_pieces_begins_once(texts: list[str]) -> None:
    pieces = [piece for text in texts for piece in split_document([text])]
    items = np.concatenate(list(encode(pieces, BytesTokenizer(), marked=True)))
    marks = items >> MARK_SHIFT
    ends = np.flatnonzero(items & 0xFFFFFF == 256)
    assert np.flatnonzero(marks & BEGINS).tolist() == [0, *(ends[:-1] + 1)]
    assert ((marks & TARGET > 0) ^ (marks & BEGINS > 0)).all()


def test_a_slice_that_begins_within_a_document_begins_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line of text\n" * 200_000)
    [file] = find_files([tmp_path / "a.txt"])
    parts = list(group(cut_file(file, 2**20), 2**20))
    assert len(parts) > 1
    begins = []
    for part in parts:
        pieces = (piece for each in part for piece in read_pieces(each, text_field=""))
        items = np.concatenate(list(encode(pieces, BytesTokenizer(), marked=True)))
        begins.append(int(np.count_nonzero(items >> MARK_SHIFT & BEGINS)))
    assert begins == [1] + [0] * (len(parts) - 1)
