"""The systemd unit of a node, for the whole system or for one user, from one template."""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decod.exit_codes import ExitCode

RESTARTS_NOT_AT = (
    ExitCode.USAGE,
    ExitCode.CONFIG,
    ExitCode.REJECTED,
    ExitCode.DATA,
    ExitCode.INTERRUPTED,
)
"""Exit codes after which a person must act: a restart would only repeat the error. After 75, 4 and
6 a restart may help, when the run, the network or the device is back."""

_STEPS_SINCE = 254
"""First version of systemd that can wait longer before each restart."""

_LEADER_EXTRA_S = 600
_EXTRA_S = 30
"""Time after the drain timeout until systemd kills the node. A leader's longer, to keep the
model."""

_TEMPLATE = """\
# Written by `decod service install`, which replaces it when it is run again.
[Unit]
Description=decod: {description}
{ordering}
# A run that is away for a day is no reason to give up.
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
WorkingDirectory={folder}
Environment=PYTHONUNBUFFERED=1
Restart=on-failure
RestartPreventExitStatus={final}
{pauses}
TimeoutStartSec=600
# SIGTERM asks the node to leave; its compute process ends when the node says so.
KillMode=mixed
TimeoutStopSec={stop_s}
# Fed while the event loop turns and the core is stepped when it is due.
WatchdogSec=180
# A compute process that runs out of memory is replaced by its node.
OOMPolicy=continue
LimitCORE=0
LimitNOFILE=65536
UMask=0077
{confinement}
[Install]
WantedBy={wanted_by}
"""

_SYSTEM_ORDERING = """\
Wants=network-online.target
After=network-online.target"""

_SYSTEM_CONFINEMENT = """\
User={user}
{folders}
# What is confined here leaves CUDA alone. Not set, because they break it: PrivateDevices,
# DevicePolicy, DeviceAllow, ProtectClock (which allows no device but a clock) and
# MemoryDenyWriteExecute (its compiler writes code).
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
"""

_MODPROBE = """\
# A confined process can't load the driver's module for unified memory, which CUDA does by itself.
# systemd goes on where there is no such program.
ExecStartPre=-+/usr/bin/nvidia-modprobe -c 0 -u
"""

_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - not to be written to by decod.

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A node that a service manager keeps running."""

    unit: str
    """Name of the unit, without `.service`."""
    arguments: Sequence[str]
    """The arguments of `decod`, from `join` or `leader` on."""
    python: str
    """The Python interpreter of this installation."""
    folder: Path
    """The folder that relative paths in the arguments refer to."""
    state_dir: Path
    user: str | None
    """The user as whom the node runs, in a unit of the system. None for a unit of a user."""
    writable: Sequence[Path] = ()
    """Further folders to which the node writes."""
    drain_timeout_s: float
    uses_cuda: bool = False
    """True if the node computes with CUDA if CUDA works."""

    @property
    def leads(self) -> bool:
        return self.arguments[0] == "leader"

    @property
    def manages_state_dir(self) -> bool:
        """Return whether systemd creates the state folder."""
        return self.user is not None and self.state_dir == system_state_dir(self.unit)


def system_state_dir(unit: str) -> Path:
    """Return the default state folder of a unit of the system."""
    return Path("/var/lib") / unit


def state_dir_in(text: str) -> Path | None:
    """Return the state folder of the node of a unit, from the unit's text; None if it has none."""
    for line in text.splitlines():
        if line.startswith("ExecStart="):
            with suppress(ValueError):
                words = shlex.split(line.replace("%%", "%").replace("$$", "$"))
                return Path(words[words.index("--state-dir") + 1])
    return None


def stop_timeout_s(service: Service) -> int:
    """Return how long a node may take to leave before it is killed."""
    return round(service.drain_timeout_s) + (_LEADER_EXTRA_S if service.leads else _EXTRA_S)


def render_unit(service: Service, *, systemd_version: int) -> str:
    """Return the text of the unit."""
    command = (service.python, "-m", "decod", *service.arguments)
    return _TEMPLATE.format(
        description=escape("leader" if service.leads else "volunteer") + f" ({service.unit})",
        ordering=_SYSTEM_ORDERING if service.user else "# A user's services know no network.",
        command=" ".join(map(quote, command)),
        folder=escape(str(service.folder)),
        final=" ".join(map(str, RESTARTS_NOT_AT)),
        pauses=_pauses(systemd_version),
        stop_s=stop_timeout_s(service),
        confinement=_confinement(service),
        wanted_by="multi-user.target" if service.user else "default.target",
    )


def _pauses(systemd_version: int) -> str:
    if systemd_version < _STEPS_SINCE:
        return f"# From systemd {_STEPS_SINCE} on pauses grow.\nRestartSec=20"
    return "RestartSec=5\nRestartSteps=6\nRestartMaxDelaySec=300"


def _confinement(service: Service) -> str:
    if service.user is None:
        # Most confinement requires NoNewPrivileges here, with which CUDA can't load its module.
        return ""
    writable = list(service.writable)
    paths = (service.folder, service.state_dir, Path(service.python))
    # The default corpus is written to the cache folder.
    folders = [f"CacheDirectory={service.unit}", f"Environment=XDG_CACHE_HOME=%C/{service.unit}"]
    if service.manages_state_dir:
        folders += [f"StateDirectory={service.unit}", "StateDirectoryMode=0700"]
    else:
        writable.append(service.state_dir)
    if any(path.is_relative_to(folder) for path in paths for folder in _TEMPORARY):
        # PrivateTmp would hide these paths.
        writable += _TEMPORARY
    else:
        folders.append("PrivateTmp=yes")
    if writable:
        folders.append("ReadWritePaths=" + " ".join(quote(str(path)) for path in writable))
    text = _SYSTEM_CONFINEMENT.format(user=service.user, folders="\n".join(folders))
    return text + (_MODPROBE if service.uses_cuda else "")


def escape(text: str) -> str:
    """Return text escaped so that systemd expands no specifiers in it."""
    return text.replace("%", "%%")


def quote(argument: str) -> str:
    """Return an argument quoted as one word of systemd's command lines and lists of paths."""
    text = escape(argument).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return text if _PLAIN.match(argument) else f'"{text}"'
