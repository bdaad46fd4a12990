"""Reading a corpus: the right tokens, and no damaged file goes unnoticed."""

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decod.data.block import BlockError
from decod.data.dataset import Dataset
from decod.data.index import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    Index,
    ShardWriter,
    TokenizerEntry,
    read_index,
    write_index,
)
from decod.data.order import microbatch_windows
from decod.data.prepare import PrepareConfig, write_corpus
from decod.data.readers import FolderReader
from decod.data.sources import Piece
from decod.data.tokenizer import BytesTokenizer
from decod.errors import ConfigError, DataError
from decod.ids import MicrobatchId
from decod.run.training_config import BatchConfig

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
TOKENS = [*TEXT.encode(), 256]
BATCH = BatchConfig(sequence_length=16, microbatch_size=3, num_microbatches=2, num_data_nodes=2)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    config = PrepareConfig(shard_tokens=11)
    pieces = [Piece(TEXT, ends_document=True)]
    write_corpus(tmp_path / "corpus", pieces, (BytesTokenizer(), None), config)
    return tmp_path / "corpus"


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads((folder / "index.json").read_text())
    change(fields)
    (folder / "index.json").write_text(json.dumps(fields))


def test_microbatch_is_the_windows_of_the_plain_token_list(corpus: Path) -> None:
    """Shards of 11 tokens make every window of 17 cross at least one border."""
    with Dataset.open(corpus) as dataset:
        for iteration in range(1, 12):
            mb = MicrobatchId(iteration, iteration % 2, 1)
            tokens = dataset.microbatch(mb, BATCH, seed=3)
            windows = microbatch_windows(mb, batch=BATCH, num_tokens=len(TOKENS), seed=3)
            assert tokens.tolist() == [TOKENS[w * 16 : w * 16 + 17] for w in windows]
            assert tokens.dtype == np.int64
            assert tokens.flags.owndata


def test_epoch_trains_on_every_target_once(corpus: Path) -> None:
    batch = BatchConfig(sequence_length=9, microbatch_size=1, num_microbatches=100)
    with Dataset.open(corpus) as dataset:
        assert dataset.num_windows(9) == 100
        rows = [dataset.microbatch(MicrobatchId(1, 0, i), batch, seed=0)[0] for i in range(100)]
        targets = sorted(token for row in rows for token in row[1:])
    assert targets == sorted(TOKENS[1:901])


def test_dataset_describes_itself(corpus: Path) -> None:
    with Dataset.open(corpus, verify=True) as dataset:
        assert (dataset.num_tokens, dataset.vocab_size) == (len(TOKENS), 257)
        assert dataset.tokenizer.decode(TOKENS) == TEXT


def test_index_hash_ignores_layout_but_not_content(corpus: Path) -> None:
    before = Dataset.open(corpus).index_sha256
    fields = json.loads((corpus / "index.json").read_text())
    (corpus / "index.json").write_text(json.dumps(dict(reversed(fields.items())), indent=7))
    assert Dataset.open(corpus).index_sha256 == before
    change_index(corpus, lambda fields: fields["shards"][0].update(sha256="0" * 64))
    assert Dataset.open(corpus).index_sha256 != before


def test_microbatch_outside_the_batch_is_refused(corpus: Path) -> None:
    with Dataset.open(corpus) as dataset, pytest.raises(ConfigError, match="data_node_index 2"):
        dataset.microbatch(MicrobatchId(1, 2, 0), BATCH, seed=0)


def test_corpus_shorter_than_a_sequence_is_refused(corpus: Path) -> None:
    batch = BatchConfig(sequence_length=len(TOKENS))
    with Dataset.open(corpus) as dataset, pytest.raises(DataError, match="E-DAT-024"):
        dataset.microbatch(MicrobatchId(1, 0, 0), batch, seed=0)


@pytest.mark.parametrize("num_bytes", [0, 21, 23])
def test_shard_of_another_size_is_named(corpus: Path, num_bytes: int) -> None:
    (corpus / "shard-00003.bin").write_bytes(bytes(num_bytes))
    with pytest.raises(DataError, match=rf"E-DAT-021 .*shard-00003\.bin .* has {num_bytes} bytes"):
        Dataset.open(corpus)


def test_missing_shard_is_named(corpus: Path) -> None:
    (corpus / "shard-00003.bin").unlink()
    with pytest.raises(DataError, match=r"E-DAT-021 .*shard-00003\.bin .*No such file"):
        Dataset.open(corpus)


