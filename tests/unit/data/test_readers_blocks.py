"""Blocks of shards: what is lent was checked, and what is in memory can't change any more."""

import os
from pathlib import Path

import pytest

from decod.data.block import Block, BlockError
from decod.data.index import BLOCK_BYTES
from decod.data.prepare import PrepareConfig, write_corpus
from decod.data.readers import Blocks, FolderReader
from decod.data.sources import Piece
from decod.data.tokenizer import BytesTokenizer

NUM_BLOCKS = 5


@pytest.fixture
def blocks(tmp_path: Path) -> Blocks:
    """Returns a shard of four whole blocks and a short one, of which two are kept in memory."""
    text = "".join(chr(97 + n % 26) for n in range(4 * BLOCK_BYTES // 2 + 100))
    pieces = [Piece(text, ends_document=False)]
    index = write_corpus(tmp_path, pieces, (BytesTokenizer(), None), PrepareConfig())
    assert len(index.shards[0].block_sha256) == NUM_BLOCKS * 64
    return Blocks(FolderReader(tmp_path, index), index, kept_max=2)


def block_at(blocks: Blocks, number: int) -> Block:
    return blocks.index.block_at(0, number * BLOCK_BYTES)


def read(blocks: Blocks, block: Block) -> bytes:
    return Path(blocks.name(block)).read_bytes()[block.offset :][: block.num_bytes]


def overwrite(blocks: Blocks, number: int) -> None:
    block = block_at(blocks, number)
    descriptor = os.open(Path(blocks.name(block)), os.O_WRONLY)
    os.pwrite(descriptor, bytes(block.num_bytes), block.offset)
    os.close(descriptor)


def test_blocks_are_the_shard(blocks: Blocks) -> None:
    content = b"".join(
        blocks.tokens(block_at(blocks, number)).tobytes() for number in range(NUM_BLOCKS)
    )
    assert content == Path(blocks.name(block_at(blocks, 0))).read_bytes()


def test_a_block_in_memory_outlives_any_change_of_its_file(blocks: Blocks) -> None:
    block = block_at(blocks, 1)
    before = blocks.tokens(block).copy()
    overwrite(blocks, 1)
    assert (blocks.tokens(block) == before).all()
    Path(blocks.name(block)).unlink()
    assert (blocks.tokens(block) == before).all()
    assert not blocks.tokens(block).flags.writeable


def test_a_block_that_is_read_again_is_checked_again(blocks: Blocks) -> None:
    """Two others have pushed it out of memory; what was used last stays."""
    for number in (0, 1, 0, 2):
        blocks.tokens(block_at(blocks, number))
    for number in (0, 1):
        overwrite(blocks, number)
    blocks.tokens(block_at(blocks, 0))
    with pytest.raises(BlockError, match=r"E-DAT-022 .*bytes 262144 to 524287") as caught:
        blocks.tokens(block_at(blocks, 1))
    assert caught.value.blocks == (block_at(blocks, 1),)


def test_other_blocks_of_a_damaged_file_are_good(blocks: Blocks) -> None:
    overwrite(blocks, 1)
    blocks.tokens(block_at(blocks, 2))


@pytest.mark.parametrize("what", ["missing", "short", "folder", "pipe", "circle"])
def test_a_file_that_can_not_be_read_is_a_bad_block(blocks: Blocks, what: str) -> None:
    """A pipe would make the reader wait for ever."""
    path = Path(blocks.name(block_at(blocks, 0)))
    match what:
        case "short":
            os.truncate(path, 2 * BLOCK_BYTES - 1)
        case _:
            path.unlink()
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "circle":
            path.symlink_to(path)
    with pytest.raises(BlockError, match=r"E-DAT-021 .*shard-00000\.bin is missing or cut off"):
        blocks.tokens(block_at(blocks, 1))


def test_a_block_that_was_given_is_lent_until_it_has_been_of_use(blocks: Blocks) -> None:
    block = block_at(blocks, 1)
    content = read(blocks, block)
    overwrite(blocks, 1)
    blocks.give(block, content)
    for number in (2, 3):
        blocks.tokens(block_at(blocks, number))
    assert blocks.tokens(block).tobytes() == content
    blocks.forget_given()
    assert blocks.tokens(block).tobytes() == content, "it is kept as any other"
    for number in (2, 3):
        blocks.tokens(block_at(blocks, number))
    with pytest.raises(BlockError):
        blocks.tokens(block)


def test_what_is_no_such_block_is_not_taken(blocks: Blocks) -> None:
    block = block_at(blocks, 1)
    for content in (b"", bytes(BLOCK_BYTES), read(blocks, block_at(blocks, 2))):
        with pytest.raises(BlockError, match="was altered"):
            blocks.give(block, content)
