"""How this process asks the system for memory: it keeps freed memory for the next tensor.

By default glibc maps every large block anew and returns it when it is freed. Each tensor that
passes through then costs one page fault per 4 KiB. For 1 MiB activations over gRPC, both ends
together took 8.6 ms of CPU time per transfer, and 4.2 ms with blocks kept.
"""

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_KEPT_BYTES = 32 << 20
"""Largest threshold that glibc accepts. Larger blocks are mapped as before."""

_KEPT_BYTES = 1 << 30
"""Amount of freed memory at the top of the heap that the process keeps."""


def keep_freed_memory() -> None:
    """Set this for the process. Does nothing if the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
