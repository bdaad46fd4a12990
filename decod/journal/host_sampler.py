"""Samples of a host, read with psutil."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any

import psutil

from decod.clocks import wall_clock
from decod.journal.records import HostRow

_SUMMED = ("rss", "vms", "shared", "text", "data", "lib", "dirty")


def _only_this() -> Iterable[int]:
    return (os.getpid(),)


class HostSampler:
    """Makes rows about this host. Used from one thread.

    What the system does not tell, such as the disks in some containers, stays null.

    Args:
        run: The run.
        peer: The peer's id.
        name: The peer's name.
        processes: Returns the ids of this peer's processes, which may have ended.
    """

    def __init__(
        self,
        run: str,
        peer: str,
        name: str,
        processes: Callable[[], Iterable[int]] = _only_this,
    ) -> None:
        self._who: dict[str, Any] = {"run": run, "peer": peer, "name": name}
        self._pids = processes
        self._processes: dict[int, psutil.Process] = {}
        self._spent: dict[int, tuple[float, int, int]] = {}
        """CPU time and context switches of each process, up to the last look."""
        self._totals = (0.0, 0, 0)
        """Of all processes that there have been, since this object was made."""
        self._before = self._counters()
        self._before_s = monotonic()

    def sample(self) -> HostRow:
        """Return what has happened since the last sample, or since this object was made."""
        now_s, now = monotonic(), self._counters()
        interval_s = now_s - self._before_s
        # A counter begins anew when an interface or a disk goes.
        changes = {
            key: max(0, value - self._before[key])
            for key, value in now.items()
            if key in self._before
        }
        self._before, self._before_s = now, now_s
        busy, idle = changes.pop("cpu_busy_s", None), changes.pop("cpu_idle_s", None)
        percent = None
        if busy is not None and idle is not None and busy + idle > 0:
            percent = 100 * busy / (busy + idle)
        return HostRow(
            time_s=wall_clock(),
            **self._who,
            interval_s=interval_s,
            cpu_percent=percent,
            **changes,
            **_state(),
            **self._memory(),
        )

    def _counters(self) -> dict[str, Any]:
        """Return numbers that only grow."""
        found: dict[str, Any] = {}
        with suppress(psutil.Error, OSError, RuntimeError):
            if network := psutil.net_io_counters():
                found["network_sent_bytes"] = network.bytes_sent
                found["network_received_bytes"] = network.bytes_recv
        with suppress(psutil.Error, OSError, RuntimeError):
            found |= _cpu()
        with suppress(psutil.Error, OSError, RuntimeError):
            if disk := psutil.disk_io_counters():
                found |= _disk(disk)
        return found | self._process_counters()

    def _process_counters(self) -> dict[str, Any]:
        self._follow()
        spent = dict[int, tuple[float, int, int]]()
        for pid, process in self._processes.items():
            with suppress(psutil.Error, OSError), process.oneshot():
                times, switches = process.cpu_times(), process.num_ctx_switches()
                spent[pid] = times.user + times.system, switches.voluntary, switches.involuntary
        for pid, (cpu_s, voluntary, involuntary) in spent.items():
            before = self._spent.get(pid, (0.0, 0, 0))
            self._totals = (
                self._totals[0] + cpu_s - before[0],
                self._totals[1] + voluntary - before[1],
                self._totals[2] + involuntary - before[2],
            )
        self._spent = spent
        return {
            "process_cpu_s": self._totals[0],
            "process_context_switches_voluntary": self._totals[1],
            "process_context_switches_involuntary": self._totals[2],
        }

    def _follow(self) -> None:
        """Look at the processes that this peer has now."""
        pids = set(self._pids())
        self._processes = {p: each for p, each in self._processes.items() if p in pids}
        for pid in pids - self._processes.keys():
            with suppress(psutil.Error):
                self._processes[pid] = psutil.Process(pid)

    def _memory(self) -> dict[str, Any]:
        sums = dict.fromkeys(_SUMMED, 0)
        for process in self._processes.values():
            with suppress(psutil.Error, OSError):
                info = process.memory_info()
                for key in _SUMMED:
                    sums[key] += getattr(info, key, 0)
        return {
            "process_resident_bytes": sums["rss"],
            "process_virtual_bytes": sums["vms"],
            "process_shared_bytes": sums["shared"],
            "process_text_bytes": sums["text"],
            "process_data_bytes": sums["data"],
            "process_library_bytes": sums["lib"],
            "process_dirty_bytes": sums["dirty"],
        }


def _cpu() -> dict[str, Any]:
    times, stats = psutil.cpu_times(), psutil.cpu_stats()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # Guests' time is part of user time.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return {
        "cpu_busy_s": sum(times) - idle_s - guests_s,
        "cpu_idle_s": idle_s,
        "cpu_context_switches": stats.ctx_switches,
        "cpu_interrupts": stats.interrupts,
        "cpu_soft_interrupts": stats.soft_interrupts,
    }


def _disk(disk: Any) -> dict[str, Any]:
    found = {
        "disk_reads": disk.read_count,
        "disk_writes": disk.write_count,
        "disk_read_bytes": disk.read_bytes,
        "disk_write_bytes": disk.write_bytes,
        "disk_read_time_s": disk.read_time / 1000,
        "disk_write_time_s": disk.write_time / 1000,
    }
    if hasattr(disk, "busy_time"):  # Not on every system.
        found["disk_busy_time_s"] = disk.busy_time / 1000
    return found


def _state() -> dict[str, Any]:
    """Return what holds at this instant."""
    found: dict[str, Any] = {}
    cores = psutil.cpu_count() or 1
    found["cpu_logical_cores"] = cores
    with suppress(OSError, psutil.Error):
        loads = psutil.getloadavg()
        for minutes, load in zip((1, 5, 15), loads, strict=True):
            found[f"cpu_load_{minutes}_min_percent"] = 100 * load / cores
    with suppress(OSError, psutil.Error):
        memory = psutil.virtual_memory()
        found |= {
            "memory_total_bytes": memory.total,
            "memory_available_bytes": memory.available,
            "memory_used_bytes": memory.used,
            "memory_used_percent": memory.percent,
        }
    return found
