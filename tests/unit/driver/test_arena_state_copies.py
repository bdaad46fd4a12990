"""Large states of the driver, its own and those that it fetches, which go to files."""

import asyncio
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from decod.driver import arena
from decod.driver.arena import CopyFile, StateCopies
from decod.driver.compute import JobError, Reply
from decod.driver.driver import ServedState
from decod.ids import JobId, TensorId
from decod.protocol.core import effects as fx
from decod.protocol.core import events as ev
from decod.protocol.core import jobs
from decod.protocol.core.effects import Effect
from decod.train.checkpoint.description import StateSink
from decod.train.checkpoint.places import DiskRoom
from tests.unit.driver.test_driver import MANIFEST, NUDGE, PEER, Bench, driving, start_job
from tests.waiting import wait_until


@pytest.fixture(name="bench")
def _bench() -> AbstractAsyncContextManager[Bench]:
    return driving()


def in_files(bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All copies of the driver's state go to files. Returns their folder."""
    monkeypatch.setattr(arena, "IN_MEMORY_MAX_BYTES", 0)
    bench.driver._copies = StateCopies(folder, DiskRoom(folder, 250))
    return folder / "copies"


async def test_a_large_copy_is_served_from_a_file_and_removed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    folder = in_files(bench, tmp_path, monkeypatch)
    askers = [
        asyncio.create_task(bench.driver.request_state(1, 4, with_optimizer=False))
        for _ in range(2)
    ]
    await wait_until(lambda: len(bench.machine.events) == 2)
    bench.script([start_job(jobs.Snapshot(with_optimizer=False))])
    bench.driver.post(NUDGE)
    described = jobs.SnapshotTaken(4, MANIFEST, 100)
    bench.compute.jobs[0][1].set_result(Reply(described, 0.0))
    await wait_until(lambda: len(bench.compute.jobs) == 2)
    (output,) = bench.compute.jobs[1][2]
    reference = output.reference()
    assert reference["num_bytes"] == output.num_bytes == 100
    (folder / str(reference["path"])).write_bytes(bytes(range(100)))

    def serve(event: ev.Event) -> list[Effect]:
        assert isinstance(event, ev.JobFinished)
        return [fx.ServeState((1, 2), 4, MANIFEST, event.outputs[0].id)]

    bench.script(serve)
    bench.compute.jobs[1][1].set_result(Reply(described, 0.0))
    first, second = [await asker for asker in askers]
    assert isinstance(first, ServedState)
    assert isinstance(second, ServedState)
    assert bench.arena.used_bytes == 0
    first.release()
    assert len(second.data) == 100
    assert second.data[90:95] == bytes(range(90, 95))
    second.release()
    await wait_until(lambda: not list(folder.iterdir()))


@pytest.mark.parametrize(
    ("num_bytes", "reason"),
    [
        (240, ""),  # The disk holds 100 of 250 already, so it goes to memory.
        (1 << 17, "no room for a copy of the state: .*the disk limit is 0.0 MiB"),
    ],
)
async def test_a_copy_that_the_disk_has_no_room_for_goes_to_memory_or_is_refused(
    num_bytes: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    in_files(bench, tmp_path, monkeypatch)
    (tmp_path / "other").write_bytes(bytes(100))
    copy = asyncio.create_task(bench.driver.run_copy(jobs.Snapshot(with_optimizer=True)))
    await wait_until(lambda: bench.compute.jobs)
    described = jobs.SnapshotTaken(4, MANIFEST, num_bytes)
    bench.compute.jobs[0][1].set_result(Reply(described, 0.0))
    if not reason:
        await wait_until(lambda: len(bench.compute.jobs) == 2)
        bench.compute.jobs[1][1].set_result(Reply(described, 0.0))
    found = await copy
    if reason:
        assert re.match(reason, str(found)), found
    else:
        assert isinstance(found, ServedState)
        assert isinstance(found.data, memoryview)
        found.release()
    assert bench.arena.used_bytes == 0


@pytest.mark.parametrize("stops_first", [False, True])
async def test_the_file_of_a_copy_that_fails_is_removed(
    stops_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    folder = in_files(bench, tmp_path, monkeypatch)
    bench.script([start_job(jobs.Snapshot(with_optimizer=True))])
    bench.driver.post(NUDGE)
    described = jobs.SnapshotTaken(4, MANIFEST, 100)
    bench.compute.jobs[0][1].set_result(Reply(described, 0.0))
    await wait_until(lambda: len(bench.compute.jobs) == 2)
    assert len(list(folder.iterdir())) == 1
    if stops_first:
        bench.script([fx.Stop(fx.StopReason.DRAINED, "")])
        bench.driver.post(NUDGE)
    error = {"code": "E-X-001", "what": "disk", "why": "full", "fix": "free it"}
    bench.compute.jobs[1][1].set_exception(JobError(error))
    await wait_until(lambda: not list(folder.iterdir()))
    failed = ev.JobFailed(JobId(1), "E-X-001 disk: full", fatal=False)
    assert (bench.machine.events[-1] == failed) is not stops_first


@pytest.mark.parametrize("with_optimizer", [True, False])
async def test_a_large_state_that_is_fetched_is_loaded_from_a_file(
    with_optimizer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """Parameters alone are fetched in each iteration, and stay in memory."""
    folder = in_files(bench, tmp_path, monkeypatch)

    def give(sink: StateSink) -> str:
        forgotten, place = sink.allocate(200), sink.allocate(100)
        assert forgotten is not None
        assert place is not None
        place[40:50] = bytes(range(10))
        return MANIFEST

    def load(event: ev.Event) -> list[Effect]:
        assert isinstance(event, ev.StateFetched)
        return [start_job(jobs.Load(4, (MANIFEST,)), event.tensor.id)]

    bench.transport.fetched = give
    wanted = fx.FetchState((PEER,), 1, 4, with_optimizer=with_optimizer)
    bench.script([wanted], load)
    bench.driver.post(NUDGE)
    await wait_until(lambda: bench.compute.jobs)
    ((source,),) = bench.compute.inputs
    assert isinstance(source, CopyFile) is with_optimizer
    assert source.view[40:50] == bytes(range(10))
    if isinstance(source, CopyFile):
        await wait_until(lambda: len(list(folder.iterdir())) == 1)
        path = folder / str(source.reference()["path"])
        assert path.read_bytes()[40:50] == bytes(range(10))
        assert bench.arena.used_bytes == 0
    bench.script([fx.FreeTensor(TensorId(1))])
    bench.driver.post(NUDGE)
    await wait_until(lambda: not folder.exists() or not list(folder.iterdir()))
    assert bench.arena.used_bytes == 0


def test_copies_that_a_killed_process_has_left_are_removed(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "1-0").write_bytes(b"left")
    StateCopies(tmp_path, DiskRoom(tmp_path))
    assert not (tmp_path / "copies").exists()
