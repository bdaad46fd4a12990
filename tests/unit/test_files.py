"""Files that are opened are files, and nobody waits for a pipe."""

import os
from pathlib import Path

import pytest

from decod.files import (
    NotOrdinaryError,
    PieceFile,
    open_lock,
    open_ordinary,
    read_at,
    read_beginning,
    read_pieces,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 40_000)
    return path


def test_pieces_are_the_file(file: Path) -> None:
    content = file.read_bytes()
    with open_ordinary(file) as descriptor:
        for start, end in ((0, None), (0, len(content)), (3, 5), (7, 7), (5_000_001, 9_000_000)):
            assert b"".join(read_pieces(descriptor, start, end)) == content[start:end]
        with pytest.raises(OSError, match="it ends at byte 10240000"):
            list(read_pieces(descriptor, 0, len(content) + 1))
        assert read_at(descriptor, len(content) - 2, 10) == content[-2:]


def test_the_beginning_of_a_file_is_all_of_a_short_one(file: Path) -> None:
    assert read_beginning(file, 300) == file.read_bytes()[:300]
    assert read_beginning(file, 10**9) == file.read_bytes()


def test_what_is_no_file_is_not_opened(tmp_path: Path, file: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(file)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(NotOrdinaryError, match="is no ordinary file"), open_ordinary(path):
            pass
    with open_ordinary(link) as descriptor:
        assert read_at(descriptor, 0, 1) == bytes(1)
    with pytest.raises(OSError, match="symbolic links"), open_ordinary(link, follow_links=False):
        pass
    with pytest.raises(NotOrdinaryError):
        open_lock(pipe)


def test_a_file_to_lock_is_made_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    open_lock(path).close()
    path.write_text("kept")
    open_lock(path).close()
    assert path.read_text() == "kept"


def test_a_file_is_written_in_any_order_and_not_after_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = PieceFile(os.open(path, os.O_RDWR | os.O_CREAT))
    file.resize(10)
    file.write_at(6, b"cde")
    file.write_at(0, memoryview(b"ab"))
    assert file.read_at(5, 3) == b"\0cd"
    assert file.read_at(8, 9) == b"e\0"
    file.close()
    file.close()
    with pytest.raises(OSError, match="it is closed"):
        file.write_at(0, b"x")
    assert path.read_bytes() == b"ab\0\0\0\0cde\0"
