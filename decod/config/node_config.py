"""`NodeConfig`: each host's own choices, and readers of the options that they come from."""

import ipaddress
import os
import re
import shlex
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from decod.config.schedule import PauseRule, WorkHours, show_rules
from decod.errors import ConfigError
from decod.paths import user_folder

# Rates and sizes as people write them: `20Mbit`, `10GiB`. A unit is always needed.

_NUMBER = r"([0-9]{1,16}(?:\.[0-9]{1,6})?)"
_RATE = re.compile(_NUMBER + r"(kbit|mbit|gbit)(?:/s)?\Z", re.ASCII | re.IGNORECASE)
_UNITS_MBIT = {"kbit": 0.001, "mbit": 1.0, "gbit": 1000.0}

_SIZE = re.compile(_NUMBER + r"(kib|mib|gib|tib|kb|mb|gb|tb|b)\Z", re.ASCII | re.IGNORECASE)
_UNITS_BYTES = {
    "TiB": 1 << 40,
    "TB": 10**12,
    "GiB": 1 << 30,
    "GB": 10**9,
    "MiB": 1 << 20,
    "MB": 10**6,
    "KiB": 1 << 10,
    "kB": 10**3,
    "B": 1,
}
_BYTES_OF = {unit.lower(): num for unit, num in _UNITS_BYTES.items()}


def read_rate(text: str) -> float:
    """Return a rate such as `20Mbit` or `1.5Gbit/s` in Mbit/s.

    Raises:
        ValueError: It is no rate. The text says how to write one.
    """
    match = _RATE.match(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is no rate: write it like 20Mbit or 1Gbit")
    return float(match[1]) * _UNITS_MBIT[match[2].lower()]


def show_rate(rate_mbit: float) -> str:
    """Return a rate in Mbit/s as `read_rate` reads it, with up to six decimals."""
    return f"{rate_mbit:.6f}".rstrip("0").rstrip(".") + "Mbit"


def read_size(text: str) -> int:
    """Return a size such as `10GiB` or `500MB` in bytes, rounded down.

    Raises:
        ValueError: It is no size. The text says how to write one.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is no size: write it like 10GiB or 500MiB")
    return int(float(match[1]) * _BYTES_OF[match[2].lower()])


def show_size(num_bytes: int) -> str:
    """Return a size as `read_size` reads it: in the largest unit that shows it without decimals."""
    for unit, each_bytes in _UNITS_BYTES.items():
        if num_bytes >= each_bytes and num_bytes % each_bytes == 0:
            return f"{num_bytes // each_bytes}{unit}"
    return f"{num_bytes}B"


CAPACITY_MAX = 4096
NUM_THREADS_MAX = 1024
UPLOAD_MIN_MBIT = 1.0
DOWNLOAD_MIN_MBIT = 5.0
RATE_MAX_MBIT = 1e6
"""Several peers send to a node at a time, and each gives up if it is too slow. So the least for
downloads is higher."""
SIZE_MIN_BYTES = 64 << 20
SIZE_MAX_BYTES = 1 << 50

DEFAULT_PORT = 7700
"""TCP port for gRPC, and UDP port of the same number for the distributed hash table."""

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104
"""Hosts to listen on that mean all addresses of this host."""

PAGE_HOST = "127.0.0.1"
PAGE_PORT = 7780
"""A node serves its page here, unless its operator chooses another address."""

DEVICE_LABEL = "device:"
"""Start of the line that names a node's device to its operator."""

RESUME_LATEST = 0
"""The value of `--resume latest`: go on from the newest whole checkpoint."""

RESUME_AUTO = -1
"""The value of `--resume auto`: continue the last run of this name as far as possible."""

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\Z"
)
_DEVICE = re.compile(r"(auto|cpu|cuda|xpu|mps|(?!cpu:|auto:)[a-z]{2,16}:[0-9]{1,3})\Z")
"""With a number, a device may be of a maker whose backend torch has loaded."""
_CUDA_DEVICES = re.compile(r"cuda:[0-9]{1,3}(,cuda:[0-9]{1,3})+\Z")
_CPU_RANKS = re.compile(r"cpu(,cpu)+\Z")
DEVICES_MAX = 64
"""Devices of one node."""
_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}\Z")


