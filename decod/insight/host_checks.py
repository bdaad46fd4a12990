"""Checks of this host itself: releases, driver, device, disk and clock.

Each is a pure function of facts, which the kernel, the disk and the compute process tell. The
result of a check is a `Diagnosis`: a level, what was found, and the remedy if that is not well.
"""

import importlib.metadata
import platform
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from decod import __version__
from decod.config.needs import stage_needs
from decod.config.node_config import NodeConfig
from decod.daemon.device_owner import try_device
from decod.daemon.node_folder import nearest_folder
from decod.daemon.run_facts import TOLERANCE_S
from decod.errors import DecodError
from decod.exit_codes import ExitCode
from decod.files import read_beginning
from decod.installation import install_hint
from decod.journal.logs import LOG_SIZE_MAX_BYTES, NUM_OLD_LOGS
from decod.membership.certificates import CLOCK_TOLERANCE_S
from decod.run.run_config import RunConfig
from decod.run.training_config import BatchConfig
from decod.texts import why_of
from decod.train.checkpoint.stage_states import KEPT_PER_STAGE


class Level(StrEnum):
    """How well things are."""

    OK = "OK"
    """Nothing needs to be done."""
    WARN = "WARN"
    """A node may run, but badly; or nobody can tell."""
    FAIL = "FAIL"
    """A node can't run, or can't take part in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of one check. `fine`, `doubtful`, `failed` and `failed_by` make one."""

    check: str
    """The check's name, one word."""
    level: Level
    found: str
    remedy: str = ""
    """One thing to do. Empty if and only if the level is OK."""
    exit_code: ExitCode = ExitCode.OK
    """That of `decod join` for the same reason. It is other than OK if and only if this is FAIL."""

    def __post_init__(self) -> None:
        assert (self.level is Level.OK) == (not self.remedy), self
        assert (self.level is Level.FAIL) == (self.exit_code is not ExitCode.OK), self


def fine(check: str, found: str) -> Diagnosis:
    """Return the diagnosis that all is well."""
    return Diagnosis(check=check, level=Level.OK, found=found)


def doubtful(check: str, found: str, remedy: str) -> Diagnosis:
    """Return the diagnosis of what hampers a node, or what can't be told."""
    return Diagnosis(check=check, level=Level.WARN, found=found, remedy=remedy)


def failed(check: str, found: str, remedy: str, exit_code: ExitCode) -> Diagnosis:
    """Return the diagnosis of what keeps a node from taking part.

    Args:
        check: The check's name.
        found: What is wrong.
        remedy: What to do.
        exit_code: With which `decod join` would end for this reason; not OK.
    """
    return Diagnosis(check=check, level=Level.FAIL, found=found, remedy=remedy, exit_code=exit_code)


def failed_by(check: str, error: DecodError) -> Diagnosis:
    """Return the diagnosis for an error that `decod join` would end with."""
    return failed(check, f"{error.code} {error.what}: {error.why}", error.fix, error.exit_code)


TORCH_MIN = (2, 10)
"""The oldest release of torch that decod runs with, as in pyproject.toml."""

MEMORY_LOW_BYTES = 1 << 30
"""Torch alone takes half of this on a GPU."""

_LOGS_BYTES = (1 + NUM_OLD_LOGS) * LOG_SIZE_MAX_BYTES
_STATES_USUAL_BYTES = 1 << 30
"""Room for states if the run, and so their size, is not known."""

