"""When the leader writes checkpoints, and that nothing which goes wrong with them disturbs it."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

from decod.daemon.checkpointing import CheckpointPlan, Checkpoints
from decod.driver import arena
from decod.errors import ConfigError
from decod.protocol.core.era import Mark
from decod.train.checkpoint.places import FileOperations
from decod.train.checkpoint.store import (
    CheckpointConfig,
    CheckpointStore,
    find_checkpoints,
    find_problems,
    run_folder,
)
from tests.support.checkpoints import RUN_ID, write_checkpoint
from tests.support.noted import noted
from tests.unit.daemon.gathered import FakeRun, describe
from tests.waiting import wait_until


def make_checkpoints(
    run: FakeRun,
    state_dir: Path,
    *,
    every: int = 10,
    keep: int = 2,
    files: FileOperations | None = None,
    on_written: Callable[[int, tuple[int, ...]], None] = lambda *_: None,
) -> Checkpoints:
    store = CheckpointStore(run_folder(state_dir, RUN_ID), files)
    config = CheckpointConfig(every_iterations=every, keep=keep)
    plan = CheckpointPlan(part=run.part, state_dir=state_dir, config=config, store=store)
    lock = asyncio.Lock()
    return Checkpoints(run.sources, plan, lock, note=run.note, on_written=on_written)


async def written(checkpoints: Checkpoints) -> None:
    """Waits for the one that is being written."""
    assert checkpoints._task is not None
    await checkpoints._task


def iterations(state_dir: Path) -> list[int]:
    found = find_checkpoints(state_dir)
    assert not any(find_problems(each) for each in found)
    return [each.iteration for each in found]


# --- when -----------------------------------------------------------------------------------------


async def test_one_is_written_every_so_many_iterations_and_so_many_are_kept(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path)
    assert checkpoints.describe()["iteration"] is None
    for iteration in range(1, 41):
        run.commit(iteration)
        if iteration % 10 == 0:
            await written(checkpoints)
    assert iterations(tmp_path) == [40, 30]
    described = checkpoints.describe()
    assert (described["iteration"], described["problem"]) == (40, None)
    assert run.lent == 0


async def test_members_that_step_by_themselves_are_asked_after_an_average(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path)
    for iteration in range(1, 31):
        run.commit(iteration, averaged=iteration % 12 == 0)
        if iteration % 12 == 0:
            await written(checkpoints)
    assert iterations(tmp_path) == [24, 12]
    assert run.failures() == []
    assert not run.is_blocked


async def test_what_is_written_last_counts_as_the_newest_though_the_clock_went_back(
    tmp_path: Path,
) -> None:
    """A checkpoint of another run is from a time when this host's clock was years ahead."""
    write_checkpoint(tmp_path, 60, created_s=4_000_000_000, run_id="s" * 26)
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path, every=2)
    for iteration in range(1, 5):
        run.commit(iteration)
        if not iteration % 2:
            await written(checkpoints)
    assert iterations(tmp_path) == [4, 2, 60]


async def test_training_does_not_wait_for_one_that_takes_long(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    relay = run.members[run.view.roster(1)[0].node_id]
    relay.may_send.clear()
    checkpoints = make_checkpoints(run, tmp_path)
    run.commit(10)
    await wait_until(lambda: run.lent == 1)
    for iteration in range(11, 26):
        run.commit(iteration)
    assert relay.num_asked == 1, "one at a time"
    relay.may_send.set()
    await written(checkpoints)
    assert iterations(tmp_path) == [10]
    run.commit(26)
    await written(checkpoints)
    assert iterations(tmp_path) == [26, 10], "the one that was due meanwhile"


async def test_an_iteration_that_puts_something_off_is_not_kept_if_another_soon_does_not(
    tmp_path: Path,
) -> None:
    """Who resumes reads the next iteration's tokens; what was put off would be missing."""
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path)
    run.commit(10, num_deferred=2)
    run.commit(11, num_deferred=1)
    assert checkpoints._task is None
    run.commit(12)
    await written(checkpoints)
    assert iterations(tmp_path) == [12]
    for iteration in range(20, 30):
        run.commit(iteration, num_deferred=4)
    assert checkpoints._task.done()
    run.commit(30, num_deferred=4)
    await written(checkpoints)
    found = find_checkpoints(tmp_path)[0]
    assert found.manifest is not None
    assert (found.iteration, found.manifest.num_deferred) == (30, 4)


