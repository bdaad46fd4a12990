"""The causes for which a node pauses by itself: a probe of this host for each, and the decision."""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from glob import glob
from math import inf
from pathlib import Path
from typing import Any, Protocol

import psutil

from decod.config.schedule import PauseRule, WorkHours

# --- the decision --------------------------------------------------------------------------------
# The decision whether a node is to pause: a pure state machine in the time of its caller.
#
# free --a cause is seen--> PAUSED --no cause for its calm time--> free
#
# Each cause by itself holds from when it is seen until it has been away for a while, so a node
# does not resume between two keystrokes, or as soon as it has cooled a little. What is not known
# counts as away: a probe that fails must not stop a node for ever. The schedule has no calm time.
# A person's pause is not decided here: it stands beside these causes, and only the person ends
# it.


CALM_S: Mapping[PauseRule, float] = {
    PauseRule.BUSY_GPU: 60.0,
    PauseRule.BATTERY: 10.0,
    PauseRule.HOT: 300.0,
    PauseRule.KEYBOARD: 60.0,
}
"""How long each cause must be away before the node resumes. A machine cools slowly. The probe of
the keyboard itself waits for some minutes without input."""

SCHEDULE = "schedule"
"""The name of the schedule among the causes."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a probe has found."""

    holds: bool | None
    """Whether the cause holds. None: it can't be known."""
    detail: str = ""
    """What was found, for people; or why nothing can be known."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of the host at one time."""

    wall: datetime
    """The local time, with its offset from UTC."""
    sightings: Mapping[PauseRule, Sighting] = field(default_factory=dict)
    zone: tzinfo | None = None
    """The zone of the wall clock, which says when it changes. None: this host's."""


@dataclass(frozen=True, slots=True)
class PauseCause:
    """A reason for which the node is paused now."""

    name: str
    """`schedule`, or the name of a rule."""
    detail: str
    """For people."""
    until: datetime | None = None
    """When it ends, in local time, if that is known."""
    calm_s: float | None = None
    """The cause is gone; in so many seconds it counts no longer. None: it still holds."""


class PauseRules:
    """The causes that hold, as time goes on."""

    def __init__(self) -> None:
        self._seen: dict[PauseRule, tuple[float, str]] = {}
        """When each rule's cause was seen last, and what was found then."""

    def step(
        self,
        now_s: float,
        found: Circumstances,
        *,
        schedule: WorkHours,
        rules: tuple[PauseRule, ...],
    ) -> tuple[PauseCause, ...]:
        """Return the causes for a pause. Without one, the node works.

        Args:
            now_s: The time of any clock that never goes back, in seconds.
            found: What is known of the host now.
            schedule: When the node works.
            rules: The rules that count. What was seen of others is forgotten.
        """
        causes = []
        if not schedule.is_open(found.wall):
            until = schedule.next_change(found.wall, found.zone)
            causes.append(PauseCause(SCHEDULE, f"outside its schedule, {schedule}", until))
        self._seen = {rule: seen for rule, seen in self._seen.items() if rule in rules}
        for rule in rules:
            sighting = found.sightings.get(rule)
            holds = sighting is not None and sighting.holds is True
            if sighting is not None and holds:
                self._seen[rule] = (now_s, sighting.detail)
            if rule not in self._seen:
                continue
            seen_s, detail = self._seen[rule]
            left_s = seen_s + CALM_S[rule] - now_s
            if holds:
                causes.append(PauseCause(rule.value, detail))
            elif left_s > 0:
                causes.append(PauseCause(rule.value, detail, calm_s=left_s))
            else:
                del self._seen[rule]
        return tuple(causes)


# --- probes --------------------------------------------------------------------------------------
# Probes of this host: one for each cause for which a node pauses by itself.
#
# A probe is a function that returns what it finds. It may block, and it may raise: it runs in a
# thread, and what goes wrong in it is only that its cause can't be known.
#
# What NVIDIA's driver tells of a GPU comes through one small interface. The package
# `nvidia-ml-py` is optional: it comes with the extra `gpu`. Without it, or without a driver that
# answers, the rules that need it can't be known.


class UnknownError(Exception):
    """Something about this host can't be known. The text says why."""


