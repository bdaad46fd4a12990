"""The device that a compute process uses.

`auto` is the first CUDA device if a trial on it succeeds, and otherwise the CPU. Only a trial tells
whether CUDA works. A driver also lists devices that this build of torch does not support, and
devices whose memory is full. A named device gets the same trial, but nothing replaces it.
"""

import warnings
from dataclasses import dataclass
from typing import Protocol

import torch

from decod.errors import HardwareError
from decod.worker.memory import host_free_bytes

AUTO = "auto"
CPU = "cpu"

_CUDA_FIRST = "cuda:0"
"""What `auto` tries."""

_TRIAL_SIZE = 64
"""Rows and columns of the matrices that a trial multiplies. Products of ones are exact."""

_CONTEXT_BYTES = 512 << 20
"""What CUDA and its libraries take of a device beside what torch counts: usually a little less."""

_PINNED_SHARE = 0.25
"""Of the free memory of a host. Pinned pages can't be swapped out."""

_REASON_MAX_CHARACTERS = 200

_TORCH_ERRORS = (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError)
"""What torch raises if CUDA does not work. A build without CUDA raises AssertionError."""


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """A device that works."""

    name: str
    """As torch calls it: `cpu`, or `cuda:` and its number."""
    text: str
    """For the operator: the device, and the reason if `auto` took the CPU."""


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
