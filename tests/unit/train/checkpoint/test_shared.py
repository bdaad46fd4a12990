"""Checkpoints in a store that members share: a folder or an object store, and stores that fail."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from decod.errors import CheckpointError, ConfigError
from decod.train.checkpoint.description import Description
from decod.train.checkpoint.iteration_folders import StageBlob, stage_file
from decod.train.checkpoint.manifest import packed
from decod.train.checkpoint.places import Folder, address_of
from decod.train.checkpoint.shared import (
    Content,
    FolderStore,
    SharedCheckpoints,
    SharedStore,
    SharedStoreError,
    UrlStore,
    find_stored,
    open_store,
    parse_folder,
)
from decod.train.checkpoint.stage_states import state_of_checkpoint
from decod.train.checkpoint.store import (
    find_problems,
    find_tensors,
    read_checkpoint,
    run_folder,
    run_id_of,
)
from tests.support.checkpoints import RUN_ID, make_manifest, random_blobs, write_checkpoint
from tests.unit.train.checkpoint.test_stage_states import described


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedStore]:
    if request.param == "folder":
        yield open_store(str(tmp_path / "store"))
        return
    fsspec = pytest.importorskip("fsspec")
    yield open_store(f"memory://{tmp_path.name}/store")
    fsspec.filesystem("memory").rm("/", recursive=True)


def write(shared: SharedCheckpoints, iteration: int, **changes: Any) -> Folder:
    """Writes a whole checkpoint."""
    folder, blobs = shared.new_folder(iteration), random_blobs(iteration)
    for index, blob in enumerate(blobs):
        shared.write_stage(folder, index, blob)
    stages = tuple(packed(blob.entries) for blob in blobs)
    return shared.finish(folder, make_manifest(iteration, stages=stages, **changes))


def iterations(store: SharedStore) -> list[int]:
    return [each.iteration for each in find_stored(store)]


def spoil(store: SharedStore, folder: Folder, name: str, change: Callable[[bytes], bytes]) -> None:
    """Changes a file of a checkpoint behind everybody's back."""
    path = f"{RUN_ID}/{folder.name}/{name}"
    content = store.read(path, 0, store.size_bytes(path))
    store.write(path, [change(content)])


def description_of(iteration: int, stage_index: int) -> Description:
    return described(stage_index, iteration)[0]


def test_a_checkpoint_has_the_bytes_that_it_has_on_a_leaders_disk(
    store: SharedStore, tmp_path: Path
) -> None:
    folder = write(SharedCheckpoints(store, RUN_ID), 5)
    local = write_checkpoint(tmp_path / "leader", 5)
    for name in ("manifest.json", stage_file(0), stage_file(1)):
        content = (local / name).read_bytes()
        assert store.read(f"{RUN_ID}/{folder.name}/{name}", 0, 1 << 20) == content
    (found,) = find_stored(store)
    assert found.run_id == RUN_ID
    assert run_id_of(run_folder(tmp_path, RUN_ID) / "5") == RUN_ID
    assert find_problems(found) == []


def test_a_folder_counts_once_its_manifest_is_there(store: SharedStore) -> None:
    shared = SharedCheckpoints(store, RUN_ID)
    folder, blobs = shared.new_folder(4), random_blobs(4)
    for index, blob in enumerate(blobs):
        shared.write_stage(folder, index, blob)
    assert find_stored(store) == []
    stages = tuple(packed(blob.entries) for blob in blobs)
    shared.finish(folder, make_manifest(4, stages=stages))
    assert iterations(store) == [4]


def test_tensors_are_read_piece_by_piece_from_where_they_lie(store: SharedStore) -> None:
    folder = write(SharedCheckpoints(store, RUN_ID), 5)
    checkpoint = read_checkpoint(parse_folder(str(folder)))
    blob, kept = random_blobs(5)[1], state_of_checkpoint(checkpoint, 1)
    assert kept is not None
    for chunk in kept.description.chunks:
        expected = bytes(blob.data[chunk.offset : chunk.offset + chunk.num_bytes])
        assert kept.read(chunk.offset) == expected
    tensor = find_tensors(checkpoint)[blob.entries[0].name]
    assert hashlib.sha256(b"".join(tensor.pieces())).hexdigest() == tensor.entry.sha256


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content[:-1] + b"?", "was altered"),
        (lambda content: content[:-1], "bytes, not"),
        (lambda content: b"?" + content[1:], "header was altered"),
    ],
)
def test_a_damaged_part_is_found(
    store: SharedStore, change: Callable[[bytes], bytes], problem: str
) -> None:
    folder = write(SharedCheckpoints(store, RUN_ID), 5)
    spoil(store, folder, stage_file(1), change)
    (found,) = find_stored(store)
    assert problem in find_problems(found)[0]


def test_a_damaged_manifest_makes_no_checkpoint(store: SharedStore) -> None:
    folder = write(SharedCheckpoints(store, RUN_ID), 5)
    spoil(store, folder, "manifest.json", lambda content: content[:-2])
    (found,) = find_stored(store)
    assert found.manifest is None
    assert "not JSON" in found.problem


def test_the_leader_looks_whether_a_members_part_is_there(store: SharedStore) -> None:
    shared, blob = SharedCheckpoints(store, RUN_ID), random_blobs(5)[1]
    folder = shared.new_folder(5)
    with pytest.raises(SharedStoreError, match="do all hosts name the same store"):
        shared.require_stage(folder, 1, description_of(5, 1))
    shared.write_stage(folder, 1, blob)
    shared.require_stage(folder, 1, description_of(5, 1))
    # Its only chunks are those of other bytes.
    with pytest.raises(SharedStoreError, match="altered"):
        shared.require_stage(folder, 1, description_of(6, 1))


