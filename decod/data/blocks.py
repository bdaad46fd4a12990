"""Blocks of shards, which are read and compared with the index before any token is used.

A shard may change while it is in use: it is overwritten or replaced, or its disk decays. Files are
therefore not mapped into memory. Each block is read with one call, hashed, and kept in this
process's own memory, where no change of the file can reach it. Only the blocks used last are kept;
the others are hashed again when they are read again.
"""

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from decod.data.block import Block, BlockError
from decod.data.index import Index
from decod.data.readers import ShardReader, altered
from decod.errors import DataError

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
        """Return a block's tokens, (N,), read-only.

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
        """Return the tokens in a block's bytes, (N,), read-only.

        Raises:
            BlockError: The bytes have another hash than the index says.
            DataError: A token is outside the vocabulary.
        """
        name = self.name(block)
        if hashlib.sha256(content).hexdigest() != self.index.block_sha256(block):
            last = block.offset + block.num_bytes - 1
            raise BlockError({block: altered(name, f"of its bytes {block.offset} to {last}")})
        tokens: Tokens = np.frombuffer(content, self._dtype)
        vocab_size = self.index.tokenizer.vocab_size
        if int(tokens.max()) >= vocab_size:
            place = int(np.argmax(tokens >= vocab_size))
            position = block.offset // self.index.item_size_bytes + place
            raise DataError(
                f"{name} holds token {int(tokens[place])} at offset {position}, but the "
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