_GIB = 1 << 30
_SET_CLOCK = "have the system keep its clock: `timedatectl set-ntp true`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """The releases in use."""

    python: str
    decod: str
    torch: str | None
    """None: torch is not installed."""
    built_for: str | None = None
    """What torch is built for: `CUDA 12.8`, `ROCm 6.4`, `CPU`, say. None: not known."""
    node: str | None = None
    """Release of decod that the node on this host runs; None if none runs, or does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Drivers and cards of NVIDIA and AMD, as the kernel shows them."""

    release: str | None
    """Of NVIDIA's driver. None: it is not loaded."""
    num_devices: int
    """NVIDIA's device files that this process could open."""
    num_cards: int
    """NVIDIA's cards on the bus, with or without a driver."""
    num_amd_cards: int = 0
    """AMD's cards on the bus that its driver can compute on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedDevice:
    """The device that a node would compute on. It has just computed something."""

    asked: str
    """`--device`."""
    name: str
    """As torch calls it: `cpu`, or `cuda:` and a number, say."""
    text: str
    """The device's name. If `auto` took the CPU, also why."""
    free_bytes: int
    torch: str
    """Release of torch."""
    built_for: str
    """What torch is built for, as in `Releases`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedFolder:
    """The state folder, and its disk. A little has been written there, and removed."""

    folder: Path
    """The folder, which need not exist yet."""
    free_bytes: int
    problem: str = ""
    """Why nothing can be written there; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """This host's clock."""

    ahead_s: float | None = None
    """By how many seconds it is ahead of another node's. None: no node was asked."""
    asked: str = ""
    """Address of that node."""
    synchronised: bool | None = None
    """Whether a time service keeps it, as the kernel says. None: the kernel does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingSystem:
    """The system on which decod runs."""

    name: str
    """`Linux` or `Darwin`, say."""
    release: str
    """Of its kernel."""
    wsl_networking: str = ""
    """How Windows shares its network with WSL2: `nat`, `mirrored`, or empty if it does not say."""


def check_system(system: OperatingSystem) -> Diagnosis:
    """Check that the system is one on which decod is at home, and name the traps of others."""
    found = f"{system.name} {system.release}"
    if system.name == "Darwin":
        found = f"macOS (Darwin {system.release}), on which decod has not been tried yet"
        return doubtful("system", found, "tell how it goes (docs/install.md#macos)")
    release = system.release.lower()
    if "microsoft" not in release:
        return fine("system", found)
    if "wsl2" not in release:
        remedy = "change it with `wsl --set-version DISTRIBUTION 2` in PowerShell"
        return doubtful("system", f"{found}: WSL 1, in which no GPU computes", remedy)
    networking = system.wsl_networking or "unknown"
    found = f"WSL2 on Windows ({system.release}), networking {networking}"
    if networking == "mirrored":
        return fine("system", f"{found}. Windows must not sleep while the node trains")
    return doubtful(
        "system",
        f"{found}: other members can't dial this node",
        "set networkingMode=mirrored, if it shall be dialled (docs/install.md#windows-with-wsl2)",
    )


def check_versions(releases: Releases, driver: Driver) -> Diagnosis:
    """Check that torch is there and recent, and built for the host's GPU."""
    torch = releases.torch
    found = f"decod {releases.decod}, Python {releases.python}, torch {torch or 'missing'}"
    if torch is None or _release_of(torch) < TORCH_MIN:
        wanted = f"decod needs torch {TORCH_MIN[0]}.{TORCH_MIN[1]} or newer"
        return failed("versions", f"{found}: {wanted}", install_hint(), ExitCode.HARDWARE)
    if releases.node not in (None, releases.decod):
        return doubtful(
            "versions",
            f"{found}: the node on this host still runs decod {releases.node}",
            "restart the node, after `decod drain`",
        )
    built_for = releases.built_for
    if built_for is None:
        return fine("versions", found)
    if driver.release is not None and not built_for.startswith("CUDA"):
        return doubtful(
            "versions",
            f"{found}: there is an NVIDIA driver, but this torch is built for {built_for}",
            "install a torch with CUDA, as PyPI has it",
        )
    if driver.release is None and driver.num_amd_cards and not built_for.startswith("ROCm"):
        return doubtful(
            "versions",
            f"{found}: there is a card of AMD, but this torch is built for {built_for}",
            "install a torch for ROCm if AMD supports the card (docs/install.md)",
        )
    return fine("versions", f"{found} for {built_for}")


