"""The device that a compute process uses: its choice, its clock, and the arena it copies from.

`auto` is the first CUDA device if a trial on it succeeds, and otherwise the CPU. Only a trial tells
whether CUDA works. A driver also lists devices that this build of torch does not support, and
devices whose memory is full. A named device gets the same trial, but nothing replaces it.

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
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

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
        device: A CUDA device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None

    def mark(self) -> torch.cuda.Event:
        """Return an instant: when the device has done what it was told so far."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> None:
        """A job begins, once the device has done what was told before."""
        self._begun = self.mark()
        self._ended = None

    def end(self) -> None:
        """The job's work has all been told."""
        self._ended = self.mark()

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
            logger.warning("compute.not_pinned CUDA error %d: copies take longer", error)
            self._address = 0
            self._num_bytes = 0
            self._works = False
            return
        self._address = address
        self._num_bytes = num_bytes


def pinned_by_cuda(max_bytes: int) -> PinnedPrefix:
    """Return a prefix that CUDA pins for all its devices."""
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, num_bytes: int) -> int:
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error:
            # CUDA keeps an error until it is asked, and torch asks after its next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return error

    return PinnedPrefix(
        max_bytes, register, lambda address: int(runtime.cudaHostUnregister(address))
    )


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
CPU = "cpu"

_CUDA_FIRST = "cuda:0"
"""The device that `auto` tries."""

_TRIAL_SIZE = 64
"""Rows and columns of the matrices that a trial multiplies. Products of ones are exact."""

_CONTEXT_BYTES = 512 << 20
"""The memory that CUDA and its libraries take of a device beside what torch counts: usually a
little less."""

_PINNED_SHARE = 0.25
"""The share of a host's free memory that may be pinned. Pinned pages can't be swapped out."""

_REASON_MAX_CHARACTERS = 200

_TORCH_ERRORS = (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError)
"""Errors that torch raises if CUDA does not work. A build without CUDA raises AssertionError."""


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """A device that works."""

    name: str
    """The device as torch calls it: `cpu`, or `cuda:` and its number."""
    text: str
    """A text for the operator: the device, and the reason if `auto` took the CPU."""


class Cuda(Protocol):
    """CUDA on this host."""

    def absence(self) -> str | None:
        """Return why no device is visible, or None if one is."""

    def try_out(self, name: str) -> ChosenDevice:
        """Compute something on a device. Return the device with its number.

        Raises:
            HardwareError: The device is missing or does not work.
        """


class TorchCuda:
    """CUDA as torch reaches it. Torch calls AMD's devices by the same names."""

    def absence(self) -> str | None:
        """Return why no device is visible, or None if one is."""
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return "this torch is built without CUDA"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if torch.cuda.is_available():
                return None
        # Torch warns if there is a driver that it can't use. Without a driver it says nothing.
        if caught:
            return _broken(_shortened(str(caught[-1].message)))
        return "no CUDA device is visible"

    def try_out(self, name: str) -> ChosenDevice:
        """Multiply two small matrices on a device, and wait for the product.

        Raises:
            HardwareError: The device is missing or does not work.
        """
        try:
            ones = torch.ones(_TRIAL_SIZE, _TRIAL_SIZE, device=name)
            product = ones @ ones
            torch.cuda.synchronize(product.device)
            exact = bool((product == _TRIAL_SIZE).all())
            title = torch.cuda.get_device_name(product.device)
        except _TORCH_ERRORS as error:
            raise _unfit(name, _shortened(str(error))) from error
        if not exact:
            raise _unfit(name, "the product of two matrices on it is wrong")
        return ChosenDevice(str(product.device), f"{product.device}, {title}")


def choose_device(asked: str, cuda: Cuda) -> ChosenDevice:
    """Return the device for what the operator asked for.

    Args:
        asked: `auto`, `cpu`, `cuda` or `cuda:N`.
        cuda: This host's CUDA. Not touched if `asked` is `cpu`.

    Raises:
        HardwareError: The named CUDA device is missing or does not work.
    """
    if asked == CPU:
        return ChosenDevice(CPU, "CPU")
    if asked != AUTO:
        return cuda.try_out(asked)
    if absence := cuda.absence():
        return ChosenDevice(CPU, f"CPU ({absence})")
    try:
        return cuda.try_out(_CUDA_FIRST)
    except HardwareError as error:
        return ChosenDevice(CPU, f"CPU ({_broken(error.why)})")


def settle(device: ChosenDevice) -> None:
    """Make a CUDA device the current one, and state what torch would take from its defaults.

    float32 products are float32's, and not TF32's with 10 bits. bfloat16 products add up in float32
    throughout. Algorithms need not be deterministic: what members must agree on does not depend on
    them (docs/research/decisions.md).
    """
    if device.name == CPU:
        return
    torch.cuda.set_device(device.name)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def pinned_max_bytes() -> int:
    """Return how much of this host's memory may be pinned for copies."""
    return int(_PINNED_SHARE * host_free_bytes())


def free_bytes(device: ChosenDevice, memory_max_bytes: int | None = None) -> int:
    """Return the free memory of a device, in bytes: no more than the operator allows, if he says.

    On a CUDA device it must be called before torch keeps any tensors there. What libraries have
    taken by then does not count as free.
    """
    if device.name != CPU:
        found = int(torch.cuda.mem_get_info(device.name)[0])
        return min(found, _for_tensors(memory_max_bytes)) if memory_max_bytes else found
    found = host_free_bytes()
    return min(found, memory_max_bytes) if memory_max_bytes else found


def cap_memory(device: ChosenDevice, memory_max_bytes: int | None) -> None:
    """Have torch refuse to allocate more memory of a CUDA device than the operator allows.

    The CPU's memory can't be capped so: there the cap only bounds what the node plans with.
    """
    if device.name == CPU or memory_max_bytes is None:
        return
    total = int(torch.cuda.mem_get_info(device.name)[1])
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, _for_tensors(memory_max_bytes) / total), device.name
    )


def uuid_of(device: ChosenDevice) -> str | None:
    """Return the name by which NVIDIA's driver knows a CUDA device; None for other devices."""
    if device.name == CPU or torch.version.hip is not None:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device.name), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _for_tensors(memory_max_bytes: int) -> int:
    return max(0, memory_max_bytes - _CONTEXT_BYTES)


def _broken(why: str) -> str:
    return f"CUDA is there but does not work: {why}"


def _unfit(name: str, why: str) -> HardwareError:
    return HardwareError(
        f"device {name} cannot be used",
        why=why,
        fix="see `nvidia-smi`, install a build of torch for it, or use device auto or cpu",
        code="E-HW-002",
    )


def _shortened(text: str) -> str:
    """Return the first line of a message of torch, without the place in torch's source."""
    line = text.strip().partition("\n")[0].partition(" (Triggered internally")[0]
    return line.removeprefix("CUDA initialization: ")[:_REASON_MAX_CHARACTERS]
