"""Files in shared memory, and what becomes of those whose processes were killed."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decod import memory_files
from decod.memory_files import is_in_memory, new_memory_file, remove_orphans

_PATCH = "from pathlib import Path; from decod import memory_files as m; m._FOLDER = Path('WHERE')"
_MAKE = "from decod.memory_files import new_memory_file; print(new_memory_file()[1])"


def _files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory_files, "_FOLDER", tmp_path)
    monkeypatch.setattr(memory_files, "_held", {})
    return tmp_path


def test_a_file_lives_as_long_as_its_process_unless_somebody_removes_it() -> None:
    descriptor, own = new_memory_file()
    os.close(descriptor)
    made = subprocess.run([sys.executable, "-c", _MAKE], capture_output=True, text=True, check=True)
    orphan = Path(made.stdout.strip())
    try:
        assert own.exists()
        assert orphan.exists()
        remove_orphans()
        assert own.exists()
        assert not orphan.exists()
    finally:
        own.unlink()


def test_no_process_id_protects_a_file_and_none_betrays_it(folder: Path) -> None:
    # In another container, this process's id may belong to nobody, or to anybody.
    maker = folder / "decod-state-abc.lock"
    own = folder / "decod-state-abc-1"
    orphan = folder / f"decod-state-{os.getpid()}-1"
    for path in (maker, own, orphan, folder / f"decod-state-{os.getpid()}.lock"):
        path.touch()
    with maker.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_orphans()
        assert _files_in(folder) == [own.name, maker.name]
    remove_orphans()
    assert _files_in(folder) == []


def test_a_child_does_not_hold_the_locks_of_its_parent(folder: Path) -> None:
    new_memory_file()
    ((descriptor, _),) = memory_files._held.values()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0 if not memory_files._held else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    remove_orphans()
    assert len(_files_in(folder)) == 2


def test_an_ordinary_end_leaves_no_lock_behind(folder: Path) -> None:
    _, path = new_memory_file()
    memory_files._let_go()
    assert len(_files_in(folder)) == 2  # Another process is yet to take the file.
    path.unlink()
    memory_files._let_go()
    assert _files_in(folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a namespace of process ids")
def test_a_node_in_another_container_leaves_the_files_alone() -> None:
    descriptor, own = new_memory_file()
    os.close(descriptor)
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    code = "from decod.memory_files import remove_orphans; remove_orphans()"
    try:
        subprocess.run([*inside, code], check=True)
        assert own.exists()
    finally:
        own.unlink()


def test_other_files_stay(folder: Path) -> None:
    others = [folder / name for name in ("decod-state-", "decod-state-abc-1", "else-1-a")]
    others.append(folder / f"decod-state-{'9' * 30}-x")
    for path in others:
        path.touch()
    remove_orphans()
    assert all(path.exists() for path in others)


# --- little room ----------------------------------------------------------------------------------


def only_these(monkeypatch: pytest.MonkeyPatch, memory: Path, disk: Path) -> None:
    monkeypatch.setattr(memory_files, "_FOLDER", memory)
    monkeypatch.setattr(memory_files, "_ON_DISK", disk)
    monkeypatch.setattr(memory_files, "_held", {})
    monkeypatch.setattr(memory_files.tempfile, "gettempdir", lambda: str(disk))


def test_a_file_that_does_not_fit_in_shared_memory_goes_to_a_folder_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    only_these(monkeypatch, memory, disk)
    take_room = memory_files.take_room

    def full(descriptor: int, size: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent == memory:
            raise OSError(errno.ENOSPC, "No space left on device")
        take_room(descriptor, size)

    monkeypatch.setattr(memory_files, "take_room", full)
    descriptor, path = new_memory_file(1000)
    os.close(descriptor)
    assert path.parent == disk
    assert path.stat().st_size == 1000
    assert not is_in_memory(path)
    assert all(each.suffix == ".lock" for each in memory.iterdir()), "what was begun is removed"


def test_shared_memory_that_cannot_be_written_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_these(monkeypatch, Path("/proc"), tmp_path)
    descriptor, path = new_memory_file()
    os.close(descriptor)
    assert path.parent == tmp_path


def test_an_error_says_what_is_wrong_in_each_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_these(monkeypatch, tmp_path, Path("/proc"))
    with pytest.raises(OSError, match=f"room for {1 << 62} bytes \\({tmp_path}: .*, /proc: "):
        new_memory_file(1 << 62)
    assert all(each.suffix == ".lock" for each in tmp_path.iterdir())


def test_orphans_on_disk_are_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = f"{_PATCH}; {_MAKE}".replace("WHERE", str(tmp_path))
    made = subprocess.run([sys.executable, "-c", make], capture_output=True, text=True, check=True)
    orphan = Path(made.stdout.strip())
    assert orphan.parent == tmp_path
    only_these(monkeypatch, tmp_path / "none", tmp_path)
    remove_orphans()
    assert not orphan.exists()