def _release_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a release such as `2.10.0+cu128`; (0, 0) if it has none."""
    match = re.match(r"([0-9]{1,6})\.([0-9]{1,6})", version)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


def check_driver(driver: Driver) -> Diagnosis:
    """Check that each NVIDIA card has a driver, and that this process may use it."""
    if driver.release is None and driver.num_cards:
        return doubtful(
            "driver",
            f"{_count(driver.num_cards, 'NVIDIA card')} and no driver",
            "install NVIDIA's driver, until `nvidia-smi` lists the card",
        )
    if driver.release is None and driver.num_amd_cards:
        return fine("driver", f"{_count(driver.num_amd_cards, 'AMD card')}, and AMD's driver")
    if driver.release is None:
        return fine("driver", "no NVIDIA card, and no driver")
    if not driver.num_devices:
        return doubtful(
            "driver",
            f"NVIDIA {driver.release}, but no device file such as /dev/nvidia0",
            "let this container or virtual machine use the GPU: `docker run --gpus all`",
        )
    return fine("driver", f"NVIDIA {driver.release}, {_count(driver.num_devices, 'device')}")


def check_device(device: TriedDevice, driver: Driver) -> Diagnosis:
    """Check that a node computes on the GPU if there is one, and that memory is free there."""
    each = " on each" if "," in device.name else ""
    found = f"{device.text}, {_gib(device.free_bytes)} free{each}"
    # The CPU was not asked for.
    if device.name == "cpu" != device.asked and driver.release is not None:
        return doubtful(
            "device", found, "install a torch that works with the driver that `nvidia-smi` shows"
        )
    if device.free_bytes < MEMORY_LOW_BYTES:
        return doubtful("device", found, "end other programs that use this memory")
    return fine("device", found)


def disk_needs_bytes(run: RunConfig | None) -> int:
    """Return how many bytes a node writes: its logs, and states of its stage and of one more.

    Args:
        run: The run, if it is known.
    """
    if run is None:
        return _LOGS_BYTES + _STATES_USUAL_BYTES
    largest_bytes = max(stage_needs(run, each).state_bytes for each in (0, 1))
    return _LOGS_BYTES + 2 * KEPT_PER_STAGE * largest_bytes


def check_disk(disk: TriedFolder, needs_bytes: int) -> Diagnosis:
    """Check that the state folder can be written, and has room.

    Args:
        disk: The disk of the state folder.
        needs_bytes: What a node writes there.
    """
    found = f"{disk.folder}: {_gib(disk.free_bytes)} free"
    if disk.problem:
        found += f", and nothing can be written: {disk.problem}"
        remedy = "give a --state-dir that you may write to, on a disk with free space"
        return failed("disk", found, remedy, ExitCode.CONFIG)
    if disk.free_bytes < needs_bytes:
        found += f", and a node writes up to {_gib(needs_bytes)}"
        return doubtful("disk", found, "free some space on that disk")
    return fine("disk", found)


def check_clock(clock: Clock) -> Diagnosis:
    """Check the clock against another node's, or else that a time service keeps it."""
    if clock.ahead_s is not None:
        return _compared(clock.ahead_s, clock.asked)
    if clock.synchronised is None:
        return doubtful("clock", "nobody can tell whether it is right", _SET_CLOCK)
    if not clock.synchronised:
        return doubtful("clock", "no time service keeps it, as far as the kernel knows", _SET_CLOCK)
    return fine("clock", "a time service keeps it")


def _compared(ahead_s: float, asked: str) -> Diagnosis:
    off_s = abs(ahead_s)
    if off_s <= TOLERANCE_S:
        return fine("clock", f"within {max(1.0, off_s):.0f} s of the clock of {asked}")
    way = "ahead of" if ahead_s > 0 else "behind"
    found = f"{off_s:,.0f} s {way} the clock of {asked}"
    if off_s <= CLOCK_TOLERANCE_S:
        return doubtful("clock", found, _SET_CLOCK)
    found += ", so papers of members are not valid here"
    return failed("clock", found, _SET_CLOCK, ExitCode.REJECTED)


