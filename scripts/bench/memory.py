"""The memory that a process takes at most, as Linux counts it."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def measured(phase: str) -> Iterator[None]:
    """Print how far this process's resident memory rises above its start, as one line of JSON.

    Pages of mapped files and of shared memory count too.
    """
    gc.collect()
    forget_peak()
    start_bytes = resident_bytes()
    yield
    print(json.dumps({"phase": phase, "peak_bytes": peak_bytes() - start_bytes}), flush=True)


@contextmanager
def report_peak(process: str, pid: int) -> Iterator[None]:
    """Print how far another process's resident memory rises above its start."""
    forget_peak(str(pid))
    start_bytes = resident_bytes(str(pid))
    yield
    found = {"process": process, "peak_bytes": peak_bytes(str(pid)) - start_bytes}
    print(json.dumps(found), flush=True)


def forget_peak(pid: str = "self") -> None:
    """Count the peak of a process anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def resident_bytes(pid: str = "self") -> int:
    """Return what a process takes now."""
    return _bytes(pid, "VmRSS")


def peak_bytes(pid: str = "self") -> int:
    """Return what it has taken at most."""
    return _bytes(pid, "VmHWM")


def _bytes(pid: str, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)
