"""A prepared corpus, opened for reading: microbatches by id, in constant memory.

Shards are mapped into memory, not read. Touching a page of a mapped file that has been truncated
kills the process, so sizes are compared with the index before mapping; whoever changes a shard
while it is in use is not protected from.
"""

import bisect
import functools
import hashlib
import itertools
import os
import stat
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from decod.data.index import Index, ShardEntry, read_index
from decod.data.order import count_windows, microbatch_windows
from decod.data.params import BatchConfig
from decod.data.tokenizer import (
    TOKENIZER_FILE,
    BytesTokenizer,
    FileTokenizer,
    Tokenizer,
    read_tokenizer_file,
)
from decod.errors import DataError
from decod.ids import MicrobatchId

# Each mapping holds a file descriptor, of which a process often has only 1024.
_MAPPED_SHARDS_MAX = 64
_VERIFY_BLOCK_TOKENS = 2**22


class Dataset:
    """Random access to the tokens of a corpus. Make one with `open`."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self.index_sha256 = index.sha256
        """Stands for the whole corpus in the run's manifest."""
        self.num_tokens = index.num_tokens
        self.vocab_size = index.tokenizer.vocab_size
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._starts = [0, *itertools.accumulate(shard.num_tokens for shard in index.shards)]
        """Position in the corpus of every shard's first token, then the end."""
        self._map = functools.lru_cache(maxsize=_MAPPED_SHARDS_MAX)(self._map_shard)

    @classmethod
    def open(cls, path: Path, *, verify: bool = False) -> Self:
        """Open a corpus and check the sizes of its files.

        Args:
            path: A folder that `decod data prepare` wrote.
            verify: Also read everything: compare hashes and look at every token.

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

    @functools.cached_property
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
                raise _altered(path)
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
        """Return how many sequences an epoch has."""
        return count_windows(self.num_tokens, sequence_length=sequence_length)

    def microbatch(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a microbatch; see `decod.data.order` for which they are.

        Args:
            mb: Which microbatch of the run.
            batch: The run's batch.
            seed: The run's seed.

        Returns:
            (microbatch_size, sequence_length + 1) int64, new memory. Inputs are all columns but
            the last, targets all but the first.

        Raises:
            ConfigError: The run has no such microbatch.
            DataError: The corpus is too short, or a token is outside the vocabulary.
        """
        windows = microbatch_windows(mb, batch=batch, num_tokens=self.num_tokens, seed=seed)
        tokens = np.empty((batch.microbatch_size, batch.sequence_length + 1), np.int64)
        for row, window in zip(tokens, windows, strict=True):
            self._read_into(row, window * batch.sequence_length)
        return tokens

    def verify(self) -> None:
        """Read every file and compare it with the index.

        Raises:
            DataError: A file was altered or a token is outside the vocabulary.
        """
        for shard_index, shard in enumerate(self.index.shards):
            tokens = self._map(shard_index)
            digest = hashlib.sha256()
            for first in range(0, shard.num_tokens, _VERIFY_BLOCK_TOKENS):
                block = tokens[first : first + _VERIFY_BLOCK_TOKENS]
                self._check_vocab(block, shard, first)
                digest.update(block.data)
            if digest.hexdigest() != shard.sha256:
                raise _altered(self.folder / shard.file)
        _ = self.tokenizer

    def close(self) -> None:
        """Unmap the shards. The dataset cannot be used any more."""
        self._map.cache_clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _read_into(self, row: npt.NDArray[np.int64], position: int) -> None:
        """Fill `row`, (T,), with the tokens from `position` on, across shards."""
        done = 0
        while done < len(row):
            shard_index = bisect.bisect_right(self._starts, position + done) - 1
            first = position + done - self._starts[shard_index]
            part = self._map(shard_index)[first : first + len(row) - done]
            self._check_vocab(part, self.index.shards[shard_index], first)
            row[done : done + len(part)] = part
            done += len(part)

    def _map_shard(self, shard_index: int) -> "npt.NDArray[np.uint16 | np.uint32]":
        shard = self.index.shards[shard_index]
        path = self.folder / shard.file
        # Sizes were checked when the dataset was opened, but that may be days ago.
        _check_size(path, shard)
        return np.memmap(path, self._dtype, mode="r", shape=(shard.num_tokens,))

    def _check_vocab(
        self, tokens: "npt.NDArray[np.uint16 | np.uint32]", shard: ShardEntry, first: int
    ) -> None:
        if int(tokens.max()) < self.vocab_size:
            return
        offset = int(np.argmax(tokens >= self.vocab_size))
        raise DataError(
            f"{self.folder / shard.file} holds token {int(tokens[offset])} at offset "
            f"{first + offset}, but the vocabulary has {self.vocab_size}",
            why="the shard is damaged or was not made by `decod data prepare`",
            fix="copy the shard again from its source or prepare the corpus again",
            code="E-DAT-023",
        )


def _check_size(path: Path, shard: ShardEntry) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise _wrong_size(path, f"it cannot be opened ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise _wrong_size(path, "it is not a file")
    if status.st_size != shard.num_bytes:
        raise _wrong_size(
            path, f"it has {status.st_size} bytes where the index says {shard.num_bytes}"
        )


def _wrong_size(path: Path, reason: str) -> DataError:
    return DataError(
        f"shard {path} is missing or cut off",
        why=reason,
        fix="copy it again from its source or prepare the corpus again",
        code="E-DAT-021",
    )


def _altered(path: Path) -> DataError:
    return DataError(
        f"{path} was altered",
        why="its SHA-256 is not the one in the index",
        fix="copy it again from its source or prepare the corpus again",
        code="E-DAT-022",
    )
