"""The part of this host that a process may use: processors and memory, within the limits of its
container.

A container or a service may get less than the host has. On Linux, control groups say how much. Both
versions of them are read. Groups are nested, and each one on the way up limits those below it.
"""

import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from decod.system import PROC, num_allowed_processors

_UNLIMITED_BYTES = 1 << 60
"""From here on, version 1 of control groups means that there is no limit."""


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The control groups of this process.

    Args:
        root: Where control groups are mounted.
        own: File that names the process's groups.
    """

    root: Path = Path("/sys/fs/cgroup")
    own: Path = PROC / "self/cgroup"

    def processors(self) -> list[float]:
        """Return how many processors' time each group allows, if it has a quota."""
        found = [*map(_quota_of, self._groups()), *map(_old_quota_of, self._old_groups("cpu"))]
        return [quota for quota in found if quota is not None]

    def memory_rooms(self) -> list[int]:
        """Return what is left of each group's limit of memory, if it has one."""
        found = [*map(_room_of, self._groups())]
        found += map(_old_room_of, self._old_groups("memory"))
        return [room for room in found if room is not None]

    def _groups(self) -> Iterator[Path]:
        """Yield this process's group of version 2, and those above it."""
        for kinds, name in self._names():
            if not kinds:
                yield from _way_up(self.root, name)
                # Beside version 1, version 2 has a folder of its own.
                yield from _way_up(self.root / "unified", name)

    def _old_groups(self, kind: str) -> Iterator[Path]:
        """Yield this process's group of version 1 for a kind of limit, and those above it."""
        for kinds, name in self._names():
            if kind in kinds.split(","):
                mounts = dict.fromkeys((self.root / kinds, self.root / kind))
                yield from _way_up(next(filter(Path.is_dir, mounts), self.root / kind), name)

    def _names(self) -> list[tuple[str, str]]:
        """Return the process's groups: what each one limits (version 2: nothing), and its path."""
        try:
            lines = self.own.read_text(errors="replace").splitlines()
        except OSError:
            return []
        found = [line.split(":", 2) for line in lines if line.count(":") >= 2]
        return [(kinds, name) for _, kinds, name in found if name.startswith("/")]


def num_processors(groups: ControlGroups | None = None) -> int:
    """Return how many processors this process may keep busy. A part of one counts as one.

    Args:
        groups: The process's control groups; if absent, those that the system says.
    """
    own = num_allowed_processors()
    quotas = (groups or ControlGroups()).processors()
    return max(1, min(own, *(math.ceil(quota) for quota in quotas)) if quotas else own)


def host_free_bytes(groups: ControlGroups | None = None) -> int:
    """Return the memory that this process may still take of the host.

    Args:
        groups: The process's control groups; if absent, those that the system says.
    """
    import psutil

    rooms = (groups or ControlGroups()).memory_rooms()
    limits = [int(psutil.virtual_memory().available), *rooms]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - int(psutil.Process().memory_info().vms))
    return max(0, min(limits))


def _way_up(root: Path, name: str) -> Iterator[Path]:
    """Yield a group and those above it.

    In a container, the root may be the container's own group, and the path one of the host's.
    """
    group = root / name.strip("/")
    while group.is_relative_to(root):
        yield group
        group = group.parent


def _quota_of(group: Path) -> float | None:
    words = _text(group / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return _share(words[0], words[1])


def _old_quota_of(group: Path) -> float | None:
    return _share(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _share(quota: str, period: str) -> float | None:
    """Return a quota in processors; None if there is none, which version 1 writes as -1."""
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _room_of(group: Path) -> int | None:
    """Return what is left of a group's limit. None: it has none."""
    # Beyond `memory.high`, the system makes a process wait for memory.
    limits = [_number(group / "memory.max"), _number(group / "memory.high")]
    return _left(limits, group / "memory.current", group / "memory.stat", "inactive_file")


def _old_room_of(group: Path) -> int | None:
    limit = _number(group / "memory.limit_in_bytes")
    if limit is not None and limit >= _UNLIMITED_BYTES:
        return None
    usage, stat = group / "memory.usage_in_bytes", group / "memory.stat"
    return _left([limit], usage, stat, "total_inactive_file")


def _left(limits: list[int | None], usage: Path, stat: Path, reclaimed: str) -> int | None:
    least = min((limit for limit in limits if limit is not None), default=None)
    used = _number(usage)
    if least is None or used is None:
        return None
    # The system drops what it has read from files before it refuses memory.
    for line in _text(stat).splitlines():
        kind, _, num = line.partition(" ")
        if kind == reclaimed and num.isdecimal():
            used -= int(num)
    return least - used


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
