"""A bug report: logs and facts of a node in one archive, without what nobody else should see.

It holds a fixed list of files, each with a limit, and nothing else, so keys, data and weights stay
out. `redaction` removes what texts hold. Of a long file the newest lines are kept. What was cut or
can't be read is said in the report. The archive is written whole or not at all.
"""

import importlib.metadata
import io
import json
import os
import platform
import re
import resource
import shutil
import socket
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from decod import __version__
from decod.daemon.node_folder import is_in_use, nearest_folder, user_of
from decod.errors import HardwareError
from decod.files import read_beginning, read_end, replace_durably
from decod.host_limits import num_processors
from decod.insight.redaction import Redactor, lines_of_keys
from decod.installation import DISTRIBUTION
from decod.journal.journal_file import FOLDER, NUM_FILES, JournalFile
from decod.journal.logs import NUM_OLD_LOGS
from decod.texts import why_of

LOG_MAX_BYTES = 8 << 20
"""Of all parts of node.log together. The newest win."""
JOURNAL_MAX_BYTES = 2 << 20
OTHER_MAX_BYTES = 1 << 20
"""Of any other file."""
CRASHES_MAX = 5
"""Newest reports of unexpected errors."""
RUNS_MAX = 3
"""Newest runs whose iterations are in the report."""

_KEY_FILES = ("identity.key", "roots/*/*.key", "memberships/*/papers.json")
_KEY_FILE_MAX_BYTES = 1 << 20
_ADDRESS_FILES = "memberships/*/peers.json"


@dataclass(frozen=True, slots=True)
class ReportFile:
    """One file of the report."""

    name: str
    content: bytes = field(repr=False)
    cut: str = ""
    """Says which part is left out; empty if none is."""


