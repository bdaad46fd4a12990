"""Facts of this host and of the node's process, for a bug report. Each may be missing."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from decod import __version__
from decod.daemon.control import SOCKET_NAME
from decod.daemon.node_folder import is_in_use, nearest_folder
from decod.errors import DISTRIBUTION
from decod.files import read_beginning
from decod.host_limits import num_processors
from decod.texts import why_of

_TEXT_MAX_BYTES = 1 << 16
_PID_TIMEOUT_S = 2.0


def versions() -> dict[str, Any]:
    """Return the releases of decod, Python, and of what decod needs."""
    packages: dict[str, str | None] = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires(DISTRIBUTION) or ():
            found = re.match(r"[A-Za-z0-9._-]+", requirement)
            if found is not None and "extra ==" not in requirement:
                packages[found[0]] = _version(found[0])
    return {
        "decod": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "libc": " ".join(platform.libc_ver()),
        "packages": packages,
    }


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def system(state_dir: Path) -> dict[str, Any]:
    """Return what the kernel says of this host. Sizes are in bytes.

    Args:
        state_dir: The folder whose disk is looked at.
    """
    kernel = platform.uname()
    facts: dict[str, Callable[[], Any]] = {
        "kernel": lambda: f"{kernel.system} {kernel.release} {kernel.version} {kernel.machine}",
        "distribution": lambda: platform.freedesktop_os_release().get("PRETTY_NAME"),
        "num_cpus": os.cpu_count,
        "num_cpus_usable": num_processors,
        "load": os.getloadavg,
        "memory": lambda: _plain(psutil.virtual_memory()),
        "swap": lambda: _plain(psutil.swap_memory()),
        "disk": lambda: _plain(shutil.disk_usage(nearest_folder(state_dir))),
        "open_files_limit": lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
        "boot_s": psutil.boot_time,
    }
    found: dict[str, Any] = {}
    for name, read in facts.items():
        try:
            found[name] = read()
        except (OSError, psutil.Error) as error:
            found[name] = f"unknown: {why_of(error)}"
    return found


def _plain(values: Any) -> dict[str, Any]:
    return dict(values._asdict())


def configuration(state_dir: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Return how the node was started, as far as this host knows.

    Args:
        state_dir: The node's folder.
        environment: The variables that set options.
    """
    process = _daemon_of(state_dir)
    command = _command_of(process) if process is not None else None
    return {
        "state_dir": str(state_dir),
        "in_use": is_in_use(state_dir),
        "command": command,
        "run_file": _run_file_of(process, command) if process is not None else None,
        "environment": environment,
    }


def _daemon_of(state_dir: Path) -> Path | None:
    """Return the kernel's folder of the daemon that listens in a state folder, if one does."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PID_TIMEOUT_S)
        connection.connect(str(state_dir / SOCKET_NAME))
        size = struct.calcsize("3i")
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return Path(f"/proc/{struct.unpack('3i', peer)[0]}")
    return None


def _command_of(process: Path) -> list[str] | None:
    with suppress(OSError):
        # The kernel gives such a file no size.
        text = (process / "cmdline").read_bytes()[:_TEXT_MAX_BYTES].decode(errors="replace")
        return text.rstrip("\0").split("\0")
    return None


def _run_file_of(process: Path, command: list[str] | None) -> str | None:
    """Return the text of the run file that a leader was started with."""
    named = [word for word in command or () if word.endswith(".toml")]
    for name in named[:1]:
        with suppress(OSError):
            path = process / "cwd" / name
            return read_beginning(path, _TEXT_MAX_BYTES).decode(errors="replace")
    return None


def hosts_of_options(command: list[str] | None, environment: dict[str, str]) -> list[str]:
    """Return the hosts that options name, with or without a port."""
    words = [word for part in command or () for word in part.split("=", 1)]
    options = ("--advertise", "--listen")
    given = [value for name, value in pairwise(words) if name in options]
    given += [
        value for name, value in environment.items() if name.endswith(("_ADVERTISE", "_LISTEN"))
    ]
    return [value.rpartition(":")[0] or value for value in given]


def own_hosts() -> list[str]:
    """Return the names of this host."""
    names = [socket.gethostname(), platform.node()]
    with suppress(OSError):
        lines = read_beginning(Path("/etc/hosts"), 1 << 16).decode(errors="replace").splitlines()
        words = [line.partition("#")[0].split() for line in lines]
        names += [name for line in words if names[0] in line[1:] for name in line[1:]]
    return [name for name in dict.fromkeys(names) if name]
