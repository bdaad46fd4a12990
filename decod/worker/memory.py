"""Memory of device and host: how much is free, when it ran out, and how to get some back."""

import gc

import torch

from decod.host_limits import host_free_bytes

__all__ = ["free_unused", "host_free_bytes", "ran_out"]

_CPU_ERROR = "can't allocate memory"
"""Words in what torch raises if the CPU's allocator fails: a RuntimeError like any other."""


def ran_out(error: BaseException) -> bool:
    """Return whether an error says that the device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ERROR in str(error)


def free_unused() -> None:
    """Give memory that nothing refers to back to the device."""
    # An error's traceback refers to frames, and these to it.
    gc.collect()
    torch.cuda.empty_cache()
