"""Measure how fast a data node reads tokens: from a folder, and from an object store.

    python scripts/bench_data_store.py

The store is a folder of this host that answers late and shares its bandwidth among all requests, as
one beyond a network does. Tokens are read as in training: a consumer, which stands for the compute
process, reads what is in the cache, and the node fetches what is not. The corpus is larger than the
cache. With an empty cache the store is the limit at first, and the ratio to it says what decod
itself costs. Later most of what a sequence needs is in the cache. With a consumer that computes at
half of the first speed, the share of waiting says whether reading ahead works.
"""

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from decod.daemon.data_supply import StoreSource
from decod.data.block import BlockError
from decod.data.corpus import open_corpus
from decod.data.dataset import CacheConfig, Dataset
from decod.data.index import Index, ShardWriter, TokenizerEntry, write_index
from decod.data.tokenizer import BytesTokenizer
from decod.ids import MicrobatchId
from decod.run.training_config import BatchConfig
from decod.tasks import in_thread

BATCH = BatchConfig(sequence_length=1024, microbatch_size=4, num_microbatches=8)


class ThrottledFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types.
    """This host's files, with the latency and the bandwidth of a network."""

    protocol = ("throttled",)
    latency_s = 0.05
    bytes_per_s = 20e6
    num_bytes = 0
    """Given so far."""
    _link = threading.Lock()

    @override
    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        content: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        time.sleep(self.latency_s)
        with self._link:
            ThrottledFileSystem.num_bytes += len(content)
            time.sleep(len(content) / self.bytes_per_s)
        return content


def make_corpus(folder: Path, num_tokens: int) -> None:
    """Write a corpus of random tokens."""
    folder.mkdir()
    tokenizer = BytesTokenizer()
    writer = ShardWriter(folder, dtype="uint16", shard_tokens=2**24)
    rng = np.random.default_rng(1)
    writer.append(rng.integers(0, tokenizer.vocab_size, num_tokens, dtype=np.uint32))
    entry = TokenizerEntry(
        kind=tokenizer.kind,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
    )
    index = Index(
        format_version=2,
        tokenizer=entry,
        dtype="uint16",
        num_tokens=num_tokens,
        block_bytes=2**18,
        shards=writer.finish(),
    )
    write_index(folder, index)


def microbatches(num: int, first: int = 0) -> Iterator[MicrobatchId]:
    for number in range(first, first + num):
        iteration, index = divmod(number, BATCH.num_microbatches)
        yield MicrobatchId(iteration + 1, 0, index)


def read_folder(folder: Path, num: int) -> float:
    """Return the seconds that reading so many microbatches from a folder takes."""
    with Dataset.open(folder) as dataset:
        begun_s = time.monotonic()
        for mb in microbatches(num):
            dataset.microbatch(mb, BATCH, seed=0)
        return time.monotonic() - begun_s


async def read_store(
    folder: Path, cache: CacheConfig, num: int, *, first: int = 0, compute_s: float = 0.0
) -> float:
    """Return the seconds that reading takes from a store, beside `compute_s` a microbatch."""
    remote = open_corpus(f"throttled://{folder}", cache)
    source = StoreSource(remote, BATCH, 0, note=note, clock=time.monotonic)
    consumer = Consumer(remote, source, asyncio.get_running_loop())
    waited_s = await in_thread(lambda: sum(consumer.read(num, first, compute_s)))
    await source.close()
    return waited_s


class Consumer:
    """What reads microbatches in a thread, as compute process and node do it together."""

    def __init__(
        self, remote: Dataset, source: StoreSource, loop: asyncio.AbstractEventLoop
    ) -> None:
        assert remote.folder is not None
        self._dataset = Dataset.open_cached(remote.folder)
        self._source, self._loop = source, loop

    def read(self, num: int, first: int, compute_s: float) -> Iterator[float]:
        """Yield the seconds that each of so many microbatches takes."""
        for mb in microbatches(num, first):
            begun_s = time.monotonic()
            self._loop.call_soon_threadsafe(self._source.follow, mb)
            self._read(mb)
            yield time.monotonic() - begun_s
            time.sleep(compute_s)

    def _read(self, mb: MicrobatchId) -> None:
        while True:
            try:
                self._dataset.microbatch(mb, BATCH, seed=0)
            except BlockError as error:
                asked = self._source.at_once(error.blocks)
                found = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
                for block, content in found.items():
                    assert isinstance(content, bytes)
                    self._dataset.give(block, content)
            else:
                return


def note(event: str, **fields: object) -> None:
    print(f"{event}: {fields}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=100, help="How many to time.")
    parser.add_argument("--megabytes", type=int, default=3072, help="Size of the corpus, in MiB.")
    parser.add_argument("--cache", type=int, default=1536, help="Size of the cache, in MiB.")
    options = parser.parse_args()
    register_implementation("throttled", ThrottledFileSystem, clobber=True)
    num = options.microbatches
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "corpus"
        caches = [CacheConfig(Path(name) / each, lambda: options.cache * 2**20) for each in "ab"]
        make_corpus(folder, options.megabytes * 2**19)
        folder_s = min(read_folder(folder, num) for _ in range(3))
        cold_s = asyncio.run(read_store(folder, caches[0], num))
        cold_bytes = fetched_bytes()
        warm_s = min(asyncio.run(read_store(folder, caches[0], num)) for _ in range(3))
        compute_s = 2 * cold_s / num
        waited_s = asyncio.run(read_store(folder, caches[1], num, compute_s=compute_s))
        filled = 100 * num
        asyncio.run(read_store(folder, caches[0], filled, first=num))
        fetched_bytes()
        steady_s = asyncio.run(read_store(folder, caches[0], filled, first=num + filled)) / 100
        steady_bytes = fetched_bytes() / 100
    num_tokens = num * BATCH.tokens_per_microbatch
    print("| source | tokens/s | ratio to the folder | bytes fetched for a token |")
    print("|---|---|---|---|")
    for source, seconds, size in (
        ("folder", folder_s, 0),
        ("what the cache holds", warm_s, 0),
        ("empty cache, at first", cold_s, cold_bytes),
        ("filled cache, more of a large corpus", steady_s, steady_bytes),
    ):
        cells = f"{num_tokens / seconds:,.0f} | {folder_s / seconds:.3f} | {size / num_tokens:.1f}"
        print(f"| {source} | {cells} |")
    store_s = cold_bytes / ThrottledFileSystem.bytes_per_s
    print(f"empty cache: {store_s / cold_s:.2f} of the store's bandwidth")
    shares = [each / (each + num * compute_s) for each in (waited_s, folder_s)]
    print(f"computing at half of that speed: {shares[0]:.1%} of the time is spent reading")
    print(f"the same from the folder: {shares[1]:.1%}")


def fetched_bytes() -> int:
    """Return what the store has given since the last call."""
    fetched, ThrottledFileSystem.num_bytes = ThrottledFileSystem.num_bytes, 0
    return fetched


if __name__ == "__main__":
    main()