def test_shard_cut_off_after_opening_is_an_error_and_not_a_crash(corpus: Path) -> None:
    """Reading behind the end of a mapped file would kill the process."""
    dataset = Dataset.open(corpus)
    for path in corpus.glob("shard-*.bin"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="is missing or cut off"):
        dataset.microbatch(MicrobatchId(1, 0, 0), BATCH, seed=0)


def test_altered_shard_is_found_by_verification_and_by_reading(corpus: Path) -> None:
    path = corpus / "shard-00002.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    Dataset.open(corpus).close()
    message = r"E-DAT-022 .*shard-00002\.bin was altered: the SHA-256 of its bytes 0 to 21"
    with pytest.raises(DataError, match=message):
        Dataset.open(corpus, verify=True)
    batch = BatchConfig(sequence_length=16, microbatch_size=1, num_microbatches=56)
    with Dataset.open(corpus) as dataset:
        num_bad = 0
        for index in range(batch.num_microbatches):
            mb = MicrobatchId(1, 0, index)
            window = microbatch_windows(mb, batch=batch, num_tokens=len(TOKENS), seed=0)[0]
            holds = window * 16 < 33 and window * 16 + 17 > 22
            with pytest.raises(DataError, match=message) if holds else nullcontext():
                dataset.microbatch(mb, batch, seed=0)
            num_bad += holds
    assert num_bad == 2


def test_all_bad_blocks_of_a_microbatch_are_named_and_can_be_given(corpus: Path) -> None:
    """One try shows all that must be fetched; the next one finds it."""
    good = {path.name: path.read_bytes() for path in corpus.glob("shard-*.bin")}
    with Dataset.open(corpus) as dataset:
        expected = dataset.microbatch(MicrobatchId(1, 0, 0), BATCH, seed=0)
    for path in corpus.glob("shard-*.bin"):
        path.unlink()
    index = read_index(corpus)
    dataset = Dataset(FolderReader(corpus, index), index)
    with pytest.raises(BlockError, match=r"and .* more blocks are bad") as caught:
        dataset.microbatch(MicrobatchId(1, 0, 0), BATCH, seed=0)
    for block in caught.value.blocks:
        name = Path(dataset.blocks.name(block)).name
        with pytest.raises(BlockError, match="was altered"):
            dataset.give(block, good[name][:-1] + b"?")
        dataset.give(block, good[name])
    assert (dataset.microbatch(MicrobatchId(1, 0, 0), BATCH, seed=0) == expected).all()


