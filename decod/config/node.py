"""`NodeConfig`: each host's own choices, and readers of the options that they come from."""

import ipaddress
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from decod.errors import ConfigError

CAPACITY_MAX = 4096
NUM_THREADS_MAX = 1024
UPLOAD_MIN_MBIT, UPLOAD_MAX_MBIT = 1.0, 1e6

DEFAULT_PORT = 7700
"""TCP port for gRPC, and UDP port of the same number for the distributed hash table."""

DEVICE_LABEL = "device:"
"""Start of the line that names a node's device to its operator."""

RESUME_LATEST = 0
"""The value of `--resume latest`: go on from the newest whole checkpoint."""

RESUME_AUTO = -1
"""The value of `--resume auto`: continue the last run of this name as far as possible."""

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\Z"
)
_DEVICE = re.compile(r"(auto|cpu|cuda(:[0-9]{1,3})?)\Z")
_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}\Z")


def default_state_dir() -> Path:
    """Return the system's default folder for identity, checkpoints, logs and control socket."""
    return platformdirs.user_state_path("decod")


def default_cache_dir() -> Path:
    """Return the system's default folder for data that can be made again, like the corpus."""
    return platformdirs.user_cache_path("decod")


def invoking_user() -> str | None:
    """Return the user who ran this command with `sudo`, or None if nobody did."""
    return os.environ.get("SUDO_USER") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node on one host. Nothing in it changes what is learnt."""

    listen_host: str = "0.0.0.0"  # noqa: S104 - volunteers are there to be reached.
    """Address to listen on; `127.0.0.1` for this machine only."""
    listen_port: int = DEFAULT_PORT
    """TCP and UDP port. 0: the system chooses a free one."""
    advertise: str | None = None
    """HOST:PORT under which others reach this node, if it is not the address on which it listens:
    behind a router, say. Absent: the node asks a peer."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`. `auto` is `cuda:0` if a trial on it succeeds, and the CPU
    otherwise. A named device is used, or the node does not start."""
    capacity: int | None = None
    """Microbatches held in memory at a time, 1 to 4096. Absent: derived from free memory."""
    num_threads: int | None = None
    """Threads of the compute process on the CPU, 1 to 1024. Absent: torch decides."""
    upload_max_mbit: float | None = None
    """Most that this node sends to all others together, in Mbit/s, at least 1. Absent: no limit."""
    drain_timeout_s: float = 60.0
    """Longest time that leaving may take, in seconds, 0 to 86400. In it, the node finishes the
    iteration in hand, and the last node of a stage waits for a successor. After it the node leaves
    at once, and the others repeat an iteration. Raise it if iterations take longer."""
    state_dir: Path = field(default_factory=default_state_dir)
    """Identity, checkpoints, logs and control socket. One node per folder."""
    rejoins: bool = True
    """Whether the node joins again by itself when the run has gone on without it. Otherwise the
    command ends with exit code 75, for a service manager that starts it again."""
    maps_port: bool = True
    """Whether to ask a router to map the port if others can't reach this node."""
    passes_on: bool | None = None
    """Whether this node passes on connections between members of which neither can be dialled.
    Absent: data nodes do, volunteers don't."""
    name: str | None = None
    """Shown to others in `decod status`. Absent: derived from the node's id."""

    def __post_init__(self) -> None:
        if self.listen_port != 0:
            _check_port(str(self.listen_port), f"listen port {self.listen_port}")
        if self.advertise is not None:
            _, port = parse_listen(self.advertise)
            if port == 0:
                raise _bad_address(self.advertise, "others cannot connect to port 0")
        check_device(self.device)
        for name, limit in (("capacity", CAPACITY_MAX), ("num_threads", NUM_THREADS_MAX)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(
                    f"{name} is {value}",
                    why=f"it is a count from 1 to {limit}",
                    fix="leave it out to have it measured",
                    code="E-CFG-022",
                )
        cap = self.upload_max_mbit
        if cap is not None and not UPLOAD_MIN_MBIT <= cap <= UPLOAD_MAX_MBIT:
            raise ConfigError(
                f"upload limit is {cap:g} Mbit/s",
                why="below 1 Mbit/s, others give up waiting; above 1,000 Gbit/s it limits nothing",
                fix="give 1Mbit or more, or no --upload-max to send as fast as the link allows",
                code="E-CFG-025",
            )
        if not 0 <= self.drain_timeout_s <= 86_400:
            raise ConfigError(
                f"drain timeout is {self.drain_timeout_s}",
                why="it is a number of seconds from 0 to a day",
                fix="leave it out to get a minute",
                code="E-CFG-024",
            )
        if self.name is not None and not _NODE_NAME.match(self.name):
            raise ConfigError(
                f"name is {ascii(self.name)[:60]}",
                why="it appears on other people's terminals, so it has plain characters only",
                fix="give 1 to 32 characters of letters, digits, dot, _ and -",
                code="E-CFG-023",
            )

    @property
    def upload_max_bytes_per_s(self) -> float | None:
        return None if self.upload_max_mbit is None else self.upload_max_mbit * 1e6 / 8

    @property
    def arguments(self) -> str:
        """The options of a command that starts the same node again, quoted for a shell."""
        usual = NodeConfig()._options
        options = {"--state-dir": str(self.state_dir)} | {
            option: value
            for option, value in self._options.items()
            if value is not None and value != usual[option]
        }
        words = [f"{option} {shlex.quote(value)}" for option, value in options.items()]
        words += [] if self.rejoins else ["--no-rejoin"]
        words += [] if self.maps_port else ["--no-port-mapping"]
        if self.passes_on is not None:
            words.append("--pass-on" if self.passes_on else "--no-pass-on")
        return " ".join(words)

    @property
    def _options(self) -> dict[str, str | None]:
        host = f"[{self.listen_host}]" if ":" in self.listen_host else self.listen_host
        return {
            "--listen": f"{host}:{self.listen_port}",
            "--advertise": self.advertise,
            "--device": self.device,
            "--capacity": str(self.capacity) if self.capacity else None,
            "--threads": str(self.num_threads) if self.num_threads else None,
            "--upload-max": _mbit(self.upload_max_mbit) if self.upload_max_mbit else None,
            "--drain-timeout": f"{self.drain_timeout_s:g}s",
            "--name": self.name,
        }


def _mbit(rate: float) -> str:
    """Return a rate in Mbit/s as the option's text: with six decimals, as it is read."""
    return f"{rate:.6f}".rstrip("0").rstrip(".") + "Mbit"


def check_device(device: str) -> None:
    """Check the name of a device.

    Raises:
        ConfigError: The name is none of `auto`, `cpu`, `cuda` and `cuda:N`.
    """
    if not _DEVICE.match(device):
        raise ConfigError(
            f"device is {ascii(device)[:60]}",
            why="decod computes on a CPU or a CUDA device",
            fix="give auto, cpu, cuda or cuda:0",
            code="E-CFG-021",
        )


def _bad_address(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"address {ascii(text)[:80]} is not HOST:PORT",
        why=why,
        fix="write it like 0.0.0.0:7700, example.org:7700 or [::1]:7700",
        code="E-CFG-020",
    )


def _check_port(port: str, text: str) -> int:
    # `isdecimal` alone accepts digits of other scripts, and int() accepts "1_0" and "+1".
    if not (port.isascii() and port.isdecimal()):
        raise _bad_address(text, "the port is not a number")
    if len(port) > 5 or int(port) > 65_535:
        raise _bad_address(text, "a port is at most 65535")
    return int(port)


def parse_listen(text: str) -> tuple[str, int]:
    """Return host (without brackets) and port of `HOST:PORT`, `HOST` or `[IPv6]:PORT`.

    A missing port means 7700. Port 0 lets the system choose.

    Raises:
        ConfigError: The host is neither an address nor a host name, or the port is impossible
            (E-CFG-020).
    """
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        if not closing or (rest and not rest.startswith(":")):
            raise _bad_address(text, "brackets hold an IPv6 address and a port follows them")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _bad_address(text, "there is no IPv6 address in the brackets") from None
        return host, _check_port(rest[1:], text) if rest else DEFAULT_PORT
    if text.count(":") > 1:
        raise _bad_address(text, "an IPv6 address goes in brackets")
    host, colon, port = text.partition(":")
    if not _HOST_NAME.match(host) or not _is_plausible_ipv4(host):
        raise _bad_address(text, "there is no valid host name or address in it")
    return host, _check_port(port, text) if colon else DEFAULT_PORT


def _is_plausible_ipv4(host: str) -> bool:
    """Return False for numbers and dots that are no IPv4 address, like 300.0.0.1."""
    if not re.fullmatch(r"[0-9.]+", host):
        return True
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
