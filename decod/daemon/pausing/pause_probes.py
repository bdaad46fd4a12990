"""Probes of this host: one for each cause for which a node pauses by itself.

A probe is a function that returns what it finds. It may block, and it may raise: it runs in a
thread, and what goes wrong in it is only that its cause can't be known.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from glob import glob
from math import inf
from pathlib import Path

import psutil

from decod.config.schedule import PauseRule
from decod.daemon.pausing.nvml import Nvml, OwnGpu, UnknownError
from decod.daemon.pausing.rules import Sighting

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
