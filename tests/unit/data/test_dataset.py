"""Reading a corpus: the right tokens, and no damaged file goes unnoticed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decod.data.dataset import Dataset
from decod.data.order import microbatch_windows
from decod.data.params import BatchConfig
from decod.data.prepare import PrepareConfig, write_corpus
from decod.data.sources import Piece
from decod.data.tokenizer import BytesTokenizer
from decod.errors import ConfigError, DataError
from decod.ids import MicrobatchId

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


def test_altered_shard_is_found_by_verification(corpus: Path) -> None:
    path = corpus / "shard-00002.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    Dataset.open(corpus).close()
    with pytest.raises(DataError, match=r"E-DAT-022 .*shard-00002\.bin was altered"):
        Dataset.open(corpus, verify=True)


def test_token_outside_the_vocabulary_is_named_with_its_offset(corpus: Path) -> None:
    for path in corpus.glob("shard-*.bin"):
        tokens = np.fromfile(path, "<u2")
        tokens[4:] = 257
        tokens.tofile(path)
    message = r"E-DAT-023 .*shard-00000\.bin holds token 257 at offset 4, but .* has 257"
    with pytest.raises(DataError, match=message):
        Dataset.open(corpus, verify=True)
    with Dataset.open(corpus) as dataset, pytest.raises(DataError, match="E-DAT-023"):
        dataset.microbatch(MicrobatchId(1, 0, 0), BATCH, seed=0)


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
        lambda fields: fields.update(format_version=2),
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
