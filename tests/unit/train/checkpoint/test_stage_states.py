"""Single stages' states on disk: written whole or not at all, found only if every byte is right."""

import dataclasses
from pathlib import Path

import pytest

from decod.errors import CheckpointError
from decod.train.checkpoint.description import (
    Description,
    describe_blob,
    description_text,
    entry_json,
    parameter_hash,
    parse_description,
)
from decod.train.checkpoint.places import FileOperations
from decod.train.checkpoint.stage_states import KeptState, StateStore, state_of_checkpoint
from decod.train.checkpoint.store import read_checkpoint
from tests.support.checkpoints import random_blob, write_checkpoint


def described(stage: int, seed: int) -> tuple[Description, memoryview]:
    """Return what a donor says of a random state, and its blob."""
    blob = random_blob(stage, seed=seed)
    entries, chunks = describe_blob(blob.entries, blob.data)
    text = description_text([entry_json(entry) for entry in entries], "".join(chunks))
    return parse_description(text), blob.data


def keep(store: StateStore, stage: int, iteration: int) -> KeptState:
    description, data = described(stage, iteration)
    return store.write(
        stage, iteration, parameter_hash(description.entries, data), description, data
    )


def test_what_is_kept_is_found_again_as_it_was_described(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states")
    assert store.find() == []
    written = [keep(store, 1, 20), keep(store, 0, 20), keep(store, 1, 40)]
    found = StateStore(tmp_path / "states").find()
    assert found == [written[2], written[0], written[1]]
    description, data = described(1, 40)
    assert found[0].description == description
    for chunk in description.chunks:
        assert found[0].read(chunk.offset) == data[chunk.offset : chunk.offset + chunk.num_bytes]


def test_an_iteration_that_was_computed_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """When the run has gone back, what was written of the future that was given up is replaced."""
    store = StateStore(tmp_path / "states")
    keep(store, 1, 20)
    description, data = described(1, seed=99)
    hash_ = parameter_hash(description.entries, data)
    again = store.write(1, 20, hash_, description, data)
    assert StateStore(tmp_path / "states").find() == [again]
    chunk = description.chunks[0]
    assert again.read(chunk.offset) == data[chunk.offset : chunk.offset + chunk.num_bytes]
    assert [path.name for path in again.path.parent.parent.iterdir()] == ["20"]


def test_the_newest_two_of_each_stage_stay(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states")
    for iteration in (9, 10, 100):
        keep(store, 1, iteration)
    keep(store, 0, 9)
    assert store.prune(1) == [9]
    assert store.prune(1) == store.prune(0) == []
    assert [(s.stage_index, s.iteration) for s in store.find()] == [(1, 100), (1, 10), (0, 9)]


def test_states_of_a_future_that_was_given_up_go_first_and_never_the_newest(tmp_path: Path) -> None:
    """This host was away while the run went back to 40."""
    before = StateStore(tmp_path / "states")
    for iteration in (80, 100):
        keep(before, 1, iteration)
    store = StateStore(tmp_path / "states")
    assert store.prune(1) == [], "nobody knows yet that they were given up"
    keep(store, 1, 60)
    keep(store, 0, 60)
    assert store.prune(1) == [80]
    assert [(s.stage_index, s.iteration) for s in store.find()] == [(1, 100), (1, 60), (0, 60)]
    keep(store, 1, 80)
    assert store.prune(1) == [100]
    assert [s.iteration for s in store.find() if s.stage_index == 1] == [80, 60]


@pytest.mark.parametrize(
    "name", ["../../escape", "/tmp/escape", "stage-0.safetensors", "a/../../b", "\0", "x" * 5000]
)
def test_the_names_of_tensors_never_become_paths(tmp_path: Path, name: str) -> None:
    """A mirror may hold whatever the members of a stage have described."""
    description, data = described(1, 20)
    first, *others = description.entries
    named = dataclasses.replace(
        description, entries=(dataclasses.replace(first, name=name), *others)
    )
    store = StateStore(tmp_path / "runs" / "states")
    hash_ = parameter_hash(named.entries, data)
    store.write(1, 20, hash_, named, data)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    place = "runs/states/1/20"
    assert files == {f"{place}/manifest.json", f"{place}/stage-1.safetensors"}


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "at"), [("manifest.json", 5), ("stage-1.safetensors", 20), ("stage-1.safetensors", -1)]
)
def test_a_flipped_bit_is_noticed(tmp_path: Path, file: str, at: int) -> None:
    store = StateStore(tmp_path / "states")
    state = keep(store, 1, 20)
    _flip(state.path.with_name(file), at)
    assert store.find() == []
    if at == -1:
        with pytest.raises(CheckpointError, match="E-CKP-015"):
            state.read(state.description.chunks[-1].offset)


@pytest.mark.parametrize("change", ["other stage", "other iteration", "link", "cut", "gone"])
def test_what_is_not_what_its_place_says_is_not_found(tmp_path: Path, change: str) -> None:
    store = StateStore(tmp_path / "states")
    path = keep(store, 1, 20).path
    folder = path.parent
    match change:
        case "other stage":
            folder.parent.rename(folder.parent.with_name("2"))
        case "other iteration":
            folder.rename(folder.with_name("21"))
        case "link":
            folder.rename(tmp_path / "20")
            folder.symlink_to(tmp_path / "20")
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "gone":
            path.unlink()
    assert store.find() == []


def test_a_blob_that_is_not_what_was_said_is_not_kept(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states")
    description, data = described(1, 20)
    data = memoryview(bytearray(data))
    data[0] ^= 1
    with pytest.raises(CheckpointError, match="E-CKP-012"):
        store.write(1, 20, "0" * 64, description, data)
    assert store.find() == []
    assert list((tmp_path / "states" / "1").iterdir()) == []


class _FullDisk(FileOperations):
    def write(self, descriptor: int, data: memoryview | bytes) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    kept = keep(StateStore(tmp_path / "states"), 1, 20)
    with pytest.raises(CheckpointError, match="No space left"):
        keep(StateStore(tmp_path / "states", _FullDisk()), 1, 40)
    assert StateStore(tmp_path / "states").find() == [kept]


def test_a_checkpoint_gives_each_stage_as_its_members_would_describe_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 20)
    description, data = described(1, 20)
    state = state_of_checkpoint(read_checkpoint(folder), 1)
    assert state is not None
    assert state.description.id == description.id
    chunk = description.chunks[-1]
    assert state.read(chunk.offset) == data[chunk.offset : chunk.offset + chunk.num_bytes]
    assert state_of_checkpoint(read_checkpoint(folder), 2) is None
    _flip(state.path, -1)
    assert state_of_checkpoint(read_checkpoint(folder), 1) is None
    broken = dataclasses.replace(read_checkpoint(folder), manifest=None)
    assert state_of_checkpoint(broken, 1) is None
