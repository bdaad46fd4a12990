"""Blocks: the pieces of a corpus with a hash of their own, and those that this host's disk keeps.

Corpora in object stores are kept block by block, a file for each. Cheap to import.

    CACHE/0c31f0a2b97d4e11/index.json           of a corpus, named by its index's hash
                           tokenizer.json
                           blocks/00003/262144  of shard 3, from that byte on

Several processes and nodes may share a cache, without a word to each other: a file appears complete
or not at all, its readers compare it with its hash, and a file that was removed is fetched again.
The blocks used last stay. A cache has no other state than its files, so it survives any end.
"""

import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decod.errors import DataError
from decod.files import open_lock, open_ordinary, read_at

OnRead = Callable[[int], None]
"""Called with the number of bytes read from disk since the last call."""

BLOCKS_TOLD_MAX = 64
"""Largest number of bad blocks in one error. The others are found once these are replaced."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a shard."""

    shard_index: int
    offset: int
    """Offset in the shard's file, in bytes."""
    num_bytes: int


class BlockError(DataError):
    """Blocks of a corpus can't be read, or were altered. Another copy of the corpus may have them.

    You get a plain `DataError` if another copy would be no better.

    Args:
        problems: The bad blocks, each with its error. Not empty.
    """

    def __init__(self, problems: Mapping[Block, DataError]) -> None:
        self.blocks = tuple(problems)[:BLOCKS_TOLD_MAX]
        first = next(iter(problems.values()))
        more = len(problems) - 1
        what = f"{first.what} (and {more} more blocks are bad)" if more else first.what
        super().__init__(what, why=first.why, fix=first.fix, code=first.code)


BLOCKS_FOLDER = "blocks"
LOCK_FILE = ".lock"
"""A file in the cache's folder. Whoever changes more than one file holds its lock."""

_UNFINISHED = ".part-"
_UNFINISHED_MAX_S = 3600.0
"""An older file was left by a process that was killed."""
_KEPT_SHARE = 0.9
"""The share of the limit that is kept, once blocks are removed. So a search for the oldest pays for
many new ones."""


def is_cached(folder: Path) -> bool:
    """Return whether a folder is what a cache holds of a corpus, rather than all of one."""
    return (folder / BLOCKS_FOLDER).is_dir()


class BlockCache:
    """The blocks of one corpus in a cache. Its methods may be called from several threads.

    Args:
        folder: The corpus's folder in the cache.
        limit_bytes: Returns how much the whole cache may hold. It holds that, and a tenth more
            for each further node that shares it. None: nothing is added here.
    """

    def __init__(self, folder: Path, limit_bytes: Callable[[], int] | None = None) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held_bytes: int | None = None
        """The size of the whole cache, roughly. None: not counted yet."""
        self._new_bytes = 0
        """Added since the last count."""

    @property
    def limit_bytes(self) -> int:
        """What the whole cache may hold."""
        return 0 if self._limit_bytes is None else self._limit_bytes()

    def path(self, block: Block) -> Path:
        """Return the path of a block's file."""
        return self.folder / BLOCKS_FOLDER / f"{block.shard_index:05d}" / str(block.offset)

    def holds(self, block: Block) -> bool:
        """Return whether there is a file for a block, which counts as used now."""
        try:
            os.utime(self.path(block))
        except OSError:
            return False
        return True

    def get(self, block: Block) -> bytes | None:
        """Return a block's bytes, unchecked; None if they are not here. They count as used now."""
        path = self.path(block)
        try:
            with open_ordinary(path, follow_links=False) as descriptor:
                content = read_at(descriptor, 0, block.num_bytes + 1)
            # A folder that others share may be one that this user may only read.
            with suppress(PermissionError):
                os.utime(path)
        except OSError:
            return None
        return content

    def put(self, block: Block, content: bytes) -> None:
        """Keep a block that was compared with its hash, and remove the oldest if need be.

        Raises:
            OSError: The disk refuses.
        """
        path = self.path(block)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
        try:
            # Not synced: a power cut may leave a wrong file, which its hash tells.
            unfinished.write_bytes(content)
            unfinished.replace(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        with self._lock:
            self._count(len(content))

    def drop(self, block: Block) -> None:
        """Remove a block whose bytes are wrong."""
        with suppress(OSError):
            self.path(block).unlink()

    def _count(self, num_bytes: int) -> None:
        """Take note of new bytes, and make room if the cache has grown too large."""
        limit = self.limit_bytes
        self._new_bytes += num_bytes
        if self._held_bytes is not None:
            self._held_bytes += num_bytes
            # Others may add blocks too.
            counted_lately = self._new_bytes < limit * (1 - _KEPT_SHARE)
            if self._held_bytes <= limit and counted_lately:
                return
        self._held_bytes = self._make_room(limit)
        self._new_bytes = 0

    def _make_room(self, limit: int) -> int:
        """Remove the oldest blocks if the cache is larger than this; return what it holds."""
        root = self.folder.parent
        with open_lock(root / LOCK_FILE) as lock:
            # One at a time, or two would remove twice as much. The system frees it with the file.
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.utime(lock.fileno())
            now_s = os.fstat(lock.fileno()).st_mtime  # By the clock that marks the files.
            files = sorted(_files(root, now_s - _UNFINISHED_MAX_S))
            held_bytes = sum(size for _, size, _ in files)
            # Others need room on the disk, too.
            limit = min(limit, held_bytes + shutil.disk_usage(root).free // 2)
            if held_bytes <= limit:
                return held_bytes
            for _, size, path in files:
                if held_bytes <= limit * _KEPT_SHARE:
                    break
                with suppress(OSError):
                    os.unlink(path)
                held_bytes -= size
        return held_bytes


def _files(root: Path, long_ago_s: float) -> Iterator[tuple[float, int, str]]:
    """Yield the blocks of all corpora: when they were used last, their sizes and paths."""
    for folder in root.glob(f"*/{BLOCKS_FOLDER}/*"):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if not entry.name.startswith(_UNFINISHED):
                        yield status.st_mtime, status.st_size, entry.path
                    elif status.st_mtime < long_ago_s:
                        os.unlink(entry.path)
