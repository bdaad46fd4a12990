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
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Self

from decod.daemon.block_source import BlockSource
from decod.data.block import Block
from decod.driver.arena import ArenaAllocator, TensorRegion
from decod.driver.compute import Compute, JobError, Reply
from decod.driver.driver import CoreHandle
from decod.errors import DataError, DecodError
from decod.ids import RunId
from decod.membership.papers import Membership
from decod.net.block_transfer import BlockRequest, fetch_block
from decod.objects import StoreError
from decod.protocol.core.jobs import BaseJob, Embed, GiveBlock
from decod.protocol.core.view import Member
from decod.tasks import TaskSet

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
            _UnavailableError: No source has it, or it is not needed any more.
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
            arena.free(region)

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