def test_part_of_a_large_corpus_is_verified_evenly(corpus: Path) -> None:
    num_bytes = len(TOKENS) * 2
    with Dataset.open(corpus) as dataset:
        assert dataset.verify() == dataset.verify(size_max_bytes=num_bytes) == num_bytes
        assert num_bytes / 6 < dataset.verify(size_max_bytes=num_bytes // 5) <= num_bytes / 5 + 22
        (corpus / "shard-00001.bin").write_bytes(bytes(22))
        dataset.verify(size_max_bytes=num_bytes // 2)
        with pytest.raises(DataError, match="was altered"):
            dataset.verify(size_max_bytes=num_bytes)


def test_a_shard_that_is_not_what_its_own_hash_says_is_found(corpus: Path) -> None:
    """Its blocks hold, but the hash that the run's members compare is of another shard."""
    change_index(corpus, lambda fields: fields["shards"][0].update(sha256="0" * 64))
    with pytest.raises(DataError, match=r"shard-00000\.bin was altered: the SHA-256 of it"):
        Dataset.open(corpus, verify=True)


def test_token_outside_the_vocabulary_is_named_with_its_offset(tmp_path: Path) -> None:
    """Whoever wrote the shard hashed it too, so only the tokens themselves show it."""
    writer = ShardWriter(tmp_path, dtype="uint16", shard_tokens=100)
    writer.append(np.array([1, 2, 3, 4, 257, 5] * 10, np.uint32))
    shards, tokenizer = writer.finish(), BytesTokenizer()
    entry = TokenizerEntry(
        kind="bytes", sha256=tokenizer.sha256, vocab_size=257, eos_id=tokenizer.eos_id
    )
    index = Index(
        format_version=FORMAT_VERSION,
        tokenizer=entry,
        dtype="uint16",
        num_tokens=60,
        block_bytes=BLOCK_BYTES,
        shards=shards,
    )
    write_index(tmp_path, index)
    message = r"E-DAT-023 .*shard-00000\.bin holds token 257 at offset 4, but .* has 257"
    with pytest.raises(DataError, match=message):
        Dataset.open(tmp_path, verify=True)
    with Dataset.open(tmp_path) as dataset, pytest.raises(DataError, match="E-DAT-023") as caught:
        dataset.microbatch(MicrobatchId(1, 0, 0), BATCH, seed=0)
    assert not isinstance(caught.value, BlockError), "another copy would be no better"


def test_a_corpus_of_the_first_format_version_says_how_to_go_on(corpus: Path) -> None:
    """Its hash stays what it was, so a run can be resumed once it has been prepared again."""

    def make_old(fields: dict[str, Any]) -> None:
        fields["format_version"] = 1
        del fields["block_bytes"]
        for shard in fields["shards"]:
            del shard["block_sha256"]

    now = Dataset.open(corpus).index_sha256
    change_index(corpus, make_old)
    old = json.loads((corpus / "index.json").read_text())
    text = json.dumps(old, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == now
    with pytest.raises(DataError, match=r"format version 1.*decod data prepare --force") as caught:
        Dataset.open(corpus)
    assert str(corpus) in caught.value.fix


def _rename(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["shards"][0].update(file=name)


@pytest.mark.parametrize(
    "change",
    [
        _rename("../../etc/passwd"),
        _rename("/etc/passwd"),
        _rename("shard-00000.bin/../x"),
        _rename("shard-00000.bin\n"),
        _rename("shard-" + "\N{ARABIC-INDIC DIGIT ZERO}" * 5 + ".bin"),
        _rename("shard-00001.bin"),
        lambda fields: fields.update(extra=1),
        lambda fields: fields["shards"][0].update(extra=1),
        lambda fields: fields.update(format_version=3),
        lambda fields: fields.update(block_bytes=0),
        lambda fields: fields.update(block_bytes=2**21),
        lambda fields: fields.update(block_bytes=2**20 - 1),
        lambda fields: fields["shards"][0].update(block_sha256=""),
        lambda fields: fields["shards"][0].update(block_sha256="0" * 128),
        lambda fields: fields["shards"][0].update(block_sha256="g" * 64),
        lambda fields: fields["shards"][0].pop("block_sha256"),
        lambda fields: fields.update(num_tokens=str(fields["num_tokens"])),
        lambda fields: fields.update(num_tokens=fields["num_tokens"] + 1),
        lambda fields: fields.update(num_tokens=float(fields["num_tokens"])),
        lambda fields: fields.update(shards=[]),
        lambda fields: fields.update(dtype="float64"),
        lambda fields: fields.update(dtype="uint32"),
        lambda fields: fields["shards"][0].update(num_bytes=10**30),
        lambda fields: fields["shards"][0].update(num_tokens=-1),
        lambda fields: fields["shards"][0].update(num_tokens=12),
        lambda fields: fields["shards"][0].update(sha256="0"),
        lambda fields: fields["tokenizer"].update(kind="pickle"),
        lambda fields: fields["tokenizer"].update(eos_id=257),
        lambda fields: fields["tokenizer"].update(vocab_size=70_000),
        lambda fields: fields.pop("tokenizer"),
    ],
)
def test_unfit_index_is_refused(corpus: Path, change: Callable[[dict[str, Any]], None]) -> None:
    change_index(corpus, change)
    with pytest.raises(DataError, match=r"E-DAT-020 .*index\.json is not a valid index"):
        Dataset.open(corpus)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null"])
def test_index_that_is_no_json_object_is_refused(corpus: Path, content: bytes) -> None:
    (corpus / "index.json").write_bytes(content)
    with pytest.raises(DataError, match=r"E-DAT-020 .*index\.json is not a valid index"):
        Dataset.open(corpus)


def test_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"E-DAT-020 .*nowhere has no index\.json"):
        Dataset.open(tmp_path / "nowhere")


def test_foreign_bytes_tokenizer_is_refused(corpus: Path) -> None:
    change_index(corpus, lambda fields: fields["tokenizer"].update(sha256="0" * 64))
    with pytest.raises(DataError, match="made with another bytes tokenizer"):
        Dataset.open(corpus, verify=True)


def test_missing_or_altered_tokenizer_file_is_refused(corpus: Path) -> None:
    change_index(corpus, lambda fields: fields["tokenizer"].update(kind="tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be used: there is no such file"):
        Dataset.open(corpus, verify=True)
    (corpus / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"E-DAT-022 .*tokenizer\.json was altered"):
        Dataset.open(corpus, verify=True)
