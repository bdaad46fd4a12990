"""A node as an agent of launchd, which starts and watches programs on macOS. Not yet tried on one.

An agent belongs to a user, and starts when that user logs in. launchd knows no exit codes after
which a restart is of no use, so it waits a minute before each.
"""

import os
import plistlib
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from decod.cli.service_unit import Service, stop_timeout_s

_LABEL = "org.decod."
_RESTART_PAUSE_S = 60


def agent_path(unit: str) -> Path:
    """Return the file of an agent."""
    return Path.home() / "Library" / "LaunchAgents" / f"{_LABEL}{unit}.plist"


def render_agent(service: Service) -> str:
    """Return the text of the file."""
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


def state_dir_of_agent(text: str) -> Path | None:
    """Return the state folder of an agent's node, from its file; None if it has none."""
    with suppress(ValueError, KeyError, TypeError):
        words: list[Any] = plistlib.loads(text.encode())["ProgramArguments"]
        return Path(words[words.index("--state-dir") + 1])
    return None


def log_of_agent(text: str) -> Path:
    """Return the file to which an agent's node writes."""
    return Path(plistlib.loads(text.encode())["StandardOutPath"])


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


def domain() -> str:
    """Return launchd's name of the user's agents."""
    return f"gui/{os.getuid()}"


def label(unit: str) -> str:
    """Return launchd's name of an agent."""
    return f"{domain()}/{_LABEL}{unit}"


def is_loaded(program: str, unit: str) -> bool:
    """Return whether launchd knows an agent now."""
    command = [program, "print", label(unit)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
