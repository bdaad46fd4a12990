"""The memory that a node process and its compute process share.

The node allocates regions and names them by offset and size. The compute process reads inputs and
writes outputs in place, and never allocates.
"""

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from decod.errors import CheckpointError
from decod.files import PieceFile
from decod.protocol.core.job_codec import Region, misplaced
from decod.texts import why_of
from decod.train.checkpoint.entries import BytesInFile, StateBytes
from decod.train.layout import byte_view
from decod.worker.device import PinnedPrefix


class Arena:
    """A mapped memory file, seen as tensors.

    Args:
        descriptor: Descriptor of a file of any size. The file may grow while it is mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size_bytes = 0
        self._pinned: PinnedPrefix | None = None

    def pin(self, pinned: PinnedPrefix) -> None:
        """Pin what is in use from now on, for a device."""
        self._pinned = pinned

    def tensor(self, region: Region, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor that shares a region's memory. Writing to it writes to the arena.

        Args:
            region: Must have exactly the size of the tensor.
            dtype: Type of the elements.
            shape: Shape of the tensor, which is contiguous and on the CPU.

        Raises:
            ShapeError: The region lies outside the arena, is misaligned, or has another size.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if region.path:
            raise misplaced(f"the file {region.path} for {dtype} {shape}")
        if region.num_bytes != num_bytes:
            raise misplaced(f"a region of {region.num_bytes} bytes for a {dtype} {shape}")
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if region.offset % dtype.itemsize:
            raise misplaced(f"a region at offset {region.offset} for {dtype}")
        end = region.offset + num_bytes
        buffer = self._mapped(end)
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=region.offset)
        if self._pinned is not None:
            self._pinned.cover(flat.data_ptr() - region.offset, end, self._size_bytes)
        return flat.view(shape)

    @contextmanager
    def state(self, region: Region) -> Iterator[StateBytes]:
        """Lend the bytes of a state for reading, which may be in a file.

        Raises:
            ShapeError: As `tensor`.
            CheckpointError: The file can't be opened.
        """
        if not region.path:
            yield byte_view(self.tensor(region, torch.uint8, (region.num_bytes,)))
            return
        try:
            file = PieceFile(os.open(region.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError as error:
            raise CheckpointError(
                f"the state that has arrived in {region.path} can't be read",
                why=why_of(error),
                fix="mend the disk, or give --state-dir another one",
            ) from error
        with closing(file):
            yield BytesInFile(file, region.num_bytes)

    def _mapped(self, end: int) -> Any:
        if end > self._size_bytes:
            size_bytes = os.fstat(self.descriptor).st_size
            if end > size_bytes:
                raise misplaced(f"a region ends at {end} of an arena of {size_bytes} bytes")
            # Tensors on the old mapping keep it alive. Both mappings show the same memory.
            self._map = mmap.mmap(self.descriptor, size_bytes)
            self._size_bytes = size_bytes
        return self._map
