"""Checkpoints in a store that members share: who writes which part, and what goes wrong there."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from decod.config.node_config import RESUME_LATEST
from decod.daemon.checkpointing import CheckpointPlan, Checkpoints, settings_of
from decod.daemon.disk_states import StoredChunks
from decod.daemon.resume import find_resumed
from decod.errors import CheckpointError
from decod.net.rate_caps import Lane, Pace
from decod.train.checkpoint.description import described_hash, parse_description
from decod.train.checkpoint.iteration_folders import stage_file
from decod.train.checkpoint.manifest import packed
from decod.train.checkpoint.places import Folder
from decod.train.checkpoint.shared import Content, FolderStore, SharedCheckpoints, find_stored
from decod.train.checkpoint.store import CheckpointConfig, find_checkpoints, find_problems
from tests.support.checkpoints import RUN_ID, make_manifest, random_blobs, write_checkpoint
from tests.unit.daemon.gathered import FakeRun, Member, describe
from tests.unit.daemon.nodes import make_manifest as run_manifest
from tests.waiting import wait_until


class Store(FolderStore):
    """A folder that fails while a test says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.failing: str = ""
        """Part of the names that can't be written; empty if all can."""
        self.lost = False

    @override
    def names(self, folder: str) -> list[str]:
        if self.lost:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return super().names(folder)

    @override
    def write(self, name: str, content: Content) -> None:
        if self.lost or (self.failing and self.failing in name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(name, content)


class Counting(Pace):
    """Counts what leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    @override
    async def wait(self, size_bytes: int, lane: Lane) -> None:
        assert lane is Lane.STATES
        self.num_bytes += size_bytes


class Sharing:
    """A leader with a store, and its checkpoints."""

    def __init__(self, tmp_path: Path, run: FakeRun) -> None:
        self.store = Store(tmp_path / "store")
        self.shared = SharedCheckpoints(self.store, RUN_ID)
        self.state_dir = tmp_path / "leader"
        self.pace = Counting()
        self.stored: list[tuple[int, Folder]] = []
        self.run = run
        plan = CheckpointPlan(
            part=run.part,
            state_dir=self.state_dir,
            config=CheckpointConfig(every_iterations=10, keep=2),
            shared=self.shared,
            pace=self.pace,
            on_stored=lambda *told: self.stored.append(told),
        )
        self.checkpoints = Checkpoints(
            run.sources, plan, asyncio.Lock(), note=run.note, on_written=lambda *_: None
        )

    async def commit(self, iteration: int) -> None:
        """Commits an iteration, and waits for its checkpoint."""
        self.run.commit(iteration)
        assert self.checkpoints._task is not None
        await self.checkpoints._task

    def members(self) -> list[Member]:
        return [self.run.members[each.node_id] for each in self.run.view.roster(1)]

    def iterations(self) -> list[int]:
        """Returns those in the store. All are whole."""
        found = find_stored(self.store)
        assert not any(find_problems(each) for each in found)
        return [each.iteration for each in found]

    def on_disk(self) -> list[int]:
        return [each.iteration for each in find_checkpoints(self.state_dir)]

    def told(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.run.notes if name == event]


def payload_bytes(sharing: Sharing, stage_index: int) -> int:
    manifest = find_stored(sharing.store)[0].manifest
    assert manifest is not None
    return sum(entry.num_bytes for entry in manifest.stages[stage_index])


async def test_members_with_the_store_write_their_parts_and_send_nothing(tmp_path: Path) -> None:
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", "r1b", iteration=0))
    for member in sharing.members():
        member.share = sharing.shared
    for iteration in (10, 20, 30):
        await sharing.commit(iteration)
    assert sharing.iterations() == [30, 20]
    assert sharing.on_disk() == []
    first, second = sharing.members()
    assert (first.num_parts, first.num_asked, second.num_parts, second.num_asked) == (
        3,
        0,
        0,
        0,
    )
    assert [iteration for iteration, _ in sharing.stored] == [10, 20, 30]
    described = sharing.checkpoints.describe()
    assert described["folder"] == str(tmp_path / "store")
    assert sharing.pace.num_bytes == 3 * payload_bytes(sharing, 0), "its own stage alone"
    assert (described["iteration"], described["problem"]) == (30, None)
    (path,) = {fields["path"] for fields in sharing.told("checkpoint.written")[-1:]}
    assert path == str(sharing.stored[-1][1])
    assert sharing.run.lent == 0


async def test_without_a_member_with_the_store_the_leader_writes_the_part(tmp_path: Path) -> None:
    """A member without a store is asked once, and then left in peace for a while."""
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", iteration=0))
    await sharing.commit(10)
    await sharing.commit(20)
    assert sharing.iterations() == [20, 10]
    assert sharing.on_disk() == []
    paced = sharing.pace.num_bytes
    assert paced == 2 * (payload_bytes(sharing, 0) + payload_bytes(sharing, 1))
    assert not list(sharing.state_dir.rglob("*.safetensors"))
    assert sharing.told("store.unused") == []


async def test_the_member_with_the_store_writes_though_others_come_first(tmp_path: Path) -> None:
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", "r1b", iteration=0))
    first, second = sharing.members()
    second.share = sharing.shared
    await sharing.commit(10)
    assert sharing.iterations() == [10]
    assert (first.num_asked, second.num_parts) == (0, 1)


async def test_training_goes_on_while_a_member_writes(tmp_path: Path) -> None:
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", iteration=0))
    (member,) = sharing.members()
    member.share = sharing.shared
    member.may_send.clear()
    sharing.run.commit(10)
    await wait_until(lambda: member.num_parts == 1 and not sharing.run.is_blocked)
    assert sharing.run.blocked[0] is True
    sharing.run.commit(11)
    member.may_send.set()
    assert sharing.checkpoints._task is not None
    await sharing.checkpoints._task
    assert sharing.iterations() == [10]


# --- what goes wrong ------------------------------------------------------------------------------


async def test_a_part_that_the_stage_did_not_vote_for_is_not_named(tmp_path: Path) -> None:
    """The leader fetches that stage instead."""
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", iteration=0))
    (member,) = sharing.members()
    member.share = sharing.shared
    sharing.run.leader.hashes = ((1, "0" * 64),)
    await sharing.commit(10)
    (told,) = sharing.told("store.unused")
    assert "do not hash to what the members voted on" in told["reason"]
    assert (member.num_parts, member.num_asked) == (1, 1)
    assert sharing.iterations() == [10]
    voted = described_hash(parse_description(describe(1, 20)).entries)
    sharing.run.leader.hashes = ((1, voted),)
    await sharing.commit(20)
    assert member.num_asked == 1, "the next one is right"
    assert sharing.iterations() == [20, 10]


@pytest.mark.parametrize("manifest", ['{"tensors": [5]}', describe(0, 10), '{"tensors": []}'])
async def test_a_member_that_describes_another_stage_writes_nothing(
    tmp_path: Path, manifest: str
) -> None:
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", iteration=0))
    (member,) = sharing.members()
    member.share, member.manifest = sharing.shared, manifest
    await sharing.commit(10)
    assert len(sharing.told("store.unused")) == 1
    assert "E-CKP-002" in sharing.run.failures()[0], "it sends the same nonsense"
    assert sharing.iterations() == sharing.on_disk() == []


async def test_a_member_with_another_store_is_told_and_its_stage_is_fetched(tmp_path: Path) -> None:
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", iteration=0))
    (member,) = sharing.members()
    member.share = SharedCheckpoints(FolderStore(tmp_path / "elsewhere"), RUN_ID)
    await sharing.commit(10)
    (told,) = sharing.told("store.unused")
    assert "do all hosts name the same store?" in told["reason"]
    assert (told["stage"], member.num_asked) == (1, 1)
    assert sharing.iterations() == [10]


@pytest.mark.parametrize("failing", ["stage-0", "manifest.json", "everything"])
async def test_a_store_that_fails_is_told_and_the_disk_takes_the_checkpoint(
    tmp_path: Path, failing: str
) -> None:
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", iteration=0))
    (member,) = sharing.members()
    member.share = sharing.shared
    await sharing.commit(10)
    store = sharing.store
    store.lost, store.failing = failing == "everything", failing
    await sharing.commit(20)
    (told,) = sharing.told("store.failed")
    assert "No space left" in told["reason"] or "not connected" in told["reason"]
    assert "\n" not in told["reason"]
    assert sharing.on_disk() == [20]
    assert sharing.checkpoints.last == 20
    problem = sharing.checkpoints.describe()["problem"]
    assert problem.startswith("E-CKP-02")
    assert not sharing.run.is_blocked
    assert sharing.run.lent == 0
    store.lost, store.failing = False, ""
    assert sharing.iterations() == [10], "nothing of 20 counts"
    assert len(store.names(RUN_ID)) == 1, "nothing is left of it"
    await sharing.commit(30)
    assert sharing.iterations() == [30, 10]
    assert len(store.names(RUN_ID)) == 2
    assert sharing.checkpoints.describe()["problem"] is None


async def test_a_part_that_a_member_can_not_write_is_fetched(tmp_path: Path) -> None:
    sharing = Sharing(tmp_path, FakeRun(tmp_path, "r1a", iteration=0))
    (member,) = sharing.members()
    own = Store(tmp_path / "store")
    own.failing = "stage-1"
    member.share = SharedCheckpoints(own, RUN_ID)
    await sharing.commit(10)
    assert "No space left" in sharing.told("store.unused")[0]["reason"]
    assert sharing.iterations() == [10]


# --- from the store -------------------------------------------------------------------------------


def write(store: FolderStore, iteration: int, **changes: Any) -> Folder:
    """Writes a checkpoint of the tiny run into a store."""
    manifest, shared = run_manifest(), SharedCheckpoints(store, RUN_ID)
    blobs = random_blobs(iteration, manifest.run.model)
    folder = shared.new_folder(iteration)
    for index, blob in enumerate(blobs):
        shared.write_stage(folder, index, blob)
    stages = tuple(packed(blob.entries) for blob in blobs)
    settings = settings_of(manifest)
    return shared.finish(
        folder, make_manifest(iteration, settings=settings, stages=stages, **changes)
    )


def test_a_run_goes_on_from_the_newest_on_disk_or_in_the_store(tmp_path: Path) -> None:
    store, manifest = Store(tmp_path / "store"), run_manifest()
    folder = write(store, 30)
    blobs = random_blobs(20, manifest.run.model)
    local = write_checkpoint(tmp_path, 20, blobs, settings=settings_of(manifest))
    said: list[str] = []
    found = find_resumed(tmp_path, manifest, RESUME_LATEST, said.append, store).folder
    assert (found, said) == (folder, [])
    part = Path(str(folder)) / stage_file(1)
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    found = find_resumed(tmp_path, manifest, RESUME_LATEST, said.append, store).folder
    assert found == local
    assert f"checkpoint {folder} is bad, the one before is used" in said[0]


def test_a_store_that_can_not_be_read_hides_no_newer_checkpoint(tmp_path: Path) -> None:
    store, manifest = Store(tmp_path / "store"), run_manifest()
    blobs = random_blobs(20, manifest.run.model)
    write_checkpoint(tmp_path, 20, blobs, settings=settings_of(manifest))
    store.lost = True
    with pytest.raises(CheckpointError, match=r"E-CKP-020 .*not connected"):
        find_resumed(tmp_path, manifest, RESUME_LATEST, lambda _: None, store)


def test_a_newcomer_takes_the_chunks_of_its_first_state_from_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    shared = SharedCheckpoints(store, RUN_ID)
    folder, blobs = shared.new_folder(5), random_blobs(5)
    for index, blob in enumerate(blobs):
        shared.write_stage(folder, index, blob)
    manifest = make_manifest(5, stages=tuple(packed(blob.entries) for blob in blobs))
    place = shared.finish(folder, manifest)
    chunks, description = StoredChunks(store, manifest.sha256), parse_description(describe(1, 5))
    failed: list[str] = []
    chunks.on_failed.append(failed.append)
    assert chunks.read(description.chunks[0]) is None, "nothing is awaited"
    chunks.expect(description)
    for chunk in description.chunks:
        expected = blobs[1].data[chunk.offset : chunk.offset + chunk.num_bytes]
        assert chunks.read(chunk) == bytes(expected)
    later = parse_description(describe(1, 6))
    chunks.expect(later)
    assert chunks.read(later.chunks[0]) is None, "it is of another iteration"
    assert failed == []
    (Path(str(place)) / stage_file(1)).unlink()
    chunks.expect(description)
    assert chunks.read(description.chunks[0]) is None
    assert chunks.read(description.chunks[1]) is None
    assert len(failed) == 1, "the store is left after its first failure"


def test_chunks_of_another_checkpoint_are_not_looked_at(tmp_path: Path) -> None:
    store, description = Store(tmp_path / "store"), parse_description(describe(1, 5))
    write(store, 5)
    chunks = StoredChunks(store, "0" * 64)
    chunks.expect(description)
    assert chunks.read(description.chunks[0]) is None
