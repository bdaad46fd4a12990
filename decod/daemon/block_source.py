"""Where a data node's blocks come from while it trains: its disk, or an object store ahead of use.

The compute process reads what is in the cache, so it never waits for a store itself. This process
fetches blocks into the cache in the order of training, because the tokens of every later microbatch
are known. It begins with the microbatch that is trained on now, and goes on until it is some blocks
ahead. Requests run in threads: nothing here holds up the event loop.

While a store does not answer, one request at a time tries it, after pauses that grow. All others
fail at once, so that other data nodes are asked meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from decod.daemon.backoff import Backoff
from decod.data.block import Block
from decod.data.dataset import Dataset
from decod.data.readers import StoreReader
from decod.errors import DataError
from decod.ids import MicrobatchId
from decod.objects import StoreError
from decod.run.training_config import BatchConfig
from decod.tasks import TaskSet, in_thread
from decod.texts import size_text

T = TypeVar("T")

AHEAD_BLOCKS = 256
"""How far to read ahead: a minute at 1 MiB/s."""
_PARALLEL = 16
"""Requests at a time. Object stores answer late, and many at once."""
_THREADS_MAX = 64
"""Unanswered requests go on in their threads. With so many, no more are made."""
_READ_S = 5.0
"""Timeout of reading a block from this host's disk."""
_FETCH_S = 20.0
"""Timeout of fetching a block from a store."""
_PAUSE_MAX_S = 15.0
"""Longest pause before a store that did not answer is asked again."""
_LOOK_S = 1.0
"""How often reading ahead looks whether a store answers again."""
_BACK_ITERATIONS = 8
"""A run that reads what is so old has gone back. Microbatches that were put off are younger."""
_CACHE_SHARE = 4
"""Reading ahead fills at most this part of the cache, or it would remove what it has read."""


class BlockSource(Protocol):
    """Where a data node's blocks come from."""

    dataset: Dataset
    name: str
    """As people call it."""

    def follow(self, mb: MicrobatchId) -> None:
        """Take note that a microbatch's tokens are read now."""
        ...

    async def at_once(self, blocks: Sequence[Block]) -> dict[Block, bytes | DataError]:
        """Return blocks that the compute process lacks in normal operation, or what prevents it."""
        ...

    async def fetch(self, block: Block) -> bytes:
        """Return a block's bytes, unchecked.

        Raises:
            DataError: They can't be read.
            TimeoutError: It takes too long.
        """
        ...

    async def close(self) -> None:
        """Stop reading ahead."""
        ...


class FolderSource:
    """A folder on this host. Blocks that the compute process can't read there are bad.

    Args:
        dataset: The data node's data.
    """

    name = "this host's disk"

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def follow(self, mb: MicrobatchId) -> None:
        """The system reads ahead by itself."""

    async def at_once(self, blocks: Sequence[Block]) -> dict[Block, bytes | DataError]:  # noqa: ARG002
        return {}

    async def fetch(self, block: Block) -> bytes:
        async with asyncio.timeout(_READ_S):
            return await in_thread(lambda: self.dataset.reader.read(block, from_disk=True))

    async def close(self) -> None:
        """Nothing is under way."""


