"""The few file operations that checkpoints need, one method each.

They are separate from the store so that a test can crash between any two of them.
"""

import os
import stat
from pathlib import Path

PIECE_BYTES = 4 << 20
"""Size of a piece to write, read or hash at a time."""


class FileOperations:
    """Operations of the operating system. Every one may raise OSError."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def create(self, path: Path) -> int:
        """Return the descriptor of a new file. Never opens an existing file."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

    def write(self, descriptor: int, data: memoryview | bytes) -> None:
        """Write all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def sync(self, path: Path) -> None:
        """Wait until a file's content, or a folder's list of names, has reached the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file or folder. Nothing else may have the new name."""
        path.rename(target)

    def remove_file(self, path: Path) -> None:
        """Remove a file, or a symlink itself."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


def remove_tree(folder: Path, files: FileOperations) -> None:
    """Remove a folder and its content, unless it is missing or a symlink."""
    if not is_plain_folder(folder):
        return
    for inner in sorted(folder.iterdir()):
        if is_plain_folder(inner):
            remove_tree(inner, files)
        else:
            files.remove_file(inner)
    files.remove_folder(folder)


def is_plain_folder(path: Path) -> bool:
    """Return whether a path is a folder itself, and not a symlink to one.

    Raises:
        OSError: The path may exist, but can't be examined.
    """
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