async def test_the_last_iteration_is_kept_when_the_run_ends(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path)
    await checkpoints.finish()
    assert iterations(tmp_path) == [], "nothing has been learnt"
    run.commit(10)
    await checkpoints.finish()
    await checkpoints.finish()
    assert iterations(tmp_path) == [10]
    run.commit(13)
    await checkpoints.finish()
    assert iterations(tmp_path) == [13, 10]


async def test_a_stage_that_leaves_while_the_run_ends_has_the_last_iteration_written_once(
    tmp_path: Path,
) -> None:
    """The members go as soon as it is written: a second try would fail, and say so."""
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path)
    run.commit(7)
    await asyncio.gather(checkpoints.finish(), checkpoints.finish())
    assert iterations(tmp_path) == [7]
    assert [member.num_asked for member in run.members.values()] == [1]
    assert run.failures() == []


async def test_after_the_run_went_back_its_loss_is_that_of_the_iteration_that_is_kept(
    tmp_path: Path,
) -> None:
    """A leader that never heard of that iteration's loss says so, and writes none."""
    run = FakeRun(tmp_path, "r1a", iteration=0)
    run.leader.loss = None
    checkpoints = make_checkpoints(run, tmp_path)
    run.go_back(7)
    await checkpoints.finish()
    assert iterations(tmp_path) == []
    assert "E-CKP-018" in run.failures()[-1]
    run.commit(8, loss=1.5)
    run.commit(9, loss=1.25)
    run.go_back(8)
    await checkpoints.finish()
    (found,) = find_checkpoints(tmp_path)
    assert found.manifest is not None
    assert (found.iteration, found.manifest.loss) == (8, 1.5)


@pytest.mark.parametrize(("back_to", "newest"), [(25, 20), (20, 20), (9, None)])
async def test_after_the_run_went_back_an_older_checkpoint_is_the_newest(
    tmp_path: Path, back_to: int, newest: int | None
) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path)
    for iteration in (10, 20, 30):
        run.commit(iteration)
        await written(checkpoints)
    run.go_back(back_to)
    assert checkpoints.last == newest


async def test_none_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path, every=0)
    run.commit(100)
    await checkpoints.finish()
    await checkpoints.close()
    assert iterations(tmp_path) == []


async def test_after_the_run_went_back_new_ones_stay_and_count_as_the_newest(
    tmp_path: Path,
) -> None:
    """Another node had led since this one wrote 60 and 70, and the run went back to 40."""
    for iteration in (60, 70):
        write_checkpoint(tmp_path, iteration)
    run = FakeRun(tmp_path, "r1a", iteration=45)
    known = list[int]()
    checkpoints = make_checkpoints(
        run, tmp_path, on_written=lambda iteration, _: known.append(iteration)
    )
    assert checkpoints.last is None
    for iteration in range(46, 61):
        run.commit(iteration)
        if iteration % 10 == 0:
            await written(checkpoints)
            assert iterations(tmp_path)[0] == checkpoints.last == known[-1] == iteration
    assert iterations(tmp_path) == [60, 50]
    run.commit(63)
    await checkpoints.finish()
    assert iterations(tmp_path) == [63, 60]
    assert (checkpoints.last, known) == (63, [50, 60, 63])


async def test_the_last_iteration_is_kept_though_an_earlier_one_has_its_number(
    tmp_path: Path,
) -> None:
    """It is of a future that was given up."""
    write_checkpoint(tmp_path, 50)
    run = FakeRun(tmp_path, "r1a", iteration=50)
    checkpoints = make_checkpoints(run, tmp_path)
    assert checkpoints.last == 50
    await checkpoints.finish()
    (found,) = find_checkpoints(tmp_path)
    assert found.manifest is not None
    assert found.manifest.created_s > 1_700_000_050


@pytest.mark.parametrize("values", [{"every_iterations": -1}, {"keep": 0}, {"keep": 1001}])
def test_impossible_wishes_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="checkpoint"):
        CheckpointConfig(**values)


