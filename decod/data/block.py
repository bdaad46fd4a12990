"""Blocks: the pieces of a corpus with a hash of their own. Cheap to import."""

from collections.abc import Mapping
from dataclasses import dataclass

from decod.errors import DataError

BLOCKS_TOLD_MAX = 64
"""Largest number of bad blocks in one error. The others are found once these are replaced."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a shard."""

    shard_index: int
    offset: int
    """Offset in the shard's file, in bytes."""
    num_bytes: int


class BlockError(DataError):
    """Blocks of a corpus can't be read, or were altered. Another copy of the corpus may have them.

    You get a plain `DataError` if another copy would be no better.

    Args:
        problems: The bad blocks, each with its error. Not empty.
    """

    def __init__(self, problems: Mapping[Block, DataError]) -> None:
        self.blocks = tuple(problems)[:BLOCKS_TOLD_MAX]
        first, more = next(iter(problems.values())), len(problems) - 1
        what = f"{first.what} (and {more} more blocks are bad)" if more else first.what
        super().__init__(what, why=first.why, fix=first.fix, code=first.code)
