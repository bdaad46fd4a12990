"""Devices that compute: the CPU, and the accelerators that torch knows.

Whatever decod asks of a device beside tensors is a method of `Device`. `torch.accelerator` and
torch's own streams and events serve all accelerators; the classes hold what is different. Nothing
else in decod names a kind of device, so another kind is one more class. Torch also loads backends
of other makers by itself. `Accelerator` serves those as it is.

| kind | devices | streams | pinned memory | float64 |
|---|---|---|---|---|
| `cpu` | the host's processors | no | no | yes |
| `cuda` | NVIDIA's; AMD's too, with a torch for ROCm | yes | the arena | yes |
| `xpu` | Intel's | yes | for copies alone | as the device says |
| `mps` | Apple's | no | no | no |

Decod asks for no automatic casts and draws no random numbers on a device, so neither is here.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from decod.host_limits import host_free_bytes

CPU = "cpu"

_REASON_MAX_CHARACTERS = 200

TORCH_ERRORS = (RuntimeError, AssertionError, ValueError, torch.cuda.DeferredCudaCallError)
"""What torch raises if a device does not work: AssertionError if it is built without CUDA, and
ValueError if it is built for another kind."""


class Pinning(NamedTuple):
    """A driver's calls for memory that it copies from without a buffer of its own."""

    register: Callable[[int, int], int]
    """Pins memory from an address on, so many bytes. Returns 0, or the driver's error."""
    unregister: Callable[[int], int]
    """Undoes that for the memory at an address."""


class Device:
    """A device as torch names it. This class is the CPU's, and what others have not.

    Args:
        name: Such as `cpu`, `cuda:0` or `mps`.
    """

    kind: ClassVar[str] = CPU
    driver_text: ClassVar[str] = ""
    """What the operator asks about devices of this kind."""
    collectives: ClassVar[str] = "gloo"
    """The backend of torch.distributed among devices of this kind."""
    context_bytes: ClassVar[int] = 0
    """Memory that driver and libraries take of a device, beside what torch counts."""
    has_streams: ClassVar[bool] = False
    """Whether copies run beside what the device computes, and events tell when it has."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def title(self) -> str:
        """The maker's name for it."""
        return "CPU"

    @property
    def uuid(self) -> str | None:
        """The name by which NVIDIA's driver knows it; None for other devices."""
        return None

    @property
    def has_float64(self) -> bool:
        """Whether it computes in float64."""
        return True

    @property
    def takes_grouped_heads(self) -> bool:
        """Whether FlashAttention runs here, which takes fewer key heads than query heads."""
        return False

    @property
    def pinning(self) -> Pinning | None:
        """How memory that the driver did not allocate is pinned. None: not at all."""
        return None

    def absence(self) -> str | None:
        """Return why no device of this kind is visible, or None if one is."""
        return None

    def settle(self) -> None:
        """Make the device the current one, and state what torch would take from its defaults."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told."""

    def free_bytes(self) -> int:
        """Return the memory that is free now."""
        return host_free_bytes()

    def allocated_bytes(self) -> int:
        """Return the memory that tensors have on the device. 0: nobody counts."""
        return 0

    def cap(self, num_bytes: int) -> None:
        """Have torch refuse to allocate more than so many bytes, where it can."""

    def give_back_unused(self) -> None:
        """Give memory that torch keeps for later tensors back to the device."""

    def instant(self) -> torch.Event | None:
        """Return when the device has done what it was told so far. None: it has no clock."""
        return None


@cache
def _supports_float64(name: str) -> bool:
    """Return whether torch says that a device computes in float64, or says nothing of it."""
    try:
        return torch.float64 in torch.accelerator.get_device_capability(name)["supported_dtypes"]
    except (AttributeError, RuntimeError):
        return True  # Torch 2.10 can't be asked, and later ones not about every kind.


class Accelerator(Device):
    """A device with memory of its own, as far as torch treats all of them alike."""

    kind = "accelerator"
    has_streams = True

    @property
    @override
    def title(self) -> str:
        module = torch.get_device_module(self.name)
        named = getattr(module, "get_device_name", None)
        return self.name if named is None else str(named(self.name))

    @property
    @override
    def has_float64(self) -> bool:
        return _supports_float64(self.name)

    @override
    def absence(self) -> str | None:
        try:
            module = torch.get_device_module(self.name)
            return None if module.is_available() else f"no device {self.name} is visible"
        except TORCH_ERRORS as error:
            return shortened(str(error))

    @override
    def settle(self) -> None:
        torch.accelerator.set_device_index(self.name)
        torch.set_float32_matmul_precision("highest")

    @override
    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.name)

    @override
    def free_bytes(self) -> int:
        return int(torch.accelerator.get_memory_info(self.name)[0])

    @override
    def allocated_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self.name)

    @override
    def give_back_unused(self) -> None:
        torch.accelerator.empty_cache()

    @override
    def instant(self) -> torch.Event | None:
        event = torch.Event(self.name, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.name))
        return event


_AMPERE = (8, 0)


@cache
def _capability(name: str) -> tuple[int, int]:
    return torch.cuda.get_device_capability(name)