async def test_without_a_device_the_last_is_what_disks_keep_unless_a_newer_one_is_there(
    tmp_path: Path,
) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path, every=5)
    for iteration in range(1, 8):
        run.commit(iteration)
        if iteration == 5:
            await written(checkpoints)
    run.device_gone = True
    run.leader.marks, run.on_disks = (Mark(4, ()), Mark(6, ())), {4}
    await checkpoints.finish()
    assert iterations(tmp_path) == [5], "going back to 4 would lose what is there"
    run.on_disks = {4, 6}
    await checkpoints.finish()
    assert iterations(tmp_path) == [6, 5]


# --- what goes wrong ------------------------------------------------------------------------------


class FillingDisk(FileOperations):
    """A disk that is full while a test says so."""

    full = False

    @override
    def write(self, descriptor: int, data: memoryview | bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data)


async def test_a_full_disk_is_told_and_the_last_good_one_stays(tmp_path: Path) -> None:
    run, disk = FakeRun(tmp_path, "r1a", iteration=0), FillingDisk()
    checkpoints = make_checkpoints(run, tmp_path, files=disk)
    run.commit(10)
    await written(checkpoints)
    disk.full = True
    run.commit(20)
    await written(checkpoints)
    (reason,) = run.failures()
    assert "E-CKP-012" in reason
    assert "No space left" in reason
    described = checkpoints.describe()
    assert (described["iteration"], described["problem"]) == (10, reason)
    assert iterations(tmp_path) == [10]
    run.commit(21)
    assert checkpoints._task is not None
    assert checkpoints._task.done(), "not before the next is due"
    disk.full = False
    run.commit(30)
    await written(checkpoints)
    described = checkpoints.describe()
    assert (described["iteration"], described["problem"]) == (30, None)
    assert iterations(tmp_path) == [30, 10]


async def test_what_does_not_fit_into_memory_is_not_begun(tmp_path: Path) -> None:
    """The system would end the leader, and with it the run."""
    run = FakeRun(tmp_path, "r1a", iteration=0)
    free = [1000]
    config = CheckpointConfig(every_iterations=10)
    checkpoints = Checkpoints(
        run.sources,
        CheckpointPlan(part=run.part, state_dir=tmp_path, config=config),
        asyncio.Lock(),
        note=run.note,
        on_written=lambda *_: None,
        free_memory_bytes=lambda: free[0],
    )
    run.commit(10)
    await written(checkpoints)
    assert "E-CKP-014" in run.failures()[0]
    assert run.blocked == [], "nobody was asked for anything"
    free[0] = 1 << 30
    run.commit(20)
    await written(checkpoints)
    assert iterations(tmp_path) == [20]


async def test_a_state_whose_copy_goes_to_a_file_needs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "IN_MEMORY_MAX_BYTES", 0)
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = Checkpoints(
        run.sources,
        CheckpointPlan(
            part=run.part, state_dir=tmp_path, config=CheckpointConfig(every_iterations=10)
        ),
        asyncio.Lock(),
        note=run.note,
        on_written=lambda *_: None,
        free_memory_bytes=lambda: 0,
    )
    run.commit(10)
    await written(checkpoints)
    assert iterations(tmp_path) == [10]