def _count(num: int, word: str) -> str:
    return f"{num} {word}" + ("" if num == 1 else "s")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB"


_NVIDIA_ID = "0x10de"
_AMD_ID = "0x1002"
_DISPLAY_CLASS = "0x03"
"""Beginning of the class of graphics cards and accelerators on the PCI bus."""

_DRIVER_FILE_MAX_BYTES = 4096
_TRIAL_BYTES = 4096
"""Written to the disk and removed again."""


def releases_of(device: TriedDevice | None, node_release: str | None) -> Releases:
    """Return the releases in use.

    Args:
        device: What the compute process said; None if none was started.
        node_release: Release of decod that the node on this host runs, if one does.
    """
    torch = None if device is None else device.torch
    if device is None:
        with suppress(importlib.metadata.PackageNotFoundError):
            torch = importlib.metadata.version("torch")
    return Releases(
        python=platform.python_version(),
        decod=__version__,
        torch=torch,
        built_for=None if device is None else device.built_for,
        node=node_release,
    )


def read_driver(root: Path = Path("/")) -> Driver:
    """Return the drivers and cards of NVIDIA and AMD.

    Args:
        root: The folder with `proc`, `dev` and `sys`.
    """
    text = ""
    with suppress(OSError):
        path = root / "proc/driver/nvidia/version"
        text = read_beginning(path, _DRIVER_FILE_MAX_BYTES).decode("ascii", "replace")
    makers = [_maker_of_card(each) for each in (root / "sys/bus/pci/devices").glob("*")]
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
    match = re.search(r"NVRM version: .*?\s([0-9]+\.[0-9.]+)\s", text)
    return Driver(
        release=match[1] if match else None,
        num_devices=sum(1 for _ in (root / "dev").glob("nvidia[0-9]*")),
        num_cards=makers.count(_NVIDIA_ID),
        num_amd_cards=makers.count(_AMD_ID) if (root / "dev/kfd").exists() else 0,
    )


def _maker_of_card(device: Path) -> str:
    """Return the maker of a graphics card on the bus; empty if it is something else."""
    try:
        vendor, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
    except (OSError, ValueError):
        return ""
    return vendor if kind.startswith(_DISPLAY_CLASS) else ""


_WSLINFO_TIMEOUT_S = 5.0


def read_system() -> OperatingSystem:
    """Return the system on which this process runs."""
    networking = ""
    program = shutil.which("wslinfo")
    if program is not None:
        with suppress(OSError, subprocess.SubprocessError):
            command = [program, "--networking-mode", "-n"]
            told = subprocess.run(  # noqa: S603 - a fixed program of Windows.
                command, capture_output=True, text=True, check=True, timeout=_WSLINFO_TIMEOUT_S
            )
            networking = told.stdout.strip()[:16]
    name, release = platform.system(), platform.release()
    return OperatingSystem(name=name, release=release, wsl_networking=networking)


async def tried_device(config: NodeConfig) -> TriedDevice:
    """Start a compute process, which tries the device of `config`, and end it.

    Raises:
        HardwareError: The named device does not work, or the compute process can't start
            (E-HW-002).
    """
    # Any run will do: nothing of it is built.
    # Any run will do whose microbatches have a sequence for each device.
    batch = BatchConfig(microbatch_size=config.num_devices)
    facts = await try_device(RunConfig(batch=batch), config)
    return TriedDevice(
        asked=config.device,
        name=facts["device"],
        text=facts["device_text"],
        free_bytes=facts["memory_bytes"],
        torch=facts["torch"],
        built_for=facts["built_for"],
    )


def try_disk(folder: Path) -> TriedFolder:
    """Write a little where a folder is, or would be made. Nothing is left there."""
    existing = nearest_folder(folder)
    problem = ""
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(_TRIAL_BYTES))
    except OSError as error:
        problem = why_of(error)
    return TriedFolder(folder=folder, free_bytes=shutil.disk_usage(existing).free, problem=problem)
