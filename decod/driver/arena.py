"""The places of tensors: memory that node and compute process share, and files for large states.

The shared memory is one anonymous file, mapped by both. Each tensor is written into it once, by the
network or the device, and read in place by the other. The file has no name, so it vanishes with its
last process, even after a crash. Its pages take memory only once they have been written, so its
size is a bound (invariant I6), not a reservation. The sizes of what jobs output are here too, since
their places are taken before a job begins.

A region has one owner at a time: who reads a tensor from the network into it, then the driver,
which knows it by the tensor's id until the core frees that. The last owner calls `release`.
"""

import bisect
import errno
import mmap
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from decod.compression.plan import StagePlans
from decod.files import PieceFile
from decod.limits import StageBlocks
from decod.planner.partition import part_sizes
from decod.protocol.core import jobs
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.job_codec import Region
from decod.protocol.core.jobs import AverageKind, BaseJob
from decod.system import anonymous_file, give_back_pages
from decod.tasks import in_thread
from decod.train.checkpoint.entries import BytesInFile
from decod.train.checkpoint.places import DiskRoom, FileOperations, remove_tree

ALIGNMENT_BYTES = 64
"""Alignment of every region: a cache line, which is enough for any vector load."""


@dataclass(slots=True, eq=False, kw_only=True)
class ArenaRegion(Region):
    """A piece of the arena. `view` gives access to its bytes."""

    view: memoryview
    give_back: Callable[["ArenaRegion"], None]
    released: bool = False

    def release(self) -> None:
        """Give the memory back to the arena. The view must not be used afterwards."""
        assert not self.released, "released twice"
        self.released = True
        self.give_back(self)


class ArenaAllocator:
    """An allocator of regions, first fit. Only the node process allocates.

    Args:
        size_bytes: Most bytes that can be allocated at a time. Rounded up to whole pages.
    """

    def __init__(self, size_bytes: int) -> None:
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = anonymous_file("decod-arena")
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
                view = self._view[offset : offset + size_bytes]
                return ArenaRegion(offset, size_bytes, view=view, give_back=self._take_back)
        return None

    def _take_back(self, region: ArenaRegion) -> None:
        offset = region.offset
        size = _aligned(region.num_bytes)
        self.used_bytes -= size
        index = bisect.bisect(self._free, (offset, 0))
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
        give_back_pages(self._map)
        with suppress(BufferError):
            self._map.close()