async def test_a_member_that_vanishes_is_told_and_training_goes_on(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    run.members[run.view.roster(1)[0].node_id].dies_sending = True
    checkpoints = make_checkpoints(run, tmp_path)
    run.commit(10)
    await written(checkpoints)
    (reason,) = run.failures()
    assert "stage 1 did not give its state" in reason
    assert iterations(tmp_path) == []
    assert not run.is_blocked
    assert run.lent == 0


@pytest.mark.parametrize("manifest", ['{"tensors": [5]}', describe(0, 10), '{"tensors": []}'])
async def test_a_member_that_describes_another_stage_spoils_nothing(
    tmp_path: Path, manifest: str
) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    run.members[run.view.roster(1)[0].node_id].manifest = manifest
    checkpoints = make_checkpoints(run, tmp_path)
    run.commit(10)
    await written(checkpoints)
    assert "E-CKP-002" in run.failures()[0]
    assert iterations(tmp_path) == []
    assert run.lent == 0


async def test_what_a_leader_that_was_killed_left_of_another_run_makes_room(tmp_path: Path) -> None:
    """Each resume is a run of its own: nobody writes to the folder of the one before again."""
    other = write_checkpoint(tmp_path, 60, run_id="s" * 26)
    for name in (".writing-70", ".removing-50"):
        shutil.copytree(other, other.with_name(name))
    elsewhere = write_checkpoint(tmp_path / "elsewhere", 1)
    other.with_name(".writing-80").symlink_to(elsewhere)
    run = FakeRun(tmp_path, "r1a", iteration=0)
    checkpoints = make_checkpoints(run, tmp_path)
    run.commit(10)
    await written(checkpoints)
    assert {path.name for path in other.parent.iterdir()} == {"60", ".writing-80"}
    assert iterations(tmp_path) == [10, 60]
    assert elsewhere.is_dir()


class SlowDisk(FileOperations):
    """Stops at its first write until a test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    @override
    def write(self, descriptor: int, data: memoryview | bytes) -> None:
        self.reached.set()
        self.go_on.wait(20)
        super().write(descriptor, data)


async def test_a_node_that_ends_ends_the_checkpoint_that_it_writes(tmp_path: Path) -> None:
    """If the run has lost a stage, it may be all that is left of it."""
    run, disk = FakeRun(tmp_path, "r1a", iteration=0), SlowDisk()
    checkpoints = make_checkpoints(run, tmp_path, files=disk)
    run.commit(10)
    await wait_until(disk.reached.is_set)
    closing = asyncio.create_task(checkpoints.close())
    disk.go_on.set()
    await closing
    assert iterations(tmp_path) == [10]


async def test_one_that_is_written_while_the_run_goes_back_is_not_rested_on(tmp_path: Path) -> None:
    """The run may be going back to the one before: that stays."""
    run, disk = FakeRun(tmp_path, "r1a", iteration=0), SlowDisk()
    known = list[int]()
    checkpoints = make_checkpoints(
        run, tmp_path, keep=1, files=disk, on_written=lambda iteration, _: known.append(iteration)
    )
    disk.go_on.set()
    run.commit(10)
    await written(checkpoints)
    disk.go_on.clear()
    disk.reached.clear()
    run.commit(20)
    await wait_until(disk.reached.is_set)
    returned = {"iteration": 10, "reason": "stage 1 was lost"}
    run.progress.take(noted("run.returned", returned, 0.0))
    disk.go_on.set()
    await written(checkpoints)
    assert set(iterations(tmp_path)) == {10, 20}
    assert (checkpoints.last, known) == (10, [10])
    for iteration in range(11, 21):
        run.commit(iteration)
    await written(checkpoints)
    assert iterations(tmp_path) == [20]
    assert (checkpoints.last, known) == (20, [10, 20])


async def test_until_a_new_one_can_be_gone_back_to_the_one_before_stays(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    there = list[list[int]]()
    checkpoints = make_checkpoints(
        run, tmp_path, keep=1, on_written=lambda *_: there.append(iterations(tmp_path))
    )
    for iteration in (10, 20):
        run.commit(iteration)
        await written(checkpoints)
    assert there == [[10], [20, 10]]
    assert iterations(tmp_path) == [20]


async def test_a_node_that_ends_does_not_wait_for_members(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "r1a", iteration=0)
    relay = run.members[run.view.roster(1)[0].node_id]
    relay.may_send.clear()
    checkpoints = make_checkpoints(run, tmp_path)
    run.commit(10)
    await wait_until(lambda: relay.num_asked)
    await checkpoints.close()
    assert run.lent == 0
    assert iterations(tmp_path) == []


async def test_a_checkpoint_that_is_cancelled_leaves_the_memory_when_nobody_reads_it(
    tmp_path: Path,
) -> None:
    """The writing thread must not read what somebody else writes by then."""
    run, disk = FakeRun(tmp_path, "r1a", iteration=0), SlowDisk()
    checkpoints = make_checkpoints(run, tmp_path, files=disk)
    run.commit(10)
    await wait_until(disk.reached.is_set)
    task = checkpoints._task
    assert task is not None
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert run.lent == 1
    disk.go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    assert run.lent == 0
    assert iterations(tmp_path) == []
    assert list(run_folder(tmp_path, RUN_ID).iterdir()) == []
