"""The memory that a process takes at most, as Linux counts it."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")


@contextmanager
def measured(phase: str) -> Iterator[None]:
    """Print how far the process's resident memory rises above its start, as one line of JSON.

    Pages of mapped files and of shared memory count too.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # The peak so far is forgotten.
    start_bytes = _bytes("VmRSS")
    yield
    peak_bytes = _bytes("VmHWM") - start_bytes
    print(json.dumps({"phase": phase, "peak_bytes": peak_bytes}), flush=True)


def _bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)
