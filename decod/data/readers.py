"""Where the bytes of a corpus come from: a folder, an object store, or the cache of one.

Blocks of shards are read and compared with the index before any token is used.

A shard may change while it is in use: it is overwritten or replaced, or its disk decays. Files are
therefore not mapped into memory. Each block is read with one call, hashed, and kept in this
process's own memory, where no change of the file can reach it. Only the blocks used last are kept;
the others are hashed again when they are read again.
"""

import fcntl
import hashlib
import os
import stat
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from decod.data.block import BLOCKS_FOLDER, LOCK_FILE, Block, BlockCache, BlockError
from decod.data.index import INDEX_FILE, Index, ShardEntry
from decod.data.tokenizer import FILE_SIZE_MAX_BYTES, TOKENIZER_FILE, read_tokenizer_file
from decod.errors import DataError
from decod.files import open_lock, open_ordinary, read_at, replace_durably
from decod.objects import ObjectFolder
from decod.system import forget_cached

_SIZES_CHECKED = 8
"""Shards in a store whose sizes are asked for at the start. Each question takes a while."""


class ShardReader(Protocol):
    """Where the bytes of a corpus come from."""

    place: str
    """The place of the corpus, as people know it."""
    folder: Path | None
    """The folder from which another process of this host can read, too. None: there is none."""
    num_parallel: int
    """How many blocks are best read at a time."""

    def name(self, file: str) -> str:
        """Return the whole name of one of the corpus's files."""
        ...

    def read(self, block: Block, *, from_disk: bool = False) -> bytes:
        """Return a block's bytes. The caller compares them with their hash.

        Args:
            block: A block of the index.
            from_disk: Make the system drop its cache of the block, which may hold wrong bytes.

        Raises:
            BlockError: They can't be read.
            StoreError: The store does not give them.
        """
        ...

    def read_tokenizer(self) -> bytes:
        """Return the bytes of the tokenizer's file. Raises DataError."""
        ...

    def check_sizes(self, index: Index) -> None:
        """Compare the sizes of the shards with the index. Raises DataError."""
        ...


class FolderReader:
    """Reads shards from a folder."""

    num_parallel = 1

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder: Path | None = folder
        self._folder = folder
        self._index = index
        self.place = str(folder)

    def name(self, file: str) -> str:
        return str(self._folder / file)

    def read(self, block: Block, *, from_disk: bool = False) -> bytes:
        path = self._folder / self._index.shards[block.shard_index].file
        last = block.offset + block.num_bytes - 1
        try:
            with open_ordinary(path) as descriptor:
                if from_disk:
                    forget_cached(descriptor, block.offset, block.num_bytes)
                content = read_at(descriptor, block.offset, block.num_bytes)
        except OSError as error:
            reason = f"its bytes {block.offset} to {last} can't be read ({error.strerror})"
            raise BlockError({block: missing_shard(str(path), reason)}) from error
        if len(content) < block.num_bytes:
            reason = f"it ends before its byte {last}"
            raise BlockError({block: missing_shard(str(path), reason)})
        return content

    def read_tokenizer(self) -> bytes:
        return read_tokenizer_file(self._folder / TOKENIZER_FILE)

    def check_sizes(self, index: Index) -> None:
        for shard in index.shards:
            _check_size(self._folder / shard.file, shard)


