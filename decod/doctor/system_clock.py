"""The kernel's word on the clock. Python has no function for that, so the C library is called."""

import ctypes

_TIMEX_SIZE_BYTES = 512
"""At least that of `struct timex` on any architecture. Zeroes ask, and change nothing."""
_TIME_ERROR = 5
"""What adjtimex returns if nothing keeps the clock. From the kernel's timex.h."""


def clock_synchronised() -> bool | None:
    """Return whether a time service keeps the clock; None if the kernel does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_SIZE_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR
