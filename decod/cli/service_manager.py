"""The managers that keep a node running: systemd on Linux, launchd on macOS.

Launchd has not been tried on a Mac yet. It knows no exit codes after which a restart is of no use,
so it waits a minute before each.
"""

import os
import plistlib
import pwd
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from decod.cli.service_unit import Service, render_unit, state_dir_in, stop_timeout_s
from decod.errors import ConfigError, DecodError
from decod.paths import user_folder


class ServiceError(DecodError):
    """The service manager refused, and said why. Files that were written before are kept."""

    code = "E-RUN-030"


@dataclass(frozen=True, slots=True)
class Manager(ABC):
    """A service manager, of the machine or of this user."""

    of_system: bool

    def join_path(self, unit: str) -> Path:
        """Return the file that holds the join string of a unit."""
        folder = Path("/etc/decod") if self.of_system else user_folder("config")
        return folder / f"{unit}.join"

    @property
    @abstractmethod
    def runs(self) -> bool:
        """Whether the manager runs this machine. In a container it does not, say."""

    @abstractmethod
    def require(self) -> None:
        """Raise a ConfigError if the manager does not run this machine (E-CFG-071)."""

    @abstractmethod
    def unit_path(self, unit: str) -> Path:
        """Return the file that describes a service."""

    @abstractmethod
    def render(self, service: Service) -> str:
        """Return the text of that file."""

    @abstractmethod
    def state_dir(self, unit: str) -> Path | None:
        """Return the state folder of an installed service's node."""

    @abstractmethod
    def enable(self, unit: str, *, starts: bool) -> None:
        """Have a service start with the machine, or at login, and perhaps now.

        Like the following ones, it raises a ServiceError if the manager refuses.
        """

    @abstractmethod
    def start(self, unit: str) -> None:
        """Start a service."""

    @abstractmethod
    def stop(self, unit: str) -> None:
        """Stop a service until the machine starts again."""

    @abstractmethod
    def disable(self, unit: str) -> None:
        """Stop a service, and have it start no more."""

    @abstractmethod
    def forget(self) -> None:
        """Take note that a file has gone."""

    @abstractmethod
    def show(self, unit: str) -> bool:
        """Say how a service is. Return whether it runs."""

    @abstractmethod
    def log_command(self, unit: str, num_lines: int, *, follow: bool) -> list[str]:
        """Return the command line that shows what a service's node has written."""


def chosen_manager(of_system: bool | None) -> Manager:  # noqa: FBT001 - a flag's value.
    """Return the manager of this system.

    Args:
        of_system: The machine's, or this user's. None: the machine's for root.
    """
    if sys.platform == "darwin":
        if of_system:
            raise click.UsageError("on macOS a service is one of a user: leave out --system")
        return Launchd(of_system=False)
    return Systemd(os.geteuid() == 0 if of_system is None else of_system)


_BOOTED = Path("/run/systemd/system")
"""This folder exists while systemd runs the machine (sd_booted(3))."""

_SHOWN = "ActiveState,SubState,Result,UnitFileState,StateChangeTimestamp"
"""The properties of a service that systemd is asked for."""


@dataclass(frozen=True, slots=True)
class Systemd(Manager):
    """The systemd of the machine or of this user."""

    @property
    @override
    def runs(self) -> bool:
        return _BOOTED.is_dir()

    @override
    def require(self) -> None:
        self._program("systemctl")

    @override
    def unit_path(self, unit: str) -> Path:
        if self.of_system:
            return Path("/etc/systemd/system") / f"{unit}.service"
        return user_folder("config", "systemd") / "user" / f"{unit}.service"

    @override
    def render(self, service: Service) -> str:
        return render_unit(service, systemd_version=_systemd_version())

    @override
    def state_dir(self, unit: str) -> Path | None:
        return state_dir_in(self.unit_path(unit).read_text(encoding="utf-8"))

    @override
    def enable(self, unit: str, *, starts: bool) -> None:
        self._control("daemon-reload")
        self._control("enable", f"{unit}.service")
        if not self.of_system:
            _linger()
        if starts:
            # Not "start": the service may be running with an earlier unit.
            self._control("restart", f"{unit}.service")

    @override
    def start(self, unit: str) -> None:
        self._control("start", f"{unit}.service")

    @override
    def stop(self, unit: str) -> None:
        self._control("stop", f"{unit}.service")

    @override
    def disable(self, unit: str) -> None:
        self._control("disable", "--now", f"{unit}.service")

    @override
    def forget(self) -> None:
        self._control("daemon-reload")

    @override
    def show(self, unit: str) -> bool:
        told = self._control("show", f"{unit}.service", "--property", _SHOWN)
        properties = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
        since = properties.get("StateChangeTimestamp")
        state = f"{properties.get('ActiveState', 'unknown')} ({properties.get('SubState', '?')})"
        click.echo(f"{unit}: {state}" + (f" since {since}" if since else ""))
        click.echo(f"starts with the machine: {properties.get('UnitFileState', 'unknown')}")
        if properties.get("ActiveState") == "active":
            return True
        result = properties.get("Result", "success")
        why = "" if result == "success" else f", since it ended with {result}"
        click.echo(f"it does not run{why}; see decod service logs, then decod service start")
        return False

    @override
    def log_command(self, unit: str, num_lines: int, *, follow: bool) -> list[str]:
        command = [*self._program("journalctl"), "-u", f"{unit}.service", "-n", str(num_lines)]
        return [*command, "--follow" if follow else "--no-pager"]

    def _program(self, name: str) -> list[str]:
        """Return the beginning of a command line of one of systemd's programs, for this manager.

        Raises:
            ConfigError: systemd does not run this machine (E-CFG-071).
        """
        found = shutil.which(name)
        if found is None or not self.runs:
            raise ConfigError(
                "no systemd runs this machine",
                why="decod service leaves it to systemd to start and watch a node",
                fix="see docker/ for containers, or use another service manager: docs/volunteer.md",
                code="E-CFG-071",
            )
        return [found] if self.of_system else [found, "--user"]

    def _control(self, *arguments: str) -> str:
        return _told([*self._program("systemctl"), "--no-ask-password", *arguments], arguments)


