"""Files in shared memory, and what becomes of those whose processes were killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decod import memory_files
from decod.memory_files import new_memory_file, remove_orphans

_MAKE = "from decod.memory_files import new_memory_file; print(new_memory_file()[1])"


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


def test_other_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_files, "_FOLDER", tmp_path)
    others = [tmp_path / name for name in ("decod-state-", "decod-state-abc-1", "else-1-a")]
    others.append(tmp_path / f"decod-state-{'9' * 30}-x")
    for path in others:
        path.touch()
    remove_orphans()
    assert all(path.exists() for path in others)