@dataclass(frozen=True, slots=True)
class OwnGpu:
    """A GPU on which a compute process, or a rank of it, works."""

    uuid: str
    """Its name at the driver."""
    pid: int
    """The process."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    memory_bytes: int
    """0 if it is not known."""
    utilization: float
    """Part of the time in which it computes, from 0 to 1; 0 if it is not known."""


class Nvml(Protocol):
    """The questions to the driver. Calls may block, and may raise `UnknownError`."""

    def processes(self, uuid: str) -> list[GpuProcess]:
        """Return the processes on a GPU."""

    def heat(self, uuid: str) -> tuple[float, float]:
        """Return the temperature of a GPU, and that at which it slows down, in degrees Celsius."""


class NvidiaMl:
    """NVML as `nvidia-ml-py` reaches it. Nothing is imported or loaded before the first call."""

    def __init__(self) -> None:
        self._pynvml: Any = None
        self._asked_us: dict[str, int] = {}
        """The time of the last sample of each GPU's use, in the driver's microseconds."""

    def processes(self, uuid: str) -> list[GpuProcess]:
        nvml, handle = self._opened(uuid)
        memory: dict[int, int] = {}
        try:
            for each in (
                *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
                *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
            ):
                # A process may compute and draw. Each list counts all its memory.
                memory[each.pid] = max(memory.get(each.pid, 0), each.usedGpuMemory or 0)
        except nvml.NVMLError as error:
            raise UnknownError(f"the driver does not list processes: {error}") from error
        busy = self._utilization(nvml, handle, uuid)
        pids = {**memory, **busy}
        return [GpuProcess(pid, memory.get(pid, 0), busy.get(pid, 0.0)) for pid in pids]

    def heat(self, uuid: str) -> tuple[float, float]:
        nvml, handle = self._opened(uuid)
        try:
            now_c = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            slow_c = nvml.nvmlDeviceGetTemperatureThreshold(
                handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            )
        except nvml.NVMLError as error:
            raise UnknownError(f"the driver tells no temperature: {error}") from error
        return float(now_c), float(slow_c)

    def _opened(self, uuid: str) -> tuple[Any, Any]:
        """Return the library and its handle of a GPU."""
        if self._pynvml is None:
            self._pynvml = _loaded()
        nvml = self._pynvml
        try:
            return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            raise UnknownError(f"the driver does not know {uuid}: {error}") from error

    def _utilization(self, nvml: Any, handle: Any, uuid: str) -> dict[int, float]:
        """Return how busy each process was since the last call, by its id."""
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, self._asked_us.get(uuid, 0))
        except nvml.NVMLError:
            # Nobody has computed, or this device does not tell. Memory is known all the same.
            return {}
        busy: dict[int, float] = {}
        for sample in samples:
            self._asked_us[uuid] = max(self._asked_us.get(uuid, 0), sample.timeStamp)
            # Old drivers give percentages out of range for processes that have ended.
            busy[sample.pid] = max(busy.get(sample.pid, 0.0), min(1.0, sample.smUtil / 100))
        return busy


def _loaded() -> Any:
    """Return the library, ready for use."""
    try:
        import pynvml
    except ImportError as error:
        raise UnknownError("nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise UnknownError(f"NVIDIA's driver does not answer: {error}") from error
    return pynvml


Probe = Callable[[], Sighting]

BUSY_MIN = 0.2
"""Others compute on the GPU if they keep it busy for this part of the time. A desktop takes a few
percent."""
HELD_MIN_BYTES = 2 << 30
"""Others use the GPU if they hold as much of its memory. A desktop holds some hundred MiB."""

HOT_C = 90.0
"""A processor is too hot at this temperature, unless its sensor names a sensible limit."""
_HIGH_C = (60.0, 110.0)
"""Sensors name limits from -273 to 65,000 degrees. Those in between are believed."""
_PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu", "acpitz")
"""Sensors of processors, by their driver. Disks and network cards have sensors too."""

_WEIGHTS = {False: 0, None: 1, True: 2}
"""Of what is found out about each of several GPUs."""

IDLE_MIN_S = 300.0
"""A terminal is in use for this long after its last input."""
_LOGINCTL_TIMEOUT_S = 2.0


def make_probes(
    gpus: Callable[[], Sequence[OwnGpu]], nvml: Nvml, wall: Callable[[], float]
) -> Mapping[PauseRule, Probe]:
    """Return the probe of each rule.

    Args:
        gpus: Returns the GPUs that the node uses.
        nvml: The driver.
        wall: Returns the time in seconds of the Unix epoch.
    """
    return {
        PauseRule.BUSY_GPU: lambda: busy_gpu(gpus(), nvml),
        PauseRule.BATTERY: battery,
        PauseRule.HOT: lambda: hot(gpus(), nvml),
        PauseRule.KEYBOARD: lambda: keyboard(wall()),
    }


def busy_gpu(own: Sequence[OwnGpu], nvml: Nvml) -> Sighting:
    """Find out whether others use one of the node's GPUs."""
    if not own:
        return Sighting(holds=False, detail="the node uses no GPU now")
    # What is known of one tells more than what is not known of another.
    return max((_use_of(each, own, nvml) for each in own), key=lambda each: _WEIGHTS[each.holds])