class StoreSource:
    """An object store with a cache on this host.

    Args:
        dataset: The data node's data, with a cache.
        batch: The run's batch.
        seed: The run's seed.
        note: Takes the name of an event, and its fields as keywords.
        clock: Returns the time, in seconds.
    """

    name = "the store"

    def __init__(
        self,
        dataset: Dataset,
        batch: BatchConfig,
        seed: int,
        *,
        note: Callable[..., None],
        clock: Callable[[], float],
    ) -> None:
        assert isinstance(dataset.reader, StoreReader)
        assert dataset.reader.cache is not None
        self.dataset, self._reader, self._cache = dataset, dataset.reader, dataset.reader.cache
        self._batch, self._seed, self._note, self._clock = batch, seed, note, clock
        self._tasks = TaskSet()
        self._fetching: dict[Block, asyncio.Task[bytes]] = {}
        self._permits = asyncio.Semaphore(_PARALLEL)
        self._num_threads = 0
        self._trouble: StoreError | None = None
        """Why the store has not answered the last request."""
        self._failed_s = self._retry_s = 0.0
        self._pauses = Backoff()
        self._cache_fails = False
        self._read: dict[int, int] = {}
        """Data node index -> number of the microbatch that is read now."""
        self._queued: dict[int, int] = {}
        """The same -> number of the last microbatch whose blocks were put into the queue."""
        self._queue: deque[Block] = deque()
        self._moved = asyncio.Event()

    # --- ahead of use -------------------------------------------------------------------------

    def follow(self, mb: MicrobatchId) -> None:
        number = mb.iteration * self._batch.num_microbatches + mb.index
        of = mb.data_node_index
        if number < self._read.get(of, number) - _BACK_ITERATIONS * self._batch.num_microbatches:
            self._queued[of] = self._read[of] = number
        self._read[of] = max(number, self._read.get(of, 0))
        if not self._queued:
            self._judge_cache()
            for _ in range(_PARALLEL):
                self._tasks.start(self._work())
        self._queued.setdefault(of, number)
        self._moved.set()

    def _judge_cache(self) -> None:
        limit, needed = self._cache.limit_bytes, self.dataset.open_bytes
        if limit < needed:
            path = str(self._cache.folder.parent)
            sizes = {"limit": size_text(limit), "needed": size_text(needed)}
            self._note("data.cache_small", path=path, **sizes)

    async def _work(self) -> None:
        """Fetch blocks that will be needed, one after the other."""
        while True:
            block = await self._next()
            while not await in_thread(partial(self._cache.holds, block)):
                try:
                    await self.fetch(block)
                    break
                except StoreError as error:
                    if error.is_final:
                        break
                except DataError:
                    break  # It is damaged. Whoever needs it finds out, and says so.
                # Another's request may be answered before the pause is over.
                pause_s = max(0.0, self._retry_s - self._clock())
                await asyncio.sleep(min(pause_s, _LOOK_S))

    async def _next(self) -> Block:
        while not self._queue:
            self._moved.clear()
            mb = self._next_microbatch()
            if mb is None:
                await self._moved.wait()
                continue
            # Other workers wait for these blocks, rather than for those of a later microbatch.
            blocks = self.dataset.blocks_of(mb, self._batch, self._seed)
            self._queue.extend(blocks)
            self._moved.set()
        return self._queue.popleft()

    def _next_microbatch(self) -> MicrobatchId | None:
        for of, queued in self._queued.items():
            if queued < self._read[of] + self._num_ahead():
                # What was read meanwhile needs no fetching.
                number = max(queued, self._read[of]) + 1
                self._queued[of] = number
                iteration, index = divmod(number, self._batch.num_microbatches)
                return MicrobatchId(iteration, of, index)
        return None

    def _num_ahead(self) -> int:
        """Return by how many microbatches to read ahead."""
        block_bytes = self.dataset.index.block_bytes
        room = self._cache.limit_bytes // block_bytes // _CACHE_SHARE
        row_bytes = (self._batch.sequence_length + 1) * self.dataset.index.item_size_bytes
        needed = self._batch.microbatch_size * (1 + row_bytes // block_bytes)
        return max(1, min(AHEAD_BLOCKS, room) // needed)

    # --- on demand ----------------------------------------------------------------------------

    async def at_once(self, blocks: Sequence[Block]) -> dict[Block, bytes | DataError]:
        found = await asyncio.gather(*map(self.fetch, blocks), return_exceptions=True)
        answers: dict[Block, bytes | DataError] = {}
        for block, answer in zip(blocks, found, strict=True):
            if isinstance(answer, bytes | DataError):
                answers[block] = answer
            else:
                raise answer
        return answers

    async def fetch(self, block: Block) -> bytes:
        task = self._fetching.get(block)
        if task is None:
            task = self._fetching[block] = self._tasks.start(self._fetch(block))
            task.add_done_callback(lambda done: self._fetched(block, done))
        # Others may wait for the same block.
        return await asyncio.shield(task)

    def _fetched(self, block: Block, done: "asyncio.Task[bytes]") -> None:
        del self._fetching[block]
        if not done.cancelled():
            done.exception()  # Nobody may be waiting any more.

    async def _fetch(self, block: Block) -> bytes:
        found = await in_thread(lambda: self._reader.cached(block))
        if found is not None:
            return found
        async with self._permits:
            asked_s = self._clock()
            if self._trouble is not None:
                if asked_s < self._retry_s:
                    raise self._unanswered(block, self._trouble.why)
                # The others see what comes of this one.
                self._retry_s = asked_s + _FETCH_S
            try:
                content = await self._ask(block)
            except StoreError as error:
                self._failed(error, asked_s)
                raise
        self._answered()
        self.dataset.blocks.check(block, content)
        await self._keep(block, content)
        return content

    async def _ask(self, block: Block) -> bytes:
        if self._num_threads >= _THREADS_MAX:
            raise self._unanswered(block, f"{self._num_threads} requests are unanswered")
        self._num_threads += 1
        asked = in_thread(lambda: self._reader.fetch(block))
        asked.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(_FETCH_S):
                return await asyncio.shield(asked)
        except TimeoutError:
            self._tasks.start(self._keep_late(block, asked))
            raise self._unanswered(block, f"no answer in {_FETCH_S:.0f} s") from None

    async def _keep_late(self, block: Block, asked: "asyncio.Future[bytes]") -> None:
        """Keep a block for whoever asks next. A slow store would be asked for it for ever."""
        with suppress(DataError):
            content = await asked
            self.dataset.blocks.check(block, content)
            await self._keep(block, content)

    def _unanswered(self, block: Block, reason: str) -> StoreError:
        return StoreError(self.dataset.blocks.name(block), reason, is_final=False)

    def _ended(self, asked: "asyncio.Future[bytes]") -> None:
        self._num_threads -= 1
        if not asked.cancelled():
            asked.exception()

    def _failed(self, error: StoreError, asked_s: float) -> None:
        if error.is_final:
            self._answered()
            return
        if self._trouble is not None and asked_s < self._failed_s:
            return  # Asked before the pause.
        if self._trouble is None:
            self._note("data.unreachable", path=self.dataset.place, reason=error.why)
        self._trouble, self._failed_s = error, self._clock()
        self._retry_s = self._failed_s + min(self._pauses.next_s(), _PAUSE_MAX_S)

    def _answered(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            self._pauses.reset()
            self._note("data.reachable", path=self.dataset.place)

    async def _keep(self, block: Block, content: bytes) -> None:
        try:
            await in_thread(lambda: self._reader.keep(block, content))
        except OSError as error:
            if not self._cache_fails:
                path, reason = str(self._cache.folder), error.strerror or str(error)
                self._note("data.uncached", path=path, reason=reason)
            self._cache_fails = True
        else:
            self._cache_fails = False

    async def close(self) -> None:
        await self._tasks.close()