def _systemd_version() -> int:
    """Return the version of systemd on this host, or 0 if it has none."""
    found = shutil.which("systemctl")
    if found is None:
        return 0
    result = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    match = re.match(r"systemd (\d+)", result.stdout)
    return int(match[1]) if match else 0


def _linger() -> None:
    """Make the user's services start with the machine. If that is refused, only say so."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    found = shutil.which("loginctl")
    if found is not None:
        command = [found, "--no-ask-password", "enable-linger", user]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:  # noqa: S603
            return
    click.echo(
        f"it starts when {user} logs in; to have it start with the machine: "
        f"sudo loginctl enable-linger {user}"
    )


_LABEL = "org.decod."
_RESTART_PAUSE_S = 60


@dataclass(frozen=True, slots=True)
class Launchd(Manager):
    """The launchd of this user, on macOS. Its services are called agents, and start at login."""

    @property
    @override
    def runs(self) -> bool:
        return True

    @override
    def require(self) -> None:
        self._program("launchctl")

    @override
    def unit_path(self, unit: str) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{_LABEL}{unit}.plist"

    @override
    def render(self, service: Service) -> str:
        log = str(service.state_dir / "service.log")
        agent = {
            "Label": f"{_LABEL}{service.unit}",
            "ProgramArguments": [service.python, "-m", "decod", *service.arguments],
            "WorkingDirectory": str(service.folder),
            "EnvironmentVariables": {"PYTHONUNBUFFERED": "1"},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_PAUSE_S,
            # SIGTERM asks the node to leave.
            "ExitTimeOut": stop_timeout_s(service),
            # Of others, the system slows down what runs in the background.
            "ProcessType": "Interactive",
            "SoftResourceLimits": {"NumberOfFiles": 65536, "Core": 0},
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        return plistlib.dumps(agent).decode()

    @override
    def state_dir(self, unit: str) -> Path | None:
        with suppress(ValueError, KeyError, TypeError):
            words = self._agent(unit)["ProgramArguments"]
            return Path(words[words.index("--state-dir") + 1])
        return None

    @override
    def enable(self, unit: str, *, starts: bool) -> None:
        self.disable(unit)  # It may run with an earlier file.
        if starts:
            self.start(unit)

    @override
    def start(self, unit: str) -> None:
        if self._printed(unit) is None:
            self._control("bootstrap", _domain(), str(self.unit_path(unit)))

    @override
    def stop(self, unit: str) -> None:
        self.disable(unit)

    @override
    def disable(self, unit: str) -> None:
        if self._printed(unit) is not None:
            self._control("bootout", f"{_domain()}/{_LABEL}{unit}")

    @override
    def forget(self) -> None:
        """Do nothing: launchd reads the file when it is told to."""

    @override
    def show(self, unit: str) -> bool:
        told = self._printed(unit)
        runs, text = (False, "not loaded") if told is None else state_in(told)
        click.echo(f"{unit}: {text}")
        if not runs:
            click.echo("it does not run; see decod service logs, then decod service start")
        return runs

    @override
    def log_command(self, unit: str, num_lines: int, *, follow: bool) -> list[str]:
        log = self._agent(unit)["StandardOutPath"]
        return [self._program("tail"), "-n", str(num_lines), *(["-F"] if follow else []), log]

    def _agent(self, unit: str) -> Any:
        return plistlib.loads(self.unit_path(unit).read_bytes())

    def _program(self, name: str) -> str:
        found = shutil.which(name)
        if found is None:
            raise ConfigError(
                f"there is no {name}",
                why="decod service leaves it to launchd to start and watch a node",
                fix="put it on the PATH, or run the node in a terminal",
                code="E-CFG-071",
            )
        return found

    def _printed(self, unit: str) -> str | None:
        """Return what launchd says of an agent; None if it does not know it now."""
        command = [self._program("launchctl"), "print", f"{_domain()}/{_LABEL}{unit}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        return None if result.returncode else result.stdout

    def _control(self, *arguments: str) -> str:
        return _told([self._program("launchctl"), *arguments], arguments)


def _domain() -> str:
    """Return launchd's name of the user's agents."""
    return f"gui/{os.getuid()}"


def state_in(told: str) -> tuple[bool, str]:
    """Return whether an agent runs, and a text for the operator.

    Args:
        told: What `launchctl print` says of it.
    """
    facts = dict(
        line.strip().split(" = ", 1) for line in told.splitlines() if line.count(" = ") == 1
    )
    state = facts.get("state", "unknown")
    code = facts.get("last exit code", "")
    ended = f", last exit code {code}" if code and code != "(never exited)" else ""
    return state == "running", f"{state}{ended}"


def _told(command: Sequence[str], arguments: Sequence[str]) -> str:
    """Run a program of a service manager, and return what it writes.

    Raises:
        ServiceError: The manager refuses.
    """
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode:
        said = " ".join((result.stderr or result.stdout).split())
        raise ServiceError(
            f"{Path(command[0]).name} {' '.join(arguments)} failed",
            why=said[:500] or f"exit code {result.returncode}",
            fix="see `decod service logs`; a service of the machine takes root",
        )
    return result.stdout
