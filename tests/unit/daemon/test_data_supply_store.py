"""Blocks from an object store, ahead of use: in order, checked, and without a hang or a flood."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("fsspec")

from decod.daemon import data_supply as block_source
from decod.daemon.data_supply import StoreSource
from decod.data.block import BlockError
from decod.data.corpus import open_corpus
from decod.data.dataset import CacheConfig, Dataset
from decod.data.prepare import PrepareConfig, prepare, upload
from decod.data.readers import StoreReader
from decod.ids import MicrobatchId
from decod.objects import StoreError
from decod.run.training_config import BatchConfig
from tests.support.failing_store import PROTOCOL, FailingFileSystem
from tests.waiting import wait_until

URL = f"{PROTOCOL}://bucket/corpus"
BATCH = BatchConfig(sequence_length=32, microbatch_size=2, num_microbatches=2)
SEED = 3


class Bench:
    """A source of blocks over a store that fails as it is told to."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.now_s = 0.0
        self.notes: list[tuple[str, dict[str, object]]] = []
        self.dataset = open_corpus(URL, CacheConfig(folder / "cache", lambda: limit_bytes))
        self.source = StoreSource(
            self.dataset,
            BATCH,
            SEED,
            note=lambda event, **fields: self.notes.append((event, fields)),
            clock=lambda: self.now_s,
        )
        assert isinstance(self.dataset.reader, StoreReader)
        self.reader = self.dataset.reader

    def holds(self, iteration: int, index: int) -> bool:
        """Return whether a microbatch is in the cache."""
        cache = self.reader.cache
        assert cache is not None
        blocks = self.dataset.blocks_of(MicrobatchId(iteration, 0, index), BATCH, SEED)
        return all(cache.path(block).exists() for block in blocks)


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> Iterator[type[FailingFileSystem]]:
    """Yields a store with a corpus of many shards of a block."""
    FailingFileSystem.calm()
    (tmp_path / "text.txt").write_text("".join(f"line {n * n} of many\n" for n in range(2000)))
    prepare(tmp_path / "own", [tmp_path / "text.txt"], PrepareConfig(shard_tokens=100))
    upload(tmp_path / "own", URL)
    yield FailingFileSystem
    FailingFileSystem.calm()


@pytest.fixture(name="bench")
@asynccontextmanager
async def _bench(tmp_path: Path, store: object) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, limit_bytes=2**30)
    try:
        yield bench
    finally:
        await bench.source.close()


