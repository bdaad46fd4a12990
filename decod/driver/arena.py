"""The memory that node and compute process share: one anonymous file, mapped by both.

Each tensor is written into it once, by the network or the device, and read in place by the other.
The file has no name, so it vanishes with its last process, even after a crash. Its pages take
memory only once they have been written, so its size is a bound (invariant I6), not a reservation.
"""

import bisect
import mmap
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass

ALIGNMENT_BYTES = 64
"""Alignment of every region: a cache line, which is enough for any vector load."""


@dataclass(frozen=True, slots=True, eq=False)
class ArenaRegion:
    """A piece of the arena. `view` gives access to its bytes."""

    offset: int
    size_bytes: int
    view: memoryview

    def reference(self) -> dict[str, int]:
        """Return the form in which a request names this region to the compute process."""
        return {"offset": self.offset, "num_bytes": self.size_bytes}


class ArenaAllocator:
    """An allocator of regions, first fit. Only the node process allocates.

    Args:
        size_bytes: Most bytes that can be allocated at a time. Rounded up to whole pages.
    """

    def __init__(self, size_bytes: int) -> None:
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = _anonymous_file()
        os.ftruncate(self.fd, size_bytes)
        self._map = mmap.mmap(self.fd, size_bytes)
        self._view = memoryview(self._map)
        self.size_bytes = size_bytes
        self.used_bytes = 0
        # Free stretches as (offset, size), sorted, never adjacent.
        self._free: list[tuple[int, int]] = [(0, size_bytes)]

    def allocate(self, size_bytes: int) -> ArenaRegion | None:
        """Return a region of exactly `size_bytes`, or None if no free stretch is large enough."""
        taken = _aligned(size_bytes)
        for index, (offset, size) in enumerate(self._free):
            if size >= taken:
                if size == taken:
                    del self._free[index]
                else:
                    self._free[index] = (offset + taken, size - taken)
                self.used_bytes += taken
                assert self.used_bytes <= self.size_bytes, (self.used_bytes, self.size_bytes)
                return ArenaRegion(offset, size_bytes, self._view[offset : offset + size_bytes])
        return None

    def free(self, region: ArenaRegion) -> None:
        """Take a region back. Its view must not be used afterwards."""
        offset, size = region.offset, _aligned(region.size_bytes)
        self.used_bytes -= size
        assert self.used_bytes >= 0, "freed twice"
        index = bisect.bisect(self._free, (offset, 0))
        assert index == 0 or sum(self._free[index - 1]) <= offset, "freed twice"
        assert index == len(self._free) or offset + size <= self._free[index][0], "freed twice"
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            index -= 1
            offset = self._free[index][0]
            size += self._free.pop(index)[1]
        self._free.insert(index, (offset, size))

    def close(self) -> None:
        """Give the memory back to the system. Views that still exist then read zeros."""
        os.close(self.fd)
        self._view.release()
        # The file lives as long as any view, and the daemon may begin another life: free its pages.
        with suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE)
        with suppress(BufferError):
            self._map.close()


def _aligned(size_bytes: int) -> int:
    return max(ALIGNMENT_BYTES, -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("decod-arena")
    fd, path = tempfile.mkstemp(prefix="decod-arena-")
    os.unlink(path)
    return fd
