"""A data node whose data are bad: jobs wait for good blocks, or the node leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from decod.daemon import data_supply
from decod.daemon.data_supply import DataSupply, FolderSource
from decod.data.block import Block
from decod.data.dataset import Dataset
from decod.data.prepare import PrepareConfig, prepare
from decod.driver.arena import ArenaAllocator
from decod.driver.compute import Compute, JobError, Reply
from decod.driver.driver import CoreHandle, NodeDriver
from decod.errors import DataError
from decod.ids import MicrobatchId, NodeId, RunId
from decod.net.block_transfer import BlockRequest
from decod.objects import StoreError
from decod.protocol.core.jobs import BaseJob, Embed, Forward, GiveBlock, Nothing
from tests.support.members import data_node
from tests.waiting import wait_until

MINE = data_node("me")
ME, OTHER, STRANGER = (data_node(name).node_id for name in ("me", "other", "stranger"))
DATA = (ME, OTHER)
RUN = RunId("r" * 26)
SILENCE = StoreError("s3://bucket/x", "no route to host", is_final=False)
EMBED = Embed(MicrobatchId(1, 0, 0))


class FakeCompute:
    """Answers jobs as it is told to; a block that it was given is good from then on."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.errors: list[JobError] = []
        """With which the next jobs that read data fail."""
        self.given: list[bytes] = []
        self.kinds: list[type] = []

    def submit(self, job: BaseJob, *, inputs: Any = (), outputs: Any = ()) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.kinds.append(type(job))
        if isinstance(job, GiveBlock):
            self.given.append(bytes(inputs[0].view))
        if isinstance(job, Embed) and self.errors:
            future.set_exception(self.errors.pop(0))
        else:
            future.set_result(Reply(Nothing(), 0.0))
        return future


class FakeSource(FolderSource):
    """A folder that can behave like an object store."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self.followed: list[MicrobatchId] = []
        self.lacks_at_once: DataError | None = None
        """Why `at_once` has nothing. None: it is a folder's."""
        self.gives_at_once = False
        self.num_failures = 0
        """How many more times it does not answer."""

    @override
    def follow(self, mb: MicrobatchId) -> None:
        self.followed.append(mb)

    @override
    async def at_once(self, blocks: Sequence[Block]) -> dict[Block, bytes | DataError]:
        if self.gives_at_once:
            return {block: self.dataset.reader.read(block) for block in blocks}
        return dict.fromkeys(blocks, self.lacks_at_once) if self.lacks_at_once else {}

    @override
    async def fetch(self, block: Block) -> bytes:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise SILENCE
        return await super().fetch(block)


class Bench:
    """A data node with a corpus of two shards, one block each."""

    def __init__(self, folder: Path) -> None:
        (folder / "text.txt").write_text("0123456789" * 100)
        prepare(folder / "own", [folder / "text.txt"], PrepareConfig(shard_tokens=600))
        self.dataset = Dataset.open(folder / "own")
        self.source = FakeSource(self.dataset)
        self.blocks = [self.dataset.index.block_at(shard, 0) for shard in (0, 1)]
        self.notes: list[tuple[str, dict[str, object]]] = []
        self.left: list[float] = []
        self.arena = ArenaAllocator(1 << 16)
        members = [
            SimpleNamespace(node_id=node, name=name, address="h:1")
            for node, name in ((ME, "a"), (OTHER, "b"))
        ]
        view = SimpleNamespace(data_nodes=members)
        core = CoreHandle()
        core.attach(cast("NodeDriver", SimpleNamespace(facts=SimpleNamespace(view=view))))
        self.supply = DataSupply(
            self.source,
            core,
            RUN,
            MINE,
            note=lambda event, **fields: self.notes.append((event, fields)),
            leave=lambda: self.left.append(0.0),
        )
        self.compute = FakeCompute()
        self.over = self.supply.before(cast("Compute", self.compute), self.arena)

    def path(self, number: int) -> Path:
        """Returns the file of a block."""
        return Path(self.dataset.blocks.name(self.blocks[number]))

    def bad(self, *numbers: int) -> JobError:
        """Returns what a job says that has met these blocks."""
        error = {"code": "E-DAT-022", "what": "a shard was altered", "why": "hash", "fix": "mend"}
        return JobError(error, [self.blocks[number] for number in numbers])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_supply, "PATIENCE_S", 0.0)


@pytest.fixture(name="bench")
@asynccontextmanager
async def _bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    async with bench.supply:
        yield bench


async def test_jobs_that_read_no_data_pass_as_they_are(bench: Bench) -> None:
    assert bench.over.submit(Forward(EMBED.microbatch)).done()
    assert bench.over.ended is bench.compute.ended


async def test_a_job_runs_again_with_the_blocks_that_it_lacked(bench: Bench) -> None:
    """Each file is named once in a while, however many of its blocks are bad."""
    bench.compute.errors = [bench.bad(0, 1), bench.bad(0)]
    assert (await bench.over.submit(EMBED)).result == Nothing()
    assert bench.compute.kinds == [Embed, *[GiveBlock] * 2, Embed, GiveBlock, Embed]
    content = [bench.dataset.reader.read(block) for block in bench.blocks]
    assert bench.compute.given == [*content, content[0]]
    assert [event for event, _ in bench.notes] == ["data.damaged", "data.restored"] * 2
    paths = [bench.dataset.blocks.name(block) for block in bench.blocks]
    assert [fields["path"] for _, fields in bench.notes] == [paths[0]] * 2 + [paths[1]] * 2
    assert bench.left == []
    assert bench.arena.used_bytes == 0


