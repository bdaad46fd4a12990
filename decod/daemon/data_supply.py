"""The data of a data node while it trains. A bad block is replaced, or the node leaves.

The compute process reads the data, and compares every block with the index. A job that meets a bad
block waits. The node names the block in the log and in `decod status`, reads it from its source
again, and asks the run's other data nodes for it. Once it has the block, it runs the job again. So
no microbatch is trained on bad data or deferred, and the core is not involved.

Of a corpus in an object store, the compute process reads what is in the cache. A job that meets a
block that is not there waits in the same way, but nobody is told unless the store fails.

If no data node has the block, the node leaves at once, as if its operator had asked it to: another
data node takes over, also as leader. A run without another data node ends, with a checkpoint of the
last committed iteration. In both cases the command ends with the error that names the file.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, Self, TypeVar

from decod.data.block import Block
from decod.data.dataset import Dataset
from decod.data.readers import StoreReader
from decod.driver.arena import ArenaAllocator, TensorRegion
from decod.driver.compute import Compute, JobError, Reply
from decod.driver.driver import CoreHandle
from decod.errors import DataError, DecodError
from decod.ids import MicrobatchId, RunId
from decod.membership.papers import Membership
from decod.net.block_transfer import BlockRequest, fetch_block
from decod.objects import StoreError
from decod.protocol.core.jobs import BaseJob, Embed, GiveBlock
from decod.protocol.core.view import Member
from decod.run.training_config import BatchConfig
from decod.tasks import Backoff, TaskSet, in_thread
from decod.texts import size_text

# --- where blocks come from ----------------------------------------------------------------------
# Where a data node's blocks come from while it trains: its disk, or an object store ahead of use.
#
# The compute process reads what is in the cache, so it never waits for a store itself. This
# process fetches blocks into the cache in the order of training, because the tokens of every
# later microbatch are known. It begins with the microbatch that is trained on now, and goes on
# until it is some blocks ahead. Requests run in threads: nothing here holds up the event loop.
#
# While a store does not answer, one request at a time tries it, after pauses that grow. All others
# fail at once, so that other data nodes are asked meanwhile.


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


# --- bad blocks ----------------------------------------------------------------------------------


PATIENCE_S = 10.0
"""How long to look for a block. A network file system is usually back after that time."""

STORE_PATIENCE_S = 600.0
"""The same while an object store does not answer: it is hardly ever gone for good."""

_PAUSE_S = 1.0
_ANSWER_S = 5.0
"""How long another data node's question for a block may take."""

_TELL_AGAIN_S = 60.0
"""How often a file that stays bad is reported, so that status and log are not flooded."""


class _UnavailableError(Exception):
    """A block is not available. The text says why."""


