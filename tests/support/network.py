"""Hosts on this machine that are joined by links of given, unequal rates.

Each host is a network namespace with one interface. All hosts hang on a bridge in a namespace of
its own. Nothing can therefore leave the network, and no interface or route of the machine is
touched. A host's packets are sorted by destination: every other host has an HTB class with a rate
and a short queue. So each *direction of each pair* is a link of its own, whose rate can be changed
in use.

There is no latency beyond that of the queues. Delaying packets takes a qdisc (netem) that not every
kernel has, or a switch in user space that takes processors from the measured nodes. In equation
(1), unequal rates have the same effect as unequal latencies.

It needs root, `ip` and `tc`; `missing()` names what is missing. Namespaces are named after the
process that made them. The next network removes the leftovers of a killed process.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "decodnet"
NAMESPACES = Path("/run/netns")
_COMMAND_TIMEOUT_S = 20.0

_QUEUE_S = 0.1
"""Time that a link's queue takes to drain, within the bounds below. Longer queues only delay."""
_QUEUE_MIN_BYTES = 1 << 16
_QUEUE_MAX_BYTES = 1 << 18

_FRAME_BYTES = 1 << 14
"""Most that a host hands to its link at once. Larger frames cost less time, but come in bursts."""

_DROP_PREF = 1
"""Preference of routing rules. Lower ones come first."""

HOSTS_MAX = 100

Pair = tuple[str, str]
"""Sender and receiver."""


class NetworkError(Exception):
    """The machine refused a part of the network."""


class Network:
    """Hosts with a link for every ordered pair. Leaving the `with` block removes everything.

    Start processes with `command`, and end them before you leave the block: a namespace lives on,
    unnamed, while a process is in it.

    Args:
        hosts: Names of the hosts.
        rates: Mbit/s from one host to another, for each ordered pair that talks.
        access: Mbit/s that a host sends to all others together, and as many that it receives. Such
            a host has no rates of its own.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        rates: Mapping[Pair, float],
        access: Mapping[str, float] | None = None,
    ) -> None:
        assert len(set(hosts)) == len(hosts) <= HOSTS_MAX, hosts
        self._access = dict(access or {})
        self.hosts = tuple(hosts)
        self.rates = dict(rates)
        """Present rate of each link, in Mbit/s."""
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            self._lay_out()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def address(self, host: str) -> str:
        """Return the IP address of a host, which only the other hosts can reach."""
        return f"10.99.0.{self._number(host)}"

    def command(self, host: str) -> tuple[str, ...]:
        """Return the prefix of a command that makes it run on a host, as the same process."""
        return inside(self.namespace(host))

    def namespace(self, host: str) -> Path:
        """Return the file of a host's network namespace."""
        return NAMESPACES / self._namespace(host)

    def set_rate(self, begin: str, end: str, mbit_per_s: float) -> None:
        """Change the rate of one direction of a link, at once and also for queued packets."""
        self.rates[begin, end] = mbit_per_s
        run_command(("tc", "-n", self._namespace(begin), *self._class("change", begin, end)))

    def cut(self, begin: str, end: str) -> None:
        """Drop everything that one host sends to another. The other direction stays."""
        self._drop("add", begin, end)

    def heal(self, begin: str, end: str) -> None:
        """Undo a `cut`."""
        self._drop("del", begin, end)

    def move(self, host: str, address: str) -> None:
        """Give a host another address, for which no link has a rate."""
        change = [
            f"address delete {self.address(host)}/24 dev eth0",
            f"address add {address}/24 dev eth0",
        ]
        batch("ip", self._namespace(host), change)

    def _drop(self, verb: str, begin: str, end: str) -> None:
        rule = ("from", self.address(begin), "pref", str(_DROP_PREF), "blackhole")
        run_command(("ip", "-n", self._namespace(end), "rule", verb, *rule))

    def remove(self) -> None:
        """Remove everything that exists of the network."""
        for namespace in (*map(self._namespace, self.hosts), self._switch):
            delete(namespace)

    # --- inside -------------------------------------------------------------------------------

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _number(self, host: str) -> int:
        return self.hosts.index(host) + 1

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{self._number(host)}"

    def _lay_out(self) -> None:
        run_command(("ip", "netns", "add", self._switch))
        batch("ip", self._switch, ["link add name bridge type bridge", "link set bridge up"])
        for host in self.hosts:
            self._add_host(host)

    def _add_host(self, host: str) -> None:
        namespace, port = self._namespace(host), f"port{self._number(host)}"
        run_command(("ip", "netns", "add", namespace))
        pair = f"link add name {port} type veth peer name eth0 netns {namespace}"
        batch("ip", self._switch, [pair, f"link set {port} master bridge up"])
        setup = [
            "link set lo up",
            f"link set eth0 gso_max_size {_FRAME_BYTES} up",
            f"address add {self.address(host)}/24 dev eth0",
            # Packets for this host are looked up after the rules of `cut`.
            f"rule add pref {_DROP_PREF + 1} lookup local",
            "rule delete pref 0",
        ]
        batch("ip", namespace, setup)
        if host in self._access:
            rate = self._access[host]
            batch("tc", namespace, self._shape("eth0", rate))
            batch("tc", self._switch, self._shape(port, rate))
            return
        # Packets without a class (ARP, hosts without a rate) are not held back.
        commands = ["qdisc add dev eth0 root handle 1: htb default 0"]
        for begin, end in self.rates:
            if begin == host:
                commands += self._link(begin, end)
        batch("tc", namespace, commands)

    def _shape(self, device: str, mbit_per_s: float) -> list[str]:
        """Return what gives all packets that leave a device one rate.

        Short packets go first, which are acknowledgements: behind the data of the other direction
        they would come late, and hold their own direction up.
        """
        kbit = round(mbit_per_s * 1e3)
        shape = f"ceil {kbit}kbit burst {_FRAME_BYTES} cburst {_FRAME_BYTES} quantum 20000"
        first, rest = f"rate {kbit // 10}kbit {shape}", f"rate {kbit - kbit // 10}kbit {shape}"
        short = "u32 match ip protocol 6 0xff match u16 0 0xff80 at 2"
        return [
            f"qdisc add dev {device} root handle 1: htb default 3",
            f"class add dev {device} parent 1: classid 1:1 htb rate {kbit}kbit {shape}",
            f"class add dev {device} parent 1:1 classid 1:2 htb prio 0 {first}",
            f"class add dev {device} parent 1:1 classid 1:3 htb prio 1 {rest}",
            f"qdisc add dev {device} parent 1:3 bfifo limit {_queue_bytes(mbit_per_s)}",
            f"filter add dev {device} parent 1: protocol ip prio 1 {short} flowid 1:2",
        ]

    def _link(self, begin: str, end: str) -> Iterable[str]:
        number, address = self._number(end), self.address(end)
        yield " ".join(self._class("add", begin, end))
        limit = _queue_bytes(self.rates[begin, end])
        yield f"qdisc add dev eth0 parent 1:{number:x} bfifo limit {limit}"
        match = f"u32 match ip dst {address}/32"
        yield f"filter add dev eth0 parent 1: protocol ip prio 1 {match} flowid 1:{number:x}"

    def _class(self, verb: str, begin: str, end: str) -> tuple[str, ...]:
        rate = f"{round(self.rates[begin, end] * 1e3)}kbit"
        words = f"class {verb} dev eth0 parent 1: classid 1:{self._number(end):x} htb"
        # A burst of one frame: the rate holds over any time that matters.
        return *words.split(), "rate", rate, "burst", str(_FRAME_BYTES), "quantum", "20000"