async def test_another_failure_of_a_job_is_its_own(bench: Bench) -> None:
    error = {"code": "E-HW-003", "what": "out of memory", "why": "w", "fix": "f"}
    bench.compute.errors = [JobError(error)]
    with pytest.raises(JobError, match="E-HW-003"):
        await bench.over.submit(EMBED)
    assert bench.left == []


def _without(bench: Bench) -> None:
    bench.path(0).unlink()


def _with_silent_store(bench: Bench) -> None:
    bench.source.lacks_at_once = SILENCE
    bench.source.num_failures = 10**9


def _without_room(bench: Bench) -> None:
    bench.arena.allocate(bench.arena.size_bytes)


@pytest.mark.parametrize(
    ("blocks", "spoil", "reason"),
    [
        ((0,), _without, r"E-DAT-022 a shard was altered: hash; reading it.*nor did b \("),
        ((), lambda _: None, "another copy would be no better"),
        ((0,), _with_silent_store, r"s3://bucket/x can't be read.*no route to host"),
        ((0,), _without_room, "no room for a good copy"),
    ],
    ids=["nobody has it", "no block is bad", "silent store", "no room"],
)
async def test_a_node_that_gets_no_good_copy_leaves_with_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blocks: tuple[int, ...],
    spoil: Callable[[Bench], None],
    reason: str,
) -> None:
    """Its jobs wait until nothing is committed any more, and it leaves once."""
    monkeypatch.setattr(data_supply, "STORE_PATIENCE_S", 0.0)
    bench = Bench(tmp_path)

    async def work() -> None:
        async with bench.supply:
            spoil(bench)
            bench.compute.errors = [bench.bad(*blocks), bench.bad(*blocks)]
            jobs = [bench.over.submit(EMBED) for _ in range(2)]
            await wait_until(lambda: bool(bench.left))
            assert not any(job.done() for job in jobs)
            bench.supply.give_up()
            for job in jobs:
                with pytest.raises(JobError):
                    await job

    with pytest.raises(DataError, match=reason) as caught:
        await work()
    assert caught.value.exit_code == 9
    assert bench.left == [0.0]
    assert [event for event, _ in bench.notes].count("data.lost") == 1


async def test_blocks_that_a_store_gives_are_handed_on_without_a_word(bench: Bench) -> None:
    bench.source.gives_at_once = True
    bench.compute.errors = [bench.bad(0, 1)]
    assert (await bench.over.submit(EMBED)).result == Nothing()
    assert bench.compute.given == [bench.dataset.reader.read(each) for each in bench.blocks]
    assert bench.notes == []
    assert bench.source.followed == [MicrobatchId(1, 0, 0)]


async def test_a_store_that_does_not_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """Longer than for a bad block, which nobody may ever mend."""
    monkeypatch.setattr(data_supply, "_PAUSE_S", 0.001)
    bench.source.lacks_at_once = SILENCE
    bench.source.num_failures = 20
    bench.compute.errors = [bench.bad(0)]
    assert (await bench.over.submit(EMBED)).result == Nothing()
    assert bench.source.num_failures == 0
    assert bench.notes == [], "the source tells it"
    assert bench.left == []


async def test_the_end_of_a_run_does_not_wait_for_a_store(bench: Bench) -> None:
    bench.source.lacks_at_once = SILENCE
    bench.source.num_failures = 10**9
    bench.compute.errors = [bench.bad(0)]
    job = bench.over.submit(EMBED)
    await wait_until(lambda: bench.source.num_failures < 10**9)
    bench.supply.give_up()
    with pytest.raises(JobError):
        await job
    assert bench.left == []


async def test_an_object_that_is_gone_is_told_as_damage(bench: Bench) -> None:
    gone = StoreError("s3://bucket/x", "there is no such object", is_final=True)
    bench.source.lacks_at_once = gone
    bench.compute.errors = [bench.bad(0)]
    assert (await bench.over.submit(EMBED)).result == Nothing()
    assert [event for event, _ in bench.notes] == ["data.damaged", "data.restored"]
    assert bench.notes[0][1]["reason"] == "there is no such object"


async def test_only_data_nodes_are_given_blocks_and_only_good_ones(bench: Bench) -> None:
    read = bench.supply.read_for_peer
    block = bench.blocks[1]

    async def ask(sender: NodeId, block: Block) -> bytes | str:
        return await read(BlockRequest(run_id=RUN, sender=sender, block=block))

    assert await ask(OTHER, block) == bench.dataset.reader.read(block)
    assert await ask(STRANGER, block) == "only data nodes of the run are given data"
    for other in (Block(2, 0, 10), Block(1, 0, 10), Block(1, 10**6, 10), Block(0, 2, 1198)):
        assert await ask(OTHER, other) == "the data here have no such block"
    path = bench.path(1)
    path.write_bytes(bytes(path.stat().st_size))
    assert await ask(OTHER, block) == "this node's own copy of it is bad"
    path.unlink()
    assert await ask(OTHER, block) == "this node's own copy of it is bad"
