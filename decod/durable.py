"""Files that survive a power loss: written beside their place, synced, renamed, synced."""

import os
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file, and wait until the disk has its content (not yet its name).

    A new file gets `mode`, as far as the process's umask allows.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file's content, completely or not at all, and wait until the disk has it.

    Nothing is left behind if it can't be written.
    """
    new = path.with_name(f".{path.name}.tmp")
    new.unlink(missing_ok=True)
    try:
        write_durably(new, content, mode=mode)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
