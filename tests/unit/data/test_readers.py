"""A corpus in an object store: fetched block by block, checked, and kept in a cache."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fsspec")

from decod.data.block import Block, BlockCache, BlockError, is_cached
from decod.data.corpus import open_corpus
from decod.data.dataset import CacheConfig, Dataset
from decod.data.prepare import PrepareConfig, prepare, upload
from decod.data.readers import StoreReader
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.objects import ObjectFolder, StoreError
from decod.run.training_config import BatchConfig
from tests.support.failing_store import PROTOCOL, FailingFileSystem
from tests.support.http_store import http_store

BATCH = BatchConfig(sequence_length=64, microbatch_size=4, num_microbatches=4)
URL = f"{PROTOCOL}://bucket/corpus"
FIRST = "shard-00000.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a corpus of several shards."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n * n} of many\n" for n in range(1000)))
    prepare(tmp_path / "corpus", [text], PrepareConfig(shard_tokens=3000))
    return tmp_path / "corpus"


@pytest.fixture
def store(folder: Path) -> Iterator[type[FailingFileSystem]]:
    """Yields a store that holds the corpus."""
    FailingFileSystem.calm()
    upload(folder, URL)
    yield FailingFileSystem
    FailingFileSystem.calm()


def cache_at(folder: Path, limit_bytes: int = 2**30) -> CacheConfig:
    return CacheConfig(folder, lambda: limit_bytes)


def same_tokens(left: Dataset, right: Dataset) -> bool:
    ids = [MicrobatchId(n, 0, index) for n in (1, 2) for index in range(4)]
    return all(
        (left.microbatch(mb, BATCH, 7) == right.microbatch(mb, BATCH, 7)).all() for mb in ids
    )


@pytest.mark.usefixtures("store")
def test_a_corpus_at_a_url_is_the_one_in_the_folder(folder: Path, tmp_path: Path) -> None:
    with Dataset.open(folder) as own, open_corpus(URL, cache_at(tmp_path / "cache")) as remote:
        assert remote.place == URL
        assert remote.index_sha256 == own.index_sha256
        assert remote.verify() == own.num_bytes
        assert same_tokens(own, remote)
        assert remote.tokenizer.sha256 == own.tokenizer.sha256
        assert remote.folder is not None
        assert is_cached(remote.folder)
        assert not is_cached(folder)


@pytest.mark.usefixtures("store")
def test_any_url_of_fsspec_will_do(folder: Path) -> None:
    upload(folder, "memory://bucket/corpus")
    with Dataset.open(folder) as own, open_corpus("memory://bucket/corpus") as remote:
        assert same_tokens(own, remote)
        assert remote.folder is None


def test_another_process_reads_what_is_in_the_cache(
    folder: Path, store: type[FailingFileSystem], tmp_path: Path
) -> None:
    """It names the blocks that are not there, and takes them in."""
    remote = open_corpus(URL, cache_at(tmp_path / "cache"))
    assert remote.folder is not None
    mb = MicrobatchId(1, 0, 0)
    with Dataset.open(folder) as own, Dataset.open_cached(remote.folder) as cached:
        expected = own.microbatch(mb, BATCH, 0)
        with pytest.raises(BlockError, match="has not come from its store yet") as caught:
            cached.microbatch(mb, BATCH, 0)
        assert set(caught.value.blocks) == set(own.blocks_of(mb, BATCH, 0))
        for block in caught.value.blocks:
            cached.give(block, remote.reader.read(block))
        assert (cached.microbatch(mb, BATCH, 0) == expected).all()
    asked = store.asked.total()
    with Dataset.open_cached(remote.folder) as again:
        assert (again.microbatch(mb, BATCH, 0) == expected).all()
    assert store.asked.total() == asked


def test_a_block_that_comes_damaged_is_fetched_once_more(
    store: type[FailingFileSystem], tmp_path: Path
) -> None:
    with open_corpus(URL, cache_at(tmp_path / "cache")) as remote:
        block = remote.index.block_at(0, 0)
        store.corrupt[FIRST] = 1
        remote.blocks.tokens(block)
        assert store.asked[FIRST] == 2
        remote.blocks.clear()
        remote.blocks.tokens(block)
        assert store.asked[FIRST] == 2, "it is in the cache"


def test_an_object_that_stays_damaged_is_named_and_not_kept(
    store: type[FailingFileSystem], tmp_path: Path
) -> None:
    with open_corpus(URL, cache_at(tmp_path / "cache")) as remote:
        block = remote.index.block_at(0, 0)
        store.corrupt[FIRST] = 2
        with pytest.raises(BlockError, match=f"{URL}/{FIRST} was altered"):
            remote.blocks.tokens(block)
        store.truncate[FIRST] = 2
        with pytest.raises(BlockError, match=f"{URL}/{FIRST} was altered"):
            remote.blocks.tokens(block)
        assert remote.blocks.tokens(block).size == block.num_bytes // 2


def test_a_bad_block_in_the_cache_is_fetched_again(
    store: type[FailingFileSystem], tmp_path: Path
) -> None:
    with open_corpus(URL, cache_at(tmp_path / "cache")) as remote:
        block = remote.index.block_at(0, 0)
        good = remote.reader.read(block)
        assert isinstance(remote.reader, StoreReader)
        assert remote.reader.cache is not None
        path = remote.reader.cache.path(block)
        for bad in (b"", good[:-1], good + b"x", bytes(len(good))):
            path.write_bytes(bad)
            assert remote.reader.read(block) == good
            assert path.read_bytes() == good
        assert store.asked[FIRST] == 5


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("memory://nowhere", "there is no such place, or it holds no prepared corpus"),
        ("nonsense://bucket/corpus", "Protocol not known"),
    ],
)
def test_a_wrong_place_is_refused_in_one_line(url: str, text: str) -> None:
    with pytest.raises(DataError, match=text) as caught:
        open_corpus(url)
    assert "\n" not in str(caught.value)


def test_what_a_store_refuses_is_told_without_the_password(
    store: type[FailingFileSystem], tmp_path: Path
) -> None:
    with open_corpus(URL, cache_at(tmp_path / "cache")) as remote:
        store.error = PermissionError("no access for ftp://me:secret@host/x\nnext line")
        with pytest.raises(StoreError, match="no access for ftp://host/x next line") as caught:
            remote.reader.read(remote.index.block_at(0, 0))
        assert caught.value.is_final
        store.error = ConnectionResetError("gone")
        with pytest.raises(StoreError, match="gone") as caught:
            remote.reader.read(remote.index.block_at(0, 0))
        assert not caught.value.is_final


def test_a_shard_of_another_size_is_found_at_the_start(
    folder: Path, store: type[FailingFileSystem]
) -> None:
    store().pipe_file(f"{URL}/{FIRST}", b"short")
    with pytest.raises(DataError, match=f"shard {URL}/{FIRST} is missing or cut off: it has 5"):
        open_corpus(URL)
    store().rm_file(f"{URL}/{FIRST}")
    with pytest.raises(DataError, match=f"{URL}/{FIRST} can't be read"):
        open_corpus(URL)


@pytest.mark.usefixtures("store")
def test_a_cache_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="E-DAT-061"):
        open_corpus(URL, cache_at(tmp_path / "cache"))


# --- the cache --------------------------------------------------------------------------------


def size_of(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*/blocks/*/*"))


def test_what_was_used_last_stays_within_the_limit(tmp_path: Path) -> None:
    """Two nodes share the cache, each with a corpus of its own. Neither exceeds it by much."""
    root = tmp_path / "cache"
    limit = 20_000
    one, other = (BlockCache(root / name, lambda: limit) for name in ("one", "other"))
    blocks = [Block(0, n * 1000, 1000) for n in range(60)]
    for number, block in enumerate(blocks):
        for cache in (one, other):
            cache.put(block, bytes([number]) * 1000)
            # Clocks of file systems may be coarse.
            os.utime(cache.path(block), ns=(number, number))
            cache.get(blocks[0])
        assert size_of(root) <= limit * 1.2
    assert one.get(blocks[-1]) == bytes([59]) * 1000
    assert one.get(blocks[0]) == bytes(1000)
    assert one.holds(blocks[0])
    assert one.get(blocks[1]) is None
    assert not one.holds(blocks[1])


def test_nodes_that_share_a_corpus_never_see_half_a_block(tmp_path: Path) -> None:
    """Both write the same blocks, and each removes what the other may be reading."""
    blocks = [Block(0, n * 5000, 5000) for n in range(8)]
    caches = [BlockCache(tmp_path / "cache" / "one", lambda: 20_000) for _ in range(2)]

    def work(number: int) -> set[bytes | None]:
        seen: set[bytes | None] = set()
        for turn in range(100):
            block = blocks[(number + turn * 3) % len(blocks)]
            caches[number % 2].put(block, bytes([block.offset // 5000]) * 5000)
            seen.add(caches[number % 2].get(blocks[turn % len(blocks)]))
        return seen

    with ThreadPoolExecutor(4) as pool:
        seen = set().union(*pool.map(work, range(4)))
    assert seen <= {None} | {bytes([n]) * 5000 for n in range(8)}
    assert len(seen) > 1
    assert size_of(tmp_path / "cache") <= 20_000 * 1.2 + 5000


def test_a_lower_limit_holds_from_the_next_block_on(tmp_path: Path) -> None:
    limits = [100_000]
    cache = BlockCache(tmp_path / "cache" / "one", lambda: limits[-1])
    for number in range(50):
        cache.put(Block(0, number * 1000, 1000), bytes(1000))
    assert size_of(tmp_path / "cache") == 50_000
    limits.append(10_000)
    cache.put(Block(1, 0, 1000), bytes(1000))
    assert size_of(tmp_path / "cache") <= 10_000


def test_files_that_a_killed_process_left_are_removed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache" / "one", lambda: 10_000)
    cache.put(Block(0, 0, 10), bytes(10))
    folder = cache.path(Block(0, 0, 10)).parent
    for name, age_s in ((".part-1-0", 7200), (".part-2-0", 60)):
        path = folder / name
        path.write_bytes(bytes(10))
        at_s = folder.stat().st_mtime - age_s
        os.utime(path, (at_s, at_s))
    BlockCache(tmp_path / "cache" / "one", lambda: 10_000).put(Block(0, 10, 10), bytes(10))
    assert sorted(path.name for path in folder.iterdir()) == [".part-2-0", "0", "10"]


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache" / "one", lambda: 10_000)
    block = Block(0, 0, 10)
    cache.path(block).mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        cache.put(block, bytes(10))
    assert [path.name for path in cache.path(block).parent.iterdir()] == ["0"]


# --- over HTTP --------------------------------------------------------------------------------


def test_a_corpus_over_http(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with http_store(folder) as store, Dataset.open(folder) as own:
        with open_corpus(store.url, cache_at(tmp_path / "cache")) as remote:
            assert same_tokens(own, remote)
            store.status = 503
            with pytest.raises(StoreError, match="503") as caught:
                remote.reader.fetch(remote.index.block_at(0, 0))  # type: ignore[attr-defined]
            assert not caught.value.is_final
        store.status = 403
        with pytest.raises(DataError, match="403") as refused:
            open_corpus(store.url)
        assert "\n" not in str(refused.value)
        store.status, store.knows_ranges = None, False
        with pytest.raises(StoreError, match="the server sends all of it instead of a part"):
            ObjectFolder(store.url).read_range(FIRST, 0, 10)