@dataclass(slots=True)
class Contents:
    """The files of a report."""

    files: list[ReportFile] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Files that are not in the report, and why."""

    @property
    def size_bytes(self) -> int:
        return sum(len(file.content) for file in self.files)


@dataclass(frozen=True, slots=True)
class _Source:
    """A text before redaction."""

    name: str
    text: str
    cut: str = ""


def known_secrets(state_dir: Path) -> list[str]:
    """Return lines of the private keys in a state folder, so that they can be removed."""
    found = []
    for pattern in _KEY_FILES:
        for path in state_dir.glob(pattern):
            # What this user can't read is not in this user's report.
            with suppress(OSError):
                text = read_beginning(path, _KEY_FILE_MAX_BYTES).decode(errors="replace")
                found += lines_of_keys(text)
    return found


def contents_of(state_dir: Path, facts: Mapping[str, Any], redactor: Redactor) -> Contents:
    """Return the files of a report on the node of a state folder.

    Args:
        state_dir: The folder. Anything in it may be missing, damaged or unreadable.
        facts: Objects to write as JSON, by the name of their file.
        redactor: Learns all hosts, then redacts all texts.
    """
    found = Contents()
    sources = [
        _Source(name, json.dumps(each, indent=1, ensure_ascii=False))
        for name, each in facts.items()
    ]
    sources += _sources_of(state_dir, found.left_out)
    for path in state_dir.glob(_ADDRESS_FILES):
        with suppress(OSError):
            redactor.learn(read_beginning(path, OTHER_MAX_BYTES).decode(errors="replace"))
    for source in sources:
        redactor.learn(source.text)
    for source in sources:
        content = redactor.redact(source.text).encode(errors="replace")
        found.files.append(ReportFile(source.name, content, source.cut))
    found.left_out = [redactor.redact(each) for each in found.left_out]
    found.files.insert(0, ReportFile("CONTENTS.txt", _contents_text(found).encode()))
    return found


def _sources_of(state_dir: Path, left_out: list[str]) -> Iterator[_Source]:
    parts = ["node.log", *(f"node.log.{age}" for age in range(1, NUM_OLD_LOGS + 1))]
    journal = [JournalFile(state_dir / FOLDER).path(age).name for age in range(NUM_FILES)]
    yield from _rotated(state_dir, parts, LOG_MAX_BYTES, left_out)
    yield from _rotated(state_dir / FOLDER, journal, JOURNAL_MAX_BYTES, left_out)
    paths = [state_dir / "compute.log", state_dir / "planning.log"]
    paths += _newest(state_dir.glob("crash-*.txt"), CRASHES_MAX)
    for path in paths:
        yield from _rotated(path.parent, [path.name], OTHER_MAX_BYTES, left_out)
    for path in _newest(state_dir.glob("runs/*/iterations.csv"), RUNS_MAX):
        for source in _rotated(path.parent, [path.name], OTHER_MAX_BYTES, left_out):
            yield _Source(f"runs/{path.parent.name}/{path.name}", source.text, source.cut)


def _newest(paths: Iterator[Path], num_max: int) -> list[Path]:
    def written_s(path: Path) -> float:
        with suppress(OSError):
            return path.lstat().st_mtime
        return 0.0

    return sorted(paths, key=written_s, reverse=True)[:num_max]


def _rotated(
    folder: Path, names: Sequence[str], size_max_bytes: int, left_out: list[str]
) -> Iterator[_Source]:
    """Yield the newest of a file's parts, which are named from the newest to the oldest."""
    left = size_max_bytes
    for name in names:
        path = folder / name
        try:
            size = path.lstat().st_size
            if left <= 0:
                left_out.append(f"{name}: {size:,} bytes, older than what the report has room for")
                continue
            text = read_end(path, left).decode(errors="replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            left_out.append(f"{name}: {why_of(error)}")
            continue
        missing = max(0, size - len(text.encode(errors="replace")))
        cut = f"its oldest {missing:,} of {size:,} bytes" if size > left else ""
        left -= min(size, left)
        yield _Source(name, text, cut)


def _contents_text(contents: Contents) -> str:
    """Return the report's first file: what is in it, what is not, and how it was redacted."""
    lines = ["A bug report of decod. It holds:", ""]
    for file in contents.files:
        cut = f"  left out: {file.cut}" if file.cut else ""
        lines.append(f"{len(file.content):>12,} bytes  {file.name}{cut}")
    if contents.left_out:
        lines += ["", "Not in it:", "", *contents.left_out]
    lines += [
        "",
        "Private keys, join strings and tokens are removed. IP addresses and host names are host-1",
        "and so on, user names are user-1 and so on, and the user's home is ~. The same name has",
        "the same pseudonym in all files. Training data and weights are never part of a report.",
        "",
    ]
    return "\n".join(lines)


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
    command = None
    if process is not None:
        with suppress(psutil.Error):
            command = process.cmdline()
    return {
        "state_dir": str(state_dir),
        "in_use": is_in_use(state_dir),
        "command": command,
        "run_file": _run_file_of(process, command) if process is not None else None,
        "environment": environment,
    }


def _daemon_of(state_dir: Path) -> psutil.Process | None:
    """Return the daemon that uses a state folder, if one does."""
    pid = user_of(state_dir)
    if pid is None:
        return None
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _run_file_of(process: psutil.Process, command: list[str] | None) -> str | None:
    """Return the text of the run file that a leader was started with."""
    named = [word for word in command or () if word.endswith(".toml")]
    for name in named[:1]:
        with suppress(OSError, psutil.Error):
            path = Path(process.cwd()) / name
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


_FILE_MODE = 0o600


def write_archive(path: Path, files: Sequence[ReportFile], *, now_s: float) -> int:
    """Write a tar.gz that only its owner may read; return its size in bytes.

    Args:
        path: The file to write.
        files: What it holds, in a folder that has the archive's name.
        now_s: Seconds of the Unix epoch.

    Raises:
        HardwareError: It can't be written (E-HW-016). Nothing of it is left.
    """
    content = packed(files, folder=path.name.removesuffix(".tar.gz"), now_s=now_s)
    try:
        replace_durably(path, content, mode=_FILE_MODE)
    except OSError as error:
        raise HardwareError(
            f"can't write the bug report {path}",
            why=why_of(error),
            fix="free space, or name a file on another disk with --output",
            code="E-HW-016",
        ) from error
    return len(content)


def packed(files: Sequence[ReportFile], *, folder: str, now_s: float) -> bytes:
    """Return files as tar.gz. It names no user and no host."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for file in files:
            info = tarfile.TarInfo(f"{folder}/{file.name}")
            info.size, info.mtime, info.mode = len(file.content), int(now_s), _FILE_MODE
            archive.addfile(info, io.BytesIO(file.content))
    return stream.getvalue()