def test_a_state_that_is_not_what_its_member_said_leaves_no_part(store: SharedStore) -> None:
    shared, blob = SharedCheckpoints(store, RUN_ID), random_blobs(5)[1]
    folder, other = shared.new_folder(5), random_blobs(6)[1]
    with pytest.raises(CheckpointError, match=r"E-CKP-012 .* is not what its member said"):
        shared.write_stage(folder, 1, StageBlob(blob.entries, other.data))
    assert stage_file(1) not in store.names(f"{RUN_ID}/{folder}")
    with pytest.raises(CheckpointError, match="given up"):
        shared.write_stage(folder, 1, blob, lambda: True)
    assert stage_file(1) not in store.names(f"{RUN_ID}/{folder}")


def test_old_and_unfinished_ones_are_pruned(store: SharedStore) -> None:
    shared = SharedCheckpoints(store, RUN_ID)
    for iteration in (1, 2, 3):
        last = write(shared, iteration)
    write(SharedCheckpoints(store, "s" * 26), 1)
    unfinished, begun = shared.new_folder(2), shared.new_folder(4)
    for folder in (unfinished, begun):
        shared.write_stage(folder, 0, random_blobs()[0])
    shared.prune(2, last.name)
    assert iterations(store) == [3, 2, 1], "another run's stays"
    names = store.names(RUN_ID)
    assert unfinished not in names
    assert begun in names, "another leader may be writing it"


def test_after_a_rollback_the_abandoned_future_goes_first(store: SharedStore) -> None:
    shared = SharedCheckpoints(store, RUN_ID)
    for iteration in (10, 20):
        write(shared, iteration, created_s=1_700_000_000 + iteration)
    last = write(shared, 5, created_s=1_700_000_100)
    again = write(shared, 10, created_s=1_700_000_200)
    assert last.name != again.name
    shared.prune(2, again.name)
    assert iterations(store) == [10, 5]


def test_what_others_keep_in_the_store_is_left_alone(store: SharedStore) -> None:
    shared = SharedCheckpoints(store, RUN_ID)
    folder = write(shared, 5)
    store.write("notes/1-00000000/readme.txt", [b"mine"])
    store.write(f"{RUN_ID}/notes.txt", [b"mine"])
    shared.prune(1, folder.name)
    assert iterations(store) == [5]
    assert store.read("notes/1-00000000/readme.txt", 0, 10) == b"mine"
    assert "notes.txt" in store.names(RUN_ID)


# --- stores that fail -----------------------------------------------------------------------------


class FailingStore(FolderStore):
    """A folder whose calls fail from one on."""

    def __init__(self, path: Path, after: int) -> None:
        super().__init__(path)
        self.left = after

    def _call(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    @override
    def names(self, folder: str) -> list[str]:
        self._call()
        return super().names(folder)

    @override
    def size_bytes(self, name: str) -> int:
        self._call()
        return super().size_bytes(name)

    @override
    def write(self, name: str, content: Content) -> None:
        self._call()
        super().write(name, content)

    @override
    def remove(self, folder: str, first: str) -> None:
        self._call()
        super().remove(folder, first)


@pytest.mark.parametrize("after", range(9))
def test_a_store_that_fails_at_any_call_keeps_the_old_checkpoint_or_has_the_new(
    tmp_path: Path, after: int
) -> None:
    whole = FolderStore(tmp_path)
    write(SharedCheckpoints(whole, RUN_ID), 1)
    failing = SharedCheckpoints(FailingStore(tmp_path, after), RUN_ID)
    failure, found = "", []
    try:
        folder = write(failing, 2)
        failing.prune(1, folder.name)
        found = find_stored(failing.store)
    except (SharedStoreError, OSError) as error:  # Pruning leaves OSError to its caller.
        failure = str(error)
    if failure:
        assert "Permission denied" in failure
    else:
        assert [each.iteration for each in found] == [2]
    assert iterations(whole) in ([1], [2, 1], [2])
    assert not any(find_problems(each) for each in find_stored(whole))


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    shared = SharedCheckpoints(FolderStore(tmp_path / "store"), RUN_ID)
    with pytest.raises(SharedStoreError, match=r"E-CKP-021 .*(Not a directory|File exists)"):
        write(shared, 1)


class BrokenFiles:
    """A file system of fsspec whose calls raise what no other store raises."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> None:
            raise RuntimeError(f"Unable to locate\ncredentials for {name}")

        return call


def test_exceptions_of_all_stores_become_one_line(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = UrlStore(f"memory://{tmp_path.name}")
    store._files = BrokenFiles()
    shared = SharedCheckpoints(store, RUN_ID)
    with pytest.raises(SharedStoreError, match=r"E-CKP-021 .*to locate credentials") as failed:
        write(shared, 1)
    assert "\n" not in str(failed.value)
    with pytest.raises(SharedStoreError, match=r"E-CKP-020 .*Unable to locate credentials"):
        find_stored(store)
    with pytest.raises(OSError, match="Unable to locate credentials"):
        shared.discard("1-00000000")


def test_a_missing_package_is_told_with_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-095 .*\[objects\]"):
        open_store("nosuchstore://bucket/run")


def test_a_password_in_a_url_is_used_and_not_shown() -> None:
    pytest.importorskip("fsspec")
    folder = open_store("memory://me:secret@bucket/run").folder(f"{RUN_ID}/1-00000000")
    assert str(folder) == f"memory://bucket/run/{RUN_ID}/1-00000000"
    assert address_of(folder) == f"memory://me:secret@bucket/run/{RUN_ID}/1-00000000"
    assert address_of(parse_folder(address_of(folder))) == address_of(folder)


def test_file_urls_are_paths(tmp_path: Path) -> None:
    assert str(open_store(f"file://{tmp_path}/a")) == f"{tmp_path}/a"