def _aligned(size_bytes: int) -> int:
    return max(ALIGNMENT_BYTES, -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


# Files for large states on their way into and out of the compute process, so that they take no
# memory.
#
# The compute process writes a copy of its own state piece by piece, and whoever reads it gets it
# from the file in the same way. A state that arrives goes to a file chunk by chunk, and the
# compute process loads it piece by piece. Each file has a name until it is closed, so the cap on
# the disk counts it.

COPIES = "copies"
"""Name of the folder. What a process leaves there that was killed, the next removes."""

IN_MEMORY_MAX_BYTES = 256 << 20
"""Larger copies go to files. Smaller ones fit beside any model, and memory is faster than a disk:
while a state is copied, its device computes nothing."""


def goes_to_file(size_bytes: int) -> bool:
    """Return whether a copy of this size is too large for memory."""
    return size_bytes > IN_MEMORY_MAX_BYTES


class CopyFile(Region):
    """A file with a copy of a state. `view` gives access to its bytes."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        super().__init__(0, size_bytes, str(path))
        self._file = PieceFile(FileOperations().create(path))
        self.view = BytesInFile(self._file, size_bytes)

    def release(self) -> None:
        """Remove the file in a thread: a large one takes a disk a while."""
        in_thread(self.close)

    def close(self) -> None:
        """Remove the file. What it takes of the disk is free as soon as nobody writes into it."""
        with suppress(OSError):  # The next process removes it.
            os.unlink(self.path)
        self._file.close()


TensorRegion = ArenaRegion | CopyFile
"""The place of a tensor of a job."""


class StateCopies:
    """The files of a node's copies.

    Args:
        folder: The node's state folder.
        room: The cap on what it holds.
    """

    def __init__(self, folder: Path, room: DiskRoom) -> None:
        self._folder = (folder / COPIES).absolute()
        self._room = room
        self._names = count()
        with suppress(OSError):  # `create` reports what is wrong with the folder.
            remove_tree(self._folder, FileOperations())

    def create(self, size_bytes: int) -> CopyFile | None:
        """Return a file for a copy; None if it is small enough for memory.

        Raises:
            OSError: The disk is too full, or refuses.
        """
        if not goes_to_file(size_bytes):
            return None
        self._room.require(size_bytes)
        FileOperations().make_folder(self._folder)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < size_bytes:
            needed = size_bytes / 2**20
            free = free_bytes / 2**20
            raise OSError(
                errno.ENOSPC, f"it takes {needed:.1f} MiB, and the disk has {free:.1f} MiB left"
            )
        return CopyFile(self._folder / f"{os.getpid()}-{next(self._names)}", size_bytes)


_PADDING_BYTES = 4096
"""Room for blocks that are filled up."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes from which those of the jobs' outputs follow."""

    activation_bytes: int
    wire_element_bytes: int
    """Bytes of one gradient element on its way between members."""
    sum_element_bytes: int
    """Bytes of one element of an averaged gradient: float32, or float64 for models in float64."""
    num_parameters: int = 0
    """Parameters of this node's stage; 0 until it is built."""
    plans: StagePlans | None = None
    """The plans by which averages of this node's stage travel. None: it is not built."""
    of_stages: Callable[[StageBlocks], Mapping[int, StagePlans]] = lambda _: {}
    """Returns the plans by which averages of every stage travel, in a cut."""
    parameters_copy_bytes: int = 0
    """Size of a copy of the stage's parameters, without the optimizer's state. 0 until one was
    made."""

    def of_stage(self, job: jobs.Build, num_parameters: int) -> "Sizes":
        """Return the sizes for a node that has built a stage."""
        plans = self.of_stages(job.cut).get(job.stage_index)
        return replace(self, num_parameters=num_parameters, plans=plans, parameters_copy_bytes=0)

    def part_bytes(self, phase: int, num_parts: int, spec: AverageSpec) -> tuple[int, ...]:
        """Return the sizes of a contribution's parts on their way, in bytes."""
        return self._part_bytes(phase, num_parts, spec, self.wire_element_bytes)

    def mean_bytes(self, phase: int, num_parts: int, spec: AverageSpec) -> tuple[int, ...]:
        """Return the sizes of an average's parts, in bytes."""
        return self._part_bytes(phase, num_parts, spec, self.sum_element_bytes)

    def _part_bytes(
        self, phase: int, num_parts: int, spec: AverageSpec, element_bytes: int
    ) -> tuple[int, ...]:
        if not num_parts:
            return ()
        num_elements = self.num_parameters
        if self.plans is not None:
            if plan := self.plans.plan(spec.fragment, spec.rank, spec.bits):
                return tuple(plan.part_bytes(phase, num_parts))
            num_elements = self.plans.fragments[spec.fragment].num_elements
        return tuple(n * element_bytes for n in part_sizes(num_elements, num_parts))

    @property
    def as_they_are(self) -> "Sizes":
        """The sizes of averages whose numbers travel as they are."""
        return replace(self, plans=None, wire_element_bytes=self.sum_element_bytes)

    @property
    def part_bytes_max(self) -> int:
        """The most that a part from another node may have. No format makes a large part longer."""
        return self.num_parameters * self.sum_element_bytes + _PADDING_BYTES


def output_bytes(job: BaseJob, sizes: Sizes) -> tuple[int, ...]:
    """Return the sizes of a job's outputs."""
    match job:
        case jobs.Embed() | jobs.Forward() | jobs.Head() | jobs.Backward():
            return (sizes.activation_bytes,)
        case jobs.Gather(num_parts=num_parts, phase=phase, spec=spec):
            return _travelling(job, sizes).part_bytes(phase, num_parts, spec)
        case jobs.Reduce(part=part, num_parts=num_parts, phase=phase, spec=spec):
            return (_travelling(job, sizes).mean_bytes(phase, num_parts, spec)[part],)
        case jobs.Decode():
            return (sizes.num_parameters * sizes.sum_element_bytes,)
        case jobs.Snapshot(with_optimizer=False) if sizes.parameters_copy_bytes:
            return (sizes.parameters_copy_bytes,)
        case _:
            return ()


def _travelling(job: jobs.Gather | jobs.Reduce, sizes: Sizes) -> Sizes:
    return sizes.as_they_are if job.kind is AverageKind.BETWEEN else sizes