class Cuda(Accelerator):
    """A device of NVIDIA or, with a torch for ROCm, of AMD, which torch calls by the same name."""

    kind = "cuda"
    driver_text = "rocminfo" if torch.version.hip else "nvidia-smi"
    collectives = "nccl"
    context_bytes = 512 << 20
    """Usually a little less."""

    @property
    @override
    def title(self) -> str:
        hip = f" (ROCm {torch.version.hip})" if torch.version.hip else ""
        return torch.cuda.get_device_name(self.name) + hip

    @property
    @override
    def uuid(self) -> str | None:
        if torch.version.hip is not None:
            return None
        uuid = getattr(torch.cuda.get_device_properties(self.name), "uuid", None)
        return None if uuid is None else f"GPU-{uuid}"

    @property
    @override
    def takes_grouped_heads(self) -> bool:
        return torch.version.hip is None and _capability(self.name) >= _AMPERE

    @property
    @override
    def pinning(self) -> Pinning | None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

        def register(address: int, num_bytes: int) -> int:
            error = int(runtime.cudaHostRegister(address, num_bytes, 0))
            if error:
                # CUDA keeps an error until it is asked, and torch asks after its next kernel.
                with suppress(RuntimeError):
                    torch.zeros(1, device=self.name)
            return error

        return Pinning(register, lambda address: int(runtime.cudaHostUnregister(address)))

    @override
    def absence(self) -> str | None:
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return "this torch is built without CUDA"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if torch.cuda.is_available():
                return None
        # Torch warns if there is a driver that it can't use. Without a driver it says nothing.
        if caught:
            why = shortened(str(caught[-1].message)).removeprefix("CUDA initialization: ")
            return f"CUDA is there but does not work: {why}"
        return "no CUDA device is visible"

    @override
    def settle(self) -> None:
        """As `Device`.

        float32 products are float32's, and not TF32's with 10 bits. bfloat16 products add up in
        float32 throughout. Algorithms need not be deterministic: what members must agree on does
        not depend on them (docs/research/decisions.md).
        """
        super().settle()
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    @override
    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.name)[0])

    @override
    def cap(self, num_bytes: int) -> None:
        total = int(torch.cuda.mem_get_info(self.name)[1])
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), self.name)


class Xpu(Accelerator):
    """A device of Intel. Not yet tried on one."""

    kind = "xpu"
    driver_text = "xpu-smi"
    collectives = "xccl"
    context_bytes = 512 << 20


class Mps(Accelerator):
    """A device of Apple, which shares the host's memory. Not yet tried on one."""

    kind = "mps"
    driver_text = "system_profiler SPDisplaysDataType"
    has_streams = False

    @property
    @override
    def has_float64(self) -> bool:
        return False

    @property
    @override
    def title(self) -> str:
        return "Apple GPU"

    @override
    def absence(self) -> str | None:
        if not torch.backends.mps.is_built():
            return "this torch is built without Metal"
        return None if torch.backends.mps.is_available() else "no device of Apple is visible"

    @override
    def settle(self) -> None:
        torch.set_float32_matmul_precision("highest")

    @override
    def free_bytes(self) -> int:
        room = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(room, host_free_bytes()))

    @override
    def allocated_bytes(self) -> int:
        return torch.mps.current_allocated_memory()

    @override
    def cap(self, num_bytes: int) -> None:
        share = num_bytes / torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(min(1.0, share))

    @override
    def instant(self) -> torch.Event | None:
        return None


KINDS: dict[str, type[Device]] = {each.kind: each for each in (Device, Cuda, Xpu, Mps)}
"""Kinds of devices with a class of their own."""


@cache
def device_named(name: str | torch.device) -> Device:
    """Return the device of a name, or of a tensor. It need not exist."""
    kind = str(name).partition(":")[0]
    return KINDS.get(kind, Accelerator)(str(name))


def device_of(tensor: Tensor) -> Device:
    """Return the device on which a tensor lies."""
    return device_named(tensor.device)


def first_accelerator() -> Device | None:
    """Return the first device of the kind that this torch is built for. None: for CPUs alone.

    It need not be visible. A build of torch knows one kind.
    """
    found = torch.accelerator.current_accelerator(check_available=False)
    if found is None:
        return None
    return device_named(found.type if found.type == Mps.kind else f"{found.type}:0")


def built_for() -> str:
    """Return what this torch is built for: `CUDA 12.8`, `ROCm 6.4`, `MPS` or `CPU`, say."""
    found = torch.accelerator.current_accelerator(check_available=False)
    kind = CPU if found is None else found.type
    if kind == Cuda.kind:
        hip = torch.version.hip
        return f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}"
    return kind.upper()


_MEMORY_WORDS = (
    "can't allocate memory",  # The CPU's allocator.
    "MPS backend out of memory",
)
"""In a RuntimeError like any other."""

_LOST_WORDS = (
    "CUDA error",
    "HIP error",
    "device lost",
    "DEVICE_LOST",
)


def ran_out(error: BaseException) -> bool:
    """Return whether an error says that the device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _MEMORY_WORDS)


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that a device does nothing more for this process.

    It does not after a failed assertion, either. But that is an error in decod.
    """
    text = str(error)
    if ran_out(error) or not isinstance(error, RuntimeError) or "device-side assert" in text:
        return False
    return isinstance(error, torch.AcceleratorError) or any(each in text for each in _LOST_WORDS)


def shortened(text: str) -> str:
    """Return the first line of a message of torch, without the place in torch's source."""
    line = text.strip().partition("\n")[0].partition(" (Triggered internally")[0]
    return line[:_REASON_MAX_CHARACTERS]