async def test_later_microbatches_are_fetched_in_their_order(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """As far ahead as is allowed, no further, and each block once."""
    monkeypatch.setattr(block_source, "AHEAD_BLOCKS", 8)
    bench.source.follow(MicrobatchId(1, 0, 0))
    ahead = [(1, 1), (2, 0), (2, 1), (3, 0)]
    await wait_until(lambda: all(bench.holds(*each) for each in ahead))
    assert not bench.holds(3, 1)
    bench.source.follow(MicrobatchId(1, 0, 1))
    await wait_until(lambda: bench.holds(3, 1))
    assert not bench.holds(4, 0)
    bench.source.follow(MicrobatchId(9, 0, 0))
    await wait_until(lambda: bench.holds(11, 0))
    assert not bench.holds(6, 0), "it has been left behind"
    bench.source.follow(MicrobatchId(20, 0, 0))
    await wait_until(lambda: bench.holds(22, 0))
    bench.source.follow(MicrobatchId(5, 0, 1))
    await wait_until(lambda: bench.holds(6, 0))
    assert max(FailingFileSystem.asked.values()) == 1


async def test_a_small_cache_bounds_how_far_ahead(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit_bytes=1000)
    bench.source.follow(MicrobatchId(1, 0, 0))
    await wait_until(lambda: bench.holds(1, 1))
    assert not bench.holds(2, 1)
    await bench.source.close()
    small = {"path": str(tmp_path / "cache"), "limit": "0.0 MiB", "needed": "0.1 MiB"}
    assert bench.notes == [("data.cache_small", small)]


async def test_a_store_out_of_reach_is_told_once_and_tried_after_pauses(
    store: type[FailingFileSystem], bench: Bench
) -> None:
    blocks = bench.dataset.blocks_of(MicrobatchId(1, 0, 0), BATCH, SEED)
    kept = await bench.source.fetch(blocks[0])
    store.error = ConnectionError("no route to host")
    store.asked.clear()
    found = await bench.source.at_once(blocks[1:])
    assert {type(each) for each in found.values()} == {StoreError}
    asked = store.asked.total()
    for _ in range(5):
        with pytest.raises(StoreError, match="no route"):
            await bench.source.fetch(blocks[1])
    assert store.asked.total() == asked, "it pauses"
    assert await bench.source.fetch(blocks[0]) == kept, "it is in the cache"
    bench.now_s += 60.0
    with pytest.raises(StoreError, match="no route"):
        await bench.source.fetch(blocks[1])
    assert store.asked.total() == asked + 1
    store.error = None
    bench.now_s += 60.0
    await bench.source.fetch(blocks[1])
    assert [event for event, _ in bench.notes] == ["data.unreachable", "data.reachable"]
    assert bench.notes[0][1] == {"path": URL, "reason": "no route to host"}


async def test_reading_ahead_goes_on_when_the_store_does(
    store: type[FailingFileSystem], monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    monkeypatch.setattr(block_source, "_PAUSE_MAX_S", 0.0)
    monkeypatch.setattr(block_source, "_LOOK_S", 0.001)
    store.error = ConnectionError("no route to host")
    bench.source.follow(MicrobatchId(1, 0, 0))
    await wait_until(lambda: bool(bench.notes))
    store.error = None
    await wait_until(lambda: bench.holds(1, 1) and bench.holds(5, 0))


async def test_a_store_that_does_not_answer_is_given_up_in_time(
    store: type[FailingFileSystem], monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """Its requests go on in their threads, but they don't pile up."""
    monkeypatch.setattr(block_source, "_FETCH_S", 0.01)
    monkeypatch.setattr(block_source, "_THREADS_MAX", 2)
    store.may_answer.clear()
    blocks = bench.dataset.blocks_of(MicrobatchId(1, 0, 0), BATCH, SEED)
    try:
        for reason in ("no answer in", "no answer in", "2 requests are unanswered"):
            bench.now_s += 60.0
            with pytest.raises(StoreError, match=reason):
                await bench.source.fetch(blocks[0])
    finally:
        store.may_answer.set()
    bench.now_s += 60.0
    monkeypatch.setattr(block_source, "_FETCH_S", 30.0)
    await wait_until(lambda: store.asked.total() > 0)
    while not bench.holds(1, 0):
        bench.now_s += 60.0
        await bench.source.at_once(blocks)


async def test_an_answer_that_comes_too_late_is_there_for_the_next_question(
    tmp_path: Path, store: type[FailingFileSystem], monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """Otherwise a store that always takes a little too long would never give anything."""
    monkeypatch.setattr(block_source, "_FETCH_S", 0.01)
    store.may_answer.clear()
    block = bench.dataset.blocks_of(MicrobatchId(1, 0, 0), BATCH, SEED)[0]
    cache = bench.reader.cache
    assert cache is not None
    try:
        with pytest.raises(StoreError, match="no answer in"):
            await bench.source.fetch(block)
    finally:
        store.may_answer.set()
    await wait_until(lambda: cache.path(block).exists())
    store.error = ConnectionError("no route to host")
    with Dataset.open(tmp_path / "own") as own:
        assert await bench.source.fetch(block) == own.reader.read(block)


async def test_damage_is_told_apart_from_silence(
    tmp_path: Path, store: type[FailingFileSystem], bench: Bench
) -> None:
    block = bench.dataset.blocks_of(MicrobatchId(1, 0, 0), BATCH, SEED)[0]
    file = bench.dataset.index.shards[block.shard_index].file
    store.corrupt[file] = 2
    with pytest.raises(BlockError, match=f"{URL}/{file} was altered"):
        await bench.source.fetch(block)
    store.error = FileNotFoundError(file)
    with pytest.raises(StoreError, match=f"{URL}/{file} .*there is no such object"):
        await bench.source.fetch(block)
    store.error = None
    with Dataset.open(tmp_path / "own") as own:
        assert await bench.source.fetch(block) == own.reader.read(block)
    assert bench.notes == []


async def test_a_full_disk_is_told_and_blocks_come_all_the_same(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.reader, "keep", refuse)
    blocks = bench.dataset.blocks_of(MicrobatchId(1, 0, 0), BATCH, SEED)
    found = await bench.source.at_once(blocks)
    assert all(isinstance(each, bytes) for each in found.values())
    assert [event for event, _ in bench.notes] == ["data.uncached"]
    assert bench.notes[0][1]["reason"] == "No space left on device"