def _use_of(gpu: OwnGpu, own: Sequence[OwnGpu], nvml: Nvml) -> Sighting:
    found, own_pids = nvml.processes(gpu.uuid), {each.pid for each in own}
    if all(each.pid != gpu.pid for each in found):
        # In a container, the driver names processes by the host's ids.
        return Sighting(holds=None, detail="the node's own process is not among the GPU's")
    others = [each for each in found if each.pid not in own_pids]
    busy = min(1.0, sum(each.utilization for each in others))
    held_bytes = sum(each.memory_bytes for each in others)
    used = f"others keep the GPU {100 * busy:.0f} % busy and hold {held_bytes / 2**30:.1f} GiB"
    return Sighting(holds=busy >= BUSY_MIN or held_bytes >= HELD_MIN_BYTES, detail=used)


def battery() -> Sighting:
    """Find out whether the machine runs on its battery."""
    found = psutil.sensors_battery()
    if found is None:
        return Sighting(holds=False, detail="there is no battery")
    if found.power_plugged is None:
        return Sighting(holds=None, detail="the battery does not tell whether power is plugged in")
    return Sighting(
        holds=not found.power_plugged, detail=f"on battery, {found.percent:.0f} % are left"
    )


def hot(own: Sequence[OwnGpu], nvml: Nvml) -> Sighting:
    """Find out whether a processor, or one of the node's GPUs, is too hot."""
    found = _processors()
    for each in own:
        try:
            found.append(("GPU", *nvml.heat(each.uuid)))
        except UnknownError:
            if not found:
                raise
    if not found:
        return Sighting(holds=None, detail="this machine shows no temperatures")
    name, now_c, limit_c = max(found, key=lambda each: each[1] - each[2])
    text = f"{name} is at {now_c:.0f} °C, and its limit is {limit_c:.0f} °C"
    return Sighting(holds=now_c >= limit_c, detail=text)


def _processors() -> list[tuple[str, float, float]]:
    """Return name, temperature and limit of each processor's sensor."""
    found = []
    for driver, sensors in psutil.sensors_temperatures().items():
        if driver in _PROCESSORS:
            for sensor in sensors:
                low_c, high_c = _HIGH_C
                sensible = sensor.high is not None and low_c <= sensor.high <= high_c
                name = sensor.label or driver
                found.append((name, sensor.current, sensor.high if sensible else HOT_C))
    return found


def keyboard(
    wall_s: float,
    *,
    loginctl: Callable[[], str | None] | None = None,
    terminals: Sequence[str] = ("/dev/pts/[0-9]*", "/dev/tty[0-9]*"),
) -> Sighting:
    """Find out whether somebody uses the machine, here or over SSH.

    The login manager knows, since desktops tell it when they are idle. Without one, the last input
    to a terminal is looked at: the kernel notes it as the time of access.

    Args:
        wall_s: The time, in seconds of the Unix epoch.
        loginctl: Returns what the login manager says; None if there is none.
        terminals: Patterns of the terminals' paths.
    """
    said = (loginctl or _ask_loginctl)()
    if said is not None:
        in_use = "IdleHint=no" in said.splitlines()
        return Sighting(holds=in_use, detail="somebody uses this machine" if in_use else "idle")
    last_s = -inf
    for path in (path for pattern in terminals for path in glob(pattern)):
        try:
            last_s = max(last_s, Path(path).stat().st_atime)
        except OSError:
            continue
    if last_s == -inf:
        return Sighting(holds=None, detail="there is no login manager and no terminal")
    idle_s = max(0.0, wall_s - last_s)
    text = f"the last input to a terminal was {idle_s:.0f} s ago"
    return Sighting(holds=idle_s < IDLE_MIN_S, detail=text)


def _ask_loginctl() -> str | None:
    """Return the properties of the login manager; None if there is none."""
    program = shutil.which("loginctl")
    if program is None:
        return None
    try:
        # Without a session's name, it tells of all sessions together.
        result = subprocess.run(  # noqa: S603 - a program of the system, with fixed arguments.
            [program, "show-session", "--property=IdleHint"],
            capture_output=True,
            text=True,
            timeout=_LOGINCTL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 and "IdleHint=" in result.stdout else None
