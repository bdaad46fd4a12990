"""Shard files: tokens, cut at a fixed number, with a hash of the file and one of every block."""

import hashlib
import os
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from decod.data.index import BLOCK_BYTES, NUM_SHARDS_MAX, Dtype, ShardEntry, shard_file
from decod.errors import DataError


class ShardFile:
    """One shard while it is written. As a context, it closes the file.

    Args:
        path: The file, which is created or replaced.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=2**20)
        self._hash, self._block_hash = hashlib.sha256(), hashlib.sha256()
        self._block_hashes: list[str] = []
        self.num_bytes = 0

    def write(self, content: bytes) -> None:
        """Append some bytes."""
        self._file.write(content)
        self._hash.update(content)
        left = memoryview(content)
        while left:
            room = BLOCK_BYTES - self.num_bytes % BLOCK_BYTES
            block, left = left[:room], left[room:]
            self._block_hash.update(block)
            self.num_bytes += len(block)
            if self.num_bytes % BLOCK_BYTES == 0:
                self._finish_block()

    def finish(self, shard_index: int, *, item_size_bytes: int) -> ShardEntry:
        """Wait until the disk has the bytes, and return their entry in the index."""
        if self.num_bytes % BLOCK_BYTES:
            self._finish_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        return ShardEntry(
            file=shard_file(shard_index),
            num_tokens=self.num_bytes // item_size_bytes,
            num_bytes=self.num_bytes,
            sha256=self._hash.hexdigest(),
            block_sha256="".join(self._block_hashes),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _finish_block(self) -> None:
        self._block_hashes.append(self._block_hash.hexdigest())
        self._block_hash = hashlib.sha256()


class ShardWriter:
    """Cuts a stream of token ids into shard files."""

    def __init__(self, folder: Path, *, dtype: Dtype, shard_tokens: int) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_bytes = shard_tokens * self._dtype.itemsize
        self._done: list[ShardEntry] = []
        self._shard: ShardFile | None = None

    def append(self, token_ids: npt.NDArray[np.uint32]) -> None:
        """Write ids, (T,), which must fit the dtype."""
        content = token_ids.astype(self._dtype).tobytes()
        while content:
            if self._shard is None:
                require_few(len(self._done) + 1)
                self._shard = ShardFile(self._folder / shard_file(len(self._done)))
            room = self._shard_bytes - self._shard.num_bytes
            self._shard.write(content[:room])
            content = content[room:]
            if self._shard.num_bytes == self._shard_bytes:
                self._finish_shard()

    def finish(self) -> tuple[ShardEntry, ...]:
        """Finish the last shard and return all of them."""
        self._finish_shard()
        return tuple(self._done)

    def close(self) -> None:
        """Close the file after an error."""
        if self._shard is not None:
            self._shard.close()

    def _finish_shard(self) -> None:
        if self._shard is None:
            return
        with self._shard as shard:
            self._shard = None
            entry = shard.finish(len(self._done), item_size_bytes=self._dtype.itemsize)
            self._done.append(entry)


def require_few(num_shards: int) -> None:
    """Raise DataError if a corpus can't have so many shards."""
    if num_shards > NUM_SHARDS_MAX:
        raise DataError(
            f"the corpus needs more than {NUM_SHARDS_MAX} shards",
            why="their names have five digits",
            fix="raise --shard-tokens",
            code="E-DAT-016",
        )
