"""A prepared corpus, opened for reading: microbatches by id, in bounded memory.

Every byte is compared with the index before it is used, block by block; see `decod.data.readers`.
"""

import bisect
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from decod.data.block import Block, BlockCache, BlockError, OnRead
from decod.data.index import (
    BEGINS,
    INDEX_FILE,
    INDEX_SIZE_MAX_BYTES,
    MARK_SHIFT,
    TARGET,
    Index,
    parse_index,
    read_index,
)
from decod.data.order import CHUNK_TOKENS, NUM_LANES, count_windows, microbatch_windows
from decod.data.readers import (
    Blocks,
    CacheReader,
    FolderReader,
    ShardReader,
    StoreReader,
    altered,
    keep_description,
)
from decod.data.tokenizer import (
    NO_BOS,
    TOKENIZER_FILE,
    BytesTokenizer,
    FileTokenizer,
    Tokenizer,
)
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.objects import ObjectFolder, StoreError, patiently
from decod.run.training_config import BatchConfig


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Where blocks from an object store are kept."""

    folder: Path
    limit_bytes: Callable[[], int]
    """Returns how much it may hold."""


_Place = tuple[MicrobatchId, BatchConfig, int]
"""What determines a microbatch: its id, the run's batch, and the run's seed."""


@dataclass(frozen=True, slots=True)
class Document:
    """The beginning of a document."""

    position: int
    """Place of its first token in the corpus."""
    num_tokens: int
    """Number of all its tokens."""
    token_ids: list[int]
    """The first of them."""
    marks: list[int] | None
    """Their marks. None: the corpus has none."""


class Dataset:
    """Random access to the tokens of a corpus. Create one with `open` or a method beside it."""

    def __init__(self, reader: ShardReader, index: Index) -> None:
        self.reader = reader
        self.index = index
        self.index_sha256 = index.sha256
        """Hash that identifies the corpus in the run's manifest."""
        self.num_tokens = index.num_tokens
        self.num_bytes = index.num_tokens * index.item_size_bytes
        self.vocab_size = index.tokenizer.vocab_size
        self.blocks = Blocks(reader, index)
        self._starts = [0, *itertools.accumulate(shard.num_tokens for shard in index.shards)]
        """Position in the corpus of every shard's first token, then the end."""
        self._read_last: tuple[_Place, npt.NDArray[np.int64]] | None = None
        """The microbatch read last, if it has marks. They are asked for after its tokens."""

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
        index = read_index(path)
        dataset = cls(FolderReader(path, index), index)
        dataset.reader.check_sizes(index)
        if verify:
            dataset.verify()
        return dataset

    @classmethod
    def open_cached(cls, folder: Path) -> Self:
        """Open what a cache holds of a corpus in a store. Blocks that it lacks are bad ones.

        Args:
            folder: The `folder` of a dataset that `open_url` has opened.

        Raises:
            DataError: The index is invalid.
        """
        index = read_index(folder)
        return cls(CacheReader(folder, index), index)

    @classmethod
    def open_url(cls, url: str, cache: CacheConfig | None = None) -> Self:
        """Open a corpus in an object store, and check the sizes of some of its shards.

        Args:
            url: A folder that `decod data prepare` wrote and somebody copied there.
            cache: Where blocks are kept. None: blocks are fetched each time.

        Raises:
            DataError: The store can't be read, the index is invalid, a shard is missing or
                truncated, or the cache can't be written. The message names the object.
        """

        def opened() -> tuple[StoreReader, Index]:
            store = ObjectFolder(url)
            content = _read_index_json(store)
            index = parse_index(content, store.name(INDEX_FILE))
            kept = None
            if cache is not None:
                folder = cache.folder / hashlib.sha256(content).hexdigest()[:16]
                kept = BlockCache(folder, cache.limit_bytes)
            reader = StoreReader(store, index, kept)
            reader.check_sizes(index)
            if kept is not None:
                has_file = index.tokenizer.kind == TOKENIZER_FILE
                keep_description(
                    kept.folder, content, reader.read_tokenizer() if has_file else None
                )
            return reader, index

        return cls(*patiently(opened, time.sleep))

    @property
    def place(self) -> str:
        """The folder or URL of the corpus, as people know it."""
        return self.reader.place

    @property
    def is_stored(self) -> bool:
        """Whether the corpus is in an object store."""
        return isinstance(self.reader, StoreReader)

    @property
    def folder(self) -> Path | None:
        """The folder where another process of this host can open the corpus, too; None if
        nowhere."""
        return self.reader.folder

    @property
    def open_bytes(self) -> int:
        """Size of the blocks from which sequences come at a time. A cache should hold them."""
        index = self.index
        chunk_bytes = CHUNK_TOKENS * index.item_size_bytes + index.block_bytes
        return min(self.num_bytes, NUM_LANES * chunk_bytes)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the corpus.

        Raises:
            DataError: Its file is missing, altered or unusable.
        """
        entry = self.index.tokenizer
        tokenizer: Tokenizer = BytesTokenizer()
        if entry.kind == "tokenizer.json":
            name = self.reader.name(TOKENIZER_FILE)
            content = self.reader.read_tokenizer()
            bos = NO_BOS if entry.bos_id is None else entry.bos_id
            if hashlib.sha256(content).hexdigest() != entry.sha256:
                raise altered(name)
            tokenizer = FileTokenizer(content, eos=entry.eos_id, bos=bos, name=name)
        if (tokenizer.sha256, tokenizer.vocab_size) != (entry.sha256, entry.vocab_size):
            raise DataError(
                f"{self.place} was made with another {entry.kind} tokenizer",
                why=f"its index says vocabulary {entry.vocab_size}, hash {entry.sha256[:12]}",
                fix="prepare the corpus again with this version of decod",
                code="E-DAT-015",
            )
        return tokenizer

    def num_windows(self, sequence_length: int) -> int:
        """Return the number of sequences in an epoch.

        Raises:
            DataError: The corpus is packed for sequences of another length.
        """
        packed = self.index.sequence_length
        if packed not in (None, sequence_length):
            raise DataError(
                f"{self.place} holds conversations in windows of {packed} tokens, and a sequence "
                f"has {sequence_length}",
                why="a sequence would hold parts of conversations",
                fix=f"set batch.sequence_length = {packed}, or prepare the conversations again "
                f"with --sequence-length {sequence_length}",
                code="E-DAT-026",
            )
        return count_windows(self.num_tokens, sequence_length=sequence_length)

    def require_batch(self, batch: BatchConfig) -> None:
        """Check that the corpus can fill a batch.

        Raises:
            DataError: One iteration takes more sequences than the corpus has, the corpus is packed
                for sequences of another length, or it does not tell where documents begin.
        """
        if batch.reads_apart and self.index.marks is None:
            raise DataError(
                f"batch.documents is {batch.documents}, and {self.place} does not tell where "
                "documents begin",
                why="tokens would see the documents before their own",
                fix="prepare the text again with --document-masks, or set batch.documents = "
                '"together"',
                code="E-DAT-026",
            )
        num_windows = self.num_windows(batch.sequence_length)
        needed = batch.microbatch_size * batch.num_microbatches * batch.num_data_nodes
        if num_windows < needed:
            raise DataError(
                f"the corpus {self.place} has {self.num_tokens} tokens, which is {num_windows} "
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
        return self.index.ids(self._items(mb, batch, seed))

    def marks(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> npt.NDArray[np.uint8]:
        """Return the marks of a microbatch's tokens, bits of `TARGET` and `BEGINS`.

        A row begins a document, since it shows nothing of what came before. Tokens without marks
        are all targets, of one document a row, and nothing is read.

        Args:
            mb: Id of the microbatch.
            batch: The run's batch.
            seed: The run's seed.

        Returns:
            (microbatch_size, sequence_length + 1) uint8, new memory. The first column is of tokens
            that are only inputs, and no target whatever its mark.

        Raises as `microbatch`.
        """
        if self.index.marks is None:
            marks = np.full((batch.microbatch_size, batch.sequence_length + 1), TARGET, np.uint8)
        else:
            marks = (self._items(mb, batch, seed) >> MARK_SHIFT).astype(np.uint8)
        marks[:, 0] |= BEGINS
        return marks

    def _items(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> npt.NDArray[np.int64]:
        """Return the items of a microbatch; see `decod.data.index`. Otherwise as `microbatch`."""
        if self._read_last is not None and self._read_last[0] == (mb, batch, seed):
            return self._read_last[1]
        self.num_windows(batch.sequence_length)
        windows = microbatch_windows(mb, batch=batch, num_tokens=self.num_tokens, seed=seed)
        items = np.empty((batch.microbatch_size, batch.sequence_length + 1), np.int64)
        problems: dict[Block, DataError] = {}
        for row, window in zip(items, windows, strict=True):
            self._read_into(row, window * batch.sequence_length, problems)
        if problems:
            raise BlockError(problems)
        self.blocks.forget_given()
        if self.index.marks is not None:
            self._read_last = ((mb, batch, seed), items)
        return items

    def blocks_of(self, mb: MicrobatchId, batch: BatchConfig, seed: int) -> list[Block]:
        """Return the blocks that hold a microbatch, in its order. Arguments as of `microbatch`."""
        windows = microbatch_windows(mb, batch=batch, num_tokens=self.num_tokens, seed=seed)
        length = batch.sequence_length
        return [
            block for window in windows for block, _, _ in self._spans(window * length, length + 1)
        ]

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
        digests = [hashlib.sha256() for _ in self.index.shards]
        num_bytes = 0
        num_parallel = self.reader.num_parallel if size_max_bytes is None else 1
        for block, content in self._read(self._every(step), num_parallel):
            self.blocks.check(block, content)
            digests[block.shard_index].update(content)
            num_bytes += len(content)
            if on_read is not None:
                on_read(len(content))
        for digest, shard in zip(digests, self.index.shards, strict=True):
            if step == 1 and digest.hexdigest() != shard.sha256:
                raise altered(self.reader.name(shard.file))
        return num_bytes

    def _every(self, step: int) -> Iterator[Block]:
        """Yield one of so many blocks."""
        seen = itertools.count()
        for shard_index, shard in enumerate(self.index.shards):
            for offset in range(0, shard.num_bytes, self.index.block_bytes):
                if next(seen) % step == 0:
                    yield self.index.block_at(shard_index, offset)

    def _read(self, blocks: Iterator[Block], num_parallel: int) -> Iterator[tuple[Block, bytes]]:
        """Yield blocks with their bytes, unchecked. So many are read at a time."""
        if num_parallel == 1:
            for block in blocks:
                yield block, self.reader.read(block)
            return
        with ThreadPoolExecutor(num_parallel) as pool:
            asked = deque(
                (block, pool.submit(self.reader.read, block))
                for block in itertools.islice(blocks, num_parallel)
            )
            while asked:
                block, future = asked.popleft()
                yield block, future.result()
                asked.extend(
                    (more, pool.submit(self.reader.read, more))
                    for more in itertools.islice(blocks, 1)
                )

    def documents(self, num_tokens_max: int) -> Iterator[Document]:
        """Yield the documents, in order, each with its first tokens.

        Without marks, documents are what stands between end tokens, and these are left out.

        Args:
            num_tokens_max: How many of a document's tokens to yield.

        Raises:
            BlockError: The corpus is damaged.
        """
        is_marked = self.index.marks is not None
        beginning: list[int] = []
        num_tokens = position = 0

        def document() -> Document:
            ids = self.index.ids(np.array(beginning, np.int64)).tolist()
            marks = [item >> MARK_SHIFT for item in beginning] if is_marked else None
            return Document(position - num_tokens, num_tokens, ids, marks)

        for block in self._every(1):
            items = self.blocks.tokens(block)
            start = 0
            bounds = (
                items >> MARK_SHIFT & BEGINS if is_marked else items == self.index.tokenizer.eos_id
            )
            for end in [*np.flatnonzero(bounds).tolist(), len(items)]:
                room = num_tokens_max - len(beginning)
                beginning += items[start : min(end, start + room)].tolist()
                num_tokens += end - start
                position += end - start
                start = end
                if end < len(items):
                    if num_tokens or not is_marked:
                        yield document()
                    beginning = []
                    num_tokens = 0
                    start += not is_marked
                    position += not is_marked
        if is_marked:
            yield document()

    def close(self) -> None:
        """Free the memory."""
        self._read_last = None
        self.blocks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _read_into(
        self, row: npt.NDArray[np.int64], position: int, problems: dict[Block, DataError]
    ) -> None:
        """Fill `row`, (T,), with the items from `position` on, across blocks and shards."""
        done = 0
        for block, start, num in self._spans(position, len(row)):
            try:
                row[done : done + num] = self.blocks.tokens(block)[start : start + num]
            except BlockError as error:
                problems[block] = error
            done += num

    def _spans(self, position: int, num_tokens: int) -> Iterator[tuple[Block, int, int]]:
        """Yield what tokens from `position` on lie in: block, first token in it, their number."""
        done = 0
        item_size_bytes = self.index.item_size_bytes
        while done < num_tokens:
            shard_index = bisect.bisect_right(self._starts, position + done) - 1
            offset = (position + done - self._starts[shard_index]) * item_size_bytes
            block = self.index.block_at(shard_index, offset)
            start = (offset - block.offset) // item_size_bytes
            num = min(num_tokens - done, block.num_bytes // item_size_bytes - start)
            yield block, start, num
            done += num


def _read_index_json(store: ObjectFolder) -> bytes:
    try:
        return store.read(INDEX_FILE, INDEX_SIZE_MAX_BYTES)
    except StoreError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise DataError(
            f"{store} has no {INDEX_FILE}",
            why="there is no such place, or it holds no prepared corpus",
            fix="check the URL, or copy a corpus there with `decod data upload FOLDER URL`",
            code="E-DAT-020",
        ) from error
