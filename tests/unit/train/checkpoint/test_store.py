"""Checkpoints on disk: all of one or nothing of it, and never a wrong one taken for a right one."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from typing_extensions import override

from decod.errors import CheckpointError
from decod.train.checkpoint.iteration_folders import StageBlob, stage_file
from decod.train.checkpoint.manifest import CheckpointManifest, parse_manifest
from decod.train.checkpoint.places import FileOperations
from decod.train.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    find_checkpoints,
    find_links,
    find_problems,
    find_tensors,
    read_checkpoint,
    remove_unfinished,
    run_folder,
)
from tests.support.checkpoints import (
    RUN_ID,
    arrive,
    flip_a_byte,
    make_manifest,
    random_blobs,
    write_checkpoint,
)
from tests.unit.train.checkpoint.test_stage_states import described


def good(state_dir: Path) -> list[int]:
    """Returns the iterations of the checkpoints that hold, the newest first."""
    return [found.iteration for found in find_checkpoints(state_dir) if not find_problems(found)]


def folders(state_dir: Path) -> set[str]:
    return {path.name for path in run_folder(state_dir, RUN_ID).iterdir()}


def test_what_is_written_is_found_and_holds(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 40)
    (found,) = find_checkpoints(tmp_path)
    assert (found.folder, found.iteration) == (folder, 40)
    assert found.manifest is not None
    assert found.manifest.loss == 2.5
    assert find_problems(found) == []
    assert folders(tmp_path) == {"40"}
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) == (
        found.manifest.size_bytes
    )


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    """Any tool can read them, and finds in them what was given."""
    folder, blobs = write_checkpoint(tmp_path, 3), random_blobs(seed=3)
    for index, blob in enumerate(blobs):
        with safe_open(folder / f"stage-{index}.safetensors", framework="numpy") as file:
            assert set(file.keys()) == {entry.name for entry in blob.entries}
            for entry in blob.entries:
                data = blob.data[entry.offset : entry.offset + entry.num_bytes]
                assert file.get_tensor(entry.name).tobytes() == data


def test_tensors_of_any_stage_are_found(tmp_path: Path) -> None:
    """So a run can go on with its model cut in another way."""
    found = find_tensors(read_checkpoint(write_checkpoint(tmp_path, 3)))
    given = {e.name: (b, e) for b in random_blobs(seed=3) for e in b.entries}
    assert found.keys() == given.keys()
    for name, (source, entry) in given.items():
        expected = source.data[entry.offset : entry.offset + entry.num_bytes]
        assert b"".join(found[name].pieces()) == expected


def test_what_has_arrived_in_its_file_makes_the_same_checkpoint(tmp_path: Path) -> None:
    """It is not written twice, and a byte that the disk has altered meanwhile is found."""
    expected = write_checkpoint(tmp_path / "a", 3)
    store = CheckpointStore(run_folder(tmp_path / "b", RUN_ID))
    for altered in (True, False):
        arriving = store.arriving(3, 1000)
        blobs = random_blobs(seed=3)
        description, data = described(1, 3)
        arrived = arriving.place(stage_file(1), description)
        arrive(data, description, arrived)
        blobs[1] = StageBlob(description.entries, arrived)
        if altered:
            flip_a_byte(arrived.path)
            with pytest.raises(CheckpointError, match=r"E-CKP-012 .* not what its member said"):
                store.write(make_manifest(3), blobs)
        else:
            written = store.write(make_manifest(3), blobs)
        arriving.close()
    assert {p.name: p.read_bytes() for p in written.iterdir()} == {
        p.name: p.read_bytes() for p in expected.iterdir()
    }
    assert folders(tmp_path / "b") == {"3"}


def test_without_room_nothing_is_asked_for(tmp_path: Path) -> None:
    store = CheckpointStore(run_folder(tmp_path, RUN_ID))
    with pytest.raises(CheckpointError, match=r"E-CKP-012 .* iteration 3 .*No space.*MiB"):
        store.arriving(3, 1 << 60)
    assert folders(tmp_path) == set()


def test_what_a_killed_leader_left_arriving_is_removed(tmp_path: Path) -> None:
    store = CheckpointStore(run_folder(tmp_path, RUN_ID))
    description, _ = described(1, 3)
    store.arriving(3, 1000).place(stage_file(1), description)
    remove_unfinished(tmp_path)
    assert folders(tmp_path) == set()


# --- atomicity ------------------------------------------------------------------------------------


class Crash(BaseException):
    """The machine stops. Nothing may handle it."""


class CrashingFiles(FileOperations):
    """Stops before operation `stop_at`; what was not synced by then is gone from the disk."""

    def __init__(self, stop_at: int) -> None:
        self.num_done = 0
        self._stop_at = stop_at
        self._unsynced: set[Path] = set()
        self._descriptors: dict[int, Path] = {}

    def _step(self) -> None:
        if self.num_done == self._stop_at:
            for path in self._unsynced:
                if path.exists():
                    os.truncate(path, path.stat().st_size // 2)
            raise Crash
        self.num_done += 1

    @override
    def make_folder(self, path: Path) -> None:
        self._step()
        super().make_folder(path)

    @override
    def create(self, path: Path) -> int:
        self._step()
        descriptor = super().create(path)
        self._descriptors[descriptor] = path
        self._unsynced.add(path)
        return descriptor

    @override
    def write(self, descriptor: int, data: memoryview | bytes) -> None:
        self._step()
        super().write(descriptor, data)

    @override
    def sync(self, path: Path) -> None:
        self._step()
        super().sync(path)
        self._unsynced.discard(path)

    @override
    def rename(self, path: Path, target: Path) -> None:
        self._step()
        super().rename(path, target)

    @override
    def remove_file(self, path: Path) -> None:
        self._step()
        super().remove_file(path)

    @override
    def remove_folder(self, path: Path) -> None:
        self._step()
        super().remove_folder(path)


def keep_two(state_dir: Path, files: FileOperations) -> None:
    """Writes checkpoint 30 where two others are, and keeps two."""
    store = CheckpointStore(run_folder(state_dir, RUN_ID), files)
    store.write(make_manifest(30, created_s=1_800_000_000), random_blobs(seed=30))
    store.prune(2, 30)


@pytest.mark.parametrize("before", [10, 60], ids=["older ones", "ones of a future given up"])
def test_a_crash_between_any_two_operations_leaves_the_old_or_the_new(
    tmp_path: Path, before: int
) -> None:
    whole, second = tmp_path / "whole", before + 10
    for iteration in (before, second):
        write_checkpoint(whole, iteration)
    expected = {(second, before), (30, second, before), (30, second)}
    seen, stop_at, crashed = set(), 0, True
    while crashed:
        state_dir = tmp_path / str(stop_at)
        shutil.copytree(whole, state_dir)
        try:
            keep_two(state_dir, CrashingFiles(stop_at))
            crashed = False
        except Crash:
            pass
        assert all(not find_problems(found) for found in find_checkpoints(state_dir)), stop_at
        left = tuple(good(state_dir))
        assert left in expected, (stop_at, left)
        seen.add(left)
        # Whatever was left behind, the next one is written, and nothing else stays.
        CheckpointStore(run_folder(state_dir, RUN_ID)).prune(5)
        store = CheckpointStore(run_folder(state_dir, RUN_ID))
        store.write(make_manifest(40), random_blobs(seed=40))
        store.prune(1, 40)
        assert folders(state_dir) == {"40"}
        shutil.rmtree(state_dir)
        stop_at += 1
    assert stop_at > 70, "every write of every tensor is a place to stop at"
    assert seen == expected


def test_what_somebody_has_put_into_one_goes_with_it(tmp_path: Path) -> None:
    mine = write_checkpoint(tmp_path, 10) / "mine" / "notes"
    mine.mkdir(parents=True)
    (mine / "text").write_text("loss looks fine")
    (mine / "link").symlink_to(tmp_path)
    store = CheckpointStore(run_folder(tmp_path, RUN_ID))
    store.write(make_manifest(20), random_blobs())
    store.prune(1, 20)
    assert folders(tmp_path) == {"20"}
    assert tmp_path.is_dir()


class ClutchedFiles(FileOperations):
    """What is to be removed can't be: another program has it open over a network, say."""

    @override
    def remove_folder(self, path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def test_one_that_can_not_be_removed_is_in_no_other_ones_way(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    store = CheckpointStore(run_folder(tmp_path, RUN_ID), ClutchedFiles())
    store.write(make_manifest(20), random_blobs(seed=20))
    with pytest.raises(OSError, match="busy"):
        store.prune(1, 20)
    store.write(make_manifest(30), random_blobs(seed=30))
    assert good(tmp_path) == [30, 20]
    # Nor is it where an iteration comes again, after the run went back.
    store.write(make_manifest(30, created_s=1_900_000_000), random_blobs(seed=31))
    assert good(tmp_path) == [30, 20]


def test_only_so_many_are_kept_and_the_oldest_go(tmp_path: Path) -> None:
    for iteration in (8, 9, 10, 11):
        write_checkpoint(tmp_path, iteration)
    CheckpointStore(run_folder(tmp_path, RUN_ID)).prune(2)
    assert good(tmp_path) == [11, 10]


def test_those_of_a_future_that_was_given_up_go_first_and_never_the_newest(tmp_path: Path) -> None:
    """The run went back to 40 from beyond 69, which this host had written."""
    for iteration in (36, 66, 69):
        write_checkpoint(tmp_path, iteration)
    store, left = CheckpointStore(run_folder(tmp_path, RUN_ID)), []
    for iteration in (54, 57, 60):
        write_checkpoint(tmp_path, iteration, created_s=1_800_000_000 + iteration)
        store.prune(3, iteration)
        left.append(good(tmp_path))
    assert left == [[54, 69, 36], [57, 54, 36], [60, 57, 54]]
    write_checkpoint(tmp_path, 45, created_s=1_900_000_000)
    store.prune(1, 45)
    assert good(tmp_path) == [45]


class FullDisk(FileOperations):
    """Takes so many bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._free_bytes = capacity_bytes

    @override
    def write(self, descriptor: int, data: memoryview | bytes) -> None:
        self._free_bytes -= len(data)
        if self._free_bytes < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data)


@pytest.mark.parametrize("capacity_bytes", [0, 100, 3000, 12_000])
def test_a_full_disk_is_told_and_costs_only_the_new_one(
    tmp_path: Path, capacity_bytes: int
) -> None:
    write_checkpoint(tmp_path, 10)
    store = CheckpointStore(run_folder(tmp_path, RUN_ID), FullDisk(capacity_bytes))
    with pytest.raises(CheckpointError, match=r"E-CKP-012 .* iteration 20 .*No space.*MiB"):
        store.write(make_manifest(20), random_blobs())
    assert good(tmp_path) == [10]
    assert folders(tmp_path) == {"10"}, "what had been written makes room again"


def test_a_state_that_is_not_what_its_member_said_is_no_checkpoint(tmp_path: Path) -> None:
    blobs = random_blobs()
    blobs[1].data[0] ^= 1
    with pytest.raises(CheckpointError, match=r"E-CKP-012 stage-1: .* is not what"):
        CheckpointStore(run_folder(tmp_path, RUN_ID)).write(make_manifest(1), blobs)
    assert folders(tmp_path) == set()


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(run_folder(tmp_path, RUN_ID))
    with pytest.raises(CheckpointError, match="given up"):
        store.write(make_manifest(1), random_blobs(), abandoned=lambda: True)
    assert folders(tmp_path) == set()


# --- bad checkpoints ------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    os.truncate(folder / "stage-1.safetensors", 1000)


def empty(folder: Path) -> None:
    os.truncate(folder / "stage-0.safetensors", 0)


def lengthen(folder: Path) -> None:
    with (folder / "stage-0.safetensors").open("ab") as file:
        file.write(b"\0")


def swap_stages(folder: Path) -> None:
    (folder / "stage-0.safetensors").rename(folder / "x")
    (folder / "stage-1.safetensors").rename(folder / "stage-0.safetensors")
    (folder / "x").rename(folder / "stage-1.safetensors")


def take_from_another(folder: Path) -> None:
    other = write_checkpoint(folder.parents[3] / "other", 21)
    shutil.copy(other / "stage-1.safetensors", folder)


def flip_last_byte(folder: Path) -> None:
    path = folder / "stage-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def flip_header_byte(folder: Path) -> None:
    path = folder / "stage-0.safetensors"
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    path.write_bytes(content)


def huge_header(folder: Path) -> None:
    path = folder / "stage-0.safetensors"
    content = bytearray(path.read_bytes())
    content[:8] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(content)


def garbage_of_right_size(folder: Path) -> None:
    path = folder / "stage-0.safetensors"
    path.write_bytes(os.urandom(path.stat().st_size))


def remove_stage(folder: Path) -> None:
    (folder / "stage-1.safetensors").unlink()


def link_stage(folder: Path) -> None:
    path = folder / "stage-1.safetensors"
    path.rename(folder.parents[3] / "elsewhere")
    path.symlink_to(folder.parents[3] / "elsewhere")


def pipe_stage(folder: Path) -> None:
    path = folder / "stage-1.safetensors"
    path.unlink()
    os.mkfifo(path)


def foreign_file(folder: Path) -> None:
    (folder / "weights.pt").write_bytes(b"\x80\x04")


def link_folder(folder: Path) -> None:
    folder.rename(folder.parents[3] / "elsewhere")
    folder.symlink_to(folder.parents[3] / "elsewhere")


def link_manifest(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parents[3] / "elsewhere")
    (folder / "manifest.json").symlink_to(folder.parents[3] / "elsewhere")


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def empty_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 0)


def sparse_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 1 << 40)


def deep_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def pickled_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"\x80\x04\x95\x10\x00\x00\x00")


def manifest_of_another_iteration(folder: Path) -> None:
    other = write_checkpoint(folder.parents[3] / "other", 21)
    shutil.copy(other / "manifest.json", folder)


def folder_of_another_iteration(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(write_checkpoint(folder.parents[3] / "other", 21), folder)


def file_instead(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("20")


DAMAGES = [
    truncate,
    empty,
    lengthen,
    swap_stages,
    take_from_another,
    flip_last_byte,
    flip_header_byte,
    huge_header,
    garbage_of_right_size,
    remove_stage,
    link_stage,
    pipe_stage,
    foreign_file,
    link_folder,
    link_manifest,
    no_manifest,
    empty_manifest,
    sparse_manifest,
    deep_manifest,
    pickled_manifest,
    manifest_of_another_iteration,
    folder_of_another_iteration,
    file_instead,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_found_out(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    state_dir = tmp_path / "state"
    write_checkpoint(state_dir, 10)
    damage(write_checkpoint(state_dir, 20))
    bad = [found for found in find_checkpoints(state_dir) if found.iteration == 20]
    assert len(bad) == 1
    problems = find_problems(bad[0])
    assert problems
    assert all(problem.isprintable() and len(problem) < 300 for problem in problems), problems
    assert good(state_dir) == [10]


def test_what_systems_and_editors_leave_does_no_harm(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 10)
    for name in (".DS_Store", "._stage-0.safetensors", ".m.swp", "manifest.json~", "Thumbs.db"):
        (folder / name).write_bytes(b"x")
    assert good(tmp_path) == [10]
    (folder / ".folder").mkdir()
    (folder / "notes.txt").write_text("")
    assert find_problems(find_checkpoints(tmp_path)[0]) == [
        ".folder does not belong there: remove it",
        "notes.txt does not belong there: remove it",
    ]


def test_one_that_is_not_there_is_told_from_a_link(tmp_path: Path) -> None:
    """A run may have started from it, and somebody has moved it away."""
    assert read_checkpoint(tmp_path / "40").problem == "it is not there"
    (tmp_path / "40").symlink_to(tmp_path / "absent")
    assert read_checkpoint(tmp_path / "40").problem == "it is no folder, or a symlink to one"


def test_a_link_to_a_runs_folder_is_not_followed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", 5)
    (tmp_path / "state" / "runs").mkdir(parents=True)
    (tmp_path / "state" / "runs" / "linked").symlink_to(tmp_path / "other" / "runs" / RUN_ID)
    assert find_checkpoints(tmp_path / "state") == []
    assert find_checkpoints(tmp_path / "absent") == []
    assert find_links(tmp_path / "state") == [tmp_path / "state" / "runs" / "linked"]
    assert find_links(tmp_path / "other") == find_links(tmp_path / "absent") == []


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    text = (write_checkpoint(tmp_path, 10) / "manifest.json").read_bytes()
    assert parse_manifest(text).to_json() == text
    for position in range(0, len(text), 7):
        changed = bytearray(text)
        changed[position] ^= 1
        with pytest.raises(CheckpointError, match="E-CKP-010"):
            parse_manifest(bytes(changed))
    with pytest.raises(CheckpointError, match="its own hash"):
        parse_manifest(text + b" ")


def signed(manifest: CheckpointManifest, **changes: object) -> bytes:
    """Returns a manifest with impossible values and a hash that holds."""
    return replace(manifest, **changes).to_json()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("iteration", 0),
        ("iteration", True),
        ("iteration", 1 << 60),
        ("run_id", "../../etc"),
        ("run_id", 5),
        ("created_s", -1),
        ("created_s", 253_402_300_800),
        ("loss", 3),
        ("loss", "3"),
        ("num_deferred", -1),
        ("settings", {"model": {"nested": 1}}),
        ("settings", {str(number): 1 for number in range(1001)}),
        ("stages", ()),
    ],
)
def test_a_manifest_with_impossible_values_is_refused_though_its_hash_holds(
    tmp_path: Path, field: str, value: object
) -> None:
    found = read_checkpoint(write_checkpoint(tmp_path, 10))
    assert found.manifest is not None
    with pytest.raises(CheckpointError, match="E-CKP-010"):
        parse_manifest(signed(found.manifest, **{field: value}))


@pytest.mark.parametrize(
    "changes", [{"offset": 4}, {"num_bytes": 1 << 40}, {"dtype": "int8"}, {"shape": (1 << 61, 8)}]
)
def test_tensors_lie_one_behind_another(tmp_path: Path, changes: dict[str, object]) -> None:
    """A gap would be a place for bytes that nothing vouches for."""
    found = read_checkpoint(write_checkpoint(tmp_path, 10))
    assert found.manifest is not None
    first, *others = found.manifest.stages[0]
    first = replace(first, **changes)  # type: ignore[arg-type]
    stages = ((first, *others), found.manifest.stages[1])
    # A dtype that is unknown has no place in a header either, so the text is made by hand.
    values = json.loads(found.manifest.to_json())
    values["stages"][0][0] |= {**changes, "shape": list(first.shape)}
    text = signed(found.manifest, stages=stages)
    for each in (text, json.dumps(values).encode()):
        with pytest.raises(CheckpointError, match="E-CKP-010"):
            parse_manifest(each)


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    """Who goes back to iteration 20 wants to go on from there, and not from an older run's 60."""
    write_checkpoint(tmp_path, 60, created_s=1000)
    write_checkpoint(tmp_path, 21, created_s=2000, run_id="s" * 26)
    assert [found.iteration for found in find_checkpoints(tmp_path)] == [21, 60]
    assert isinstance(find_checkpoints(tmp_path)[0], Checkpoint)
