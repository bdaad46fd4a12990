"""Facts of this host itself, as the kernel, the disk and the compute process tell them."""

import importlib.metadata
import platform
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from decod import __version__
from decod.config.node_config import NodeConfig
from decod.daemon.device_owner import try_device
from decod.daemon.node_folder import nearest_folder
from decod.doctor.host_checks import Driver, Releases, TriedDevice, TriedFolder
from decod.files import read_beginning
from decod.run.batch_config import BatchConfig
from decod.run.run_config import RunConfig
from decod.texts import why_of

_NVIDIA_ID = "0x10de"
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
        has_cuda=None if device is None else device.has_cuda,
        node=node_release,
    )


def read_driver(root: Path = Path("/")) -> Driver:
    """Return NVIDIA's driver and cards.

    Args:
        root: The folder with `proc`, `dev` and `sys`.
    """
    text = ""
    with suppress(OSError):
        path = root / "proc/driver/nvidia/version"
        text = read_beginning(path, _DRIVER_FILE_MAX_BYTES).decode("ascii", "replace")
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
    match = re.search(r"NVRM version: .*?\s([0-9]+\.[0-9.]+)\s", text)
    return Driver(
        release=match[1] if match else None,
        num_devices=sum(1 for _ in (root / "dev").glob("nvidia[0-9]*")),
        num_cards=sum(map(_is_nvidia_card, (root / "sys/bus/pci/devices").glob("*"))),
    )


def _is_nvidia_card(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
    except (OSError, ValueError):
        return False
    return vendor == _NVIDIA_ID and kind.startswith(_DISPLAY_CLASS)


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
        has_cuda=facts["has_cuda"],
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
