"""What a host keeps of states: written behind the machine's back, given to peers and to itself."""

import errno
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decod.daemon import disk_states as module
from decod.daemon.disk_states import DiskStates
from decod.driver.driver import ServedState
from decod.errors import NetworkError
from decod.ids import NodeId, RunId
from decod.net.donor import StateRequest
from decod.protocol.core.effects import FetchState, MirrorState
from decod.protocol.core.era import Kept, StagePart
from decod.protocol.core.events import CheckpointRead, KeptRead, StateForgotten, StateKept
from decod.train.checkpoint.description import StateSink, parameter_hash, parse_description
from decod.train.checkpoint.iteration_folders import stage_file
from decod.train.checkpoint.manifest import packed
from decod.train.checkpoint.shared import FolderStore, SharedCheckpoints
from decod.train.checkpoint.stage_states import KeptState, StageNames, StateStore, no_names
from decod.train.checkpoint.store import run_folder
from tests.support.checkpoints import (
    RUN_ID,
    arrive,
    flip_a_byte,
    make_manifest,
    random_blobs,
    write_checkpoint,
)
from tests.unit.train.checkpoint.test_stage_states import described
from tests.waiting import wait_until

PEER = NodeId("b" * 52)


class Bench:
    """A host with a disk, whose machine is a list of events."""

    def __init__(self, folder: Path, names: StageNames = no_names) -> None:
        self.events: list[Any] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.released: list[int] = []
        self.fetched: list[FetchState] = []
        self.refusals = 0
        self.kept = DiskStates(
            run_folder(folder, RUN_ID),
            post=self.events.append,
            note=lambda event, **fields: self.notes.append((event, fields)),
            fetch=self._fetch_state,
            store=StateStore(run_folder(folder, RUN_ID).with_name("states"), names=names),
        )

    async def _fetch_state(self, wanted: FetchState, sink: StateSink, *, limits: Any) -> str:
        assert limits.download_share < 1
        self.fetched.append(wanted)
        if self.refusals:
            self.refusals -= 1
            raise NetworkError("refused", why="not written yet", fix="ask again")
        description, data = described(wanted.stage_index, wanted.iteration)
        sink.expect(description)
        buffer = sink.allocate(len(data))
        assert buffer is not None
        arrive(data, description, buffer)
        return description.text

    def keep(self, stage: int, iteration: int) -> StateKept:
        """Have a state written; return what will be told of it."""
        description, data = described(stage, iteration)
        hash_ = parameter_hash(description.entries, data)
        served = ServedState(
            iteration, description.text, data, lambda: self.released.append(iteration)
        )
        self.kept.keep(stage, hash_, served)
        return StateKept(stage, iteration, hash_)

    async def load(self, stage: int, iteration: int, hash_: str = "") -> bytes | None:
        """Return what is read for a machine that wants a state of this host."""
        buffers: list[memoryview] = []

        def allocate(size_bytes: int) -> memoryview:
            buffers.append(memoryview(bytearray(size_bytes)))
            return buffers[-1]

        text = await self.kept.load(FetchState((), stage, iteration, hash_), allocate)
        return bytes(buffers[-1]) if text else None

    async def ask(self, stage: int, iteration: int, cut: tuple[int, ...] = ()) -> bytes | None:
        """Return what a peer is given."""
        request = StateRequest(
            run_id=RunId(RUN_ID),
            sender=PEER,
            stage_index=stage,
            iteration=iteration,
            with_optimizer=True,
            cut=cut,
        )
        blob = await self.kept.find(request)
        if blob is None:
            return None
        chunks = described(stage, iteration)[0].chunks
        pieces = [bytes(await blob.read(chunk.offset, chunk.num_bytes)) for chunk in chunks]
        return b"".join(pieces)


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    try:
        yield bench
    finally:
        await bench.kept.close()


@pytest.fixture(name="bench")
def _bench(tmp_path: Path) -> AbstractAsyncContextManager[Bench]:
    return started(tmp_path)


def payload(stage: int, iteration: int) -> bytes:
    description, data = described(stage, iteration)
    return b"".join(data[c.offset : c.offset + c.num_bytes] for c in description.chunks)


