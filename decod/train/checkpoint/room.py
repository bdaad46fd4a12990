"""The room that a node's operator leaves it on the disk."""

import errno
import os
from pathlib import Path


class DiskRoom:
    """The cap on what a folder holds.

    Args:
        folder: The node's state folder.
        size_max_bytes: Most that it may hold. None: there is no cap.
    """

    def __init__(self, folder: Path, size_max_bytes: int | None = None) -> None:
        self._folder, self.size_max_bytes = folder, size_max_bytes

    def cap(self, size_max_bytes: int | None) -> None:
        """Change the cap from now on. Nothing is removed for it."""
        self.size_max_bytes = size_max_bytes

    def require(self, size_bytes: int) -> None:
        """Check that the folder may hold so many bytes more.

        Raises:
            OSError: It may not.
        """
        most_bytes = self.size_max_bytes
        if most_bytes is None:
            return
        held_bytes = size_of_folder(self._folder)
        if held_bytes + size_bytes > most_bytes:
            held, needed, most = (n / 2**20 for n in (held_bytes, size_bytes, most_bytes))
            raise OSError(
                errno.EDQUOT,
                f"{self._folder} holds {held:.1f} MiB, this takes {needed:.1f} MiB, and the disk"
                f" limit is {most:.1f} MiB (decod set disk)",
            )


def size_of_folder(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes. What vanishes meanwhile counts 0."""
    total = 0
    pending = [os.fspath(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total
