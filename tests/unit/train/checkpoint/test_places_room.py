"""The cap on what a node's folder holds: what would exceed it is not written."""

import os
from pathlib import Path

import pytest

from decod.errors import CheckpointError
from decod.train.checkpoint.places import DiskRoom, size_of_folder
from decod.train.checkpoint.stage_states import StateStore
from tests.unit.train.checkpoint.test_stage_states import keep

KIB = 1024


def test_a_folder_is_as_large_as_its_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "one").write_bytes(bytes(1000))
    (tmp_path / "a" / "b" / "two").write_bytes(bytes(234))
    # A link may lead anywhere, even to a folder above.
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert size_of_folder(tmp_path) == 1234 + os.lstat(tmp_path / "a" / "up").st_size
    assert size_of_folder(tmp_path / "nowhere") == 0


def test_what_would_exceed_the_cap_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(1000))
    room = DiskRoom(tmp_path, 1500)
    room.require(500)
    with pytest.raises(OSError, match="decod set disk"):
        room.require(501)
    room.cap(None)
    room.require(1 << 50)


def test_a_state_that_would_exceed_the_cap_leaves_the_others(tmp_path: Path) -> None:
    room = DiskRoom(tmp_path)
    store = StateStore(tmp_path / "states", room=room)
    kept = keep(store, 1, 20)
    room.cap(size_of_folder(tmp_path) + 10)
    with pytest.raises(CheckpointError, match="disk limit"):
        keep(store, 1, 40)
    # A mirror is not fetched either.
    with pytest.raises(CheckpointError, match="disk limit"):
        store.require_room(2, 100)
    assert store.find() == [kept]
    room.cap(64 * KIB * KIB)
    keep(store, 1, 40)
    assert len(store.find()) == 2
