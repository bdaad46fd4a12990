"""The device that a compute process uses: its choice, its clock, and the arena it copies from.

`auto` is the first accelerator that torch knows if a trial on it succeeds, and otherwise the CPU.
Only a trial tells whether it works. A driver also lists devices that this build of torch does not
support, and devices whose memory is full. A named device gets the same trial, but nothing replaces
it.

A job's time is the device's own, because the host's clock would include what the device still does
of an earlier job.

The part of the arena that is in use is pinned. To and from memory that may be swapped out, the
driver copies by way of its own buffers, at a fraction of the speed, and the calling thread waits.
Pinned pages take memory at once, and the arena's size is only a bound. So no more is pinned than
the arena's beginning, where the node allocates first: twice as far as any tensor has reached.
"""

import logging
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decod.devices import (
    CPU,
    TORCH_ERRORS,
    Device,
    device_named,
    device_of,
    first_accelerator,
    shortened,
)
from decod.errors import CheckpointError, HardwareError
from decod.files import PieceFile
from decod.host_limits import host_free_bytes
from decod.protocol.core.job_codec import Region, misplaced
from decod.texts import why_of
from decod.train.checkpoint.entries import BytesInFile, StateBytes
from decod.train.layout import byte_view


class DeviceClock:
    """The clock of one device, for one job after another.

    Args:
        mark: Returns an instant: when the device has done what it was told so far.
    """

    def __init__(self, mark: Callable[[], torch.Event | None]) -> None:
        self._mark = mark
        self._begun: torch.Event | None = None
        self._ended: torch.Event | None = None

    def begin(self) -> None:
        """A job begins, once the device has done what was told before."""
        self._begun = self._mark()
        self._ended = None

    def end(self) -> None:
        """The job's work has all been told."""
        self._ended = self._mark()

    def busy_s(self, wall_s: float, copy_s: float) -> float:
        """Return the time of the job that has ended.

        Args:
            wall_s: By the host's clock.
            copy_s: The part of it in which a result travelled to the host.
        """
        if self._begun is None or self._ended is None:
            return wall_s
        self._ended.synchronize()
        milliseconds: float = self._begun.elapsed_time(self._ended)
        return min(wall_s, milliseconds / 1e3 + copy_s)


logger = logging.getLogger("decod.worker")

_FIRST_BYTES = 64 << 20
"""Pinned at first, so that small runs pin once."""


class PinnedPrefix:
    """The pinned beginning of a mapping.

    Args:
        max_bytes: Most bytes to pin.
        register: Pins memory from an address on, so many bytes. Returns 0, or the driver's error.
        unregister: Undoes that for the memory at an address.
    """

    def __init__(
        self,
        max_bytes: int,
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
    ) -> None:
        self._max_bytes = max_bytes
        self._register = register
        self._unregister = unregister
        self._address = self._num_bytes = 0
        self._works = True

    def cover(self, address: int, end: int, size_bytes: int) -> None:
        """Pin a mapping as far as a tensor in it reaches, unless that is too far.

        No copy may be under way.

        Args:
            address: Of the mapping.
            end: Where the tensor ends in it, in bytes.
            size_bytes: Of the mapping.
        """
        covered = address == self._address and end <= self._num_bytes
        if covered or end > self._max_bytes or not self._works:
            return
        if self._num_bytes:
            self._unregister(self._address)
        num_bytes = min(max(2 * end, _FIRST_BYTES), size_bytes, self._max_bytes)
        if error := self._register(address, num_bytes):
            logger.warning("compute.not_pinned driver's error %d: copies take longer", error)
            self._address = 0
            self._num_bytes = 0
            self._works = False
            return
        self._address = address
        self._num_bytes = num_bytes


