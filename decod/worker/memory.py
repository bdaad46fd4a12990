"""Memory of device and host: how much is free, when it ran out, and how to get some back."""

import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CPU_ERROR = "can't allocate memory"
"""In what torch raises if the CPU's allocator fails: a RuntimeError like any other."""


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


def host_free_bytes() -> int:
    """Return the memory that this process may still take of the host.

    A container or a service may be allowed less than the host has.
    """
    import psutil

    limits = [int(psutil.virtual_memory().available), *_cgroup_rooms(_OWN_CGROUP, _CGROUPS)]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - int(psutil.Process().memory_info().vms))
    return max(0, min(limits))


def _cgroup_rooms(own: Path, root: Path) -> Iterator[int]:
    """Yield what is left of the limit of this process's control group, and of those above it.

    Args:
        own: File that names the group, as `/proc/self/cgroup` does.
        root: Where the second version of control groups is mounted.
    """
    try:
        names = [line.removeprefix("0::") for line in own.read_text().splitlines()]
    except OSError:
        return
    for name in names:
        if not name.startswith("/"):
            continue
        group = root / name.strip("/")
        while group.is_relative_to(root):
            if (room := _room_of(group)) is not None:
                yield room
            group = group.parent


def _room_of(group: Path) -> int | None:
    """Return what is left of a group's limit. None: it has none."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # The system drops what it has read from files before it refuses memory.
    return limit - used + int(kinds.get("inactive_file", 0))