async def test_a_state_of_the_same_iteration_but_another_hash_is_replaced(bench: Bench) -> None:
    """The run has gone back, and computed it again: with another roster in the last bits."""
    first = bench.keep(1, 20)
    await wait_until(lambda: first in bench.events)
    description, data = described(1, seed=77)
    hash_ = parameter_hash(description.entries, data)
    bench.kept.keep(1, hash_, ServedState(20, description.text, data, lambda: None))
    await wait_until(lambda: StateKept(1, 20, hash_) in bench.events)
    assert await bench.load(1, 20, hash_) == bytes(data)
    assert await bench.load(1, 20, first.parameter_hash) is None
    for chunk in description.chunks:
        assert bench.kept.local(chunk) is not None


async def test_a_stage_of_another_cut_gets_its_part_and_no_more(tmp_path: Path) -> None:
    """A state that was kept before the model was cut anew is not taken for one of now."""
    whole, data = described(1, 7)
    old, new = (1, 3), (2, 2)
    names = [entry.name for entry in whole.entries]
    wanted = {(1, old): names, (2, new): names[:1]}
    bench = Bench(tmp_path, lambda stage, cut: wanted.get((stage, tuple(cut)), ()))
    bench.keep(1, 7)
    await wait_until(lambda: bench.events)
    buffers: list[memoryview] = []

    def allocate(size_bytes: int) -> memoryview:
        buffers.append(memoryview(bytearray(size_bytes)))
        return buffers[-1]

    async def load(cut: tuple[int, ...], hash_: str = "") -> str | None:
        part = StagePart(new, 2)
        return await bench.kept.load(FetchState((), 1, 7, hash_, cut=cut, part=part), allocate)

    assert await load(new) is None
    assert await load(old, "f" * 64) is None
    text = await load(old, parameter_hash(whole.entries, data))
    assert text is not None
    (entry,) = parse_description(text).entries
    first = whole.entries[0]
    assert (entry.name, entry.sha256) == (first.name, first.sha256)
    assert buffers[-1][: entry.num_bytes] == data[first.offset : first.offset + first.num_bytes]
    assert await bench.ask(1, 7) is None, "a peer asks for it in the run file's cut"
    assert await bench.ask(1, 7, old) is not None


async def test_own_states_are_written_in_order_and_two_stay(bench: Bench) -> None:
    expected = [bench.keep(1, iteration) for iteration in (20, 40, 60)]
    await wait_until(lambda: StateForgotten(1, 20) in bench.events)
    assert bench.events == [*expected, StateForgotten(1, 20)]
    assert sorted(bench.released) == [20, 40, 60]
    kept = [{"stage_index": 1, "iteration": iteration} for iteration in (40, 60)]
    assert bench.kept.describe() == {"kept": kept, "problem": None}
    assert await bench.ask(1, 20) is None
    assert await bench.ask(1, 40) == payload(1, 40)
    chunk = described(1, 60)[0].chunks[0]
    assert bench.kept.local(chunk) == payload(1, 60)[: chunk.num_bytes]
    assert bench.kept.local(described(1, 20)[0].chunks[0]) is None


async def _keep_two(folder: Path) -> None:
    async with started(folder) as bench:
        bench.keep(1, 20)
        bench.keep(0, 20)
        await wait_until(lambda: len(bench.events) == 2)


async def test_a_host_that_is_restarted_has_what_it_kept(tmp_path: Path) -> None:
    await _keep_two(tmp_path)
    async with started(tmp_path) as bench:
        bench.kept.start()
        await wait_until(lambda: len(bench.events) == 2)
        assert {(e.stage_index, e.iteration) for e in bench.events} == {(1, 20), (0, 20)}
        description, data = described(1, 20)
        right = parameter_hash(description.entries, data)
        assert await bench.load(1, 20, right) == bytes(data)
        assert await bench.load(1, 20) == bytes(data)
        assert await bench.load(1, 20, "0" * 64) is None
        assert await bench.load(1, 40) is None


def _spoil(folder: Path) -> None:
    (path,) = folder.rglob("stage-1.safetensors")
    path.write_bytes(bytes(path.stat().st_size))


async def test_a_state_that_went_bad_on_disk_is_not_given(tmp_path: Path, bench: Bench) -> None:
    bench.keep(1, 20)
    await wait_until(lambda: bench.events)
    _spoil(tmp_path)
    assert await bench.load(1, 20) is None
    assert bench.events[-1] == StateForgotten(1, 20)
    assert bench.kept.describe()["problem"]


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