def default_state_dir() -> Path:
    """Return the system's default folder for identity, checkpoints, logs and control socket.

    Raises:
        ConfigError: The user's home is not known (E-CFG-100).
    """
    return user_folder("state")


def default_cache_dir() -> Path:
    """Return the system's default folder for data that can be made again, like the corpus.

    Raises:
        ConfigError: The user's home is not known (E-CFG-100).
    """
    return user_folder("cache")


def invoking_user() -> str | None:
    """Return the user who ran this command with `sudo`, or None if nobody did."""
    return os.environ.get("SUDO_USER") or None


class Recompute(StrEnum):
    """The choice whether a host keeps what forward passes leave, or computes them again."""

    AUTO = "auto"
    """Compute them again if memory is short."""
    ON = "on"
    OFF = "off"


class Spread(StrEnum):
    """The part of the stage that each of a node's devices holds."""

    AUTO = "auto"
    """All of it if it fits there, and otherwise a part."""
    COPY = "copy"
    SHARD = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node on one host. Nothing in it changes what is learnt."""

    listen_host: str = "0.0.0.0"  # noqa: S104 - volunteers are there to be reached.
    """Address to listen on; `127.0.0.1` for this machine only."""
    listen_port: int = DEFAULT_PORT
    """TCP and UDP port. 0: the system chooses a free one."""
    moves_port: bool = False
    """True if one of the next ports is as good if `listen_port` is in use: the operator has chosen
    none. Only for volunteers: the address of a data node stands in join strings."""
    advertise: str | None = None
    """HOST:PORT under which others reach this node, if it is not the address on which it listens:
    behind a router, say. Absent: the node asks a peer."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `xpu` or `mps`, with a number if there are several: `cuda:1`. `auto`
    is the first GPU if a trial on it succeeds, and the CPU otherwise. A named device is used, or
    the node does not start. With several, such as `cuda:0,cuda:1`, each computes some sequences of
    every microbatch."""
    spread: Spread = Spread.AUTO
    """The choice whether each of several devices holds all of the stage (`copy`) or a part
    (`shard`). Then the optimizer is in the host's memory. `auto` is `shard` if the stage does not
    fit otherwise."""
    capacity: int | None = None
    """Microbatches held in memory at a time, 1 to 4096. Absent: derived from free memory."""
    recompute: Recompute = Recompute.AUTO
    """True if a backward pass computes its forward pass again, so that only a microbatch's input
    stays in memory between them. A third more work of the device, and the same numbers."""
    num_threads: int | None = None
    """Threads of the compute process on the CPU, 1 to 1024. Absent: torch decides."""
    upload_max_mbit: float | None = None
    """Most that this node sends to all others together, in Mbit/s, at least 1. Absent: no limit."""
    download_max_mbit: float | None = None
    """Most that this node takes from all others together, in Mbit/s, at least 5. Absent: no
    limit."""
    device_memory_max_bytes: int | None = None
    """Most memory of the device that this node uses, at least 64 MiB. On the CPU it only bounds
    what the node plans with. Absent: what is free."""
    disk_max_bytes: int | None = None
    """Most that the state folder may hold, at least 64 MiB: states and checkpoints that would
    exceed it are not written. Absent: no limit, but as much as is written stays free."""
    schedule: WorkHours | None = None
    """The hours in which this node works; outside it is paused. Absent: always. Only for
    volunteers."""
    pause_when: tuple[PauseRule, ...] | None = None
    """Causes for which this node pauses by itself. Absent: `DEFAULT_PAUSE_RULES`. Only for
    volunteers."""
    drain_timeout_s: float = 60.0
    """Longest time that leaving may take, in seconds, 0 to 86400. In it, the node finishes the
    iteration in hand, and the last node of a stage waits for a successor. After it the node leaves
    at once, and the others repeat an iteration. Raise it if iterations take longer."""
    state_dir: Path = field(default_factory=default_state_dir)
    """Identity, checkpoints, logs and control socket. One node per folder."""
    base_dir: Path | None = None
    """Folder of the model beside which the run trains an adapter. Absent: its weights are fetched
    from members, into `state_dir`. A leader must have it."""
    checkpoint_store: str | None = None
    """Path or URL of the store of checkpoints that this node shares with the leader and others. A
    path may differ from host to host. Absent: checkpoints lie on the leader's disk."""
    rejoins: bool = True
    """True if the node joins again by itself when the run has gone on without it. Otherwise the
    command ends with exit code 75, for a service manager that starts it again."""
    maps_port: bool = True
    """True to ask a router to map the port if others can't reach this node."""
    passes_on: bool | None = None
    """True if this node passes on connections between members of which neither can be dialled.
    Absent: data nodes do, volunteers don't."""
    name: str | None = None
    """Shown to others in `decod status`. Absent: derived from the node's id."""

    tensorboard_dir: Path | None = None
    """Folder for TensorBoard's event files, one folder in it for each run. Absent: none. Only a
    leader writes them."""
    wandb_project: str | None = None
    """Project of Weights & Biases to which a leader sends loss and rates. Absent: none."""

    serves_page: bool = True
    """True if this node serves the run's page and its metrics over HTTP."""
    public_page_port: int | None = None
    """TCP port at which a leader serves a page without addresses and controls to everybody. 0: the
    system chooses a free one. Absent: none."""
    page_acts: bool = True
    """True if a reader on this host who has the token can act on the node by the page."""
    page_host: str = PAGE_HOST
    """Address for that. Whoever can reach it can read the names of the run's nodes."""
    page_port: int | None = None
    """TCP port for that. 0: the system chooses a free one. Absent: 7780, or a free one if that is
    taken."""

    def __post_init__(self) -> None:
        ports = {"listen": self.listen_port, "page": self.page_port}
        for kind, port in {**ports, "public page": self.public_page_port}.items():
            if port:
                _check_port(str(port), f"{kind} port {port}")
        if self.advertise is not None:
            host, port = parse_listen(self.advertise)
            if port == 0:
                raise _bad_address(self.advertise, "others cannot connect to port 0")
            if host in EVERYWHERE:
                raise _bad_address(self.advertise, f"others cannot connect to {host}")
        check_devices(self.device)
        for name, limit in (("capacity", CAPACITY_MAX), ("num_threads", NUM_THREADS_MAX)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(
                    f"{name} is {value}",
                    why=f"it is a count from 1 to {limit}",
                    fix="leave it out to have it measured",
                    code="E-CFG-022",
                )
        self._check_caps()
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

    def _check_caps(self) -> None:
        for name, cap, least in (
            ("upload", self.upload_max_mbit, UPLOAD_MIN_MBIT),
            ("download", self.download_max_mbit, DOWNLOAD_MIN_MBIT),
        ):
            if cap is not None and not least <= cap <= RATE_MAX_MBIT:
                raise ConfigError(
                    f"{name} limit is {cap:g} Mbit/s",
                    why=f"below {least:g} Mbit/s, others give up waiting; above 1,000 Gbit/s it "
                    "limits nothing",
                    fix=f"give {least:g}Mbit or more, or no --{name}-max to use all of the link",
                    code="E-CFG-025",
                )
        for name, size in (
            ("device memory", self.device_memory_max_bytes),
            ("disk", self.disk_max_bytes),
        ):
            if size is not None and not SIZE_MIN_BYTES <= size <= SIZE_MAX_BYTES:
                raise ConfigError(
                    f"{name} limit is {show_size(size)}",
                    why="no node fits into less than 64 MiB, and above 1 PiB it limits nothing",
                    fix="give 64MiB or more, or leave it out",
                    code="E-CFG-025",
                )

    @property
    def num_devices(self) -> int:
        """Devices that compute the same microbatches."""
        return self.device.count(",") + 1

    @property
    def upload_max_bytes_per_s(self) -> float | None:
        return _bytes_per_s(self.upload_max_mbit)

    @property
    def download_max_bytes_per_s(self) -> float | None:
        return _bytes_per_s(self.download_max_mbit)

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
        flags = {
            "--no-rejoin": not self.rejoins,
            "--no-page": not self.serves_page,
            "--page-read-only": not self.page_acts,
            "--no-port-mapping": not self.maps_port,
            "--pass-on": self.passes_on is True,
            "--no-pass-on": self.passes_on is False,
        }
        return " ".join((*words, *(flag for flag, given in flags.items() if given)))

    @property
    def _options(self) -> dict[str, str | None]:
        page = None if self.page_port is None else _joined(self.page_host, self.page_port)
        public = self.public_page_port
        return {
            "--listen": _joined(self.listen_host, self.listen_port),
            "--advertise": self.advertise,
            "--device": self.device,
            "--spread": self.spread.value,
            "--capacity": str(self.capacity) if self.capacity else None,
            "--recompute": self.recompute.value,
            "--threads": str(self.num_threads) if self.num_threads else None,
            "--upload-max": show_rate(self.upload_max_mbit) if self.upload_max_mbit else None,
            "--download-max": show_rate(self.download_max_mbit) if self.download_max_mbit else None,
            "--device-memory-max": _size(self.device_memory_max_bytes),
            "--disk-max": _size(self.disk_max_bytes),
            "--schedule": None if self.schedule is None else str(self.schedule),
            "--pause-when": None if self.pause_when is None else show_rules(self.pause_when),
            "--drain-timeout": f"{self.drain_timeout_s:g}s",
            "--checkpoint-store": self.checkpoint_store,
            "--name": self.name,
            "--page": page,
            "--public-page": None if public is None else str(public),
            "--tensorboard": None if self.tensorboard_dir is None else str(self.tensorboard_dir),
            "--wandb": self.wandb_project,
        }


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bytes_per_s(rate_mbit: float | None) -> float | None:
    return None if rate_mbit is None else rate_mbit * 1e6 / 8


def _size(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else show_size(num_bytes)


def check_device(device: str) -> None:
    """Check the name of a device.

    Raises:
        ConfigError: It is no name of a device, or there are several.
    """
    if not _DEVICE.match(device):
        raise ConfigError(
            f"device is {ascii(device)[:60]}",
            why="only leader, join and doctor take several devices"
            if "," in device
            else "it names no device that torch knows; AMD's are called cuda, too",
            fix="give auto, cpu, cuda, cuda:0, xpu or mps",
            code="E-CFG-021",
        )


def check_devices(devices: str) -> None:
    """Check the name of a device, or of several with commas in between.

    Raises:
        ConfigError: A name is wrong, or the devices can't work together.
    """
    if "," not in devices:
        check_device(devices)
        return
    names = devices.split(",")
    if _CPU_RANKS.match(devices) and len(names) <= DEVICES_MAX:
        return
    if not _CUDA_DEVICES.match(devices) or len(names) > DEVICES_MAX:
        raise ConfigError(
            f"device is {ascii(devices)[:60]}",
            why=f"several devices are 2 to {DEVICES_MAX} CUDA devices, each with its number",
            fix="give cuda:0,cuda:1, or one device",
            code="E-CFG-021",
        )
    if len({int(name.partition(":")[2]) for name in names}) < len(names):
        raise ConfigError(
            f"device is {ascii(devices)[:60]}",
            why="a device is named twice, and has work for one process only",
            fix="name each device once",
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


def parse_listen(text: str, *, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return host (without brackets) and port of `HOST:PORT`, `HOST` or `[IPv6]:PORT`.

    A missing port means the default one. Port 0 lets the system choose.

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
        return host, _check_port(rest[1:], text) if rest else default_port
    if text.count(":") > 1:
        raise _bad_address(text, "an IPv6 address goes in brackets")
    host, colon, port = text.partition(":")
    if not _HOST_NAME.match(host) or not _is_plausible_ipv4(host):
        raise _bad_address(text, "there is no valid host name or address in it")
    return host, _check_port(port, text) if colon else default_port


def _is_plausible_ipv4(host: str) -> bool:
    """Return False for numbers and dots that are no IPv4 address, like 300.0.0.1."""
    if not re.fullmatch(r"[0-9.]+", host):
        return True
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