class DataSupply:
    """A layer between the driver and the compute process of a data node. Use it in `async with`.

    Args:
        source: Of the data node's blocks.
        core: Its core, which knows the other data nodes.
        run_id: The run.
        membership: The data node's.
        note: Takes the name of an event, and its fields as keywords.
        leave: Has the node leave at once.

    Raises:
        DataError: On leaving `async with`: the node left the run because its data are bad.
    """

    def __init__(
        self,
        source: BlockSource,
        core: CoreHandle,
        run_id: RunId,
        membership: Membership,
        *,
        note: Callable[..., None],
        leave: Callable[[], None],
    ) -> None:
        self._source, self._dataset, self._core = source, source.dataset, core
        self._run_id, self._membership, self._own = run_id, membership, membership.node_id
        self._note, self._leave_run = note, leave
        self._compute: Compute | None = None
        self._arena: ArenaAllocator | None = None
        self._fault: DataError | None = None
        self._given_up = asyncio.Event()
        self._restoring = asyncio.Lock()
        self._tasks = TaskSet()
        self._told_s: dict[str, float] = {}
        self._num_bad = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, _trace: object) -> None:
        await self._tasks.close()
        await self._source.close()
        if self._fault is not None:
            raise self._fault from error

    def give_up(self) -> None:
        """Fail the jobs that wait for data, so that other jobs can run. For the end of the run."""
        self._given_up.set()

    # --- as the driver sees it ----------------------------------------------------------------

    def before(self, compute: Compute, arena: ArenaAllocator) -> Compute:
        """Return this object as a `Compute` that passes jobs on to `compute`.

        Args:
            compute: The compute process.
            arena: The memory that it shares with this process.
        """
        self._compute, self._arena = compute, arena
        return self

    @property
    def ended(self) -> asyncio.Future[str]:
        assert self._compute is not None
        return self._compute.ended

    def submit(
        self,
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job. A job that reads data is repeated until it has good data."""
        compute = self._compute
        assert compute is not None

        def submit() -> asyncio.Future[Reply]:
            return compute.submit(job, inputs=inputs, outputs=outputs)

        # Submit at once, even a job that may have to be repeated: jobs must keep their order.
        first = submit()
        # Later jobs of a microbatch use the tokens that were read then.
        if not isinstance(job, Embed):
            return first
        self._source.follow(job.microbatch)
        return self._tasks.start(self._until_read(first, submit))

    async def _until_read(
        self, first: asyncio.Future[Reply], again: Callable[[], asyncio.Future[Reply]]
    ) -> Reply:
        future = first
        while True:
            try:
                return await future
            except JobError as error:
                if not error.error["code"].startswith("E-DAT-"):
                    raise
                async with self._restoring:
                    if not await self._restored(error):
                        await self._given_up.wait()
                        raise
            future = again()

    # --- bad blocks ---------------------------------------------------------------------------

    async def _restored(self, error: JobError) -> bool:
        """Give the compute process the blocks that it could not read, or else leave the run."""
        if self._fault is not None:
            return False
        if not error.blocks:
            self._leave(DataError(**error.error), "another copy would be no better")
            return False
        bad = DataError(**error.error)
        try:
            found = await self._source.at_once(error.blocks)
            for block in error.blocks:
                here = found.get(block, bad)
                if isinstance(here, bytes):
                    await self._give(block, here)
                    continue
                bad = here
                told = self._tell(block, bad)
                source, content = await self._find(block, bad)
                await self._give(block, content)
                if told:
                    self._tell_restored(block, source)
        except _UnavailableError as problem:
            if not self._given_up.is_set():
                self._leave(bad, str(problem))
            return False
        return True

    def _tell(self, block: Block, bad: DataError) -> bool:
        """Report a bad block; return False if its file has been reported a short time ago."""
        if _may_pass(bad):
            return False  # The source has told it: it is the store's trouble, not the block's.
        self._num_bad += 1
        name, now_s = self._dataset.blocks.name(block), asyncio.get_running_loop().time()
        if now_s - self._told_s.get(name, -math.inf) < _TELL_AGAIN_S:
            return False
        self._told_s[name] = now_s
        self._note("data.damaged", path=name, reason=bad.why, num_blocks=self._num_bad)
        return True

    def _tell_restored(self, block: Block, source: str) -> None:
        path, last = self._dataset.blocks.name(block), block.offset + block.num_bytes - 1
        self._note("data.restored", path=path, first=block.offset, last=last, source=source)

    async def _find(self, block: Block, bad: DataError) -> tuple[str, bytes]:
        """Return the name of a source that has a block, and the block's bytes.

        Raises:
            _UnavailableError: No source has the block, or nobody needs it any more.
        """
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        while True:
            problem = "reading it again did not help"
            for source, read in self._sources(block):
                try:
                    content = await read()
                    self._dataset.blocks.check(block, content)
                except (DecodError, TimeoutError) as error:
                    reason = error.why if isinstance(error, DecodError) else "it takes too long"
                    if source != self._source.name:
                        problem += f", nor did {source} ({reason})"
                    elif isinstance(error, DataError):
                        bad = error
                else:
                    return source, content
            patience_s = STORE_PATIENCE_S if _may_pass(bad) else PATIENCE_S
            if clock() >= begun_s + patience_s:
                raise _UnavailableError(problem)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._given_up.wait(), _PAUSE_S)
                raise _UnavailableError(problem)

    def _sources(self, block: Block) -> Iterator[tuple[str, Callable[[], Awaitable[bytes]]]]:
        """Yield the possible sources of a block: their names, and functions that fetch it."""
        yield self._source.name, partial(self._source.fetch, block)
        facts = self._core.driver.facts
        for member in facts.view.data_nodes:
            if member.node_id != self._own:
                yield member.name or member.node_id[:8], partial(self._ask, member, block)

    async def _ask(self, member: Member, block: Block) -> bytes:
        request = BlockRequest(run_id=self._run_id, sender=self._own, block=block)
        return await fetch_block(member.address, request, self._membership.tls)

    async def _give(self, block: Block, content: bytes) -> None:
        """Hand a block to the compute process.

        Raises:
            _UnavailableError: There is no memory for it, or the compute process refuses it.
        """
        arena, compute = self._arena, self._compute
        assert arena is not None
        assert compute is not None
        region = arena.allocate(len(content))
        if region is None:
            raise _UnavailableError("there is no room for a good copy in this host's memory")
        try:
            region.view[:] = content
            job = GiveBlock(block.shard_index, block.offset)
            await compute.submit(job, inputs=(region,))
        except JobError as error:
            raise _UnavailableError(str(error)) from error
        finally:
            region.release()

    def _leave(self, bad: DataError, problem: str) -> None:
        self._fault = DataError(
            bad.what,
            why=f"{bad.why}; {problem}",
            fix=f"{bad.fix}, and see with `decod run check --full` that it is good",
            code=bad.code,
        )
        self._note("data.lost", reason=self._fault.what)
        self._leave_run()

    # --- for others ---------------------------------------------------------------------------

    async def read_for_peer(self, request: BlockRequest) -> bytes | str:
        """Return a block for another data node, or the reason why it is refused."""
        facts, index, wanted = self._core.facts, self._dataset.index, request.block
        data_nodes = facts.view.data_nodes if facts is not None else ()
        if request.sender not in {member.node_id for member in data_nodes}:
            return "only data nodes of the run are given data"
        known = wanted.shard_index < len(index.shards) and (
            wanted.offset < index.shards[wanted.shard_index].num_bytes
        )
        if not known or index.block_at(wanted.shard_index, wanted.offset) != wanted:
            return "the data here have no such block"
        try:
            async with asyncio.timeout(_ANSWER_S):
                content = await self._source.fetch(wanted)
            self._dataset.blocks.check(wanted, content)
        except (DecodError, TimeoutError):
            return "this node's own copy of it is bad"
        return content


def _may_pass(bad: DataError) -> bool:
    """Return whether a block is missing only because a store does not answer now."""
    return isinstance(bad, StoreError) and not bad.is_final