async def test_what_was_altered_while_a_host_was_away_is_told_and_the_rest_is_of_use(
    tmp_path: Path,
) -> None:
    """One chunk is wrong: the state is given to nobody, the other chunks need not be fetched."""
    await _keep_two(tmp_path)
    (path,) = tmp_path.rglob("stage-1.safetensors")
    _flip(path, -1)
    async with started(tmp_path) as bench:
        bench.kept.start()
        await bench.kept.searched()
        assert [(e.stage_index, e.iteration) for e in bench.events] == [(0, 20)]
        ((event, fields),) = [note for note in bench.notes if note[0] != "state.kept"]
        assert (event, fields["stage"], fields["iteration"]) == ("state.damaged", 1, 20)
        chunks = described(1, 20)[0].chunks
        assert fields["reason"] == f"1 of {len(chunks)} chunks are not what was written"
        assert await bench.load(1, 20) is None
        assert await bench.ask(1, 20) is None
        found = [bench.kept.local(chunk) for chunk in chunks]
        assert (
            b"".join(piece for piece in found[:-1] if piece)
            == payload(1, 20)[: -chunks[-1].num_bytes]
        )
        assert found[-1] is None
        again = bench.keep(1, 20)
        await wait_until(lambda: again in bench.events)
        assert await bench.ask(1, 20) == payload(1, 20)
        assert bench.kept.describe()["problem"] is None


async def test_a_bad_manifest_is_told_too(tmp_path: Path) -> None:
    await _keep_two(tmp_path)
    (path,) = tmp_path.rglob("states/1/20/manifest.json")
    _flip(path, 5)
    async with started(tmp_path) as bench:
        bench.kept.start()
        await bench.kept.searched()
        ((event, fields),) = [note for note in bench.notes if note[0] != "state.kept"]
        assert (event, fields["stage"]) == ("state.damaged", 1)
        assert "manifest" in str(bench.kept.describe()["problem"])
        assert [(each.stage_index, each.iteration) for each in bench.events] == [(0, 20)]


async def test_what_goes_bad_under_a_running_node_is_told_once(
    tmp_path: Path, bench: Bench
) -> None:
    bench.kept.start()
    bench.keep(1, 20)
    await wait_until(lambda: bench.events)
    _spoil(tmp_path)
    for chunk in described(1, 20)[0].chunks:
        assert bench.kept.local(chunk) is None
    await wait_until(lambda: len(bench.events) == 2)
    assert bench.events[-1] == StateForgotten(1, 20)
    assert [event for event, _ in bench.notes] == ["state.kept", "state.damaged"]


async def test_a_mirror_that_the_disk_would_not_take_does_not_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    monkeypatch.setattr(
        "os.statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=512), raising=True
    )
    bench.kept.mirror(MirrorState((PEER,), 1, 20, "0" * 64))
    await wait_until(lambda: bench.notes)
    (note,) = bench.notes
    assert note[0] == "state.unkept"
    assert "E-CKP-016" in note[1]["reason"]
    assert len(bench.fetched) == 1, "it is not asked for again at once"
    assert not list(tmp_path.rglob("stage-*"))


async def test_a_failed_write_is_told_and_training_hears_nothing(
    tmp_path: Path, bench: Bench
) -> None:
    (tmp_path / "runs").write_text("no folder")
    bench.keep(1, 20)
    await wait_until(lambda: bench.notes)
    assert bench.notes[0][0] == "state.unkept"
    assert bench.events == []
    assert bench.released == [20]
    assert "could not be written" in str(bench.kept.describe()["problem"])


