"""A prepared corpus, opened for reading: microbatches by id, in bounded memory.

Every byte is compared with the index before it is used, block by block; see `decod.data.blocks`.
"""

import bisect
import hashlib
import itertools
import os
import stat
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from decod.data.block import Block, BlockError
from decod.data.blocks import Blocks, altered, missing_shard
from decod.data.index import Index, ShardEntry, read_index
from decod.data.order import count_windows, microbatch_windows
from decod.data.params import BatchConfig
from decod.data.sources import OnRead
from decod.data.tokenizer import (
    TOKENIZER_FILE,
    BytesTokenizer,
    FileTokenizer,
    Tokenizer,
    read_tokenizer_file,
)
from decod.errors import DataError
from decod.ids import MicrobatchId


class Dataset:
    """Random access to the tokens of a corpus. Create one with `open`."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self.index_sha256 = index.sha256
        """Hash that identifies the corpus in the run's manifest."""
        self.num_tokens = index.num_tokens
        self.num_bytes = index.num_tokens * index.item_size_bytes
        self.vocab_size = index.tokenizer.vocab_size
        self.blocks = Blocks(folder, index)
        self._starts = [0, *itertools.accumulate(shard.num_tokens for shard in index.shards)]
        """Position in the corpus of every shard's first token, then the end."""

    @classmethod
    def open(cls, path: Path, *, verify: bool = False) -> Self:
        """Open a corpus and check the sizes of its files.

        Args:
            path: A folder that `decod data prepare` wrote.
            verify: Also read everything: compare the hashes and check every token.

        Raises:
            DataError: The index is invalid, or a file is missing, truncated or (with `verify`)
                altered. The message names the file.
        """
        dataset = cls(path, read_index(path))
        for shard in dataset.index.shards:
            _check_size(path / shard.file, shard)
        if verify:
            dataset.verify()
        return dataset

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the corpus.

        Raises:
            DataError: Its file is missing, altered or unusable.
        """
        entry = self.index.tokenizer
        tokenizer: Tokenizer = BytesTokenizer()
        if entry.kind == "tokenizer.json":
            path = self.folder / TOKENIZER_FILE
            content = read_tokenizer_file(path)
            if hashlib.sha256(content).hexdigest() != entry.sha256:
                raise altered(path)
            tokenizer = FileTokenizer(content, eos=entry.eos_id, name=str(path))
        if (tokenizer.sha256, tokenizer.vocab_size) != (entry.sha256, entry.vocab_size):
            raise DataError(
                f"{self.folder} was made with another {entry.kind} tokenizer",
                why=f"its index says vocabulary {entry.vocab_size}, hash {entry.sha256[:12]}",
                fix="prepare the corpus again with this version of decod",
                code="E-DAT-015",
            )
        return tokenizer

    def num_windows(self, sequence_length: int) -> int:
        """Return the number of sequences in an epoch."""
        return count_windows(self.num_tokens, sequence_length=sequence_length)

    def require_batch(self, batch: BatchConfig) -> None:
        """Check that the corpus can fill a batch.

        Raises:
            DataError: One iteration takes more sequences than the corpus has.
        """
        num_windows = self.num_windows(batch.sequence_length)
        needed = batch.microbatch_size * batch.num_microbatches * batch.num_data_nodes
        if num_windows < needed:
            raise DataError(
                f"the corpus {self.folder} has {self.num_tokens} tokens, which is {num_windows} "
                f"sequences, and one iteration takes {needed}",
                why="a step would train on the same text several times",
                fix="prepare more text, or lower batch.sequence_length or batch.num_microbatches",
                code="E-DAT-024",
            )

    def microbatch(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a microbatch. `decod.data.order` defines which they are.

        Args:
            mb: Id of the microbatch.
            batch: The run's batch.
            seed: The run's seed.

        Returns:
            (microbatch_size, sequence_length + 1) int64, new memory. Inputs are all columns but
            the last, targets all but the first.

        Raises:
            BlockError: Some of the tokens are in bad blocks.
            ConfigError: The run has no such microbatch.
            DataError: The corpus is too short, or a token is outside the vocabulary.
        """
        windows = microbatch_windows(mb, batch=batch, num_tokens=self.num_tokens, seed=seed)
        tokens = np.empty((batch.microbatch_size, batch.sequence_length + 1), np.int64)
        problems: dict[Block, DataError] = {}
        for row, window in zip(tokens, windows, strict=True):
            self._read_into(row, window * batch.sequence_length, problems)
        if problems:
            raise BlockError(problems)
        self.blocks.forget_given()
        return tokens

    def give(self, block: Block, content: bytes) -> None:
        """Take in a block from another copy, for the next microbatch. Raises as `Blocks.check`."""
        self.blocks.give(block, content)

    def verify(self, *, size_max_bytes: int | None = None, on_read: OnRead | None = None) -> int:
        """Read blocks and compare them with the index. Return the number of bytes read.

        Args:
            size_max_bytes: If the corpus is larger, check a sample of about this size, evenly
                spread. None: check everything.
            on_read: Called with the number of bytes read.

        Raises:
            DataError: A file was altered or a token is outside the vocabulary.
        """
        _ = self.tokenizer
        step = 1 if size_max_bytes is None else max(1, -(-self.num_bytes // size_max_bytes))
        num_bytes, seen = 0, itertools.count()
        for shard_index, shard in enumerate(self.index.shards):
            digest = hashlib.sha256()
            for offset in range(0, shard.num_bytes, self.index.block_bytes):
                if next(seen) % step:
                    continue
                block = self.index.block_at(shard_index, offset)
                content = self.blocks.read(block)
                self.blocks.check(block, content)
                digest.update(content)
                num_bytes += len(content)
                if on_read is not None:
                    on_read(len(content))
            if step == 1 and digest.hexdigest() != shard.sha256:
                raise altered(self.folder / shard.file)
        return num_bytes

    def close(self) -> None:
        """Free the memory."""
        self.blocks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _read_into(
        self, row: npt.NDArray[np.int64], position: int, problems: dict[Block, DataError]
    ) -> None:
        """Fill `row`, (T,), with the tokens from `position` on, across blocks and shards."""
        done, item_size_bytes = 0, self.index.item_size_bytes
        while done < len(row):
            shard_index = bisect.bisect_right(self._starts, position + done) - 1
            offset = (position + done - self._starts[shard_index]) * item_size_bytes
            block = self.index.block_at(shard_index, offset)
            start = (offset - block.offset) // item_size_bytes
            num = min(len(row) - done, block.num_bytes // item_size_bytes - start)
            try:
                row[done : done + num] = self.blocks.tokens(block)[start : start + num]
            except BlockError as error:
                problems[block] = error
            done += num


def _check_size(path: Path, shard: ShardEntry) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise missing_shard(path, f"it cannot be opened ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise missing_shard(path, "it is not a file")
    if status.st_size != shard.num_bytes:
        raise missing_shard(
            path, f"it has {status.st_size} bytes where the index says {shard.num_bytes}"
        )