def _queue_bytes(mbit_per_s: float) -> int:
    """Return how much the queue of a link holds."""
    return min(max(round(_QUEUE_S * mbit_per_s * 1e6 / 8), _QUEUE_MIN_BYTES), _QUEUE_MAX_BYTES)


_numbers = itertools.count(1)


def missing() -> str | None:
    """Return why there can be no network here, or None if there can be one."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"`{program}` is not installed (package iproute2)"
    try:
        with Network(("a", "b"), {("a", "b"): 1.0}):
            return None
    except NetworkError as error:
        return f"this machine lays out no network: {error}"


def inside(namespace: Path) -> tuple[str, ...]:
    """Return the prefix of a command that makes it run in a network namespace."""
    return ("ip", "netns", "exec", namespace.name)


def remove_leftovers() -> None:
    """Remove the networks of processes that are gone."""
    with suppress(OSError):
        for path in NAMESPACES.glob(f"{PREFIX}-*"):
            pid = path.name.split("-")[1]
            if not Path("/proc", pid).exists():
                delete(path.name)


def delete(namespace: str) -> None:
    """Remove a network namespace, if it exists."""
    if (NAMESPACES / namespace).exists():
        with suppress(NetworkError):
            run_command(("ip", "netns", "delete", namespace))


def batch(program: str, namespace: str, commands: Sequence[str]) -> None:
    """Run commands of `ip` or `tc` in a network namespace."""
    run_command((program, "-n", namespace, "-batch", "-"), text="\n".join(commands) + "\n")


def run_command(command: Sequence[str], *, text: str = "") -> str:
    """Run a command, with some text as its input; return its output."""
    try:
        result = subprocess.run(
            command,
            input=text,
            capture_output=True,
            check=False,
            encoding="utf-8",
            timeout=_COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(str(error)) from error
    if result.returncode:
        raise NetworkError(f"`{' '.join(command)}`: {result.stderr.strip()}")
    return result.stdout