async def test_mirrors_are_fetched_one_after_another_and_again_if_it_is_too_early(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    monkeypatch.setattr(module, "_MIRROR_PAUSE_S", 0.0)
    bench.refusals = 2
    for stage in (1, 0):
        hash_ = parameter_hash(described(stage, 20)[0].entries, described(stage, 20)[1])
        bench.kept.mirror(MirrorState((PEER,), stage, 20, hash_))
    await wait_until(lambda: len(bench.events) == 2)
    assert [event.stage_index for event in bench.events] == [1, 0]
    assert len(bench.fetched) == 4
    assert await bench.ask(1, 20) == payload(1, 20)
    bench.kept.mirror(MirrorState((PEER,), 1, 20, ""))
    bench.refusals = 10
    bench.kept.mirror(MirrorState((PEER,), 1, 40, "0" * 64))
    await wait_until(lambda: bench.notes[-1][0] == "state.unkept")
    assert bench.refusals == 6, "it is given up after a while"


async def test_states_are_read_to_their_last_byte_before_they_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    one, two = bench.keep(1, 20), bench.keep(0, 20)
    await wait_until(lambda: len(bench.events) == 2)
    asked = tuple(Kept(e.stage_index, e.iteration, e.parameter_hash) for e in (one, two))
    asked += (Kept(2, 20, "pruned meanwhile"),)
    bench.kept.read_kept(asked)
    await wait_until(lambda: len(bench.events) == 3)
    assert bench.events[-1] == KeptRead(asked)
    _spoil(tmp_path)
    bench.kept.read_kept(asked)
    await wait_until(lambda: len(bench.events) == 5)
    assert bench.events[3:] == [StateForgotten(1, 20), KeptRead(asked)]
    assert "were altered" in bench.kept.describe()["problem"]
    assert bench.notes[-1][0] == "state.damaged"
    # A disk that hangs.
    monkeypatch.setattr(module, "_CHUNK_MAX_S", 0.01)
    hangs = threading.Event()
    monkeypatch.setattr(KeptState, "read", lambda *_: hangs.wait())
    bench.kept.read_kept(asked)
    await wait_until(lambda: len(bench.events) == 7)
    hangs.set()
    assert bench.events[5:] == [StateForgotten(0, 20), KeptRead(asked)]
    assert "has not given" in bench.kept.describe()["problem"]


async def test_checkpoints_that_can_not_be_looked_at_are_given_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_checkpoint(tmp_path, 20)
    monkeypatch.setattr(Path, "is_dir", refuse)
    assert await bench.ask(1, 20) is None
    assert "Permission denied" in bench.kept.describe()["problem"]


async def test_the_leaders_checkpoints_are_given_too(tmp_path: Path, bench: Bench) -> None:
    write_checkpoint(tmp_path, 20)
    assert await bench.ask(1, 20) == payload(1, 20)
    assert await bench.load(0, 20) is not None
    assert await bench.load(0, 20, "0" * 64) is None
    assert await bench.ask(1, 0) is None


async def test_a_checkpoint_is_read_to_its_last_byte_and_an_older_one_serves_for_a_bad_one(
    tmp_path: Path, bench: Bench
) -> None:
    folders = {iteration: write_checkpoint(tmp_path, iteration) for iteration in (10, 20, 30)}

    async def found(wanted: int) -> int | None:
        bench.events.clear()
        bench.kept.read_checkpoint(wanted)
        await wait_until(lambda: bool(bench.events))
        (event,) = bench.events
        assert isinstance(event, CheckpointRead)
        assert event.iteration == wanted
        return event.newest

    assert await found(30) == 30
    assert await found(20) == 20
    assert bench.notes == []
    flip_a_byte(folders[30] / stage_file(1))
    assert await found(30) == 20
    shutil.rmtree(folders[30])
    assert await found(30) == 20
    flip_a_byte(folders[20] / stage_file(0))
    assert await found(20) == 10
    shutil.rmtree(folders[10].parent)
    assert await found(20) is None
    assert {name for name, _ in bench.notes} == {"checkpoint.damaged"}
    bad = [(fields["iteration"], fields["reason"]) for _, fields in bench.notes]
    assert [iteration for iteration, _ in bad] == [30, 30, 20, 20]
    assert "was altered" in bad[0][1]
    assert bad[1][1] == bad[3][1] == "it is not there any more"
    assert "checkpoint of iteration 20 is bad" in bench.kept.describe()["problem"]


async def test_the_leaders_checkpoints_in_a_store_serve_as_those_on_its_disk(
    tmp_path: Path, bench: Bench
) -> None:
    shared = SharedCheckpoints(FolderStore(tmp_path / "store"), RUN_ID)
    folders = {}
    for iteration in (20, 30):
        name, blobs = shared.new_folder(iteration), random_blobs(iteration)
        for index, blob in enumerate(blobs):
            shared.write_stage(name, index, blob)
        stages = tuple(packed(blob.entries) for blob in blobs)
        folders[iteration] = shared.finish(name, make_manifest(iteration, stages=stages))
        bench.kept.use_stored(iteration, folders[iteration])
    assert await bench.ask(1, 20) == payload(1, 20)
    assert await bench.load(0, 30) is not None
    bench.kept.read_checkpoint(30)
    await wait_until(lambda: CheckpointRead(30, 30) in bench.events)
    flip_a_byte(Path(str(folders[30])) / stage_file(1))
    bench.events.clear()
    bench.kept.read_checkpoint(30)
    await wait_until(lambda: CheckpointRead(30, 20) in bench.events)
    assert await bench.load(1, 30) is None
