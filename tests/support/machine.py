"""A machine that runs systemd, in namespaces of its own: real services, started and stopped.

systemd is process 1 of a PID namespace. It sees this host's files and network. Its writes to /etc,
/var and /run stay in the machine's folder or in its memory. Of this host's units, it sees the few
that any service needs. A machine can be shut down and booted again: its changes to /etc and /var
are then still there, as after a reboot.

It needs root, and a kernel with namespaces, cgroups and overlays; `missing()` names what is
missing. All processes that a machine has started end with it.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.cluster import child_environment
from tests.support.polling import wait_for

_SYSTEMD = Path("/usr/lib/systemd/systemd")
_UNITS = Path("/usr/lib/systemd/system")
_NEEDED = (
    *(f"{name}.target" for name in ("basic", "sysinit", "multi-user", "network-online", "slices")),
    *(f"{name}.target" for name in ("sockets", "paths", "timers", "local-fs", "local-fs-pre")),
    *(f"{name}.target" for name in ("shutdown", "umount", "final", "poweroff")),
    *("systemd-poweroff.service", "systemd-journald.service"),
    *("systemd-journald.socket", "systemd-journald-dev-log.socket"),
)
_CGROUPS = Path("/sys/fs/cgroup")
_START_TIMEOUT_S = 60.0
_PARTS = ("--target", "{pid}", "--mount", "--pid", "--uts", "--ipc", "--cgroup")

# Run in the new namespaces, before systemd takes over. $1 is the machine's folder.
_SETUP = r"""
set -e
mount --make-rprivate /
mount -t proc proc /proc
unified=$(test -e /sys/fs/cgroup/cgroup.controllers && echo yes || true)
umount -R /sys/fs/cgroup
if test "$unified"; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
fi
for part in etc var; do
    mount -t overlay overlay -o "lowerdir=/$part,upperdir=$1/$part,workdir=$1/$part.work" /$part
done
mount --bind "$1/local" /etc/systemd/system
mount --bind "$1/units" /usr/lib/systemd/system
for part in system-generators user-generators; do
    test ! -d /usr/lib/systemd/$part || mount --bind "$1/none" /usr/lib/systemd/$part
done
mount -t tmpfs -o mode=755 tmpfs /run
export container=decod
exec /usr/lib/systemd/systemd --system --unit=multi-user.target --show-status=0
"""


class MachineError(Exception):
    """This host can run no machine."""


class Machine:
    """A machine. Leaving the `with` block switches it off.

    Args:
        folder: An empty folder, for everything that the machine writes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._group = f"decodtest-{os.getpid()}-{id(self)}"
        self._process: subprocess.Popen[bytes] | None = None
        for name in ("etc", "etc.work", "var", "var.work", "local", "units", "none"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in _NEEDED:
            if (_UNITS / name).exists():
                shutil.copy(_UNITS / name, folder / "units" / name)
        # Without it, the output of services would be lost.
        wanted = folder / "units" / "sysinit.target.wants"
        wanted.mkdir(exist_ok=True)
        (wanted / "systemd-journald.service").symlink_to("../systemd-journald.service")

    def __enter__(self) -> Self:
        self.boot()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.switch_off()

    # --- power --------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start systemd, and wait until it has started everything."""
        groups = [folder / self._group for folder in _hierarchies()]
        enter = "".join(f'mkdir -p "{g}"; echo $$ > "{g}/cgroup.procs"; ' for g in groups)
        unshare = "exec unshare --pid --mount --uts --ipc --cgroup --fork --kill-child"
        with (self._folder / "console").open("ab") as console:
            self._process = subprocess.Popen(
                ["bash", "-c", f'{enter}{unshare} bash -c "$0" bash "$1"', _SETUP, self._folder],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        wait_for(
            self._is_up,
            "systemd to start",
            timeout_s=_START_TIMEOUT_S,
            describe=(self._folder / "console").read_text,
        )

    def shut_down(self, *, timeout_s: float = 60.0) -> None:
        """Switch the machine off in order: services are asked to end first."""
        assert self._process is not None
        self.run("systemctl", "poweroff", check=False)
        wait_for(
            lambda: self._process is None or self._process.poll() is not None,
            "the machine to be off",
            timeout_s=timeout_s,
        )
        self._forget()

    def switch_off(self) -> None:
        """Cut the power. Nothing is asked to end."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._forget()

    def _forget(self) -> None:
        self._process = None
        tops = [hierarchy / self._group for hierarchy in _hierarchies()]
        # A group stays busy for a moment after its last process.
        wait_for(lambda: all(map(_removed, tops)), "empty groups", timeout_s=20.0)

    def _is_up(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise MachineError((self._folder / "console").read_text(errors="replace")[-2000:])
        if self._pid is None:
            return False
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

    @property
    def _pid(self) -> int | None:
        """Process 1 of the machine, by this host's numbers."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        first = [int(child) for child in children if _runs_systemd(int(child))]
        return first[0] if first else None

    # --- inside -------------------------------------------------------------------------------

    def run(
        self, *command: str | Path, check: bool = True, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine, and return its result."""
        parts = [part.format(pid=self._pid) for part in _PARTS]
        result = subprocess.run(
            ["nsenter", *parts, "--", *map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            env={**child_environment(), **(environment or {})},
            timeout=120.0,
        )
        if check and result.returncode:
            raise AssertionError(f"{command} ended with {result.returncode}: {result.stderr}")
        return result

    def decod(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a `decod` command on the machine, and return its result."""
        return self.run(sys.executable, "-m", "decod", *arguments, check=check)

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", unit, "--value", "--property", name).stdout.strip()

    def signal(self, unit: str, number: signal.Signals) -> None:
        """Send a signal to a unit's main process."""
        self.run("kill", f"-{int(number)}", self.show(unit, "MainPID"))

    def configure(self, unit: str, name: str, text: str) -> None:
        """Add lines to a unit of the machine."""
        folder = self._folder / "local" / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.conf").write_text(text, encoding="utf-8")
        self.run("systemctl", "daemon-reload")

    def path(self, path: str) -> Path:
        """Return this host's path to a file that the machine has written below /etc or /var."""
        if path.startswith("/etc/systemd/system/"):
            return self._folder / "local" / path.removeprefix("/etc/systemd/system/")
        return self._folder / path.lstrip("/")

    def log(self, unit: str) -> str:
        """Return the output of a unit since the machine was booted."""
        return self.run("journalctl", "-u", unit, "--no-pager", check=False).stdout


def missing() -> str | None:
    """Return why there can be no machine here, or None if there can be one."""
    if os.geteuid() != 0:
        return "a machine of its own for systemd needs root"
    if not _SYSTEMD.exists():
        return "systemd is not installed (package systemd)"
    for program in ("unshare", "nsenter", "journalctl", "systemctl"):
        if shutil.which(program) is None:
            return f"`{program}` is not installed"
    return None


def _hierarchies() -> list[Path]:
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [_CGROUPS / "systemd", _CGROUPS / "unified"]


def _removed(top: Path) -> bool:
    """Remove a group and the groups in it, if they are empty. Return whether it is gone."""
    for folder, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)
    return not top.exists()


def _runs_systemd(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/exe").resolve().name == "systemd"
    return False