class StoreReader:
    """Reads shards from an object store, and keeps their blocks in a cache if there is one.

    Args:
        store: The corpus's folder in the store.
        index: Its index.
        cache: Of blocks that were read before.
    """

    num_parallel = 16

    def __init__(self, store: ObjectFolder, index: Index, cache: BlockCache | None) -> None:
        self.place = str(store)
        self.folder = None if cache is None else cache.folder
        self.cache = cache
        self._store = store
        self._index = index
        self._tokenizer: bytes | None = None

    def name(self, file: str) -> str:
        return self._store.name(file)

    def read(self, block: Block, *, from_disk: bool = False) -> bytes:
        # What comes from the cache has been compared with its hash just now.
        found = None if from_disk else self.cached(block)
        if found is None:
            found = self.fetch(block)
            if self._is_good(block, found):
                with suppress(OSError):  # Then it is fetched again.
                    self.keep(block, found)
        return found

    def cached(self, block: Block) -> bytes | None:
        """Return a good block from the cache, or None. A bad one is removed."""
        content = None if self.cache is None else self.cache.get(block)
        if content is None or self._is_good(block, content):
            return content
        assert self.cache is not None
        self.cache.drop(block)
        return None

    def fetch(self, block: Block) -> bytes:
        """Return a block from the store. A block that comes damaged is fetched once more.

        Raises:
            StoreError: The store does not give it.
        """
        file = self._index.shards[block.shard_index].file
        content = b""
        for _ in range(2):
            content = self._store.read_range(file, block.offset, block.num_bytes)
            if self._is_good(block, content):
                break
        return content

    def keep(self, block: Block, content: bytes) -> None:
        """Put a block that was compared with its hash into the cache.

        Raises:
            OSError: The disk refuses.
        """
        if self.cache is not None:
            self.cache.put(block, content)

    def read_tokenizer(self) -> bytes:
        if self._tokenizer is None:
            self._tokenizer = self._store.read(TOKENIZER_FILE, FILE_SIZE_MAX_BYTES)
        return self._tokenizer

    def check_sizes(self, index: Index) -> None:
        step = -(-len(index.shards) // _SIZES_CHECKED)
        for shard in index.shards[::step]:
            found = self._store.size_bytes(shard.file)
            if found not in (None, shard.num_bytes):
                raise _wrong_size(self.name(shard.file), found, shard)

    def _is_good(self, block: Block, content: bytes) -> bool:
        return hashlib.sha256(content).hexdigest() == self._index.block_sha256(block)


class CacheReader:
    """Reads the blocks of a corpus in a store that are on this host. The node fetches the others.

    Args:
        folder: The corpus's folder in the cache.
        index: Its index.
    """

    num_parallel = 1

    def __init__(self, folder: Path, index: Index) -> None:
        self.place = str(folder)
        self.folder: Path | None = folder
        self._folder = folder
        self._cache = BlockCache(folder)
        self._index = index

    def name(self, file: str) -> str:
        return str(self._folder / file)

    def read(self, block: Block, *, from_disk: bool = False) -> bytes:  # noqa: ARG002
        content = self._cache.get(block)
        if content is None:
            raise BlockError({block: _not_here(self._cache.path(block))})
        return content

    def read_tokenizer(self) -> bytes:
        return read_tokenizer_file(self._folder / TOKENIZER_FILE)

    def check_sizes(self, index: Index) -> None:
        """Nothing to compare: blocks come as they are needed."""


def missing_shard(name: str, reason: str) -> DataError:
    """Return the error for a missing or incomplete shard."""
    return DataError(
        f"shard {name} is missing or cut off",
        why=reason,
        fix="copy it again from its source or prepare the corpus again",
        code="E-DAT-021",
    )


def altered(name: str, part: str = "of it") -> DataError:
    """Return the error for a file whose hash is wrong, in this part of it."""
    return DataError(
        f"{name} was altered",
        why=f"the SHA-256 {part} is not the one in the index",
        fix="copy it again from its source or prepare the corpus again",
        code="E-DAT-022",
    )


def keep_description(folder: Path, index_json: bytes, tokenizer_json: bytes | None) -> None:
    """Write what other processes need of a corpus beside its blocks into its folder of a cache.

    Raises:
        DataError: The disk refuses.
    """
    try:
        (folder / BLOCKS_FOLDER).mkdir(parents=True, exist_ok=True)
        with open_lock(folder.parent / LOCK_FILE) as lock:
            # Another node may be writing the same files.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if tokenizer_json is not None:
                replace_durably(folder / TOKENIZER_FILE, tokenizer_json)
            replace_durably(folder / INDEX_FILE, index_json)
    except OSError as error:
        raise DataError(
            f"blocks of the data can't be kept in {folder.parent}",
            why=error.strerror or str(error),
            fix="make that folder writable, or name another as data.cache in the run file",
            code="E-DAT-061",
        ) from error


def _not_here(path: Path) -> DataError:
    return DataError(
        f"{path} is not there",
        why="that part of the data has not come from its store yet",
        fix="see whether this host reaches the store",
        code="E-DAT-062",
    )


def _check_size(path: Path, shard: ShardEntry) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise missing_shard(str(path), f"it cannot be opened ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise missing_shard(str(path), "it is not a file")
    if status.st_size != shard.num_bytes:
        raise _wrong_size(str(path), status.st_size, shard)


def _wrong_size(name: str, size_bytes: int | None, shard: ShardEntry) -> DataError:
    return missing_shard(name, f"it has {size_bytes} bytes where the index says {shard.num_bytes}")


KEPT_MAX_BYTES = 128 * 2**20
"""Size of the blocks kept in memory. A corpus up to this size is read and hashed once."""

Tokens = npt.NDArray[np.uint16 | np.uint32]


class Blocks:
    """The blocks of a corpus.

    Args:
        reader: Where their bytes come from.
        index: The corpus's index.
        kept_max: Number of blocks to keep in memory. None: `KEPT_MAX_BYTES` of them.
    """

    def __init__(self, reader: ShardReader, index: Index, kept_max: int | None = None) -> None:
        self._reader = reader
        self.index = index
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._kept: OrderedDict[Block, Tokens] = OrderedDict()
        self._kept_max = kept_max or KEPT_MAX_BYTES // index.block_bytes
        self._given: dict[Block, Tokens] = {}
        """Blocks from another copy, because this host's file is bad."""

    def name(self, block: Block) -> str:
        """Return the whole name of a block's shard: a path, or a URL."""
        return self._reader.name(self.index.shards[block.shard_index].file)

    def tokens(self, block: Block) -> Tokens:
        """Return a block's tokens, with their marks if they have any, (N,), read-only.

        Raises:
            BlockError: The block can't be read, or was altered.
            DataError: A token is outside the vocabulary.
        """
        found = self._kept.pop(block, None)
        if found is None:
            found = self._given.get(block)
        if found is None:
            found = self.check(block, self._reader.read(block))
        self._kept[block] = found
        if len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)
        return found

    def check(self, block: Block, content: bytes) -> Tokens:
        """Return the tokens in a block's bytes as `tokens` does.

        Raises:
            BlockError: The bytes have another hash than the index says.
            DataError: A token is outside the vocabulary.
        """
        name = self.name(block)
        if hashlib.sha256(content).hexdigest() != self.index.block_sha256(block):
            last = block.offset + block.num_bytes - 1
            raise BlockError({block: altered(name, f"of its bytes {block.offset} to {last}")})
        tokens: Tokens = np.frombuffer(content, self._dtype)
        ids = self.index.ids(tokens)
        vocab_size = self.index.tokenizer.vocab_size
        if int(ids.max()) >= vocab_size:
            place = int(np.argmax(ids >= vocab_size))
            position = block.offset // self.index.item_size_bytes + place
            raise DataError(
                f"{name} holds token {int(ids[place])} at offset {position}, but the "
                f"vocabulary has {vocab_size}",
                why="the shard was not made by `decod data prepare`",
                fix="prepare the corpus again",
                code="E-DAT-023",
            )
        return tokens

    def give(self, block: Block, content: bytes) -> None:
        """Take in a block from another copy, until `forget_given`. Raises as `check`."""
        self._given[block] = self.check(block, content)

    def forget_given(self) -> None:
        """Treat given blocks like all others from now on, because they have been read."""
        self._given.clear()

    def clear(self) -> None:
        """Forget all blocks in memory."""
        self._kept.clear()
        self._given.clear()