class Arena:
    """The memory that a node process shares with others of its host, seen as tensors.

    The node allocates regions and names them by offset and size. Others read inputs and write
    outputs in place, and never allocate.

    Args:
        descriptor: Descriptor of a file of any size. The file may grow while it is mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size_bytes = 0
        self._pinned: PinnedPrefix | None = None

    def pin(self, pinned: PinnedPrefix | None) -> None:
        """Pin what is in use from now on, for a device. None: it needs no pinned memory."""
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
        memory = self._mapped(end)
        flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=region.offset)
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


AUTO = "auto"

_TRIAL_SIZE = 64
"""Rows and columns of the matrices that a trial multiplies. Products of ones are exact."""

_PINNED_SHARE = 0.25
"""The share of a host's free memory that may be pinned. Pinned pages can't be swapped out."""


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """A device that works."""

    device: Device
    text: str
    """A text for the operator: the device, and the reason if `auto` took the CPU."""

    @property
    def name(self) -> str:
        """The device as torch calls it: `cpu`, or `cuda:` and its number."""
        return self.device.name


def try_out(device: Device) -> ChosenDevice:
    """Multiply two small matrices on a device, and wait for the product. Return it with its number.

    Raises:
        HardwareError: The device is missing or does not work.
    """
    try:
        ones = torch.ones(_TRIAL_SIZE, _TRIAL_SIZE, device=device.name)
        product = ones @ ones
        device.synchronize()
        exact = bool((product == _TRIAL_SIZE).all())
        found = device_of(product)
        title = found.title
    except TORCH_ERRORS as error:
        raise _unfit(device, shortened(str(error))) from error
    if not exact:
        raise _unfit(device, "the product of two matrices on it is wrong")
    return ChosenDevice(found, f"{found.name}, {title}")


def choose_device(
    asked: str,
    first: Callable[[], Device | None] = first_accelerator,
    named: Callable[[str], Device] = device_named,
) -> ChosenDevice:
    """Return the device for what the operator asked for.

    Args:
        asked: `auto`, `cpu`, `cuda`, `cuda:N`, `xpu`, `mps`, or another name that torch has.
        first: Finds the accelerator that `auto` tries. Not asked if `asked` is something else.
        named: Finds a device by its name.

    Raises:
        HardwareError: The named device is missing or does not work.
    """
    cpu = device_named(CPU)
    if asked == CPU:
        return ChosenDevice(cpu, "CPU")
    if asked != AUTO:
        return try_out(named(asked))
    accelerator = first()
    if accelerator is None:
        return ChosenDevice(cpu, "CPU (this torch is built for CPUs alone)")
    if absence := accelerator.absence():
        return ChosenDevice(cpu, f"CPU ({absence})")
    try:
        return try_out(accelerator)
    except HardwareError as error:
        kind = accelerator.kind.upper()
        return ChosenDevice(cpu, f"CPU ({kind} is there but does not work: {error.why})")


def pinned_prefix(device: Device) -> PinnedPrefix | None:
    """Return what pins the beginning of the arena for a device; None for one that can't."""
    pinning = device.pinning
    if pinning is None:
        return None
    return PinnedPrefix(int(_PINNED_SHARE * host_free_bytes()), *pinning)


def free_bytes(device: Device, memory_max_bytes: int | None = None) -> int:
    """Return the free memory of a device, in bytes: no more than the operator allows, if he says.

    On an accelerator it must be called before torch keeps any tensors there. What libraries have
    taken by then does not count as free.
    """
    found = device.free_bytes()
    return min(found, _for_tensors(device, memory_max_bytes)) if memory_max_bytes else found


def cap_memory(device: Device, memory_max_bytes: int | None) -> None:
    """Have torch refuse to allocate more memory of a device than the operator allows.

    The CPU's memory can't be capped so: there the cap only bounds what the node plans with.
    """
    if memory_max_bytes is not None:
        device.cap(_for_tensors(device, memory_max_bytes))


def _for_tensors(device: Device, memory_max_bytes: int) -> int:
    return max(0, memory_max_bytes - device.context_bytes)


def _unfit(device: Device, why: str) -> HardwareError:
    look = f"see `{device.driver_text}`, " if device.driver_text else ""
    return HardwareError(
        f"device {device.name} cannot be used",
        why=why,
        fix=f"{look}install a build of torch for it, or use device auto or cpu",
        code="E-HW-002",
    )
